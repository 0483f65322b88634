"""What the server measures on the models of a round, each only when a selector or the filter reads it.

Everything happens before the base strategy may overwrite the replies, in plain NumPy; the model comes in through one
function, ``predict(arrays, inputs) -> logits``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsel_flwr.aggregation import best_subset
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors._check import BoolArray, FloatArray, IntArray, real
from fedsel_flwr.strategies.replies import Arrays

logger = logging.getLogger("fedsel_flwr")
Predict = Callable[[Arrays, Any], FloatArray]

ON_VALIDATION = frozenset({"kept", "accuracy", "global_accuracy", "global_loss"})
"""Columns that need a validation set."""
FROM_UPDATES = frozenset({"projection", "update", "accuracy", "kept"})
"""Columns that are read off individual updates."""


@dataclass(frozen=True)
class Validation:
    """Examples on the server, and how to run a model on them.

    Args:
        predict: Returns the logits, shape (n_examples, n_classes), of the model with these arrays on ``inputs``.
        inputs: The examples, of whatever type ``predict`` takes.
        labels: Their classes, shape (n_examples,).

    Raises:
        ParameterError: ``predict`` cannot be called, or there are no labels.

    >>> validation = Validation(lambda arrays, inputs: inputs @ arrays[0], np.eye(2), np.array([0, 1]))
    >>> loss, accuracy = validation.loss_and_accuracy([np.eye(2)])
    >>> round(loss, 4), accuracy
    (0.3133, 1.0)
    """

    predict: Predict
    inputs: Any
    labels: IntArray

    def __post_init__(self) -> None:
        """Check both."""
        labels = np.asarray(self.labels)
        if not callable(self.predict) or labels.ndim != 1 or not labels.size or labels.dtype.kind not in "iu":
            raise ParameterError(
                "validation needs a function predict(arrays, inputs) -> logits and integer labels, one per example, "
                f"got {type(self.predict).__name__} and labels of shape {labels.shape}"
            )

    def logits(self, arrays: Arrays) -> FloatArray:
        """The model's outputs, shape (n_examples, n_classes); NaN throughout if it overflows."""
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
        """Mean cross-entropy in nats and fraction correct; a model that overflows has a large finite loss."""
        logits = self.logits(arrays)
        return _loss(logits, self.labels), _accuracy(logits, self.labels)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """FedCA's combinatorial filter.

    Args:
        score: "loss" or "accuracy", of the averaged logits on the validation set.
    """

    score: str = "loss"

    def __post_init__(self) -> None:
        """Check the score."""
        if self.score not in ("loss", "accuracy"):
            raise ParameterError(f"score must be 'loss' or 'accuracy', got {self.score!r}")


@dataclass
class Measurer:
    """Measures what a selector needs.

    Args:
        selector: Its ``needs`` say what is measured.
        validation: The server's examples; None if there are none.
        filter: FedCA's filter; None keeps every usable model.
        learning_rate: eta of GPFL's gradients d_k = (w^{t-1} - w_k) / eta.
        momentum: gamma of GPFL's direction G^t = gamma G^{t-1} + (w^{t-1} - w^t) / eta.

    Raises:
        ParameterError: Something needed is missing.
    """

    selector: Selector
    validation: Validation | None = None
    filter: Filter | None = None
    learning_rate: float | None = None
    momentum: float = 0.1
    _direction: FloatArray | None = field(default=None, init=False)  # G

    def __post_init__(self) -> None:
        """Refuse at the start what could only fail later."""
        needs, name = self.selector.needs, self.selector.name
        if self.validation is None and (self.filter is not None or needs & ON_VALIDATION):
            what = (
                "FedCA's filter" if self.filter is not None else f"{name} ({', '.join(sorted(needs & ON_VALIDATION))})"
            )
            raise ParameterError(f"{what} needs a validation set on the server: pass validation=Validation(...)")
        if "kept" in needs and self.filter is None:
            raise ParameterError(f"{name} learns from FedCA's filter: pass filter=Filter(), or use the strategy FedCM")
        if "projection" in needs and self.learning_rate is None:
            raise ParameterError(f"{name} needs learning_rate, the clients' nominal initial learning rate")
        if self.learning_rate is not None:
            real("learning_rate", self.learning_rate, above=0.0)
        real("momentum", self.momentum, at_least=0.0)

    @property
    def reads_updates(self) -> bool:
        """Whether anything is read off individual updates."""
        return self.filter is not None or bool(self.selector.needs & FROM_UPDATES)

    @property
    def reader(self) -> str:
        """What reads individual updates, for messages."""
        return self.selector.name if self.selector.needs & FROM_UPDATES else "FedCA's filter"

    def models(self, models: Sequence[Arrays], reference: Arrays) -> dict[str, FloatArray | BoolArray]:
        """Measure the usable models of a round.

        Args:
            models: The clients' models, in row order.
            reference: The global model they started from.

        Returns:
            Columns with a row for each model, of kept, accuracy, projection and update, as needed.
        """
        needs, columns = self.selector.needs, dict[str, FloatArray | BoolArray]()
        if not models:
            return columns
        if self.filter is not None or "accuracy" in needs:
            logits = [self._validated.logits(arrays) for arrays in models]
            labels = self._validated.labels
            if "accuracy" in needs:
                columns["accuracy"] = np.array([_accuracy(one, labels) for one in logits])
            if self.filter is not None:
                columns["kept"] = _kept(logits, labels, self.filter.score)
        if needs & {"projection", "update"}:
            start = _flat(reference)
            updates = np.array([_flat(arrays) - start for arrays in models])
            if "update" in needs:
                columns["update"] = updates
            if "projection" in needs:
                columns["projection"] = self._project(-updates / self._eta)
        return columns

    def global_model(self, before: Arrays, after: Arrays) -> dict[str, float]:
        """Measure the new global model (the old one where the round kept it) and move GPFL's direction.

        Args:
            before: The global model of the round.
            after: The new one.

        Returns:
            global_accuracy and global_loss, as needed.
        """
        needs, scalars = self.selector.needs, dict[str, float]()
        if "projection" in needs and not self.selector.keeps_model:
            step = (_flat(before) - _flat(after)) / self._eta
            old = self._direction if self._direction is not None else np.zeros_like(step)
            self._direction = self.momentum * old + step  # G^t
        if needs & {"global_accuracy", "global_loss"}:
            loss, accuracy = self._validated.loss_and_accuracy(after)
            values = {"global_accuracy": accuracy, "global_loss": loss}
            scalars = {name: value for name, value in values.items() if name in needs}
        return scalars

    def initial_accuracy(self, arrays: Arrays) -> float:
        """Accuracy of a model on the validation set."""
        return _accuracy(self._validated.logits(arrays), self._validated.labels)

    def _project(self, gradients: FloatArray) -> FloatArray:
        """<d_k, G> / |G| (3) with G of the round before; in GPFL's initialization G is the mean of the gradients."""
        if self.selector.keeps_model:
            self._direction = gradients.mean(axis=0)
        if self._direction is None or not (length := float(np.linalg.norm(self._direction))):
            return np.zeros(len(gradients))
        return np.asarray(gradients @ self._direction / length)  # (3)

    @property
    def _validated(self) -> Validation:
        if self.validation is None:  # refused at construction
            raise ParameterError("there is no validation set")
        return self.validation

    @property
    def _eta(self) -> float:
        return self.learning_rate or 1.0


def _kept(logits: list[FloatArray], labels: IntArray, score: str) -> BoolArray:
    """FedCA's choice among the models whose logits are finite."""
    kept = np.zeros(len(logits), dtype=np.bool_)
    finite = [i for i, one in enumerate(logits) if np.isfinite(one).all()]
    if finite:
        subset, _ = best_subset(np.stack([logits[i] for i in finite]), labels, score)  # type: ignore[arg-type]
        kept[np.array(finite)[subset]] = True
    return kept


def _loss(logits: FloatArray, labels: IntArray) -> float:
    if np.isnan(logits).any():
        return 1e6
    shifted = logits - logits.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(labels)), labels]
    return float((np.log(np.exp(shifted).sum(axis=1)) - chosen).mean())


def _accuracy(logits: FloatArray, labels: IntArray) -> float:
    return 0.0 if np.isnan(logits).any() else float((logits.argmax(axis=1) == labels).mean())


def _flat(arrays: Arrays) -> FloatArray:
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in arrays])
