"""The models: sizes, shapes, and parameters that the seed alone decides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import evaluate, train
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.architectures import MODELS, REGRESSORS, build_model, vgg11

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
SMALL = tuple(name for name in MODELS if name not in ("vgg11", "cnn3"))
"""Those that read 8x8 pixels."""


def arrays_of(name: str, seed: int) -> list[npt.NDArray[np.float32]]:
    return get_arrays(build_model(name, (1, 8, 8), 10, seed))


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in SMALL for shape in SHAPES] + [("vgg11", (3, 32, 32)), ("cnn3", (1, 28, 18))],
)
def test_logits_and_gradients(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(name, shape, 7, seed=0)
    logits = model(torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (5, 1 if name in REGRESSORS else 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("logistic", (1, 28, 28), 784 * 10 + 10),
        ("mlp", (1, 28, 28), 784 * 64 + 64 + 64 * 30 + 30 + 30 * 10 + 10),
        ("mlp", (1, 8, 8), 64 * 64 + 64 + 64 * 30 + 30 + 30 * 10 + 10),
        ("linear", (20,), 21),
        ("cnn3", (3, 32, 32), 122_570),  # 896 + 18,496 + 36,928 + (1,024 + 1) * 64 + 65 * 10
        ("cnn5", (1, 28, 28), 16 * 25 + 16 + 32 * 16 * 25 + 32 + 32 * 7 * 7 * 10 + 10),
        # 3-64-128-256-256-512-512-512-512 channels, 9 weights each and a bias, and a dense layer
        ("vgg11", (3, 32, 32), 9 * (192 + 8192 + 32768 + 65536 + 131072 + 3 * 262144) + 2752 + 5130),
        ("cnn", (1, 8, 8), 16 * 9 + 16 + 32 * 16 * 9 + 32 + 32 * 2 * 2 * 10 + 10),
        ("cnn", (1, 28, 28), 16 * 9 + 16 + 32 * 16 * 9 + 32 + 32 * 7 * 7 * 10 + 10),
        ("cnn", (3, 32, 32), 16 * 27 + 16 + 32 * 16 * 9 + 32 + 32 * 8 * 8 * 10 + 10),
    ],
)
def test_number_of_parameters(name: str, shape: tuple[int, int, int], count: int) -> None:
    assert sum(array.size for array in get_arrays(build_model(name, shape, 10, seed=0))) == count


def test_only_the_cnn_drops_out() -> None:
    for name in MODELS:
        shape = (1, 8, 8) if name in SMALL else (1, 32, 32)
        image = torch.ones(1, *shape)
        model = build_model(name, shape, 10, seed=0).train()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            same = torch.equal(model(image), model(image))
        assert same == (name != "cnn")
        model.eval()
        assert torch.equal(model(image), model(image))


def test_the_smallest_vgg_learns_and_its_signal_does_not_fade() -> None:
    """24 images, brighter in one of three colours; at first the features are as large as the pixels, give or take.

    From torch's default distribution they are .02, and nothing is learnt in the same time.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        model = vgg11((3, 32, 32), 3, width=8)
    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((24, 3, 32, 32)).astype(np.float32), np.arange(24) % 3
    for label in range(3):
        inputs[labels == label, label] += 1
    with torch.no_grad():
        features = model[:-1](torch.tensor(inputs))
    assert features.shape == (24, 64)
    assert 0.2 < float(features.square().mean().sqrt()) < 5
    settings = TrainingSettings(learning_rate=0.01, batch_size=8, local_epochs=20, momentum=0.9)
    train(model, inputs, labels, settings, np.random.default_rng(1))
    assert evaluate(model, inputs, labels)[1] == 1.0
    assert vgg11((1, 64, 96), 3, width=2)(torch.zeros(2, 1, 64, 96)).shape == (2, 3)  # more than one pixel is left


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_alone_decides_the_parameters(name: str) -> None:
    first, other = arrays_of(name, 1), arrays_of(name, 2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(99)
        before = torch.get_rng_state()
        again = arrays_of(name, 1)
        assert torch.equal(torch.get_rng_state(), before)
    for ours, theirs, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert not np.array_equal(ours, different)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cnn3", (1, 17, 32), 10), r"'cnn3' reads images .* of at least 18x18 pixels, got \(1, 17, 32\)"),
        (("cnn5", (1, 3, 8), 10), r"'cnn5' reads images .* of at least 4x4 pixels"),
        (("vgg11", (3, 28, 28), 10), r"'vgg11' reads images .* of at least 32x32 pixels"),
        (("cnn", (1, 3, 8), 10), r"at least 4x4 pixels"),
        (("cnn", (64,), 10), r"reads images \(channels, height, width\)"),
        (("mlp", (), 10), r"input_shape must hold positive sizes, got \(\)"),
        (("mlp", (1, 0, 8), 10), r"input_shape must hold positive sizes, got \(1, 0, 8\)"),
        (("mlp", (1, 8, 8), 1), r"num_classes must be a whole number of at least 2, got 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, tuple[int, ...], int], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(*arguments, seed=0)
