"""Local training and evaluation against NumPy by hand; views of images; step lengths that are halved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.objectives import get_arrays, set_arrays
from fedsel_flwr.clients.training import PADDING, SHIFTS, VIEWS, crop_flip, draw_views, evaluate, train
from fedsel_flwr.clients.training_settings import TrainingSettings, examples_per_round
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.clients.helpers import Recorder
from tests.simulations import inprocess

FloatArray = npt.NDArray[np.float64]
INPUTS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
LABELS = np.array([0, 1, 1, 0, 2, 2, 1, 0, 2, 1, 0, 2], dtype=np.int64)


def settings_of(**options: Any) -> TrainingSettings:
    """Step length .5 and full batches, unless other settings are given."""
    return TrainingSettings(**{"learning_rate": 0.5, "batch_size": 12} | options)


def logistic_model() -> nn.Linear:
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


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 12},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"proximal_mu": 2.0},
        {"momentum": 0.5, "weight_decay": 0.05, "proximal_mu": 0.7},
    ],
)
def test_batches_momentum_decay_and_proximal_term_by_hand(options: dict[str, float]) -> None:
    chosen = {"batch_size": 5, "momentum": 0.0, "weight_decay": 0.0, "proximal_mu": 0.0} | options
    model = logistic_model()
    start = current = np.concatenate([part.ravel() for part in parameters_of(model)])
    settings = settings_of(learning_rate=0.3, local_epochs=2, **chosen)
    reported = train(model, INPUTS, LABELS, settings, np.random.default_rng(7))

    generator = np.random.default_rng(7)
    generator.integers(2**63)  # the seed of the dropout is drawn first
    velocity, losses = np.zeros_like(start), []
    for _ in range(2):
        order = generator.permutation(12)
        for first in range(0, 12, int(chosen["batch_size"])):
            rows = order[first : first + int(chosen["batch_size"])]
            loss, *gradients = loss_and_gradient(current[:9].reshape(3, 3), current[9:], rows)
            losses.append(loss)
            gradient = np.concatenate([part.ravel() for part in gradients])
            # d/dw mu/2 |w - w0|² = mu (w - w0)
            gradient += chosen["proximal_mu"] * (current - start) + chosen["weight_decay"] * current
            velocity = chosen["momentum"] * velocity + gradient
            current = current - 0.3 * velocity
    assert reported == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(np.concatenate([part.ravel() for part in parameters_of(model)]), current, atol=2e-6)


@pytest.mark.parametrize(
    ("size", "options", "lengths"),
    [
        (10, {"batch_size": 4, "local_epochs": 3}, [4, 4, 2] * 3),
        (5, {"batch_size": 2, "local_epochs": 9, "local_steps": 7}, [2, 2, 1, 2, 2, 1, 2]),  # steps override epochs
    ],
)
def test_every_pass_shows_every_example_once_in_a_new_order(
    size: int, options: dict[str, int], lengths: list[int]
) -> None:
    model, inputs = Recorder(), np.arange(size, dtype=np.float32)[:, np.newaxis]
    train(model, inputs, np.zeros(size, dtype=np.int64), settings_of(**options), np.random.default_rng(0))
    assert [len(batch) for batch in model.seen] == lengths
    shown = np.concatenate(model.seen)[:, 0].tolist()
    passes = [shown[start : start + size] for start in range(0, len(shown) - size + 1, size)]
    assert all(sorted(order) == list(range(size)) for order in passes)
    assert len({tuple(order) for order in passes}) == len(passes) > 1


@pytest.mark.parametrize("size", [1, 7, 8, 20])
@pytest.mark.parametrize("plan", [{"local_epochs": 3}, {"local_steps": 1}, {"local_steps": 6}])
def test_examples_of_a_round_are_those_that_training_takes(size: int, plan: dict[str, int]) -> None:
    model, settings = Recorder(), settings_of(batch_size=4, **plan)
    train(model, np.zeros((size, 1), np.float32), np.zeros(size, np.int64), settings, np.random.default_rng(0))
    assert examples_per_round(settings, np.array([size])).tolist() == [sum(map(len, model.seen))]


def test_generator_decides_order_and_dropout() -> None:
    """And no global random state matters or changes."""
    results = []
    with torch.random.fork_rng(devices=[]):
        for seed, elsewhere in ((3, 1), (3, 2), (4, 2)):
            torch.default_generator.manual_seed(elsewhere)
            model = nn.Sequential(nn.Dropout(0.5), logistic_model())
            before = torch.get_rng_state()  # building the model drew from it
            loss = train(model, INPUTS, LABELS, settings_of(local_steps=2), np.random.default_rng(seed))
            assert torch.equal(torch.get_rng_state(), before)
            results.append((loss, model[1].weight.detach().clone()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert abs(results[0][0] - results[2][0]) > 1e-3  # full batches: the order is idle


def test_frozen_parameters_stay() -> None:
    model = logistic_model()
    model.bias.requires_grad_(False)
    _, bias = parameters_of(model)
    train(model, INPUTS, LABELS, settings_of(batch_size=4, proximal_mu=1.0, weight_decay=0.1), np.random.default_rng(0))
    np.testing.assert_array_equal(parameters_of(model)[1], bias)


def test_inputs_stay_and_may_be_read_only() -> None:
    inputs, labels = INPUTS.copy(), LABELS.copy()
    inputs.flags.writeable = labels.flags.writeable = False
    model = logistic_model()
    train(model, inputs, labels, settings_of(batch_size=4), np.random.default_rng(0))
    evaluate(model, inputs, labels)  # warnings are errors
    np.testing.assert_array_equal(inputs, INPUTS)


def test_divergence_is_a_result_not_an_exception() -> None:
    settings = settings_of(learning_rate=1e38, batch_size=4, local_epochs=3)
    assert math.isnan(train(logistic_model(), INPUTS * 100, LABELS, settings, np.random.default_rng(0)))


def test_evaluate_by_hand_whatever_the_batch_size() -> None:
    model = logistic_model()
    weight, bias = parameters_of(model)
    loss, *_ = loss_and_gradient(weight, bias, np.arange(12))
    accuracy = float((np.argmax(INPUTS @ weight.T + bias, axis=1) == LABELS).mean())
    assert 0 < accuracy < 1
    for batch_size in (1, 5, 12, 1024):
        assert evaluate(model, INPUTS, LABELS, batch_size=batch_size) == (pytest.approx(loss, rel=1e-6), accuracy)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_for_training_alone_and_the_mode_stays(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), logistic_model()).train(training)
    plain = evaluate(logistic_model(), INPUTS, LABELS)
    assert evaluate(model, INPUTS, LABELS) == plain
    assert abs(train(model, INPUTS, LABELS, settings_of(), np.random.default_rng(0)) - plain[0]) > 1e-3
    assert model.training is model[0].training is training


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 0.0}, {"learning_rate": math.inf}, {"batch_size": 0}, {"batch_size": 2.5},
        {"local_epochs": 0}, {"local_steps": 0}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -0.1},
        {"proximal_mu": math.nan}, {"augmentation": "blur"}, {"halved_at": (5, 3)}, {"halved_at": (3, 3)},
        {"halved_at": (0,)}, {"halved_at": (1.5,)},
    ],
)  # fmt: skip
def test_wrong_settings(values: dict[str, Any]) -> None:
    ((name, _),) = values.items()
    with pytest.raises(ParameterError, match=f"^(each value of )?{name} "):
        settings_of(**values)


def test_no_examples_or_unequal_numbers_are_refused() -> None:
    with pytest.raises(ParameterError, match="got 0 examples, 0 labels"):
        train(logistic_model(), INPUTS[:0], LABELS[:0], settings_of(), np.random.default_rng(0))
    with pytest.raises(ParameterError, match="got 12 examples, 11 labels"):
        evaluate(logistic_model(), INPUTS, LABELS[:11])
    with pytest.raises(ParameterError, match="batch_size must be a whole number of at least 1, got 0"):
        evaluate(logistic_model(), INPUTS, LABELS, batch_size=0)


# ---- step lengths that are halved ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("round", "rate"), [(1, 0.4), (2, 0.4), (3, 0.2), (4, 0.2), (5, 0.1), (900, 0.1)])
def test_the_rate_of_a_round(round: int, rate: float) -> None:
    settings = settings_of(learning_rate=0.4, batch_size=2, halved_at=(3, 5))
    assert (settings.at(round).learning_rate, settings.at(round).batch_size) == (rate, 2)


def test_both_engines_halve_it_in_the_same_round() -> None:
    def scenario(*halved_at: int) -> Any:
        keys = {"num_clients": 12, "clients_per_round": 3, "rounds": 4, "model.name": "logistic", "selector": "random"}
        return load_scenario("digits", keys | {"training.halved_at": list(halved_at)})

    alone, together = inprocess.play(scenario(3)), simulate(scenario(3), engine="vectorized")
    assert inprocess.distance(alone, together) <= 1e-5
    for rounds in ((), (1,)):
        assert inprocess.distance(together, simulate(scenario(*rounds), engine="vectorized")) > 1e-3


# ---- views of images -----------------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(0).normal(size=(11, 3, 5, 6)).astype(np.float32)
CLASSES = np.arange(11) % 4
VIEWED = {"learning_rate": 0.1, "batch_size": 4, "local_steps": 7}
CROP_FLIP = settings_of(**VIEWED, augmentation="crop-flip")


def view_of(image: npt.NDArray[np.float32], view: int) -> npt.NDArray[np.float32]:
    """The definition, with slices: pad by four, crop, mirror."""
    row, column = divmod(view // 2, 9)
    _, height, width = image.shape
    cropped = np.pad(image, ((0, 0), (4, 4), (4, 4)))[:, row : row + height, column : column + width]
    return cropped[:, :, ::-1] if view % 2 else cropped


def test_every_view_of_an_image_by_slices() -> None:
    assert (PADDING, SHIFTS, VIEWS) == (4, 9, 162)
    image = torch.tensor(IMAGES[0])
    found = crop_flip(image.expand(VIEWS, -1, -1, -1), torch.arange(VIEWS))
    np.testing.assert_array_equal(found.numpy(), np.stack([view_of(IMAGES[0], view) for view in range(VIEWS)]))
    assert found.is_contiguous()
    found.fill_(7)
    np.testing.assert_array_equal(image.numpy(), IMAGES[0])


def test_every_view_is_as_likely() -> None:
    counts = np.bincount(draw_views(np.random.default_rng(0), 162 * 400), minlength=162)
    assert counts.shape == (162,)
    assert (np.abs(counts - 400) < 5 * 20).all()  # five standard deviations


@pytest.mark.parametrize("settings", [settings_of(**VIEWED), CROP_FLIP], ids=["plain", "crop-flip"])
def test_training_shows_the_views_that_its_generator_draws(settings: TrainingSettings) -> None:
    """Without augmentation nothing more is drawn."""
    model, drawn, expected = Recorder(90, 4), np.random.default_rng(3), []
    train(model, IMAGES, CLASSES, settings, drawn)
    generator = np.random.default_rng(3)
    generator.integers(2**63)  # the dropout's seed
    for _ in range(3):
        every = IMAGES[order := generator.permutation(11)]
        if settings is CROP_FLIP:
            views = generator.integers(162, size=11)
            every = np.stack([view_of(IMAGES[i], view) for i, view in zip(order, views, strict=True)])
        expected += [every[:4], every[4:8], every[8:]]
    assert len(model.seen) == 7
    for found, batch in zip(model.seen, expected, strict=False):
        np.testing.assert_array_equal(found, batch)
    assert drawn.integers(2**40) == generator.integers(2**40)


def test_what_measures_a_model_sees_the_images_as_they_are() -> None:
    model = Recorder(90, 4)
    evaluate(model, IMAGES, CLASSES)
    np.testing.assert_array_equal(model.seen[0], IMAGES)
    world, plain = World(load_scenario("smoke", {"training.augmentation": "crop-flip"})), World(load_scenario("smoke"))
    config = {"round": 1, "needs": "loss,local_accuracy"}
    (arrays, _, said), (expected, _, told) = (one.client(0).fit(one.initial_arrays(), config) for one in (world, plain))
    assert (said["loss"], said["local_accuracy"]) == (told["loss"], told["local_accuracy"])
    set_arrays(plain.model, plain.initial_arrays())
    assert said["loss"] == answer(plain.model, {"loss"}, *plain.examples(0))["loss"]
    assert said["train_loss"] != told["train_loss"]
    assert any(not np.array_equal(one, other) for one, other in zip(arrays, expected, strict=True))


@pytest.mark.parametrize("backend", ["manual", "vmap", "sequential"])
def test_what_is_no_image_is_refused(backend: Any) -> None:
    model, vectors = nn.Sequential(nn.Linear(18, 4)), IMAGES[:, :, 0]
    with pytest.raises(ParameterError, match="augmentation = 'crop-flip'"):
        train(model, vectors, CLASSES, CROP_FLIP, np.random.default_rng(0))
    with pytest.raises(ParameterError, match=r"augmentation = 'crop-flip'.* 3 axes"):
        BatchedTrainer(model, CROP_FLIP, backend=backend).train(
            get_arrays(model), Examples(vectors, CLASSES, [np.arange(5)]), [np.random.default_rng(0)]
        )


def test_a_scenario_without_images_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"data\.dataset = 'synthetic-regression'"):
        World(load_scenario("ben-ami-linear", {"training.augmentation": "crop-flip"}))
