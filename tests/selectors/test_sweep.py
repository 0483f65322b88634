"""The sweep that looks at slices and ends early finds the set of the plain sweep over everybody."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors import bsfl_solvers


def plain(ucb: FloatArray, g: FloatArray, m: int, alpha: float) -> IntArray:
    """One client after the other, to the last."""
    order = np.argsort(-ucb, kind="stable")
    heap = g[order[:m]].tolist()
    total = sum(heap)
    heapq.heapify(heap)
    best, end = ucb[order[m - 1]] + alpha / m * total, m
    for i in range(m, len(ucb)):
        if (value := g[order[i]]) > heap[0]:
            total += value - heapq.heapreplace(heap, value)
            if (score := ucb[order[i]] + alpha / m * total) > best:
                best, end = score, i + 1
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
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_clients = int(rng.integers(2, 120))
        m = int(rng.integers(1, num_clients))
        ucb, g = instance(kind, num_clients, rng)
        assert bsfl_solvers.maximize(ucb, g, m, alpha).tolist() == plain(ucb, g, m, alpha).tolist()


@pytest.mark.parametrize("alpha", [1.0, 1000.0])
def test_as_the_plain_sweep_over_several_slices(alpha: float) -> None:
    ucb, g = instance("independent", 3 * bsfl_solvers.SLICE + 17, np.random.default_rng(1))
    assert bsfl_solvers.maximize(ucb, g, 40, alpha).tolist() == plain(ucb, g, 40, alpha).tolist()


def test_it_ends_where_no_slower_client_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100,000 clients the slow ones cannot make up for their speed: only the first slices are looked at."""
    looked = []
    advance = bsfl_solvers._Sweep.advance
    monkeypatch.setattr(
        bsfl_solvers._Sweep,
        "advance",
        lambda self, order, start, end: looked.append(end) or advance(self, order, start, end),
    )
    ucb, g = instance("independent", 100_000, np.random.default_rng(2))
    bsfl_solvers.maximize(ucb, g, 100, 0.01)
    assert max(looked, default=0) <= 2 * bsfl_solvers.SLICE
