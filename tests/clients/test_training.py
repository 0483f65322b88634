"""Local training and evaluation against NumPy by hand."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.training import _SGD, TrainingSettings, evaluate, train
from fedsel_flwr.errors import ParameterError
from tests.processes import ROOT

FloatArray = npt.NDArray[np.float64]
INPUTS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
LABELS = np.array([0, 1, 1, 0, 2, 2, 1, 0, 2, 1, 0, 2], dtype=np.int64)


def logistic_model() -> nn.Linear:
    """Return logistic regression of 3 inputs and 3 classes with fixed parameters."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(9.0).reshape(3, 3) / 10 - 0.4)
        model.bias.copy_(torch.tensor([0.1, 0.0, -0.2]))
    return model


def parameters_of(model: nn.Linear) -> tuple[FloatArray, FloatArray]:
    return model.weight.detach().numpy().astype(float), model.bias.detach().numpy().astype(float)


def loss_and_gradient(
    weight: FloatArray, bias: FloatArray, rows: npt.NDArray[np.int64]
) -> tuple[float, FloatArray, FloatArray]:
    """Return the mean cross-entropy of logistic regression and its gradient, by the formula."""
    x, y = INPUTS[rows].astype(float), LABELS[rows]
    scores = np.exp(x @ weight.T + bias)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    error = (probabilities - np.eye(3)[y]) / len(rows)
    return -float(np.log(probabilities[np.arange(len(y)), y]).mean()), error.T @ x, error.sum(axis=0)


class Recorder(nn.Module):
    """A linear model of one input that keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.seen: list[list[int]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append([int(value) for value in inputs[:, 0]])
        return self.layer(inputs)


def test_one_full_batch_step_by_hand() -> None:
    model = logistic_model()
    weight, bias = parameters_of(model)
    loss, weight_gradient, bias_gradient = loss_and_gradient(weight, bias, np.arange(12))
    reported = train(
        model, INPUTS, LABELS, TrainingSettings(learning_rate=0.5, batch_size=12), np.random.default_rng(1)
    )
    assert reported == pytest.approx(loss, rel=1e-6)
    new_weight, new_bias = parameters_of(model)
    np.testing.assert_allclose(new_weight, weight - 0.5 * weight_gradient, atol=1e-6)
    np.testing.assert_allclose(new_bias, bias - 0.5 * bias_gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "proximal_mu"), [(0.9, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 2.0), (0.5, 0.05, 0.7)]
)
def test_mini_batches_momentum_decay_and_proximal_term_by_hand(
    momentum: float, weight_decay: float, proximal_mu: float
) -> None:
    model = logistic_model()
    start = current = np.concatenate([part.ravel() for part in parameters_of(model)])
    settings = TrainingSettings(
        learning_rate=0.3,
        batch_size=5,
        local_epochs=2,
        momentum=momentum,
        weight_decay=weight_decay,
        proximal_mu=proximal_mu,
    )
    reported = train(model, INPUTS, LABELS, settings, np.random.default_rng(7))

    generator = np.random.default_rng(7)
    generator.integers(2**63)  # the seed of the dropout is drawn first
    velocity, losses = np.zeros_like(start), []
    for _ in range(2):
        order = generator.permutation(12)
        for rows in (order[:5], order[5:10], order[10:]):
            loss, *gradients = loss_and_gradient(current[:9].reshape(3, 3), current[9:], rows)
            losses.append(loss)
            gradient = np.concatenate([part.ravel() for part in gradients])
            gradient += proximal_mu * (current - start) + weight_decay * current  # d/dw mu/2 |w - w0|² = mu (w - w0)
            velocity = momentum * velocity + gradient
            current = current - 0.3 * velocity
    assert reported == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(np.concatenate([part.ravel() for part in parameters_of(model)]), current, atol=2e-6)


def test_proximal_term_keeps_the_model_near_the_received_one() -> None:
    distances = []
    for mu in (0.0, 0.1, 1.0, 10.0):
        model = logistic_model()
        weight, _ = parameters_of(model)
        settings = TrainingSettings(learning_rate=0.05, batch_size=12, local_steps=400, proximal_mu=mu)
        train(model, INPUTS, LABELS, settings, np.random.default_rng(0))
        distances.append(float(np.linalg.norm(parameters_of(model)[0] - weight)))
    assert distances[0] > distances[1] > distances[2] > distances[3] > 0


def test_epochs_show_every_example_once_per_pass_in_new_orders() -> None:
    model, inputs = Recorder(), np.arange(10, dtype=np.float32)[:, np.newaxis]
    settings = TrainingSettings(learning_rate=0.01, batch_size=4, local_epochs=3)
    train(model, inputs, np.zeros(10, dtype=np.int64), settings, np.random.default_rng(0))
    assert [len(batch) for batch in model.seen] == [4, 4, 2] * 3
    passes = [sum(model.seen[start : start + 3], []) for start in (0, 3, 6)]  # noqa: RUF017 (three short lists)
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_local_steps_override_epochs_and_cycle() -> None:
    model, inputs = Recorder(), np.arange(5, dtype=np.float32)[:, np.newaxis]
    settings = TrainingSettings(learning_rate=0.01, batch_size=2, local_epochs=9, local_steps=7)
    train(model, inputs, np.zeros(5, dtype=np.int64), settings, np.random.default_rng(0))
    assert [len(batch) for batch in model.seen] == [2, 2, 1, 2, 2, 1, 2]
    assert sorted(sum(model.seen[3:6], [])) == list(range(5))  # noqa: RUF017 (three short lists)


def test_generator_decides_order_and_dropout() -> None:
    results = []
    for seed in (3, 3, 4):
        model = nn.Sequential(nn.Dropout(0.5), logistic_model())
        settings = TrainingSettings(learning_rate=0.5, batch_size=12, local_steps=2)  # full batches: the order is idle
        loss = train(model, INPUTS, LABELS, settings, np.random.default_rng(seed))
        results.append((loss, model[1].weight.detach().clone()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert abs(results[0][0] - results[2][0]) > 1e-3


def test_global_random_states_neither_matter_nor_change() -> None:
    settings = TrainingSettings(learning_rate=0.5, batch_size=4)
    losses = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.default_generator.manual_seed(seed)
            model = nn.Sequential(nn.Dropout(0.5), logistic_model())
            before = torch.get_rng_state()  # building the model drew from it
            losses.append(train(model, INPUTS, LABELS, settings, np.random.default_rng(0)))
            assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]


def test_frozen_parameters_stay() -> None:
    model = logistic_model()
    model.bias.requires_grad_(False)
    _, bias = parameters_of(model)
    settings = TrainingSettings(learning_rate=0.5, batch_size=4, proximal_mu=1.0, weight_decay=0.1)
    train(model, INPUTS, LABELS, settings, np.random.default_rng(0))
    np.testing.assert_array_equal(parameters_of(model)[1], bias)


def test_inputs_stay_and_may_be_read_only() -> None:
    inputs, labels = INPUTS.copy(), LABELS.copy()
    inputs.flags.writeable = labels.flags.writeable = False
    model = logistic_model()
    train(model, inputs, labels, TrainingSettings(learning_rate=0.5, batch_size=4), np.random.default_rng(0))
    evaluate(model, inputs, labels)  # warnings are errors
    np.testing.assert_array_equal(inputs, INPUTS)


def test_divergence_is_a_result_not_an_exception() -> None:
    settings = TrainingSettings(learning_rate=1e38, batch_size=4, local_epochs=3)
    assert math.isnan(train(logistic_model(), INPUTS * 100, LABELS, settings, np.random.default_rng(0)))


def test_evaluate_by_hand_whatever_the_batch_size() -> None:
    model = logistic_model()
    weight, bias = parameters_of(model)
    loss, *_ = loss_and_gradient(weight, bias, np.arange(12))
    accuracy = float((np.argmax(INPUTS @ weight.T + bias, axis=1) == LABELS).mean())
    assert 0 < accuracy < 1
    for batch_size in (1, 5, 12, 1024):
        measured = evaluate(model, INPUTS, LABELS, batch_size=batch_size)
        assert measured == (pytest.approx(loss, rel=1e-6), accuracy)


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_ignores_dropout_and_leaves_the_mode(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), logistic_model()).train(training)
    assert evaluate(model, INPUTS, LABELS) == evaluate(logistic_model(), INPUTS, LABELS)
    assert model.training is training
    assert model[0].training is training


@pytest.mark.parametrize("training", [True, False])
def test_train_uses_dropout_and_leaves_the_mode(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), logistic_model()).train(training)
    plain, _ = evaluate(logistic_model(), INPUTS, LABELS)
    settings = TrainingSettings(learning_rate=0.1, batch_size=12)
    assert abs(train(model, INPUTS, LABELS, settings, np.random.default_rng(0)) - plain) > 1e-3
    assert model.training is training


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0.0}, r"learning_rate must be a finite number above 0, got 0\.0"),
        ({"learning_rate": math.inf}, r"learning_rate must be a finite number above 0, got inf"),
        ({"batch_size": 0}, r"batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, r"batch_size must be a whole number of at least 1, got 2\.5"),
        ({"local_epochs": 0}, r"local_epochs must be a whole number of at least 1, got 0"),
        ({"local_steps": 0}, r"local_steps must be a whole number of at least 1, got 0"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1\.0"),
        ({"momentum": -0.1}, r"momentum must be a finite number of at least 0, got -0\.1"),
        ({"weight_decay": -0.1}, r"weight_decay must be a finite number of at least 0, got -0\.1"),
        ({"proximal_mu": math.nan}, r"proximal_mu must be a finite number of at least 0, got nan"),
        ({"augmentation": "blur"}, r"augmentation must be one of none, crop-flip, got 'blur'"),
    ],
)
def test_wrong_settings(values: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        TrainingSettings(**{"learning_rate": 0.1, "batch_size": 8} | values)


def test_whole_numbers_are_kept_as_such() -> None:
    settings = TrainingSettings(learning_rate=1, batch_size=8.0, local_steps=np.int64(3))  # type: ignore[arg-type]
    assert (settings.batch_size, settings.local_steps) == (8, 3)
    assert type(settings.batch_size) is type(settings.local_steps) is int


def test_no_examples_or_unequal_numbers_are_refused() -> None:
    settings = TrainingSettings(learning_rate=0.1, batch_size=8)
    with pytest.raises(ParameterError, match="got 0 examples, 0 labels"):
        train(logistic_model(), INPUTS[:0], LABELS[:0], settings, np.random.default_rng(0))
    with pytest.raises(ParameterError, match="got 12 examples, 11 labels"):
        evaluate(logistic_model(), INPUTS, LABELS[:11])
    with pytest.raises(ParameterError, match="batch_size must be a whole number of at least 1, got 0"):
        evaluate(logistic_model(), INPUTS, LABELS, batch_size=0)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_steps_are_those_of_torchs_own_optimizer_bit_by_bit(momentum: float, weight_decay: float) -> None:
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    theirs = copy.deepcopy(ours)
    settings = TrainingSettings(learning_rate=0.3, batch_size=4, momentum=momentum, weight_decay=weight_decay)
    descent = _SGD(list(ours.parameters()), settings)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=momentum, weight_decay=weight_decay)
    for _ in range(20):
        for model, step in ((ours, descent.step), (theirs, optimizer.step)):
            model.zero_grad()
            nn.functional.cross_entropy(model(torch.tensor(INPUTS)), torch.tensor(LABELS)).backward()
            step()
    for own, given in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, given)


def test_training_does_not_load_torchs_compiler() -> None:
    """It takes longer than a client's first rounds."""
    program = (
        "import sys, numpy as np; from torch import nn; from fedsel_flwr.clients.training import *; "
        "train(nn.Linear(3, 2), np.ones((4, 3), np.float32), np.zeros(4, np.int64), "
        "TrainingSettings(learning_rate=0.1, batch_size=2), np.random.default_rng(0)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=100).returncode == 0
