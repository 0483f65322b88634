"""What a model is trained for: the loss that steps go down, and the quality that is reported as accuracy.

An objective belongs to the kind of data: classes have cross-entropy and the fraction correct, numbers have the squared
loss and R².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.nn import functional

Reduction = Literal["mean", "sum", "none"]
"""Of the losses of single examples: their mean, their sum, or each, shape (n,)."""


class Loss(Protocol):
    """A differentiable function of a model's outputs, shape (n, …), and the targets, shape (n,)."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
        """The losses of the examples, reduced."""


@dataclass(frozen=True)
class Objective:
    """Loss and quality of a kind of data.

    Args:
        loss: What training minimises.
        quality: A number of at most 1, larger is better, of the outputs and the targets of all examples; reported as
            ``accuracy``, and compared with a scenario's ``target_accuracy``.
    """

    loss: Loss
    quality: Callable[[torch.Tensor, torch.Tensor], float]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    """Cross-entropy in nats of logits, shape (n, n_classes), and classes, shape (n,)."""
    return functional.cross_entropy(outputs, targets, reduction=reduction)


def fraction_correct(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Fraction of logits, shape (n, n_classes), that are largest at the class."""
    return int((outputs.argmax(dim=1) == targets).sum()) / len(targets)


def squared_loss(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
    """(output - target)² of outputs, shape (n, 1), and numbers, shape (n,); without the factor 1/2 of some texts."""
    return functional.mse_loss(outputs.squeeze(-1), targets, reduction=reduction)


def r_squared(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of the targets' variance that the model explains, R² = 1 - sum of squared errors / sum of squares.

    1 is a perfect model, 0 one that knows the mean of these targets, and worse ones are negative. Of targets without
    variance, such as a single one, a perfect model explains all (1) and any other nothing (0). NaN where outputs are
    not finite.

    Args:
        outputs: Shape (n, 1).
        targets: Shape (n,).

    Returns:
        R², at most 1.

    Example:
        >>> round(r_squared(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])), 3)
        0.5
    """
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
"""By the task of a data set."""
