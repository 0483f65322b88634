"""Objectives: the loss that training minimises, and the quality that is reported as accuracy.

An objective belongs to the kind of data: classes have cross-entropy and the fraction correct, numbers have the squared
loss and R². Also a torch model's parameters as NumPy arrays, as Flower sends them (:func:`get_arrays`,
:func:`set_arrays`).
"""

from __future__ import annotations

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
        quality: A number of at most 1, larger is better, of the outputs and the targets of all examples; reported as
            ``accuracy``, and compared with a scenario's ``target_accuracy``.
    """

    loss: Loss
    quality: Callable[[torch.Tensor, torch.Tensor], float]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    """Return the cross-entropy in nats of logits, shape (n, n_classes), and classes, shape (n,)."""
    return functional.cross_entropy(outputs, targets, reduction=reduction)


def fraction_correct(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the fraction of logits, shape (n, n_classes), that are largest at the class."""
    return int((outputs.argmax(dim=1) == targets).sum()) / len(targets)


def squared_loss(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    """Return (output - target)² of outputs, shape (n, 1), and numbers, shape (n,); some texts halve it."""
    return functional.mse_loss(outputs.squeeze(-1), targets, reduction=reduction)


def r_squared(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the share of the variance that the model explains, R² = 1 - sum of squared errors / sum of squares.

    A perfect model has 1, one that always says the mean of these targets 0, a worse one less. If the targets have no
    variance, as a single one has none, a perfect model has 1 and any other 0. If outputs are not finite, R² is NaN.

    Args:
        outputs: Shape (n, 1).
        targets: Shape (n,).

    Returns:
        R², at most 1.

    Example:
        >>> round(r_squared(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])), 3)
        0.5
    """
    # in double precision: in single, the squares of large targets would leave few digits of the variance
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
"""Objectives by the task of a data set."""


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
        model: The model that is changed.
        arrays: One array per entry of the model's state dictionary, in its order and of its shapes.

    Raises:
        ParameterError: If the number of arrays, a shape or a type does not fit; the model stays as it was.
    """
    state = model.state_dict()
    if len(arrays) != len(state):
        raise ParameterError(
            f"expected {len(state)} arrays, one per entry of the model's state; got {len(arrays)}. Give the arrays of "
            "this model."
        )
    # All are checked before the first is loaded: the model must not hold half of another one.
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
