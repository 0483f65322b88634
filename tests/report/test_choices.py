"""Choices alone: mean durations against enumeration, and what a selector sees."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fedsel_flwr.checks import BoolArray, FloatArray
from fedsel_flwr.report.choices import (
    Fleet,
    draw_available,
    random_seconds,
    run_selectors,
    select_rounds,
    selector_parameters,
    sorted_seconds,
)
from fedsel_flwr.report.latencies import SELECTORS
from fedsel_flwr.selectors import create
from tests.report.synthetic import fleet


def test_durations_by_hand() -> None:
    # Pairs of 1, 2, 3, 4 s last as long as the slower one: 2, 3, 4, 3, 4, 4, mean 20 / 6. Sorted: 2 and 4, mean 3.
    seconds = np.array([[1.0, 2.0, 3.0, 4.0]])
    assert random_seconds(seconds, 2) == pytest.approx(20 / 6)
    assert sorted_seconds(seconds, np.arange(4.0), 2) == pytest.approx(3.0)
    assert random_seconds(seconds, 9) == pytest.approx(4.0)


def test_random_selection_averages_over_all_cohorts() -> None:
    seconds, _ = fleet(7, 0.6, 0.3, 20.0).draw(50, np.random.default_rng(0))
    cohorts = [seconds[:, each].max(axis=1).mean() for each in itertools.combinations(range(7), 3)]
    assert random_seconds(seconds, 3) == pytest.approx(np.mean(cohorts), rel=1e-9)


def test_a_late_or_failed_client_lasts_max_latency() -> None:
    own = fleet(2, 1e-6, 1e-6, 40.0)
    seconds, completed = replace(own, failure_rate=0.1).draw(20_000, np.random.default_rng(0))
    assert (seconds[~completed] == 40.0).all()
    # One of two clients fails with the chance 0.19: 10 s or 40 s.
    assert random_seconds(seconds, 2) == pytest.approx(0.81 * 10 + 0.19 * 40, rel=0.02)
    assert (replace(own, max_latency=9.0).draw(5, np.random.default_rng(0))[0] == 9.0).all()


def play(name: str, own: Fleet, m: int, seed: int = 1) -> tuple[FloatArray, BoolArray]:
    seconds, completed = own.draw(200, np.random.default_rng(seed))
    number = len(own.log_means)
    columns = {"local_accuracy": np.full(number, 0.5), "num_examples": own.num_examples}
    chooser = create(name, **selector_parameters(name, own, m, {}, 15.0), seed=seed)
    chooser.inform(np.arange(number), num_examples=own.num_examples)
    return seconds, select_rounds(chooser, seconds, completed, [np.arange(number)] * 200, columns)


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_prefers_the_fast_half(name: str) -> None:
    seconds, chosen = play(name, fleet(40, 0.8, 0.1, 60.0), 4)
    assert (chosen.sum(axis=1) == 4).all()
    taken = np.where(chosen, seconds, 0.0).max(axis=1)
    assert taken[100:].mean() < (0.98 if name != "tifl" else 1.02) * random_seconds(seconds, 4)


def test_cs_ucb_q_selects_large_clients_more_often() -> None:
    """Its fairness is that of the data sizes: in real runs clients tell them, so a prediction must tell them, too."""
    own = replace(fleet(40, 0.1, 0.1, 60.0), num_examples=np.repeat([50.0, 250.0], 20))
    _, seconds, chosen = run_selectors(own, 4, 1, {}, [np.arange(40)] * 200)
    assert seconds.shape == (200, 40)
    counts = chosen["cs-ucb-q"].sum(axis=0)
    assert counts[20:].mean() > 2 * counts[:20].mean()
    assert chosen["random"].sum(axis=0)[20:].mean() == pytest.approx(20, abs=2)


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
    counts = np.resize([3, 5], 40)
    equal = draw_available(counts, np.full(10, 7), 4000, generator)
    sizes = np.array([len(each) for each in equal])
    assert sizes.min() > 0
    assert [sizes[::2].mean(), sizes[1::2].mean()] == pytest.approx([3.0, 5.0], abs=0.15)
    assert all((np.diff(each) > 0).all() for each in equal[:9])
    often = np.bincount(np.concatenate(equal), minlength=10) / 4000
    assert often == pytest.approx(np.full(10, 0.4), abs=0.03)
    unequal = draw_available(counts, np.array([30, 9, 9, 9, 9, 0, 0, 0, 0, 0]), 4000, generator)
    often = np.bincount(np.concatenate(unequal), minlength=10) / 4000
    assert often[0] > often[1:5].max()
    assert often[1:5].min() > often[5:].max()


def test_large_cohorts_hide_how_often_clients_are_absent() -> None:
    """With half of the clients in a round, numbers of selections vary less than Poisson's."""
    generator = np.random.default_rng(1)
    rates = np.clip(1.2 - generator.random(60), 0.2, 1.0)
    present = generator.random((300, 60)) < rates
    selections = np.zeros(60, dtype=np.int64)
    for here in map(np.flatnonzero, present):
        selections[generator.choice(here, size=20, replace=False)] += 1
    drawn = draw_available(present.sum(axis=1), selections, 300, generator)
    often = np.bincount(np.concatenate(drawn), minlength=60) / 300
    assert often.std() == pytest.approx(rates.std(), rel=0.2)
    assert np.corrcoef(often, rates)[0, 1] > 0.9


def test_a_selector_selects_only_available_clients() -> None:
    own = fleet(10, 0.5, 0.1)
    _, _, chosen = run_selectors(own, 2, 1, {}, [np.array([1, 3, 5]), np.array([2, 8])] * 5)
    assert (chosen["random"].sum(axis=1) == 2).all()
    for one in chosen.values():
        assert np.flatnonzero(one[::2].any(axis=0)).tolist() == [1, 3, 5]
        assert np.flatnonzero(one[1::2].any(axis=0)).tolist() == [2, 8]


def test_the_same_seed_gives_the_same_rounds() -> None:
    own = fleet(20, 0.5, 0.3, 60.0)
    first, again, other = (run_selectors(own, 3, seed, {}, [np.arange(20)] * 20)[1:] for seed in (1, 1, 2))
    assert list(first[1]) == ["random", *SELECTORS]
    assert np.array_equal(first[0], again[0])
    assert all(np.array_equal(first[1][name], again[1][name]) for name in first[1])
    assert not np.array_equal(first[1]["bsfl"], other[1]["bsfl"])
