"""Variance components against sums by hand, numerical integration, and histories with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.components import _Rows, fit_components
from tests.report.synthetic import fleet, history, latencies


def test_balanced_rows_by_hand() -> None:
    # Two clients with the log seconds 0, 2 and 6, 8. Within: squares 2 + 2 = 4 over 4 - 2 rows, so sigma_e² = 2.
    # The means 1 and 7 lie 3 from their mean: variance 9 = sigma_a² + sigma_e² / 2 in the maximum, so sigma_a² = 8.
    found = fit_components(latencies([0, 0, 1, 1], np.exp([0.0, 2.0, 6.0, 8.0])))
    assert found.noise.estimate == pytest.approx(math.sqrt(2), rel=1e-3)
    assert found.spread.estimate == pytest.approx(math.sqrt(8), rel=1e-3)
    assert math.log(found.median_s) == pytest.approx(4.0, abs=1e-3)


@pytest.mark.parametrize(("spread", "noise"), [(0.8, 0.4), (1.5, 0.3), (0.1, 1.0), (0.5, 0.2)])
def test_the_likelihood_is_the_integral_over_each_clients_effect(spread: float, noise: float) -> None:
    """Client 0 has measured and censored rows (at two limits), client 1 only censored, client 2 only measured rows."""
    logs, censored = np.array([1.0, 1.4, 1.5, 2.0, 2.0, 2.0, 0.5, 0.9]), [0, 0, 1, 1, 1, 1, 0, 0]
    client = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    rows = _Rows(latencies(client, np.exp(logs), np.array(censored, dtype=bool)))
    effect = np.linspace(-10, 10, 400_001)
    whole = 0.0
    for k in range(3):
        density = norm.logpdf(effect, 0.0, spread)
        for value, cut in zip(logs[client == k], np.array(censored)[client == k], strict=True):
            density += (norm.logsf if cut else norm.logpdf)(value, 1.2 + effect, noise)
        whole += math.log(np.trapezoid(np.exp(density), effect))
    constant = -0.5 * math.log(2 * math.pi) * censored.count(0)
    assert rows.log_likelihood(1.2, spread, noise) + constant == pytest.approx(whole, abs=2e-4)


@pytest.mark.parametrize("selector", ["random", "bsfl", "cs-ucb"])
@pytest.mark.parametrize(("spread", "noise", "limit"), [(0.8, 0.4, 25.0), (0.4, 0.2, 1e9), (1.2, 0.1, 25.0)])
def test_histories_made_by_bandits(selector: str, spread: float, noise: float, limit: float) -> None:
    """Fast clients have many rows, slow ones few, and rows at the limit are cut off: within 10 % of the true values."""
    auto = {"bsfl": {"min_latency": "auto"}, "cs-ucb": {"max_latency": "auto", "exploration": 0.1}}
    own = fleet(200, spread, noise, limit)
    rows = history(own, selector, 10, 150, **auto.get(selector, {}))
    if selector == "cs-ucb":
        counts = np.bincount(rows.client, minlength=200)
        assert counts.max() > 5 * counts.min()
    found = fit_components(rows)
    assert found.spread.estimate == pytest.approx(spread, rel=0.1)
    assert found.noise.estimate == pytest.approx(noise, rel=0.1)
    assert found.median_s == pytest.approx(10.0, rel=0.1)
    assert found.spread.low < found.spread.estimate < found.spread.high


def test_without_censoring_the_limit_would_hide_part_of_the_spread() -> None:
    rows = history(fleet(200, 1.2, 0.1, 25.0), "random", 10, 150)
    ignored = latencies(rows.client, rows.seconds)
    assert fit_components(ignored).spread.estimate < 0.9 * 1.2


def test_no_spread_is_not_excluded() -> None:
    found = fit_components(history(fleet(100, 1e-9, 0.4), "random", 5, 100))
    assert found.spread.low == 0.0
    assert found.spread.estimate < 0.1
    assert found.spread.high < 0.15


def test_intervals_contain_the_true_values() -> None:
    """The population's spread, not that of these clients: 95 % of 20 intervals, less chance."""
    hits = np.zeros(2)
    for seed in range(20):
        generator = np.random.default_rng(seed)
        logs = np.repeat(0.5 * generator.standard_normal(30), 4) + 0.3 * generator.standard_normal(120)
        late = logs > 0.6
        found = fit_components(latencies(np.repeat(np.arange(30), 4), np.exp(np.minimum(logs, 0.6)), late))
        hits += [found.spread.low <= 0.5 <= found.spread.high, found.noise.low <= 0.3 <= found.noise.high]
    assert hits.min() >= 17


def test_a_client_that_is_always_cut_off_is_slower_than_the_limit() -> None:
    rows = latencies([0, 0, 0, 1, 1, 1, 2, 2, 2], [1, 2, 1.5, 3, 2, 4, 9, 9, 9], [False] * 6 + [True] * 3)
    found = fit_components(rows)
    drawn = [found.draw_fleet(np.arange(3), 3, np.random.default_rng(seed))[0] for seed in range(50)]
    assert np.mean(drawn, axis=0)[2] > math.log(9)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (([0, 0, 0], [1, 2, 3]), "there is one client"),
        (([0, 1, 2], [1, 2, 3]), "at least two clients need two measured rows"),
        (([0, 0, 1, 2], [1, 2, 3, 4]), "at least two clients need two measured rows"),
        (([0, 0, 1, 1], [5, 5, 5, 5], [True] * 4), "no latency was measured"),
    ],
)
def test_too_little_to_tell(rows: tuple[list[float], ...], problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        fit_components(latencies(*rows))
