"""Predictions of a stack of models are those of each model, and evaluation on several threads changes nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import evaluation
from fedsel_flwr.clients.batched.evaluation import logits_batched, stack_predict
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import map_on_threads, outputs, torch_predict, using_threads
from fedsel_flwr.errors import ParameterError
from tests.clients.batched.helpers import Branching, Residual, built, normalized, pooled, seeded, shared, world


def stack_of(model: nn.Module, count: int = 3) -> list[np.ndarray[Any, Any]]:
    """Models like this one, with other parameters."""
    rng = np.random.default_rng(0)
    return [
        np.stack([array * rng.normal(1, 0.1, array.shape) for _ in range(count)]).astype(array.dtype)
        for array in get_arrays(model)
    ]


@pytest.mark.parametrize(
    "build", [shared, pooled, Residual, normalized, Branching, built("mlp"), built("logistic"), built("cnn5")]
)
def test_logits_of_a_stack_are_those_of_each_model(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models in two parts, on examples that nobody may write to."""
    monkeypatch.setattr(evaluation, "MODELS", 2)
    model, inputs = seeded(build), np.asarray(world(np.float32).inputs)
    inputs.flags.writeable = False
    layers, alone = stack_of(model), torch_predict(copy.deepcopy(model))
    expected = np.stack([alone([layer[i] for layer in layers], inputs) for i in range(3)])
    for found in (logits_batched(model, layers, inputs, batch_size=7), stack_predict(model)(layers, inputs)):
        assert found.shape == (3, 60, 10)
        if build is not Branching:  # which decides by the batch
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_one_model_is_no_stack() -> None:
    model = seeded(shared)
    with pytest.raises(ParameterError, match="expected stacks whose shapes"):
        logits_batched(model, get_arrays(model), np.asarray(world(np.float32).inputs))


# ---- on several threads --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Remembers(nn.Module):
    """It keeps what it was given, as models of one's own do, and takes long enough to be overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(3, 2), torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x
        for _ in range(20):
            self.layer(x)
        return self.layer(self.given)


def test_a_thread_that_is_left_idle_answers_too_and_nothing_changes() -> None:
    model = Remembers()
    inputs, stack = np.random.default_rng(0).normal(size=(503, 3)).astype(np.float32), stack_of(model, 4)
    used: list[tuple[str, int]] = []

    def ask(own: nn.Module, first: int) -> int:
        used.append((threading.current_thread().name, torch.get_num_threads()))
        assert (own is model) == (used[-1][0] == "MainThread")
        return first

    with using_threads(1):
        answers = map_on_threads(model, range(7), ask)
        one, many = outputs(model, inputs, 10), logits_batched(model, stack, inputs, batch_size=10)
        assert torch.get_num_threads() == 1
    assert answers == list(range(7))
    assert {threads for _, threads in used} == {1}
    assert "MainThread" not in {name for name, _ in used}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    with using_threads(1):  # there is no other
        used.clear()
        map_on_threads(model, range(3), ask)
        assert used == [("MainThread", 1)] * 3
        assert torch.equal(one, outputs(model, inputs, 10))
        np.testing.assert_array_equal(many, logits_batched(model, stack, inputs, batch_size=10))


def test_an_error_of_a_part_is_raised() -> None:
    def ask(own: nn.Module, part: int) -> None:
        if part == 5:
            raise ValueError("the fifth")

    with using_threads(1), pytest.raises(ValueError, match="the fifth"):
        map_on_threads(nn.Identity(), range(6), ask)


def test_a_model_that_cannot_be_copied_is_asked_where_it_is() -> None:
    model = Remembers()
    model(torch.ones(1, 3))
    model.given = model.layer(torch.ones(1, 3))  # part of a graph
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    with using_threads(1):
        assert map_on_threads(model, range(5), lambda own, part: (own is model, part)) == [(True, i) for i in range(5)]
