"""The compiled loops: threads, clients that diverge, classes; every claim that needs Numba is skipped without it.

That they train as the loop does is among the cases of test_against_loop.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples, numba_kernels
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from tests.clients.batched.helpers import COMPILES, seeded
from tests.processes import run_python


def many() -> tuple[nn.Module, Examples]:
    """Enough arithmetic for several threads; ragged sizes."""
    draw = np.random.default_rng(4)
    sizes = draw.integers(1, 60, size=30)
    inputs = draw.normal(size=(200, 784)).astype(np.float32)
    clients = Examples(inputs, draw.integers(10, size=200), [draw.choice(200, size=k, replace=False) for k in sizes])
    return seeded(lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))), clients


def trained(model: nn.Module, clients: Examples, threads: int) -> list[Any]:
    settings = TrainingSettings(learning_rate=0.1, batch_size=7, momentum=0.5, local_epochs=2)
    layers, losses = BatchedTrainer(model, settings, backend="numba", threads=threads).train(
        get_arrays(model), clients, [np.random.default_rng(k) for k in range(len(clients.rows))]
    )
    return [*layers, losses]


@COMPILES
def test_neither_threads_nor_the_others_change_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clients = many()
    seen: set[int] = set()
    train_one = numba_kernels.train_one

    def watched(*arguments: Any) -> None:
        seen.add(threading.get_ident())
        train_one(*arguments)

    alone = trained(model, clients, 1)
    monkeypatch.setattr(numba_kernels, "train_one", watched)
    together = trained(model, clients, 3)
    assert 1 < len(seen) <= 3
    np.testing.assert_equal(together, alone)
    np.testing.assert_equal(trained(model, clients.subset([0]), 1), [one[:1] for one in alone])


@COMPILES
def test_who_diverges_is_told_and_harms_nobody() -> None:
    model, clients = many()
    expected = trained(model, clients, 1)
    inputs = clients.inputs.copy()  # type: ignore[union-attr]
    inputs[clients.rows[3]] *= 1e30
    lost = Examples(np.concatenate([clients.inputs, inputs]), np.tile(clients.labels, 2), list(clients.rows))
    lost.rows[3] = clients.rows[3] + len(inputs)  # type: ignore[index]
    found = trained(model, lost, 1)
    assert np.isnan(found[-1][3])
    np.testing.assert_equal(*([np.delete(one, 3, 0) for one in those] for those in (found, expected)))


@COMPILES
@pytest.mark.parametrize("label", [-100, 10])
def test_a_class_that_the_model_does_not_know(label: int) -> None:
    model, clients = many()
    clients.labels[clients.rows[5][0]] = label
    with pytest.raises(ParameterError, match="expected classes from 0 to 9, as many as the model has outputs; got "):
        trained(model, clients, 3)


@COMPILES
def test_inputs_that_may_not_be_written_to() -> None:
    model, clients = many()
    clients.inputs.setflags(write=False)  # type: ignore[union-attr]
    assert np.isfinite(trained(model, clients, 1)[-1]).all()


def test_training_loads_neither_numba_nor_torchs_compiler_and_a_broken_numba_is_as_good_as_none(tmp_path: Path) -> None:
    """The compiler takes longer than a client's first rounds; a user's file may have the name of what it imports."""
    (tmp_path / "numba.py").write_text("print('loaded')\nimport sys\nsys.nothing_of_that_name\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import numpy as np
from torch import nn
import fedsel_flwr.clients.batched, fedsel_flwr.simulations.engine
from fedsel_flwr.clients.training import TrainingSettings, train
settings = TrainingSettings(learning_rate=0.1, batch_size=2)
train(nn.Linear(3, 2), np.ones((4, 3), np.float32), np.zeros(4, np.int64), settings, np.random.default_rng(0))
print("torch._dynamo" in sys.modules)
from fedsel_flwr.clients.batched import numba_kernels
print(numba_kernels.njit, numba_kernels.MISSING)
"""
    missing = "None AttributeError: module 'sys' has no attribute 'nothing_of_that_name'"
    assert run_python("-c", code).stdout.splitlines() == ["False", "loaded", missing]
