"""Clients trained together get the weights and losses that they get one by one.

In double precision nothing but rounding of 1e-12 may differ. In single precision a rounding difference can turn a unit
that stands at its kink, and the weights then differ by the step length times that unit's gradient: hence small steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.objectives import REGRESSION, Objective, Reduction, fraction_correct, get_arrays
from tests.clients.batched import helpers as models
from tests.clients.batched.helpers import COMPILES, SETTINGS, built, check_against_loop, seeded, settings_of, world

BOTH = ("manual", "vmap")
IMAGES = {models.vgg: (1, 32, 32), models.odd: (1, 28, 28)}
ALL = "everything, augmented"
CASES: list[tuple[Callable[[], nn.Module], Backend, str]] = [
    *[(built("cnn"), "manual", settings) for settings in SETTINGS],
    (built("cnn"), "vmap", "steps"),
    (built("cnn"), "vmap", ALL),
    *[(build, backend, "everything") for build in (built("logistic"), built("mlp")) for backend in BOTH],
    *[(build, backend, ALL) for build in (models.dropping, models.vgg, models.odd) for backend in BOTH],
    *[(models.shared, backend, "everything") for backend in BOTH],
    *[(build, "manual", "everything") for build in (models.pooled, models.unbiased)],
    *[(build, "vmap", "everything") for build in (models.Residual, models.ChannelsLast, models.Tied, models.hooked)],
    *[
        (build, "sequential", "everything")
        for build in (models.Chance, models.Centred, models.Counting, models.Branching, models.normalized)
    ],
]


@pytest.mark.parametrize(("build", "backend", "settings"), CASES)
def test_what_differs_is_rounding(build: Callable[[], nn.Module], backend: Backend, settings: str) -> None:
    """Without a wish ("auto") the first backend that can trains."""
    model, examples = seeded(build).double(), world(shape=IMAGES.get(build, (1, 8, 8)))
    assert check_against_loop(model, examples, "vmap" if backend == "vmap" else "auto", settings).backend == backend


COMPILED = [name for name in SETTINGS if name != "full batch" and "augmented" not in name]


@pytest.mark.parametrize(
    ("build", "backend", "settings"),
    [
        (built("cnn"), "manual", ALL),
        (built("cnn"), "vmap", ALL),
        (models.odd, "manual", "everything"),
        (models.Residual, "vmap", "everything"),
        *[pytest.param(built("mlp"), "numba", settings, marks=COMPILES) for settings in COMPILED],
        pytest.param(built("logistic"), "numba", "everything", marks=COMPILES),
        pytest.param(models.unbiased, "numba", "everything", marks=COMPILES),
    ],
)
def test_single_precision(build: Callable[[], nn.Module], backend: Backend, settings: str) -> None:
    examples = world(np.float32, IMAGES.get(build, (1, 8, 8)))
    assert check_against_loop(seeded(build), examples, backend, settings, atol=1e-5).backend == backend


@COMPILES
@pytest.mark.slow  # numbers of double precision are compiled anew
@pytest.mark.parametrize("settings", ["plain", "everything"])
def test_what_differs_is_rounding_in_compiled_loops(settings: str) -> None:
    check_against_loop(seeded(built("mlp")).double(), world(), "numba", settings)


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    each = (outputs.mean(1) - targets).abs()
    return {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]


@pytest.mark.parametrize("backend", BOTH)
def test_other_losses_targets_and_inputs(backend: Backend) -> None:
    """A loss of one's own, numbers to predict, probabilities in place of classes, inputs that are whole numbers."""
    examples, rng = world(), np.random.default_rng(0)
    own = Objective(absolute_error, fraction_correct)
    check_against_loop(seeded(models.shared).double(), examples, backend, objective=own)
    vectors = world(shape=(5,))
    numbers = Examples(vectors.inputs, np.asarray(vectors.inputs).sum(1), vectors.rows)
    line = seeded(lambda: nn.Sequential(nn.Linear(5, 1)))
    check_against_loop(line.double(), numbers, backend, objective=REGRESSION)
    soft = Examples(examples.inputs, rng.dirichlet(np.ones(10), size=60), examples.rows)
    check_against_loop(seeded(models.shared).double(), soft, backend)
    if backend == "vmap":
        words = Examples(rng.integers(7, size=(60, 6)), examples.labels, examples.rows)
        assert check_against_loop(seeded(models.Words).double(), words).backend == "vmap"


@pytest.mark.parametrize("chunk", [1, 100, None])
@pytest.mark.parametrize("backend", BOTH)
def test_the_size_of_a_chunk_changes_nothing(backend: Backend, chunk: int | None) -> None:
    check_against_loop(seeded(built("cnn")).double(), world(), backend, chunk=chunk)


def test_the_loop_is_the_loop_and_repeated_runs_are_equal_to_the_last_bit() -> None:
    model, examples = seeded(built("cnn")), world(np.float32)
    start = get_arrays(model)

    def runs(backend: Backend) -> Any:
        return BatchedTrainer(model, settings_of(), backend=backend).train(start, examples, models.generators())

    alone = models.one_by_one(model, start, examples, settings_of())
    for one, other in ((runs("sequential"), alone), (runs("auto"), runs("auto"))):
        assert all(np.array_equal(a, b) for a, b in zip([*one[0], one[1]], [*other[0], other[1]], strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("build", [models.shared, models.Residual, models.normalized])
def test_on_another_device(build: Callable[[], nn.Module], held: bool) -> None:
    model, examples = seeded(build).double(), world()
    there = Examples(*examples.to(torch.device("cuda")), examples.rows) if held else examples
    found = BatchedTrainer(model, settings_of(), device="cuda").train(get_arrays(model), there, models.generators())
    here = BatchedTrainer(model, settings_of()).train(get_arrays(model), examples, models.generators())
    for a, b in zip([*found[0], found[1]], [*here[0], here[1]], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
        assert len(a) == len(models.SIZES)
