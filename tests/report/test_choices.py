"""Choices alone: mean durations against enumeration and draws, and what a selector sees."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fedsel_flwr.report.choices import Fleet, draw_available, run_selectors, select_rounds, selector_parameters
from fedsel_flwr.report.latencies import SELECTORS
from fedsel_flwr.selectors import create
from fedsel_flwr.theory import sorted_groups
from tests.report.synthetic import fleet


def constant(*seconds: float, limit: float = math.inf, failure_rate: float = 0.0) -> Fleet:
    """A fleet without noise worth mentioning."""
    return Fleet(
        log_means=np.log(seconds), noise=1e-6, shape=np.array([-1.0, 0.0, 1.0]), max_latency=limit,
        failure_rate=failure_rate, num_examples=np.ones(len(seconds)),
    )  # fmt: skip


def test_durations_by_hand() -> None:
    # Pairs of 1, 2, 3, 4 s last as long as the slower one: 2, 3, 4, 3, 4, 4, mean 20 / 6. Sorted: 2 and 4, mean 3.
    own = constant(1, 2, 3, 4)
    assert own.cohort_seconds(np.array([0, 2])) == pytest.approx(3.0, rel=0.01)
    assert own.random_seconds(2) == pytest.approx(20 / 6, rel=0.01)
    assert own.sorted_seconds(2) == pytest.approx(3.0, rel=0.01)
    assert own.random_seconds(9) == pytest.approx(4.0, rel=0.01)


def test_a_late_or_failed_client_lasts_max_latency() -> None:
    assert constant(1, 2, 9, limit=5.0).random_seconds(3) == pytest.approx(5.0, rel=0.01)
    # One of two clients fails with the chance 0.1: 2 s with the chance 0.81, else 10 s.
    assert constant(1, 2, limit=10.0, failure_rate=0.1).random_seconds(2) == pytest.approx(0.81 * 2 + 1.9, rel=0.01)


def test_random_selection_averages_over_all_cohorts() -> None:
    own = fleet(7, 0.6, 0.3, 20.0)
    cohorts = [own.cohort_seconds(np.array(each)) for each in itertools.combinations(range(7), 3)]
    assert own.random_seconds(3) == pytest.approx(np.mean(cohorts), rel=1e-9)


@pytest.mark.parametrize(("limit", "failure_rate"), [(25.0, 0.0), (25.0, 0.05), (math.inf, 0.0)])
def test_durations_agree_with_draws(limit: float, failure_rate: float) -> None:
    own = replace(fleet(20, 0.5, 0.4, limit), failure_rate=failure_rate)
    seconds, completed = own.draw(20_000, np.random.default_rng(0))
    assert seconds.max() <= own.longest
    assert (seconds[~completed] == own.longest).all()
    groups = sorted_groups(own.log_means, 5)
    drawn = np.mean([seconds[:, group].max(axis=1).mean() for group in groups])
    assert own.sorted_seconds(5) == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_prefers_the_fast_half(name: str) -> None:
    own = fleet(40, 0.8, 0.1, 60.0)
    params = selector_parameters(name, own, 4, {}, own.random_seconds(4))
    seconds, counts = select_rounds(
        create(name, **params, seed=1), own, *own.draw(200, np.random.default_rng(1)), [np.arange(40)] * 200
    )  # fmt: skip
    assert (counts[-1].sum(), seconds.shape) == (800, (200,))
    assert (np.diff(counts.sum(axis=1)) == 4).all()
    assert seconds[100:].mean() < (0.98 if name != "tifl" else 1.02) * own.random_seconds(4)


def test_parameters_are_the_scenarios_or_those_of_a_deployment() -> None:
    own = replace(fleet(3, 0.5, 0.1), num_examples=np.array([5.0, 6.0, 7.0]))
    plain = selector_parameters("bsfl", own, 2, {}, 9.0)
    assert (plain["min_latency"], plain["clients_per_round"]) == ("auto", 2)
    given = {"min_latency": 4.0, "data_weights": "sizes", "max_latency": 60.0}
    scenario = selector_parameters("bsfl", own, 2, given, 9.0)
    assert scenario == {"min_latency": 4.0, "data_weights": {0: 5.0, 1: 6.0, 2: 7.0}, "clients_per_round": 2}
    assert selector_parameters("bsfl", own, 2, {"data_weights": [1, 2, 3]}, 9.0)["data_weights"] is None
    assert selector_parameters("fedcs", own, 2, {}, 9.0) == {"deadline": 9.0, "clients_per_round": 2}
    assert selector_parameters("cs-ucb", own, 2, {}, 9.0)["max_latency"] == "auto"


def test_absent_clients() -> None:
    """Client 0 was selected 30 times as often as clients 5 to 9, which were never selected."""
    generator = np.random.default_rng(0)
    everyone = draw_available(np.zeros(0, dtype=int), np.ones(4, dtype=int), 3, generator)
    assert [each.tolist() for each in everyone] == [[0, 1, 2, 3]] * 3
    counts = np.array([3, 5])
    equal = draw_available(counts, np.full(10, 7), 4000, generator)
    assert [len(each) for each in equal[:4]] == [3, 5, 3, 5]
    assert all((np.diff(each) > 0).all() for each in equal[:9])
    often = np.bincount(np.concatenate(equal), minlength=10) / 4000
    assert often == pytest.approx(np.full(10, 0.4), abs=0.03)
    unequal = draw_available(counts, np.array([30, 9, 9, 9, 9, 0, 0, 0, 0, 0]), 4000, generator)
    often = np.bincount(np.concatenate(unequal), minlength=10) / 4000
    assert often[0] > often[1:5].max()
    assert often[1:5].min() > often[5:].max()


def test_a_selector_selects_only_available_clients() -> None:
    own = fleet(10, 0.5, 0.1)
    available = [np.array([1, 3, 5]), np.array([2, 8])] * 5
    _, counts = select_rounds(
        create("random", clients_per_round=2, seed=1), own, *own.draw(10, np.random.default_rng(1)), available
    )
    assert counts[-1].sum() == 20
    assert np.flatnonzero(counts[-1]).tolist() == [1, 2, 3, 5, 8]


def test_the_same_seed_gives_the_same_rounds() -> None:
    own = fleet(20, 0.5, 0.3, 60.0)
    first, again, other = (run_selectors(own, 3, seed, {}, [np.arange(20)] * 20) for seed in (1, 1, 2))
    assert list(first) == ["random", *SELECTORS]
    assert all(np.array_equal(first[name][0], again[name][0]) for name in first)
    assert not np.array_equal(first["bsfl"][0], other["bsfl"][0])
