"""Sampling in proportion to data sizes: its distribution, without and with replacement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import RandomBySize

SIZES = np.array([1.0, 2.0, 3.0, 4.0])
ROUNDS = 20_000


def _played(replacement: bool, available: np.ndarray[Any, Any]) -> tuple[RandomBySize, np.ndarray[Any, Any]]:
    """Counts of draws per client over many rounds of two draws."""
    selector = RandomBySize(clients_per_round=2, replacement=replacement, seed=5)
    selector.inform(np.arange(4), num_examples=SIZES)
    counts = np.zeros(4)
    for _ in range(ROUNDS):
        chosen = selector.select(available)
        counts[chosen] += selector.draws(chosen)
    return selector, counts


def test_with_replacement_every_draw_is_by_p_k() -> None:
    """p = .1, .2, .3, .4; 40,000 draws, standard error at most .0025."""
    _, counts = _played(True, np.arange(4))
    assert counts.sum() == 2 * ROUNDS
    np.testing.assert_allclose(counts / counts.sum(), SIZES / 10, atol=0.0125)


def test_with_replacement_the_absent_are_never_drawn() -> None:
    """Among clients 1 and 3: p = 2/6, 4/6."""
    _, counts = _played(True, np.array([3, 1]))
    np.testing.assert_allclose(counts / counts.sum(), [0, 1 / 3, 0, 2 / 3], atol=0.0125)


def test_without_replacement_draws_follow_each_other() -> None:
    """Client 3 is in a pair with probability .4 + .1 * 4/9 + .2 * 4/8 + .3 * 4/7 = .7159 (first draw, or second)."""
    selector, counts = _played(False, np.arange(4))
    assert counts[3] / ROUNDS == pytest.approx(0.7159, abs=0.016)
    assert selector.draws(selector.select(np.arange(4))).tolist() == [1, 1]


def test_a_draw_counts_for_its_round_only() -> None:
    selector = RandomBySize(clients_per_round=3, replacement=True, seed=1)
    selector.select(np.arange(1))
    assert selector.draws(np.array([0])).tolist() == [3]  # one client, drawn three times
    selector.select(np.empty(0, dtype=np.int64))
    assert selector.draws(np.array([0])).tolist() == [0]


def test_clients_without_examples_are_drawn_only_where_nobody_has_any() -> None:
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


@pytest.mark.parametrize("value", [1, "yes", None])
def test_replacement_is_a_boolean(value: Any) -> None:
    with pytest.raises(ParameterError, match="replacement must be True or False"):
        RandomBySize(clients_per_round=1, replacement=value)
