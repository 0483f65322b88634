"""Loss and quality by hand and against the library, in training and answers; models to arrays and back."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.metrics import r2_score
from torch import nn

from fedsel_flwr.clients.answering import answer, losses_and_gradient
from fedsel_flwr.clients.objectives import OBJECTIVES, REGRESSION, get_arrays, r_squared, set_arrays, squared_loss
from fedsel_flwr.clients.training import evaluate, train
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.architectures import build_model
from tests.clients.helpers import same

RNG = np.random.default_rng(3)
INPUTS = RNG.standard_normal((600, 3)).astype(np.float32)
WEIGHTS = np.array([1.0, -2.0, 0.5])
NUMBERS = (INPUTS @ WEIGHTS + 0.7).astype(np.float32)


def line(weight: tuple[float, float, float], bias: float) -> nn.Module:
    model = build_model("linear", (3,), 1, 0)
    set_arrays(model, [np.array([weight]), np.array([bias])])
    return model


def test_squared_loss_by_hand() -> None:
    """Outputs 1, 2, 4 for 1, 4, 3: errors 0, -2, 1."""
    outputs, targets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 4.0, 3.0])
    assert squared_loss(outputs, targets, reduction="none").tolist() == [0, 4, 1]
    assert squared_loss(outputs, targets, reduction="sum").item() == 5
    assert squared_loss(outputs, targets).item() == pytest.approx(5 / 3)


def test_r_squared_is_scikit_learns() -> None:
    for scale in (0.1, 1.0, 3.0):
        outputs = NUMBERS + scale * RNG.standard_normal(600).astype(np.float32)
        ours = r_squared(torch.tensor(outputs)[:, None], torch.tensor(NUMBERS))
        assert ours == pytest.approx(r2_score(NUMBERS, outputs), abs=1e-6)
    assert ours < 0


@pytest.mark.parametrize(
    ("outputs", "targets", "quality"),
    [
        ([2.0], [2.0], 1.0),  # targets without variance
        ([2.5], [2.0], 0.0),
        ([1.0, 1.0], [1.0, 1.0], 1.0),
        ([1.0, 2.0], [1.0, 1.0], 0.0),
        ([math.nan, 1.0], [0.0, 1.0], math.nan),  # a model that diverged
        ([math.inf, 1.0], [0.0, 1.0], math.nan),
    ],
)
def test_r_squared_at_its_limits(outputs: list[float], targets: list[float], quality: float) -> None:
    found = r_squared(torch.tensor(outputs)[:, None], torch.tensor(targets))
    assert found == pytest.approx(quality, abs=0, nan_ok=True)


@pytest.mark.parametrize("objective", OBJECTIVES.values())
def test_they_travel_to_other_processes(objective: object) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_evaluation_of_a_regression_by_hand() -> None:
    """Weights right, bias .2 too large: every error .2, loss .04; R² = 1 - .04 / variance. Batches do not matter."""
    loss, quality = evaluate(line((1.0, -2.0, 0.5), 0.9), INPUTS, NUMBERS, objective=REGRESSION)
    assert loss == pytest.approx(0.04, rel=1e-4)
    assert quality == pytest.approx(1 - 0.04 / NUMBERS.var(), rel=1e-4)
    again = evaluate(line((1.0, -2.0, 0.5), 0.9), INPUTS, NUMBERS, 7, REGRESSION)
    assert again == pytest.approx((loss, quality), rel=1e-5)


def test_one_step_of_a_regression_by_hand() -> None:
    """From zero: the gradient of mean (w·x + b - y)² is -2 mean(y x) and -2 mean(y); step .1; loss mean(y²)."""
    model = line((0.0, 0.0, 0.0), 0.0)
    settings = TrainingSettings(learning_rate=0.1, batch_size=600)
    loss = train(model, INPUTS, NUMBERS, settings, np.random.default_rng(0), REGRESSION)
    assert loss == pytest.approx(float((NUMBERS**2).mean()), rel=1e-5)
    weight, bias = get_arrays(model)
    np.testing.assert_allclose(weight[0], 0.2 * (NUMBERS[:, None] * INPUTS).mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(bias[0], 0.2 * NUMBERS.mean(), rtol=1e-4)


def test_answers_of_a_regression_by_hand() -> None:
    """Bias .2 too large everywhere: losses .04, gradient 2 x .2 mean(x) and .4."""
    model = line((1.0, -2.0, 0.5), 0.9)
    asked = {"loss", "rms_loss", "local_accuracy", "gradient"}
    said = answer(model, asked, (INPUTS, NUMBERS), (INPUTS[:50], NUMBERS[:50]), REGRESSION)
    assert (said["loss"], said["rms_loss"]) == pytest.approx((0.04, 0.04), rel=1e-3)
    assert said["local_accuracy"] == pytest.approx(1 - 0.04 / NUMBERS[:50].var(), rel=1e-3)
    gradient = np.frombuffer(said["gradient"], dtype=np.float32)  # type: ignore[arg-type]
    np.testing.assert_allclose(gradient, [*(0.4 * INPUTS.mean(axis=0)), 0.4], rtol=1e-3)
    losses, _ = losses_and_gradient(model, INPUTS, NUMBERS, objective=REGRESSION)
    np.testing.assert_allclose(losses, 0.04, rtol=1e-3)


def test_a_negative_r_squared_is_local_accuracy_0() -> None:
    """The column holds [0, 1]."""
    far = line((-5.0, 0.0, 0.0), 9.0)
    assert evaluate(far, INPUTS, NUMBERS, objective=REGRESSION)[1] < 0
    assert answer(far, {"local_accuracy"}, (INPUTS, NUMBERS), (INPUTS, NUMBERS), REGRESSION) == {"local_accuracy": 0.0}


# ---- models to arrays and back -------------------------------------------------------------------------------------


def test_round_trip_keeps_order_types_and_every_bit_buffers_included() -> None:
    source, target = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    source(torch.randn(8, 2))  # moves the running statistics
    set_arrays(target, get_arrays(source))
    arrays = get_arrays(target)
    assert same(arrays, get_arrays(source))
    shapes = [(3, 2), (3,), (3,), (3,), (3,), (3,), ()]  # weight, bias; weight, bias, mean, variance, count
    assert [array.shape for array in arrays] == shapes
    assert [array.dtype for array in arrays] == [np.float32] * 6 + [np.int64]


def test_doubles_become_the_models_type() -> None:
    model = nn.Linear(2, 1)
    set_arrays(model, [np.array([[0.1, 0.2]]), np.array([3.0])])
    assert get_arrays(model)[0].dtype == np.float32
    assert get_arrays(model)[0].tolist() == [[np.float32(0.1), np.float32(0.2)]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.ones((1, 2))], r"expected 2 arrays.*got 1"),
        ([np.ones((1, 2)), np.ones(2)], r"shape \(1,\) for 'bias'; got float64 of shape \(2,\)"),
        ([np.ones((2, 1)), np.ones(1)], r"shape \(1, 2\) for 'weight'; got float64 of shape \(2, 1\)"),
        ([np.array([["a", "b"]]), np.ones(1)], r"'weight'; got <U1"),
        ([np.ones((1, 2), dtype=object), np.ones(1)], r"'weight'; got object"),
        ([np.ones((1, 2), dtype=complex), np.ones(1)], r"'weight'; got complex128"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(arrays: list[npt.NDArray[Any]], message: str) -> None:
    model = nn.Linear(2, 1)
    before = get_arrays(model)
    with pytest.raises(ParameterError, match=message):
        set_arrays(model, arrays)
    assert same(get_arrays(model), before)
