"""The models that the scenarios train, and their parameters as NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.clients.parameters import get_arrays, set_arrays
from fedsel_flwr.errors import ParameterError

__all__ = ["MODELS", "build_model", "get_arrays", "set_arrays"]

MODELS = ("logistic", "mlp", "cnn")
"""The names that `build_model` knows."""


def build_model(name: str, input_shape: Sequence[int], num_classes: int, seed: int) -> nn.Module:
    """Build a classifier with parameters drawn from the seed.

    Args:
        name: "logistic": multinomial logistic regression; "mlp": two hidden layers of 64 and 30 rectified units;
            "cnn": two 3x3 convolutions of 16 and 32 channels, each with rectifier and 2x2 max-pooling, a dropout of
            one quarter and a dense layer.
        input_shape: The shape of one example (channels, height, width); for "cnn" at least 4x4 pixels.
        num_classes: The number of classes, at least 2.
        seed: Draws the initial parameters (torch's default distributions). Global random states stay as they are.

    Returns:
        A model from inputs of shape (n, channels, height, width) to logits of shape (n, num_classes).

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
    num_classes, seed = whole("num_classes", num_classes, 2), whole("seed", seed, 0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        if name == "logistic":
            return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
        if name == "mlp":
            return _mlp(math.prod(input_shape), num_classes)
        return _cnn(input_shape, num_classes)


def _mlp(num_inputs: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, 64),
        nn.ReLU(),
        nn.Linear(64, 30),
        nn.ReLU(),
        nn.Linear(30, num_classes),
    )


def _cnn(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ParameterError(
            f"the model 'cnn' reads images (channels, height, width) of at least 4x4 pixels; got {tuple(input_shape)}"
        )
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
