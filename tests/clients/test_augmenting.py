"""Crop and flip: the views of an image, who draws them, and where they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.objectives import get_arrays, set_arrays
from fedsel_flwr.clients.training import (
    PADDING,
    SHIFTS,
    VIEWS,
    TrainingSettings,
    crop_flip,
    draw_views,
    evaluate,
    train,
)
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World

IMAGES = np.random.default_rng(0).normal(size=(11, 3, 5, 6)).astype(np.float32)
LABELS = np.arange(11) % 4
PLAIN = TrainingSettings(learning_rate=0.1, batch_size=4, local_steps=7)
AUGMENTED = TrainingSettings(learning_rate=0.1, batch_size=4, local_steps=7, augmentation="crop-flip")


class Recorder(nn.Module):
    """Keeps the batches that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(90, 4), list[npt.NDArray[Any]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.numpy().copy())
        return self.layer(x.flatten(1))


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


def test_images_stay_as_they_are() -> None:
    images = torch.tensor(IMAGES)
    crop_flip(images, torch.arange(11)).fill_(7)
    np.testing.assert_array_equal(images.numpy(), IMAGES)


def test_every_view_is_as_likely() -> None:
    counts = np.bincount(draw_views(np.random.default_rng(0), 162 * 400), minlength=162)
    assert counts.shape == (162,)
    assert (np.abs(counts - 400) < 5 * 20).all()  # five standard deviations


def test_training_shows_the_views_that_its_generator_draws() -> None:
    model = Recorder()
    train(model, IMAGES, LABELS, AUGMENTED, np.random.default_rng(3))
    generator, expected = np.random.default_rng(3), []
    generator.integers(2**63)  # the dropout's seed
    for _ in range(3):
        order, views = generator.permutation(11), generator.integers(162, size=11)
        every = np.stack([view_of(IMAGES[i], view) for i, view in zip(order, views, strict=True)])
        expected += [every[:4], every[4:8], every[8:]]
    assert len(model.seen) == 7
    for found, batch in zip(model.seen, expected, strict=False):
        np.testing.assert_array_equal(found, batch)


def test_without_augmentation_nothing_more_is_drawn() -> None:
    plain, model = np.random.default_rng(3), Recorder()
    train(model, IMAGES, LABELS, PLAIN, plain)
    expected = np.random.default_rng(3)
    expected.integers(2**63)
    orders = [expected.permutation(11) for _ in range(3)]
    np.testing.assert_array_equal(model.seen[0], IMAGES[orders[0][:4]])
    assert plain.integers(2**40) == expected.integers(2**40)


def test_what_measures_a_model_sees_the_images_as_they_are() -> None:
    model = Recorder()
    evaluate(model, IMAGES, LABELS)
    np.testing.assert_array_equal(model.seen[0], IMAGES)
    world = World(load_scenario("smoke", {"training.augmentation": "crop-flip"}))
    plain = World(load_scenario("smoke"))
    config = {"round": 1, "needs": "loss,local_accuracy"}
    arrays, _, said = world.client(0).fit(world.initial_arrays(), dict(config))
    expected, _, told = plain.client(0).fit(plain.initial_arrays(), dict(config))
    assert (said["loss"], said["local_accuracy"]) == (told["loss"], told["local_accuracy"])
    assert said["loss"] == answer(plain_model(plain), {"loss"}, *plain.examples(0))["loss"]
    assert said["train_loss"] != told["train_loss"]
    assert any(not np.array_equal(one, other) for one, other in zip(arrays, expected, strict=True))


def plain_model(world: World) -> nn.Module:
    set_arrays(world.model, world.initial_arrays())
    return world.model


@pytest.mark.parametrize("backend", ["manual", "vmap", "sequential"])
def test_what_is_no_image_is_refused(backend: Any) -> None:
    model, vectors = nn.Sequential(nn.Linear(18, 4)), IMAGES[:, :, 0]
    with pytest.raises(ParameterError, match="augmentation = 'crop-flip'"):
        train(model, vectors, LABELS, AUGMENTED, np.random.default_rng(0))
    with pytest.raises(ParameterError, match=r"augmentation = 'crop-flip'.* 3 axes"):
        BatchedTrainer(model, AUGMENTED, backend=backend).train(
            get_arrays(model), Examples(vectors, LABELS, [np.arange(5)]), [np.random.default_rng(0)]
        )


def test_a_scenario_without_images_is_refused() -> None:
    scenario = load_scenario("ben-ami-linear", {"training.augmentation": "crop-flip"})
    with pytest.raises(ParameterError, match=r"data\.dataset = 'synthetic-regression' has examples of shape \(\d+,\)"):
        World(scenario)
