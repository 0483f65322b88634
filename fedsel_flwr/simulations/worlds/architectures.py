"""The models that the scenarios train, and their parameters as NumPy arrays.

How much a model computes: the multiplications of its forward pass, counted once.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.clients.objectives import get_arrays, set_arrays
from fedsel_flwr.errors import ParameterError

__all__ = ["MODELS", "build_model", "get_arrays", "set_arrays"]

MODELS = ("logistic", "mlp", "cnn", "cnn5", "cnn3", "vgg11", "linear")
"""The names that `build_model` knows."""
REGRESSORS = ("linear",)
"""Those that predict a number; the others classify."""


def build_model(name: str, input_shape: Sequence[int], num_classes: int, seed: int) -> nn.Module:
    """Build a model with parameters drawn from the seed.

    Args:
        name: "logistic": multinomial logistic regression; "mlp": two hidden layers of 64 and 30 rectified units;
            "cnn": two 3x3 convolutions of 16 and 32 channels, each with rectifier and 2x2 max-pooling, a dropout of
            one quarter and a dense layer; "cnn5": two padded 5x5 convolutions of 16 and 32 channels, each with
            rectifier and 2x2 max-pooling, and a dense layer; "cnn3": three 3x3 convolutions of 32, 64 and 64 channels,
            pooled between, and a dense layer of 64 rectified units before the last (GPFL's on CIFAR-10); "vgg11":
            see :func:`vgg11`; "linear": a linear map to one number, for a regression.
        input_shape: The shape of one example (channels, height, width); for "cnn" and "cnn5" at least 4x4 pixels, for
            "cnn3" 18x18, for "vgg11" at least 32x32; of any other model (features,) as well.
        num_classes: The number of classes, at least 2; "linear" has none.
        seed: Draws the initial parameters (torch's default distributions, but for "vgg11"). Global random states
            stay as they are.

    Returns:
        A model from inputs of shape (n, ...) to logits of shape (n, num_classes); "linear": to numbers, shape (n, 1).

    Raises:
        ParameterError: For an unknown name, a shape that the model cannot read, fewer than two classes, or a
            negative seed.

    Examples:
        >>> sum(array.size for array in get_arrays(build_model("mlp", (1, 28, 28), 10, seed=0)))
        52500
    """
    one_of("model", name, MODELS)
    if not input_shape or min(input_shape) < 1:
        raise ParameterError(f"input_shape must hold positive sizes; got {tuple(input_shape)}")
    num_classes = 1 if name in REGRESSORS else whole("num_classes", num_classes, 2)
    seed = whole("seed", seed, 0)
    with seeded(seed):
        if name in ("logistic", "linear"):
            return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
        if name == "mlp":
            return _mlp(math.prod(input_shape), num_classes)
        if name == "vgg11":
            _check_image(name, input_shape, 32)
            return vgg11(input_shape, num_classes)
        if name == "cnn3":
            _check_image(name, input_shape, 18)
            return _cnn3(input_shape, num_classes)
        _check_image(name, input_shape, 4)
        return (_cnn if name == "cnn" else _cnn5)(input_shape, num_classes)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block torch draws what belongs to a seed; afterwards its random state is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        yield


def vgg11(input_shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Module:
    """VGG-11 for small images.

    Configuration A of the paper: 3x3 convolutions of 64, 128, 256, 256, 512, 512, 512, 512 channels with rectifiers,
    2x2 max-pooling after the first, second, fourth, sixth and eighth. Ours, as Kim et al. only name VGG-11 for
    CIFAR-10: no batch normalisation, whose running statistics an average of models blurs; one dense layer from the 512
    channels that are left of 32x32 pixels, in place of three of 4,096 units for 224x224; no dropout. The convolutions
    start from He et al.'s normal distribution, the biases from 0: from torch's default the signal fades before the
    eighth layer.

    Args:
        input_shape: The shape of one image (channels, height, width), at least 32x32 pixels.
        num_classes: The number of classes.
        width: Channels of the first convolution; the others have up to 8 times as many.

    Returns:
        A model from inputs of shape (n, channels, height, width) to logits of shape (n, num_classes).

    References:
        K. Simonyan and A. Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015.

    Examples:
        >>> sum(array.size for array in get_arrays(vgg11((3, 32, 32), 10)))
        9225610
    """
    channels, height, width_px = input_shape
    layers: list[nn.Module] = []
    for factors in ((1,), (2,), (4, 4), (8, 8), (8, 8)):
        for factor in factors:
            layers += [nn.Conv2d(channels, factor * width, kernel_size=3, padding=1), nn.ReLU()]
            channels = factor * width
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (height // 32) * (width_px // 32), num_classes))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


def _mlp(num_inputs: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, 64),
        nn.ReLU(),
        nn.Linear(64, 30),
        nn.ReLU(),
        nn.Linear(30, num_classes),
    )


def _check_image(name: str, input_shape: Sequence[int], least: int) -> None:
    """Refuse inputs that are no images, or too small ones."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ParameterError(
            f"the model {name!r} reads images (channels, height, width) of at least {least}x{least} pixels; got "
            f"{tuple(input_shape)}"
        )


def _cnn(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * (height // 4) * (width // 4), num_classes),
    )


def _cnn5(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), num_classes),
    )


def _cnn3(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    channels, *sides = input_shape
    left = [((side - 2) // 2 - 2) // 2 - 2 for side in sides]  # no padding: 4x4 of 32x32
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * math.prod(left), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def count_multiplications(model: nn.Module, example: npt.NDArray[np.float32]) -> int:
    """Count the multiplications of matrix products and convolutions in a forward pass over one example.

    They are counted while the model runs once on this machine, not timed: the same on every machine. The backward pass
    takes about two forward passes, whatever the model, so that the ratio of two models is that of their training.

    Args:
        model: The model; it stays as it is.
        example: One example, shape (...,).

    Returns:
        The count, above 0.

    Raises:
        ParameterError: None was counted: the model is made of operations that torch does not count.

    Example:
        >>> count_multiplications(nn.Linear(6, 3), np.zeros(6, dtype=np.float32))
        18
    """
    # here, as it takes a moment that few runs need
    from torch.utils.flop_counter import FlopCounterMode

    # two examples, as batch normalization cannot take one alone
    two = torch.tensor(example).repeat(2, *[1] * example.ndim)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
        copy.deepcopy(model).cpu().train()(two)
    # of two examples; a multiplication with its addition is two operations
    count = counter.get_total_flops() // 4
    if count < 1:
        raise ParameterError(
            "clients.reference_multiplications needs a model with matrix products or convolutions, but none was "
            f"counted in {type(model).__name__}: set it to 0"
        )
    return int(count)
