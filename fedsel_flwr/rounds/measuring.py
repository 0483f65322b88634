"""What the server measures on the models of a round, each only when a selector or the filter reads it.

Everything happens before the base strategy may overwrite the replies, in plain NumPy; the model comes in through one
function, ``predict(arrays, inputs) -> logits``.

The server's examples, and how to run a model on them.

The direction in which the global model goes, and how far each client's gradient points there (GPFL).

===========  ==========================  =================================================================
paper        here                        meaning
===========  ==========================  =================================================================
d_k          row of ``gradients``        (w^{t-1} - w_k) / eta, the sum over client k's local steps
G^t          ``_direction``              gamma G^{t-1} + (w^{t-1} - w^t) / eta, G^0 = 0
eta          ``learning_rate``           the clients' nominal initial learning rate
gamma        ``momentum``                momentum of the direction
===========  ==========================  =================================================================

References:
    S. Na, Y. Liang, S.-M. Yiu, GPFL, equation (3) and the text around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.models import Arrays, Models, ModelStack, flat
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ON_VALIDATION, PER_UPDATE

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


class Direction:
    """Follows the global model.

    Args:
        learning_rate: eta, above 0.
        momentum: gamma, at least 0 and below 1.

    Raises:
        ParameterError: A parameter is out of range.

    >>> import numpy as np
    >>> direction = Direction(learning_rate=0.5, momentum=0.1)
    >>> direction.move(np.array([1.0, 2.0]), np.array([1.0, 0.0]))  # G = (0, 2) / .5
    >>> direction.project(direction.gradients(np.array([[1.5, -1.0]])))  # d = (-3, 2); <d, G> / |G|
    array([2.])
    """

    def __init__(self, learning_rate: float, momentum: float = 0.1) -> None:
        self.learning_rate = real("learning_rate", learning_rate, above=0.0)
        self.momentum = real("momentum", momentum, at_least=0.0)
        if self.momentum >= 1.0:
            raise ParameterError(f"momentum must be below 1, got {momentum!r}")
        self._direction: FloatArray | None = None

    def gradients(self, updates: FloatArray, *, in_place: bool = False) -> FloatArray:
        """d_k of updates w_k - w^{t-1}, both of shape (n_models, parameters); ``in_place`` overwrites the updates."""
        return np.divide(updates, -self.learning_rate, out=updates if in_place else None)  # d_k

    def start(self, gradients: FloatArray) -> None:
        """Begin with the mean of these gradients, shape (n_models, parameters)."""
        self._direction = gradients.mean(axis=0)  # G of round 1, ours

    def move(self, before: FloatArray, after: FloatArray) -> None:
        """Follow the global model from ``before`` to ``after``, shape (parameters,)."""
        old = np.zeros_like(before) if self._direction is None else self._direction
        self._direction = self.momentum * old + (before - after) / self.learning_rate  # G^t

    def project(self, gradients: FloatArray) -> FloatArray:
        """c_k of these gradients, shape (n_models, parameters), on the direction; 0 while it has no length."""
        if self._direction is None or not (length := float(np.linalg.norm(self._direction))):
            return np.zeros(len(gradients))
        return np.asarray(gradients @ self._direction / length)  # (3) of GPFL

    def state_dict(self) -> state_dicts.State:
        """G; an empty array before the first."""
        return {"direction": np.zeros(0) if self._direction is None else self._direction.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        direction = state_dicts.array("direction", state["direction"], np.float64)
        self._direction = direction if direction.size else None

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""


class Measurer:
    """Measures what a selector needs.

    Args:
        selector: Its ``needs`` say what is measured.
        validation: The server's examples; None if there are none.
        filter: FedCA's filter; None keeps every usable model.
        learning_rate: The clients' nominal initial learning rate, for :class:`Direction`.
        momentum: The direction's momentum.

    Raises:
        ParameterError: Something needed is missing, or a value is out of range.
    """

    def __init__(
        self,
        selector: Selector,
        validation: Validation | None = None,
        filter: Filter | None = None,
        learning_rate: float | None = None,
        momentum: float = 0.1,
    ) -> None:
        needs, name = selector.needs, selector.name
        if validation is not None and not isinstance(validation, Validation):
            raise ParameterError(f"validation must be a Validation, got {type(validation).__name__}")
        if validation is None and (filter is not None or needs & ON_VALIDATION):
            what = "FedCA's filter" if filter is not None else f"{name} ({', '.join(sorted(needs & ON_VALIDATION))})"
            raise ParameterError(f"{what} needs a validation set on the server: pass validation=Validation(...)")
        if "kept" in needs and filter is None:
            raise ParameterError(f"{name} learns from FedCA's filter: pass filter=Filter(), or use the strategy FedCM")
        if "projection" in needs and learning_rate is None:
            raise ParameterError(f"{name} needs learning_rate, the clients' nominal initial learning rate")
        self.selector, self.validation, self.filter = selector, validation, filter
        self.direction = Direction(1.0 if learning_rate is None else learning_rate, momentum)

    @property
    def reads_global(self) -> bool:
        """Whether :meth:`global_model` has something to do."""
        return bool(self.selector.needs & {"projection", "global_accuracy", "global_loss"})

    @property
    def reads_updates(self) -> bool:
        """Whether anything is read off individual updates."""
        return self.filter is not None or bool(self.selector.needs & PER_UPDATE)

    @property
    def reader(self) -> str:
        """What reads individual updates, for messages."""
        return self.selector.name if self.selector.needs & PER_UPDATE else "FedCA's filter"

    def models(
        self, models: Models, reference: Arrays, draws: IntArray | None = None
    ) -> dict[str, FloatArray | BoolArray | IntArray]:
        """Measure the usable models of a round.

        Args:
            models: The clients' models, in row order.
            reference: The global model they started from.
            draws: How often the client behind each model was drawn, shape (n_models,); None for once each.

        Returns:
            As needed: kept (bool) and, of a multiset, draws, how many of the model's the filter keeps; accuracy and
            projection of shape (n_models,); update of shape (n_models, parameters).
        """
        needs, columns = self.selector.needs, dict[str, FloatArray | BoolArray | IntArray]()
        if not len(models):
            return columns
        if self.filter is not None or "accuracy" in needs:
            logits = self._server.logits_of(models)
            if "accuracy" in needs:
                columns["accuracy"] = np.array([self._server.accuracy(one) for one in logits])  # PCZFL's A_k of (3)
            if self.filter is not None:
                if draws is not None and (draws > 1).any():
                    columns["draws"] = self.filter.copies(logits, self._server.labels, draws)
                    columns["kept"] = columns["draws"] > 0
                else:
                    columns["kept"] = self.filter.kept(logits, self._server.labels)
        if needs & {"projection", "update"}:
            updates = models.flat()
            updates -= flat(reference)
            if "update" in needs:
                columns["update"] = updates
            if "projection" in needs:
                gradients = self.direction.gradients(updates, in_place="update" not in needs)
                if self._begins:
                    self.direction.start(gradients)
                columns["projection"] = self.direction.project(gradients)
        return columns

    def global_model(self, before: Arrays, after: Arrays) -> dict[str, float]:
        """Measure the new global model (the old one where the round kept it), and follow it with the direction.

        Args:
            before: The global model of the round.
            after: The new one.

        Returns:
            global_accuracy and global_loss, as needed.
        """
        needs = self.selector.needs
        if "projection" in needs and not self._begins:
            self.direction.move(flat(before), flat(after))
        if not needs & {"global_accuracy", "global_loss"}:
            return {}
        loss, accuracy = self._server.loss_and_accuracy(after)
        values = {"global_accuracy": accuracy, "global_loss": loss}
        return {name: value for name, value in values.items() if name in needs}

    def initial_accuracy(self, arrays: Arrays) -> float:
        """Accuracy of a model on the validation set."""
        return self._server.accuracy(self._server.logits(arrays))  # PCZFL's A_k of (3)

    def state_dict(self) -> state_dicts.State:
        """The direction's."""
        return self.direction.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        self.direction.load_state_dict(state)

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""

    @property
    def _begins(self) -> bool:
        """Whether the direction begins with this round's gradients, so that its step does not move it once more."""
        return self.selector.keeps_model or (self.selector.warming_up and self.selector.round == 1)

    @property
    def _server(self) -> Validation:
        if self.validation is None:  # refused at construction
            raise ParameterError("there is no validation set")
        return self.validation
