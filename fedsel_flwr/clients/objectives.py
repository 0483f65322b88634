"""Objectives: the loss that training minimises, and the quality that is reported as accuracy.

The kind of data decides the objective. Classes have cross-entropy and the fraction correct. Numbers have the squared
loss and R². This room also converts a torch model's parameters to NumPy arrays, as Flower sends them
(:func:`get_arrays`, :func:`set_arrays`, :func:`fresh_copy`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from fedsel_flwr.errors import ParameterError

Reduction = Literal["mean", "sum", "none"]
"""Reduction of the losses of single examples: their mean, their sum, or none, shape (n,)."""


class Loss(Protocol):
    """Differentiable function of a model's outputs, shape (n, …), and the targets, shape (n,)."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
        """Return the losses of the examples, reduced."""


@dataclass(frozen=True)
class Objective:
    """Loss and quality of a kind of data.

    Args:
        loss: The loss that training minimises.
        quality: Function of the outputs and the targets of all examples. It returns a number of at most 1, and larger
            is better. The number is reported as ``accuracy``, and compared with a scenario's ``target_accuracy``.
    """

    loss: Loss
    quality: Callable[[torch.Tensor, torch.Tensor], float]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    """Return the cross-entropy in nats of logits, shape (n, n_classes), and classes, shape (n,)."""
    return functional.cross_entropy(outputs, targets, reduction=reduction)


def fraction_correct(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the fraction of logits, shape (n, n_classes), that are largest at the correct class."""
    return int((outputs.argmax(dim=1) == targets).sum()) / len(targets)


def squared_loss(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    """Return (output - target)² of outputs, shape (n, 1), and numbers, shape (n,); some texts halve it."""
    return functional.mse_loss(outputs.squeeze(-1), targets, reduction=reduction)


def r_squared(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the share of the variance that the model explains, R² = 1 - sum of squared errors / sum of squares.

    A perfect model has 1, a model that always returns the mean of these targets has 0, and a worse model has less. If
    the targets have no variance, as with a single target, a perfect model has 1 and any other has 0. If outputs are not
    finite, R² is NaN.

    Args:
        outputs: The outputs, shape (n, 1).
        targets: The targets, shape (n,).

    Returns:
        R², at most 1.

    Example:
        >>> round(r_squared(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])), 3)
        0.5
    """
    # In double precision, because in single precision the squares of large targets would leave few digits of the
    # variance.
    expected = targets.double()
    error = float((outputs.squeeze(-1).double() - expected).square().sum())
    spread = float((expected - expected.mean()).square().sum())
    if not math.isfinite(error):
        return math.nan
    return 1 - error / spread if spread > 0 else float(error == 0)


CLASSIFICATION = Objective(cross_entropy, fraction_correct)
"""Classes: cross-entropy and the fraction correct."""
REGRESSION = Objective(squared_loss, r_squared)
"""Numbers: squared loss and R²."""
OBJECTIVES = {"classification": CLASSIFICATION, "regression": REGRESSION}
"""Objective by the task of a data set."""


def get_arrays(model: nn.Module) -> list[npt.NDArray[Any]]:
    """Copy a model's parameters and buffers.

    Args:
        model: The model.

    Returns:
        One array per entry of the model's state dictionary, in its order.
    """
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def set_arrays(model: nn.Module, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Copy arrays into a model's parameters and buffers.

    Args:
        model: The model to change.
        arrays: One array per entry of the model's state dictionary, in its order and of its shapes.

    Raises:
        ParameterError: If the number of arrays, a shape or a type does not fit; the model has not changed.
    """
    state = model.state_dict()
    if len(arrays) != len(state):
        raise ParameterError(
            f"expected {len(state)} arrays, one per entry of the model's state; got {len(arrays)}. Give the arrays of "
            "this model."
        )
    # All arrays are checked before the first is loaded, so that the model never holds half of another one.
    new: dict[str, torch.Tensor] = {}
    for (key, tensor), array in zip(state.items(), arrays, strict=True):
        values = np.asarray(array)
        if values.dtype.kind not in "fiub" or values.shape != tuple(tensor.shape):
            raise ParameterError(
                f"expected numbers of shape {tuple(tensor.shape)} for {key!r}; "
                f"got {values.dtype} of shape {values.shape}. Give the arrays of this model."
            )
        new[key] = torch.tensor(values, dtype=tensor.dtype)
    model.load_state_dict(new)


def fresh_copy(model: nn.Module, arrays: Sequence[npt.NDArray[Any]]) -> nn.Module:
    """Return a copy of a model with other parameters and buffers; everything else is as in the model.

    A module may hold more than its state dictionary: buffers that are not persistent, and plain attributes. A forward
    pass may change them. Each client therefore trains a fresh copy of a model that runs no forward pass itself.

    Args:
        model: The model, which is not changed.
        arrays: One array per entry of the model's state dictionary, in its order and of its shapes.

    Raises:
        ParameterError: If the number of arrays, a shape or a type does not fit.
    """
    copied = copy.deepcopy(model)
    set_arrays(copied, arrays)
    return copied
