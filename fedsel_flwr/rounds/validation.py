"""The server's examples, and how to run a model on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import Arrays

Predict = Callable[[Arrays, Any], FloatArray]
DIVERGED = 1e6
"""Loss of a model that overflows, and the largest there is."""


@dataclass(frozen=True)
class Validation:
    """Examples on the server, and how to run a model on them.

    Args:
        predict: Returns the logits, shape (n_examples, n_classes), of the model with these arrays on ``inputs``.
        inputs: The examples, of whatever type ``predict`` takes.
        labels: Their classes, shape (n_examples,).

    Raises:
        ParameterError: ``predict`` cannot be called, there are no labels, or not as many as inputs (where these are an
            array).

    >>> validation = Validation(lambda arrays, inputs: inputs @ arrays[0], np.eye(2), np.array([0, 1]))
    >>> loss, accuracy = validation.loss_and_accuracy([np.eye(2)])
    >>> round(loss, 4), accuracy
    (0.3133, 1.0)
    """

    predict: Predict
    inputs: Any
    labels: IntArray

    def __post_init__(self) -> None:
        """Check function, labels and lengths."""
        labels = np.asarray(self.labels)
        if not callable(self.predict) or labels.ndim != 1 or not labels.size or labels.dtype.kind not in "iu":
            raise ParameterError(
                "validation needs a function predict(arrays, inputs) -> logits and integer labels, one per example, "
                f"got {type(self.predict).__name__} and labels of shape {labels.shape}"
            )
        if hasattr(self.inputs, "shape") and len(self.inputs) != len(labels):
            raise ParameterError(f"validation needs one label per example, got {len(self.inputs)} and {len(labels)}")

    def logits(self, arrays: Arrays) -> FloatArray:
        """The outputs of the model with these arrays.

        Returns:
            Shape (n_examples, n_classes); NaN throughout if the model overflows.

        Raises:
            ParameterError: ``predict`` returned another shape, or too few classes for the labels.
        """
        with np.errstate(all="ignore"):
            logits = np.asarray(self.predict(arrays, self.inputs), dtype=np.float64)
        if logits.ndim != 2 or len(logits) != len(self.labels):
            raise ParameterError(
                f"predict must return logits of shape ({len(self.labels)}, n_classes), got shape {logits.shape}"
            )
        low, high = np.min(self.labels), np.max(self.labels)
        if low < 0 or high >= logits.shape[1]:
            raise ParameterError(f"labels must lie in 0..{logits.shape[1] - 1}, predict's classes, got {low}..{high}")
        return logits if np.isfinite(logits).all() else np.full_like(logits, np.nan)

    def loss_and_accuracy(self, arrays: Arrays) -> tuple[float, float]:
        """Mean cross-entropy in nats and fraction correct; a model that overflows has a large finite loss.

        Raises:
            ParameterError: As :meth:`logits`.
        """
        logits = self.logits(arrays)
        return _loss(logits, self.labels), self.accuracy(logits)

    def accuracy(self, logits: FloatArray) -> float:
        """Fraction of logits, shape (n_examples, n_classes), that are largest at the label; 0 where there are NaN."""
        return 0.0 if np.isnan(logits).any() else float((logits.argmax(axis=1) == self.labels).mean())


def _loss(logits: FloatArray, labels: IntArray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        chosen = shifted[np.arange(len(labels)), labels]
        loss = float((np.log(np.exp(shifted).sum(axis=1)) - chosen).mean())
    return min(loss, DIVERGED) if math.isfinite(loss) else DIVERGED
