"""Models of the scenarios, built by name, and the number of multiplications of a model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError

MODELS = ("logistic", "mlp", "cnn", "cnn5", "cnn3", "vgg11", "linear")
"""Names of the models that :func:`build_model` can build."""
REGRESSORS = ("linear",)
"""Models that predict a number. All other models classify."""
SMALLEST_IMAGES = {"cnn": 4, "cnn5": 4, "cnn3": 18, "vgg11": 32}
"""Models that read images -> the smallest height and width, in pixels."""


def build_model(name: str, input_shape: Sequence[int], num_classes: int, seed: int) -> nn.Module:
    """Build a model with parameters drawn from the seed.

    The models:

    * "logistic": multinomial logistic regression.
    * "mlp": two hidden layers of 64 and 30 rectified units.
    * "cnn": two 3x3 convolutions of 16 and 32 channels, each with rectifier and 2x2 max-pooling. Then a dropout of one
      quarter and a dense layer.
    * "cnn5": two padded 5x5 convolutions of 16 and 32 channels, each with rectifier and 2x2 max-pooling. Then a dense
      layer.
    * "cnn3": three 3x3 convolutions of 32, 64 and 64 channels, with pooling between them. Then a dense layer of 64
      rectified units, and the last layer. GPFL uses this model on CIFAR-10.
    * "vgg11": see :func:`vgg11`.
    * "linear": a linear map to one number, for a regression.

    Args:
        name: Name of the model.
        input_shape: The shape of one example (channels, height, width). The smallest image has 4x4 pixels for "cnn" and
            "cnn5", 18x18 for "cnn3", and 32x32 for "vgg11". All other models also accept the shape (features,).
        num_classes: The number of classes, at least 2; ignored by "linear".
        seed: Seed that draws the initial parameters, from torch's default distributions except for "vgg11". Global
            random states are unchanged.

    Returns:
        A model from inputs of shape (n, ...) to logits of shape (n, num_classes). The model "linear" returns numbers of
        shape (n, 1).

    Raises:
        ParameterError: The model cannot read the shape, or there are fewer than two classes.

    Examples:
        >>> sum(layer.numel() for layer in build_model("mlp", (1, 28, 28), 10, seed=0).parameters())
        52500
    """
    if not input_shape or min(input_shape) < 1:
        raise ParameterError(f"input_shape must hold positive sizes, got {tuple(input_shape)}")
    num_classes = 1 if name in REGRESSORS else whole("num_classes", num_classes, 2)
    least = SMALLEST_IMAGES.get(name, 0)
    if least and (len(input_shape) != 3 or min(input_shape[1:]) < least):
        raise ParameterError(
            f"the model {name!r} reads images (channels, height, width) of at least {least}x{least} pixels, got "
            f"{tuple(input_shape)}"
        )
    with torch_seeded(seed):
        if name in ("logistic", "linear", "mlp"):
            hidden = (64, 30) if name == "mlp" else ()
            return nn.Sequential(nn.Flatten(), *_dense(math.prod(input_shape), *hidden, num_classes))
        if name == "vgg11":
            return vgg11(input_shape, num_classes)
        channels, *sides = input_shape
        if name == "cnn3":
            # Each convolution without padding removes 2 pixels, and each pooling halves. 32x32 pixels become 4x4.
            left = [((side - 2) // 2 - 2) // 2 - 2 for side in sides]
            features = [*_pooled(channels, 32, 3), *_pooled(32, 64, 3), nn.Conv2d(64, 64, kernel_size=3), nn.ReLU()]
            return nn.Sequential(*features, nn.Flatten(), *_dense(64 * math.prod(left), 64, num_classes))
        size = 3 if name == "cnn" else 5
        features = [*_pooled(channels, 16, size, size // 2), *_pooled(16, 32, size, size // 2), nn.Flatten()]
        dropout = [nn.Dropout(0.25)] if name == "cnn" else []
        return nn.Sequential(*features, *dropout, nn.Linear(32 * math.prod(side // 4 for side in sides), num_classes))


@contextlib.contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's random state within the block, and restore it afterwards."""
    # No devices, because models are built on the CPU, and saving the state of every GPU would initialise CUDA.
    with torch.random.fork_rng(devices=[]):
        # Through SeedSequence, as for all random streams of the package, so that neighbouring seeds become unrelated.
        torch.default_generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        yield


def vgg11(input_shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Module:
    """Build VGG-11 for small images.

    The convolutions are those of the paper's configuration A: 3x3 with 64, 128, 256, 256, 512, 512, 512 and 512
    channels, with rectifiers. 2x2 max-pooling follows the first, second, fourth, sixth and eighth convolution.

    Kim et al. only name VGG-11 for CIFAR-10. We chose the rest:

    * No batch normalisation, because averaging models blurs its running statistics.
    * One dense layer, because 32x32 pixels leave only 512 channels. The paper has three dense layers, with 4,096 units,
      for 224x224 pixels.
    * No dropout.
    * Initial weights of the convolutions from He et al.'s normal distribution, and biases of 0. With torch's default
      the signal fades before the eighth layer.

    Args:
        input_shape: The shape of one image (channels, height, width), at least 32x32 pixels.
        num_classes: The number of classes.
        width: Channels of the first convolution. The other convolutions have up to 8 times this number.

    Returns:
        A model from inputs of shape (n, channels, height, width) to logits of shape (n, num_classes).

    References:
        K. Simonyan and A. Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015.

    Examples:
        >>> sum(layer.numel() for layer in vgg11((3, 32, 32), 10).parameters())
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


def count_multiplications(model: nn.Module, example: npt.NDArray[np.float32]) -> int:
    """Count the multiplications of matrix products and convolutions in a forward pass over one example.

    Operations are counted, not timed, so that the result is the same on every machine. For any model, the backward pass
    costs about two forward passes. Therefore the ratio of two counts is also the ratio of the training costs.

    Args:
        model: The model, which is not changed.
        example: One example, shape (...,).

    Returns:
        The count, above 0.

    Raises:
        ParameterError: The model has no operation that torch counts.

    Example:
        >>> count_multiplications(nn.Linear(6, 3), np.zeros(6, dtype=np.float32))
        18
    """
    # Imported here, because the import takes time, and few runs count multiplications.
    from torch.utils.flop_counter import FlopCounterMode

    # Two examples, because batch normalization in training mode refuses one.
    two = torch.tensor(example).repeat(2, *[1] * example.ndim)
    counter = FlopCounterMode(display=False)
    # On a copy and with the random state restored, because batch normalization updates statistics, and dropout draws.
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
        copy.deepcopy(model).cpu().train()(two)
    # Divided by 4: there are two examples, and torch counts a multiplication and its addition as two operations.
    count = counter.get_total_flops() // 4
    if count < 1:
        raise ParameterError(
            "clients.reference_multiplications needs a model with matrix products or convolutions, but none was "
            f"counted in {type(model).__name__}. Set it to 0."
        )
    return int(count)


def _pooled(channels: int, width: int, size: int, padding: int = 0) -> list[nn.Module]:
    """Return a convolution with rectifier and 2x2 max-pooling."""
    return [nn.Conv2d(channels, width, kernel_size=size, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _dense(*widths: int) -> list[nn.Module]:
    """Return dense layers of these widths, with rectifiers between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]
