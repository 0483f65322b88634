"""The server's examples, and how to run a model on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import Arrays, Models, ModelStack

Predict = Callable[[Arrays, Any], FloatArray]
PredictStack = Callable[[Sequence[npt.NDArray[Any]], Any], FloatArray]
DIVERGED = 1e6
"""Loss of a model that overflows, and the largest there is."""


@dataclass(frozen=True)
class Validation:
    """Examples on the server, and how to run a model on them.

    Args:
        predict: Returns the logits, shape (n_examples, n_classes), of the model with these arrays on ``inputs``.
        inputs: The examples, of whatever type ``predict`` takes.
        labels: Their classes, shape (n_examples,).
        predict_stack: The same of a whole stack of models at once, shape (n_models, n_examples, n_classes), from their
            layers; None: one after the other.

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
    predict_stack: PredictStack | None = None

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
        return self._checked(logits)

    def logits_of(self, models: Models) -> list[FloatArray]:
        """The outputs of each model, as :meth:`logits`; a stack's in one pass where there is one for it."""
        if self.predict_stack is None or not isinstance(models, ModelStack):
            return models.logits(self.logits)
        with np.errstate(all="ignore"):
            together = np.asarray(self.predict_stack(models.layers, self.inputs), dtype=np.float64)
        if len(together) != len(models):
            raise ParameterError(
                f"predict_stack must return logits of {len(models)} models, got shape {together.shape}"
            )
        return [self._checked(logits) for logits in together]

    def _checked(self, logits: FloatArray) -> FloatArray:
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
