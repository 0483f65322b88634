"""A small world, and the comparison of a trainer with the loop in it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.objectives import Objective, get_arrays, set_arrays
from fedsel_flwr.clients.training import TrainingSettings, train

SETTINGS = TrainingSettings(
    learning_rate=0.05, batch_size=4, local_epochs=2, momentum=0.5, weight_decay=0.1, proximal_mu=0.2
)
SIZES = (6, 9, 4)


def world(dtype: type[np.floating[Any]] = np.float32) -> Examples:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(20, 1, 8, 8)).astype(dtype)
    return Examples(inputs, rng.integers(10, size=20), [rng.choice(20, size=size, replace=False) for size in SIZES])


def seeded(build: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        built: nn.Module = build()
    return built


def check_against_loop(
    model: nn.Module, examples: Examples, trainer: BatchedTrainer, objective: Objective, atol: float
) -> None:
    start = get_arrays(model)
    drawers = [[np.random.default_rng(i) for i in range(len(SIZES))] for _ in range(2)]
    layers, losses = trainer.train(start, examples, drawers[0])
    alone = copy.deepcopy(model)
    for i, (rows, generator) in enumerate(zip(examples.rows, drawers[1], strict=True)):
        set_arrays(alone, start)
        expected = train(alone, examples.inputs[rows], examples.labels[rows], SETTINGS, generator, objective)
        assert losses[i] == pytest.approx(expected, rel=1e-4)
        for layer, array in zip(layers, get_arrays(alone), strict=True):
            assert layer.dtype == array.dtype
            np.testing.assert_allclose(layer[i], array, atol=atol, rtol=0)
    # the generators stand where the loop leaves them
    assert [g.integers(2**40) for g in drawers[0]] == [g.integers(2**40) for g in drawers[1]]
