"""The losses that clients train on: one number an example, so that batches can be padded and averaged exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From outputs, shape (n, …), and labels, shape (n, …), to the loss of each example, shape (n,)."""


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each example's cross-entropy.

    Args:
        outputs: Logits, shape (n, n_classes).
        labels: Classes, shape (n,).

    Returns:
        Shape (n,), in nats.

    Example:
        >>> cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
        tensor([0.6931])
    """
    return functional.cross_entropy(outputs, labels, reduction="none")


def squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each example's squared error, summed over the outputs.

    Args:
        outputs: Predictions, shape (n, …).
        labels: Targets, of the same shape, or of shape (n,) where there is one output.

    Returns:
        Shape (n,).

    Example:
        >>> squared_error(torch.tensor([[3.0]]), torch.tensor([1.0]))
        tensor([4.])
    """
    error = outputs - labels.reshape(outputs.shape).to(outputs.dtype)
    return error.square().flatten(1).sum(1)
