"""The batches and dropout masks are those that the loop draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched.examples import Schedule, longest_first
from fedsel_flwr.clients.batched.steps import DropoutCall, DropoutMasks
from fedsel_flwr.clients.training import TrainingSettings, train
from tests.clients.helpers import Recorder

ROWS = [np.array([3, 9, 4, 7, 1]), np.array([8, 2, 6]), np.array([5])]


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 2, "local_epochs": 2}, {"batch_size": 2, "local_steps": 4}, {"batch_size": 9, "local_steps": 3}],
)
def test_batches_are_those_of_the_loop(settings: dict[str, Any]) -> None:
    chosen = TrainingSettings(learning_rate=0.1, **settings)
    sizes = [len(rows) for rows in ROWS]
    order = longest_first(sizes[::-1], chosen)
    if "local_epochs" in settings:
        assert order.tolist() == [2, 1, 0]
    schedule = Schedule(ROWS, chosen, [np.random.default_rng(i) for i in range(3)])
    found: list[list[list[int]]] = [[], [], []]
    for (active, width), lengths, rows, weights in zip(
        schedule.extents, schedule.lengths, schedule.rows, schedule.weights, strict=True
    ):
        for i, length in enumerate(lengths[:active]):
            found[i].append(rows[i, :length].tolist())
            assert set(rows[i, length:width]) <= {rows[i, 0]}
            assert weights[i, :width].tolist() == [1 / length] * length + [0] * (width - length)
    for i, own in enumerate(ROWS):
        model, inputs = Recorder(), np.arange(10, dtype=np.float32)[:, None]
        train(model, inputs[own], np.zeros(len(own), dtype=np.int64), chosen, np.random.default_rng(i))
        assert found[i] == [batch[:, 0].tolist() for batch in model.seen]


def test_hand_worked_lengths() -> None:
    # 5, 3 and 1 examples in batches of 2, one pass: lengths 2, 2, 1 and 2, 1 and 1
    schedule = Schedule(ROWS, TrainingSettings(learning_rate=1, batch_size=2), [np.random.default_rng(0)] * 3)
    assert schedule.steps.tolist() == [3, 2, 1]
    assert schedule.lengths.tolist() == [[2, 2, 1], [2, 1, 0], [1, 0, 0]]
    assert schedule.extents == [(3, 2), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("layer", "shape", "mask_shape", "memory_format"),
    [
        (nn.Dropout(0.25), (37,), (37,), torch.contiguous_format),
        (nn.Dropout(0.6), (3, 4, 5), (3, 4, 5), torch.contiguous_format),
        (nn.Dropout(0.6), (3, 4, 5), (3, 4, 5), torch.channels_last),
        (nn.Dropout2d(0.5), (9, 4, 5), (9, 1, 1), torch.contiguous_format),
        (nn.Dropout(1.0), (6,), (6,), torch.contiguous_format),
        (nn.Dropout(0.0), (6,), (6,), torch.contiguous_format),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_are_what_torch_draws(
    layer: nn.Module,
    shape: tuple[int, ...],
    mask_shape: tuple[int, ...],
    memory_format: torch.memory_format,
    dtype: torch.dtype,
) -> None:
    # Two layers a step, three steps, two clients with batches of 10 and 7, 10 and 2, then the first alone.
    draws = [DropoutCall(layer.p, mask_shape, memory_format), DropoutCall(0.5, (8,))]  # type: ignore[arg-type]
    streams = DropoutMasks([11, 12], draws, dtype, torch.device("cpu"))
    steps = [[10, 7], [10, 2], [10]]
    found = [streams.next(lengths, 10) for lengths in steps]
    other = nn.Dropout(0.5)
    for client, seed in enumerate([11, 12]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for masks, lengths in zip(found, steps, strict=True):
                if client < len(lengths):
                    n = lengths[client]
                    ones = torch.ones(n, *shape, dtype=dtype).contiguous(memory_format=memory_format)
                    assert torch.equal(layer(ones), ones * masks[0][client, :n])
                    assert torch.equal(other(torch.ones(n, 8, dtype=dtype)), masks[1][client, :n])
                    assert not masks[0][client, n:].any()


def test_without_dropout_no_stream_is_opened() -> None:
    assert DropoutMasks([1, 2], [], torch.float32, torch.device("cpu")).next([3], 3) == []
