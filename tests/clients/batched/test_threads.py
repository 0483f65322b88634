"""Chunks side by side on several threads: the same models to the last bit, and torch's threads as before."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.evaluation import logits_batched
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.threads import map_on_threads, using_threads
from fedsel_flwr.clients.training import TrainingSettings, outputs

SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=3, momentum=0.5)
DRAW = np.random.default_rng(0)
CLIENTS = Examples(
    DRAW.normal(size=(30, 1, 8, 8)).astype(np.float32),
    DRAW.integers(3, size=30),
    [DRAW.choice(30, size=size, replace=False) for size in (3, 7, 9, 5, 1)],
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def trained(model: nn.Module, threads: int) -> tuple[list[np.ndarray], np.ndarray]:
    torch.set_num_threads(threads)
    trainer = BatchedTrainer(model, SETTINGS, chunk=2, backend="manual")
    for _ in range(2):
        result = trainer.train(get_arrays(model), CLIENTS, [np.random.default_rng(k) for k in range(5)])
    return result


def test_chunks_on_two_threads_are_the_same_models(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)
    )
    layers, losses = trained(model, 1)
    used: list[int] = []
    unwatched = BatchedTrainer._train_chunks

    def watched(self, firsts, kernel, train_chunk):  # type: ignore[no-untyped-def]
        def chunk(first, own):  # type: ignore[no-untyped-def]
            used.append(torch.get_num_threads())
            train_chunk(first, own)

        unwatched(self, firsts, kernel, chunk)

    monkeypatch.setattr(BatchedTrainer, "_train_chunks", watched)
    others, other_losses = trained(model, 2)
    assert used == [1] * 6  # three chunks, twice, each on one thread
    np.testing.assert_array_equal(losses, other_losses)
    for one, two in zip(layers, others, strict=True):
        np.testing.assert_array_equal(one, two)
    assert torch.get_num_threads() == 2


def test_what_fails_in_a_chunk_fails_the_round(two_threads: None) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    trainer = BatchedTrainer(model, SETTINGS, chunk=1, backend="manual")
    trainer.train(get_arrays(model), CLIENTS, [np.random.default_rng(k) for k in range(5)])
    with pytest.raises(AttributeError):
        trainer.train(get_arrays(model), CLIENTS, [np.random.default_rng(0)] * 4 + [None])  # type: ignore[list-item]
    assert torch.get_num_threads() == 2


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


def test_a_thread_that_is_left_idle_answers_too_and_nothing_changes(two_threads: None) -> None:
    inputs = DRAW.normal(size=(503, 3)).astype(np.float32)
    model = Remembers()
    stack = [DRAW.normal(size=(4, *tensor.shape)).astype(np.float32) for tensor in model.state_dict().values()]
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


def test_an_error_of_a_part_is_raised(two_threads: None) -> None:
    def ask(own: nn.Module, part: int) -> None:
        if part == 5:
            raise ValueError("the fifth")

    with using_threads(1), pytest.raises(ValueError, match="the fifth"):
        map_on_threads(nn.Identity(), range(6), ask)


def test_a_model_that_cannot_be_copied_is_asked_where_it_is(two_threads: None) -> None:
    model = Remembers()
    model(torch.ones(1, 3))
    model.given = model.layer(torch.ones(1, 3))  # part of a graph
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    with using_threads(1):
        assert map_on_threads(model, range(5), lambda own, part: (own is model, part)) == [(True, i) for i in range(5)]
