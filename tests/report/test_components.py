"""Variance components against sums by hand, and histories with known answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.components import fit_components
from tests.report.synthetic import fleet, history, latencies


def test_balanced_rows_by_hand() -> None:
    # Two clients with the log seconds 0, 2 and 6, 8. Within: squares 2 + 2 = 4 over 4 - 2 rows, so sigma_e² = 2.
    # The means 1 and 7 lie 3 from their mean: 9 + 9 = 18 over 2 - 1 clients, less 2 / 2, so sigma_a² = 17.
    found = fit_components(latencies([0, 0, 1, 1], np.exp([0.0, 2.0, 6.0, 8.0])))
    assert found.noise.estimate == pytest.approx(math.sqrt(2), rel=1e-3)
    assert found.spread.estimate == pytest.approx(math.sqrt(17), rel=1e-3)
    assert math.log(found.median_s) == pytest.approx(4.0, abs=1e-3)


def test_drift_by_hand() -> None:
    logs = np.array([-1.0, 1.0, 0.0, 3.0, 5.0, 4.0, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0])
    found = fit_components(latencies([0] * 6 + [1] * 6, np.exp(logs)))
    # Client 0: half means 0 and 4, squares 2 + 2 + 6 · 2² = 28 over 5 rows. Client 1: 4/3 twice, no change, 4/3 over 5.
    assert found.drift == pytest.approx((4.0**2 - (28 / 5 + 4 / 3 / 5) * (1 / 3 + 1 / 3)) / 2)


def test_clients_have_their_own_noise_as_far_as_it_is_no_chance() -> None:
    generator = np.random.default_rng(3)
    client = np.repeat(np.arange(40), 30)
    equal = fit_components(latencies(client, np.exp(0.3 * generator.standard_normal(1200))))
    assert equal.own_noise == pytest.approx(np.full(40, equal.noise.estimate), rel=0.1)
    sds = np.where(np.arange(40) % 2, 0.1, 0.5)
    found = fit_components(latencies(client, np.exp(sds[client] * generator.standard_normal(1200))))
    assert found.own_noise[1::2] == pytest.approx(np.full(20, 0.1), rel=0.4)
    assert found.own_noise[::2] == pytest.approx(np.full(20, 0.5), rel=0.4)
    assert math.sqrt(np.mean(found.own_noise**2)) == pytest.approx(found.noise.estimate)


def test_the_effects_of_known_clients_are_shrunk_by_hand() -> None:
    """sigma_a² = 17 and sigma_e² = 2: the effect -3 has the mean -3 · 17 / (17 + 2 / 2) and the variance 17 / 18."""
    found = fit_components(latencies([0, 0, 1, 1], np.exp([0.0, 2.0, 6.0, 8.0])))
    one = replace(found, drift=0.0, samples=np.array([[4.0, math.sqrt(17), math.sqrt(2)]]))
    drawn = np.array([one.draw_fleet(np.arange(2), 3, np.random.default_rng(seed))[0] for seed in range(4000)])
    assert drawn.mean(axis=0)[:2] == pytest.approx([4 - 3 * 17 / 18, 4 + 3 * 17 / 18], abs=0.05)
    assert drawn.std(axis=0)[:2] == pytest.approx([math.sqrt(17 / 18)] * 2, abs=0.05)
    # A client without a row is like one of the others.
    assert ((drawn[:, 2] == drawn[:, 0]) | (drawn[:, 2] == drawn[:, 1])).all()


@pytest.mark.parametrize("selector", ["random", "bsfl", "cs-ucb"])
@pytest.mark.parametrize(("spread", "noise", "limit"), [(0.8, 0.4, 25.0), (0.4, 0.2, 1e9), (1.2, 0.1, 25.0)])
def test_histories_made_by_bandits(selector: str, spread: float, noise: float, limit: float) -> None:
    """Fast clients have many rows, slow ones few, and rows at the limit are cut off: within 10 % of the true values.

    In the last fleet, a fifth of the clients is always cut off. Their speed is unknown, so the spread is too small.
    """
    auto = {"bsfl": {"min_latency": "auto"}, "cs-ucb": {"max_latency": "auto", "exploration": 0.1}}
    own = fleet(200, spread, noise, limit)
    rows = history(own, selector, 10, 150, **auto.get(selector, {}))
    if selector == "cs-ucb":
        counts = np.bincount(rows.client, minlength=200)
        assert counts.max() > 5 * counts.min()
    found = fit_components(rows)
    logs = np.minimum(own.log_means, math.log(limit) + noise)
    assert found.spread.estimate == pytest.approx(logs.std(), rel=0.1)
    assert found.noise.estimate == pytest.approx(noise, rel=0.1)
    assert found.median_s == pytest.approx(math.exp(logs.mean()), rel=0.1)
    assert found.spread.low < found.spread.estimate < found.spread.high


def test_without_censoring_the_limit_would_hide_part_of_the_spread() -> None:
    rows = history(fleet(200, 1.2, 0.1, 25.0), "random", 10, 150)
    assert fit_components(latencies(rows.client, rows.seconds)).spread.estimate < 0.9 * 1.2


def test_no_spread_is_not_excluded() -> None:
    found = fit_components(history(fleet(100, 1e-9, 0.4), "random", 5, 100))
    assert found.spread.low == 0.0
    assert found.spread.estimate < 0.1
    assert found.spread.high < 0.15


def test_intervals_contain_the_true_values() -> None:
    """The population's spread, not that of these clients: 9 of 10 intervals of 40, less chance."""
    hits = np.zeros(2)
    for seed in range(40):
        generator = np.random.default_rng(seed)
        logs = np.repeat(0.5 * generator.standard_normal(60), 6) + 0.3 * generator.standard_normal(360)
        found = fit_components(latencies(np.repeat(np.arange(60), 6), np.exp(logs)))
        hits += [found.spread.low <= 0.5 <= found.spread.high, found.noise.low <= 0.3 <= found.noise.high]
    assert hits.min() >= 34


def test_a_client_that_is_always_cut_off_is_slower_than_the_limit() -> None:
    rows = latencies([0, 0, 0, 1, 1, 1, 2, 2, 2], [1, 2, 1.5, 3, 2, 4, 9, 9, 9], [False] * 6 + [True] * 3)
    found = fit_components(rows)
    drawn = [found.draw_fleet(np.arange(3), 3, np.random.default_rng(seed))[0] for seed in range(50)]
    assert np.mean(drawn, axis=0)[2] > math.log(9)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (([0, 0, 0], [1, 2, 3]), "there is one client"),
        (([0, 1, 2], [1, 2, 3]), "at least two clients need two measured rows each, got 0.*longer history"),
        (([0, 0, 1, 2], [1, 2, 3, 4]), "at least two clients need two measured rows"),
        (([0, 0, 1, 1], [5, 5, 5, 5], [True] * 4), "no latency was measured: all 4 rows are cut off"),
    ],
)
def test_too_little_to_tell(rows: tuple[list[float], ...], problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        fit_components(latencies(*rows))
