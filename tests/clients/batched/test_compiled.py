"""The compiled loops train as the loop does; every claim that needs Numba is skipped without it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples, numba_kernels
from fedsel_flwr.clients.batched.numba_mlp import Dense, NumbaKernel
from fedsel_flwr.clients.batched.steps import Unsupported
from fedsel_flwr.clients.objectives import CLASSIFICATION, REGRESSION, get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from tests.clients.batched.checking import SETTINGS, check_against_loop, seeded, world
from tests.clients.batched.test_against_loop import MODELS, three_rounds
from tests.clients.batched.test_against_loop import SETTINGS as ALL_SETTINGS

compiles = pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (no wheel for this platform)")
KNOWN = [name for name in ALL_SETTINGS if name != "full batch" and "augmented" not in name]


def unbiased() -> nn.Module:
    """Widths that are no multiples of anything, a layer without biases, two in a row."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 19), nn.ReLU(), nn.Linear(19, 3, bias=False), nn.Linear(3, 10))


@compiles
@pytest.mark.parametrize("settings", KNOWN)
@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_same_averages_after_three_rounds(name: str, settings: str) -> None:
    chosen = TrainingSettings(**ALL_SETTINGS[settings])  # type: ignore[arg-type]
    assert three_rounds(name, chosen, "numba").backend == "numba"


@compiles
@pytest.mark.slow  # numbers of double precision are compiled anew
@pytest.mark.parametrize("settings", ["plain", "everything"])
def test_what_differs_is_rounding(settings: str) -> None:
    chosen = TrainingSettings(**ALL_SETTINGS[settings])  # type: ignore[arg-type]
    three_rounds("mlp", chosen, "numba", dtype=np.float64, tolerance=1e-12)


@compiles
def test_odd_layers() -> None:
    model = seeded(unbiased)
    trainer = BatchedTrainer(model, SETTINGS, backend="numba")
    check_against_loop(model, world(), trainer, CLASSIFICATION, atol=1e-6)


def many() -> tuple[nn.Module, Examples]:
    """Enough arithmetic for several threads; ragged sizes."""
    draw = np.random.default_rng(4)
    sizes = draw.integers(1, 60, size=30)
    inputs = draw.normal(size=(200, 784)).astype(np.float32)
    clients = Examples(inputs, draw.integers(10, size=200), [draw.choice(200, size=k, replace=False) for k in sizes])
    return seeded(lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))), clients


def trained(model: nn.Module, clients: Examples, threads: int) -> list[Any]:
    settings = TrainingSettings(learning_rate=0.1, batch_size=7, momentum=0.5, local_epochs=2)
    trainer = BatchedTrainer(model, settings, backend="numba", threads=threads)
    layers, losses = trainer.train(
        get_arrays(model), clients, [np.random.default_rng(k) for k in range(len(clients.rows))]
    )
    return [*layers, losses]


@compiles
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
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    first = trained(model, clients.subset([0]), 1)
    for one, other in zip(alone, first, strict=True):
        np.testing.assert_array_equal(one[:1], other)


@compiles
def test_who_diverges_is_told_and_harms_nobody() -> None:
    model, clients = many()
    expected = trained(model, clients, 1)
    inputs = clients.inputs.copy()  # type: ignore[union-attr]
    inputs[clients.rows[3]] *= 1e30
    lost = Examples(np.concatenate([clients.inputs, inputs]), np.tile(clients.labels, 2), list(clients.rows))
    lost.rows[3] = clients.rows[3] + len(inputs)  # type: ignore[index]
    found = trained(model, lost, 1)
    assert np.isnan(found[-1][3])
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(np.delete(one, 3, 0), np.delete(other, 3, 0))


@compiles
@pytest.mark.parametrize("label", [-100, 10])
def test_a_class_that_the_model_does_not_know(label: int) -> None:
    model, clients = many()
    clients.labels[clients.rows[5][0]] = label
    with pytest.raises(ParameterError, match="expected classes from 0 to 9, as many as the model has outputs; got "):
        trained(model, clients, 3)


@compiles
def test_inputs_that_may_not_be_written_to() -> None:
    model, clients = many()
    clients.inputs.setflags(write=False)  # type: ignore[union-attr]
    assert np.isfinite(trained(model, clients, 1)[-1]).all()


@pytest.mark.parametrize(
    ("build", "changed", "objective", "said"),
    [
        (MODELS["dropping"][0], {}, CLASSIFICATION, "dense layers and the rectifiers behind them only"),
        (MODELS["cnn"][0], {}, CLASSIFICATION, "dense layers and the rectifiers behind them only"),
        (lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(784, 2)), {}, CLASSIFICATION, "dense layers and"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 2), nn.ReLU()), {}, CLASSIFICATION, "its last layer must"),
        (MODELS["mlp"][0], {"augmentation": "crop-flip"}, CLASSIFICATION, "it knows no augmentation"),
        (MODELS["mlp"][0], {"batch_size": 33}, CLASSIFICATION, "slower from 33 examples in a step on"),
        (MODELS["mlp"][0], {}, REGRESSION, "the cross-entropy of classes only"),
        (lambda: MODELS["mlp"][0]().half(), {}, CLASSIFICATION, "must share one type"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 2), nn.Tanh()), {}, CLASSIFICATION, "Tanh at '2' is not"),
    ],
)
def test_what_they_do_not_know(build: Any, changed: dict[str, Any], objective: Any, said: str) -> None:
    settings = TrainingSettings(**{"learning_rate": 0.1, "batch_size": 5} | changed)
    inputs, labels = np.zeros((3, 1, 28, 28), dtype=np.float32), np.zeros(3, dtype=np.int64)
    model = build()
    trainer = BatchedTrainer(model, settings, backend="numba", objective=objective)
    with pytest.raises(ParameterError) as error:
        trainer.train(get_arrays(model), Examples(inputs, labels, [np.arange(3)]), [np.random.default_rng(0)])
    assert "backend = 'numba'" in str(error.value)
    assert said in str(error.value)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_kernels, "MISSING", "No module named 'numba'")
    with pytest.raises(Unsupported, match=r"it needs Numba, .*fedsel-flwr\[sim\].*: No module named 'numba'"):
        NumbaKernel([Dense(0, 1, 4, 2)])


def test_torch_loads_no_numba() -> None:
    code = "import sys, fedsel_flwr.clients.batched, fedsel_flwr.simulations.engine; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "False", done.stderr


def test_numba_that_breaks_when_it_is_imported_is_as_good_as_none(tmp_path: Path) -> None:
    """A file of the user's may have the name of something that it imports."""
    (tmp_path / "numba.py").write_text("import sys\nsys.nothing_of_that_name\n")
    said = "from fedsel_flwr.clients.batched import numba_kernels as loops; print(loops.njit, loops.MISSING)"
    looking = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {said}"
    ran = subprocess.run([sys.executable, "-c", looking], capture_output=True, text=True, check=True)
    assert ran.stdout == "None AttributeError: module 'sys' has no attribute 'nothing_of_that_name'\n"
