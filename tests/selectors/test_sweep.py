"""The sweep that looks at slices and ends early finds the set of the plain sweep over everybody."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors import bsfl_solvers


def plain(ucb: FloatArray, g: FloatArray, m: int, alpha: float) -> IntArray:
    """Return the best set, with each client in turn as the slowest member; the earliest among equals."""
    order = np.argsort(-ucb, kind="stable")
    best, end = -np.inf, m
    for i in range(m, len(ucb) + 1):
        score = ucb[order[i - 1]] + alpha / m * np.sort(g[order[:i]])[-m:].sum()
        if score > best + 1e-12:
            best, end = score, i
    return np.sort(order[np.argsort(-g[order[:end]], kind="stable")[:m]])


def instance(kind: str, num_clients: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Bounds, and generalization values that are unlike them, tied, or the larger the slower."""
    ucb, g = rng.uniform(0, 3, num_clients), rng.uniform(-1, 1, num_clients)
    if kind == "tied":
        return np.round(ucb), np.round(2 * g) / 2
    return ucb, 1 - ucb + rng.normal(size=num_clients) * 1e-9 if kind == "opposed" else g


@pytest.mark.parametrize("kind", ["independent", "tied", "opposed"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0, 1e6])
def test_as_the_plain_sweep(kind: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bsfl_solvers, "SLICE", 2)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        num_clients = int(rng.integers(2, 120))
        m = int(rng.integers(1, num_clients))
        ucb, g = instance(kind, num_clients, rng)
        assert bsfl_solvers.maximize(ucb, g, m, alpha).tolist() == plain(ucb, g, m, alpha).tolist()


@pytest.mark.parametrize("alpha", [1.0, 1000.0])
def test_as_the_plain_sweep_over_several_slices(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bsfl_solvers, "SLICE", 256)
    ucb, g = instance("independent", 3 * bsfl_solvers.SLICE + 17, np.random.default_rng(1))
    assert bsfl_solvers.maximize(ucb, g, 40, alpha).tolist() == plain(ucb, g, 40, alpha).tolist()


def test_it_ends_where_no_slower_client_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100,000 clients the slow ones cannot make up for their speed: only the first slices are looked at."""
    looked = []

    class Watched(bsfl_solvers._Sweep):
        def advance(self, order, start, end):
            looked.append(end)
            return super().advance(order, start, end)

    monkeypatch.setattr(bsfl_solvers, "_Sweep", Watched)
    bsfl_solvers.maximize(*instance("independent", 100_000, np.random.default_rng(2)), 100, 0.01)
    assert max(looked, default=0) <= 2 * bsfl_solvers.SLICE
