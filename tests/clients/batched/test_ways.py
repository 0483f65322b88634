"""Models of all kinds are trained as the sequential backend would train them, whatever the backend."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.evaluation import logits_batched
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective, Reduction, fraction_correct, get_arrays
from fedsel_flwr.clients.training import torch_predict
from tests.clients.batched.checking import SETTINGS, check_against_loop, seeded, world
from tests.clients.batched.kinds import (
    Branching,
    Centred,
    Chance,
    ChannelsLast,
    Counting,
    Residual,
    Tied,
    Words,
    normalized,
    pooled,
    shared,
)


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        (shared, "manual"),
        (shared, "vmap"),
        (pooled, "manual"),
        (Residual, "vmap"),
        (ChannelsLast, "vmap"),
        (Tied, "vmap"),
        (Chance, "sequential"),
        (Centred, "sequential"),
        (Counting, "sequential"),
        (Branching, "sequential"),
        (normalized, "sequential"),
    ],
)
def test_models_of_all_kinds(build: Any, backend: str) -> None:
    model = seeded(build).double()
    trainer = BatchedTrainer(model, SETTINGS, backend="vmap" if backend == "vmap" else "auto", chunk=2)
    check_against_loop(model, world(np.float64), trainer, CLASSIFICATION, atol=1e-12)
    assert trainer.backend == backend


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    each = (outputs.mean(1) - targets).abs()
    return {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]


OWN = Objective(absolute_error, fraction_correct)


@pytest.mark.parametrize("backend", ["manual", "vmap"])
def test_a_loss_of_ones_own(backend: Any) -> None:
    model = seeded(shared).double()
    trainer = BatchedTrainer(model, SETTINGS, backend=backend, objective=OWN)
    check_against_loop(model, world(np.float64), trainer, OWN, atol=1e-12)


def test_probabilities_instead_of_classes() -> None:
    model, examples = seeded(shared).double(), world(np.float64)
    soft = np.random.default_rng(0).dirichlet(np.ones(10), size=20)
    trainer = BatchedTrainer(model, SETTINGS, backend="manual")
    check_against_loop(model, Examples(examples.inputs, soft, examples.rows), trainer, CLASSIFICATION, atol=1e-12)


@pytest.mark.parametrize("build", [shared, pooled, Residual, normalized, Branching])
def test_logits_of_a_stack(build: Any) -> None:
    model, inputs = seeded(build), world().inputs
    rng = np.random.default_rng(0)
    models = [[(a * rng.normal(1, 0.1, a.shape)).astype(a.dtype) for a in get_arrays(model)] for _ in range(3)]
    found = logits_batched(model, [np.stack(layer) for layer in zip(*models, strict=True)], inputs, batch_size=7)
    predict = torch_predict(copy.deepcopy(model))
    if build is not Branching:  # which decides by the batch
        expected: list[npt.NDArray[np.float64]] = [predict(arrays, np.asarray(inputs)) for arrays in models]
        np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)
    assert found.shape == (3, 20, 10)


def test_inputs_that_are_whole_numbers() -> None:
    model, examples = seeded(Words).double(), world()
    words = Examples(np.random.default_rng(0).integers(7, size=(20, 6)), examples.labels, examples.rows)
    trainer = BatchedTrainer(model, SETTINGS)
    check_against_loop(model, words, trainer, CLASSIFICATION, atol=1e-12)
    assert trainer.backend == "vmap"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("build", [shared, Residual, normalized])
def test_on_another_device(build: Any, held: bool) -> None:
    model, examples = seeded(build).double(), world(np.float64)
    trainer = BatchedTrainer(model, SETTINGS, device="cuda")
    there = Examples(*examples.to(torch.device("cuda")), examples.rows) if held else examples
    layers, losses = trainer.train(get_arrays(model), there, [np.random.default_rng(i) for i in range(3)])
    here = BatchedTrainer(model, SETTINGS).train(
        get_arrays(model), examples, [np.random.default_rng(i) for i in range(3)]
    )
    for a, b in zip([*layers, losses], [*here[0], here[1]], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
