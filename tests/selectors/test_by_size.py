"""Sampling in proportion to data sizes: its distribution, without and with replacement."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.selectors import RandomBySize

ROUNDS = 4_000


@pytest.mark.parametrize(
    ("replacement", "available", "expected", "within"),
    [
        # 8,000 draws with p = .1, .2, .3, .4, standard error at most .0055; among clients 1 and 3 p = 2/6, 4/6
        (True, [0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], 0.021),
        (True, [3, 1], [0.0, 1 / 3, 0.0, 2 / 3], 0.021),
        # client 3 is in a pair with .4 + .1 * 4/9 + .2 * 4/8 + .3 * 4/7 = .7159, client 0 with .2345, by the same sum
        (False, [0, 1, 2, 3], [0.1173, 0.2206, 0.3042, 0.3580], 0.017),
    ],
)
def test_shares_of_the_draws(replacement: bool, available: list[int], expected: list[float], within: float) -> None:
    selector = RandomBySize(clients_per_round=2, replacement=replacement, seed=5)
    selector.inform(np.arange(4), num_examples=np.array([1.0, 2.0, 3.0, 4.0]))
    counts = np.zeros(4)
    for _ in range(ROUNDS):
        chosen = selector.select(np.array(available))
        counts[chosen] += selector.draws(chosen)
    assert counts.sum() == 2 * ROUNDS
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=within)
    assert replacement or selector.draws(chosen).tolist() == [1, 1]


def test_a_draw_counts_for_its_round_only() -> None:
    selector = RandomBySize(clients_per_round=3, replacement=True, seed=1)
    selector.select(np.arange(1))
    assert selector.draws(np.array([0])).tolist() == [3]  # one client, drawn three times
    selector.select(np.empty(0, dtype=np.int64))
    assert selector.draws(np.array([0])).tolist() == [0]


def test_clients_without_examples_are_drawn_only_if_nobody_has_any() -> None:
    selector = RandomBySize(clients_per_round=4, replacement=True, seed=2)
    selector.inform(np.arange(3), num_examples=np.array([0.0, 5.0, 0.0]))
    assert all(selector.select(np.arange(3)).tolist() == [1] for _ in range(20))
    assert {int(k) for _ in range(50) for k in selector.select(np.array([0, 2]))} == {0, 2}


@pytest.mark.parametrize("told", [np.nan, np.inf])
def test_a_size_that_is_no_number_is_unknown(told: float) -> None:
    """It never enters the state: unknown stays -1, and a size known before stays."""
    selector = RandomBySize(clients_per_round=1, seed=3)
    selector.inform(np.arange(3), num_examples=np.array([6.0, told, 2.0]))
    assert selector.state_dict()["size"].tolist() == [6.0, -1.0, 2.0]
    selector.inform(np.arange(3), num_examples=np.array([told, 3.0, told]))
    assert selector.state_dict()["size"].tolist() == [6.0, 3.0, 2.0]
