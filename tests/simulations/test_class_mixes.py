"""Clients with mixtures of classes of their own: Kim's class heterogeneity, and GPFL's quadratic program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.partitions import by_dirichlet_classes, by_dirichlet_sizes, least_norm_sizes

LABELS = np.arange(6000) % 6


@pytest.mark.parametrize("num_clients", [1, 7, 20, 6000])
def test_equal_sizes_and_everything_is_handed_out(num_clients: int) -> None:
    parts = by_dirichlet_classes(LABELS, num_clients, 0.1, np.random.default_rng(3))
    assert sorted(np.concatenate(parts).tolist()) == list(range(6000))
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= 1


def test_classes_follow_the_clients_own_draws() -> None:
    """With plenty of every class, the shares of client 0 are those of a multinomial draw from q ~ Dir(alpha 1)."""
    for alpha, low, high in ((0.1, 0.45, 1.0), (100.0, 0.0, 0.1)):
        largest = []
        for seed in range(20):
            parts = by_dirichlet_classes(LABELS, 20, alpha, np.random.default_rng(seed))
            counts = np.bincount(LABELS[parts[0]], minlength=6)
            q = np.random.default_rng(seed)
            for _ in range(6):  # the order of the examples comes first
                q.permutation(1000)
            drawn = q.dirichlet(np.full(6, alpha))
            keep = drawn * 300 >= 5
            if keep.sum() > 1:  # the chance that honest counts are so far off is one in a million
                expected = drawn[keep] / drawn[keep].sum() * counts[keep].sum()
                assert stats.chisquare(counts[keep], expected).pvalue > 1e-6
            largest.append((counts / 300).max() - 1 / 6)
        assert low <= np.mean(largest) + 1 / 6 - (1 / 6 if alpha > 1 else 0) <= high


@pytest.mark.parametrize("seed", range(5))
def test_the_sizes_solve_the_quadratic_program(seed: int) -> None:
    """Against brute force: of all sets of clients with x > 0, the least-norm solution of Q x = d on that set."""
    rng = np.random.default_rng(seed)
    q = rng.dirichlet([0.5] * 3, size=7).T
    d = np.array([40, 50, 30])
    best, norm = None, np.inf
    for size in range(3, 8):
        for chosen in itertools.combinations(range(7), size):
            part = np.linalg.pinv(q[:, chosen]) @ d
            if (part >= -1e-9).all() and np.allclose(q[:, chosen] @ part, d, atol=1e-6) and part @ part < norm:
                best, norm = dict(zip(chosen, part, strict=True)), part @ part
    if best is None:
        with pytest.raises(ParameterError, match="class"):
            least_norm_sizes(q, d)
        return
    expected = [best.get(k, 0.0) for k in range(7)]
    np.testing.assert_allclose(least_norm_sizes(q, d), expected, atol=0.05)


def test_every_class_is_handed_out_in_the_clients_shares() -> None:
    parts = by_dirichlet_sizes(LABELS, 40, 2.0, np.random.default_rng(1))
    assert sorted(np.concatenate(parts).tolist()) == list(range(6000))
    mixtures = np.random.default_rng(1).dirichlet(2.0 * np.full(6, 1 / 6), size=40)
    for rows, q in zip(parts, mixtures, strict=True):
        assert (np.abs(np.bincount(LABELS[rows], minlength=6) - q * len(rows)) <= 6).all()


def test_a_class_that_is_in_no_mixture_is_named() -> None:
    with pytest.raises(ParameterError, match="class 1: 30 of 30 are left"):
        least_norm_sizes(np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([30, 30]))
