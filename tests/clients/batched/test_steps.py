"""The batches of many clients, by hand; that they are those of the loop is seen in test_against_loop."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.clients.batched.examples import Schedule, longest_first
from fedsel_flwr.clients.training import TrainingSettings

ROWS = [np.array([3, 9, 4, 7, 1]), np.array([8, 2, 6]), np.array([5])]
SETTINGS = TrainingSettings(learning_rate=1, batch_size=2)


def test_lengths_by_hand() -> None:
    # 5, 3 and 1 examples in batches of 2, one pass: lengths 2, 2, 1 and 2, 1 and 1
    assert longest_first([1, 3, 5], SETTINGS).tolist() == [2, 1, 0]
    schedule = Schedule(ROWS, SETTINGS, [np.random.default_rng(0)] * 3)
    assert schedule.steps.tolist() == [3, 2, 1]
    assert schedule.lengths.tolist() == [[2, 2, 1], [2, 1, 0], [1, 0, 0]]
    assert schedule.extents == [(3, 2), (2, 2), (1, 1)]
    assert schedule.weights[:, 1].tolist() == [[0.5, 0.5], [1, 0], [0, 0]]


def test_padding_repeats_a_row_of_the_batch() -> None:
    """Its loss is as finite as the batch's."""
    schedule = Schedule(ROWS, SETTINGS, [np.random.default_rng(k) for k in range(3)])
    assert (schedule.rows[:, 2, :][:1] == 5).all()
    assert schedule.rows[2, 0, 0] == schedule.rows[2, 0, 1]
    assert schedule.rows[1, 1, 0] == schedule.rows[1, 1, 1]
