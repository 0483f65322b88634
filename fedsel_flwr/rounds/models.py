"""Models of a round, as a list or as a stack of layers: their faults, and the size of their updates.

:class:`ModelList` holds models as they arrive from clients, :class:`ModelStack` models that were trained in one batch.
The server's measurements work on both (:data:`Models`). A fault is a text, empty for a usable model.

What measures a model reads its floating-point arrays only (:func:`floating`). An integer buffer, such as the step
counter of a batch normalization, is no part of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError

Arrays = Sequence[npt.NDArray[Any]]
"""One model, an array for each layer."""
LARGEST = 1e18
"""Largest magnitude of a number in a client's model. Its square, and sums of squares, are still finite in float32."""
Predict = Callable[[Arrays, Any], FloatArray]
"""Function of a model, or of the layers of a stack, and examples."""
MAX_LOSS = 1e6
"""Largest loss of :class:`Validation`. A model that overflows has this loss."""


@dataclass(frozen=True)
class ModelList:
    """Models as they arrive, each a sequence of arrays.

    >>> import numpy as np
    >>> ModelList([[np.ones((1, 2)), np.zeros(1), np.array(7)]]).flat()
    array([[1., 1., 0.]])
    """

    models: Sequence[Arrays]

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self.models)

    def flat(self, measured: Sequence[int] | None = None) -> FloatArray:
        """Return the models' floating-point numbers as a new array, shape (n_models, numbers).

        ``measured`` has the positions of the arrays to read; None takes :func:`floating`.
        """
        return np.array([flat(arrays, measured) for arrays in self.models])

    def take(self, positions: IntArray) -> ModelList:
        """Return the models at ``positions``, shape (n,)."""
        return ModelList([self.models[i] for i in positions])

    def as_list(self) -> Sequence[Arrays]:
        """Return the models one by one."""
        return self.models


@dataclass(frozen=True)
class ModelStack:
    """Models trained in one batch: one array for each layer, shape (n_models, ...), one row for each model.

    >>> import numpy as np
    >>> ModelStack([np.ones((1, 1, 2)), np.zeros((1, 1)), np.array([7])]).flat()
    array([[1., 1., 0.]])
    """

    layers: Sequence[npt.NDArray[Any]]

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self.layers[0]) if self.layers else 0

    def flat(self, measured: Sequence[int] | None = None) -> FloatArray:
        """Return the models' floating-point numbers as a new array, as :meth:`ModelList.flat` does."""
        read = floating(self.layers) if measured is None else measured
        # The empty part is for models without floating-point arrays.
        parts = [np.empty((len(self), 0)), *(self.layers[i].reshape(len(self), -1) for i in read)]
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def as_list(self) -> Sequence[Arrays]:
        """Return the models one by one, as views of the layers."""
        return [[layer[i] for layer in self.layers] for i in range(len(self))]

    def take(self, positions: IntArray) -> ModelStack:
        """Return the models at ``positions``, shape (n,)."""
        if len(positions) == len(self) and (positions == np.arange(len(self))).all():
            return self
        return ModelStack([layer[positions] for layer in self.layers])

    def faults(self, reference: Arrays) -> list[str]:
        """Return each model's fault, as :func:`fault_in_arrays` does."""
        if not len(self):
            return []
        if wrong := _fault_in_form(reference, [layer[0] for layer in self.layers]):
            return [wrong] * len(self)
        faults = [""] * len(self)
        # In reverse order, so that of several faults of a model the one in the first layer remains.
        for i, (layer, own) in reversed(list(enumerate(zip(self.layers, reference, strict=True)))):
            for row, fault in _faults_in_rows(layer, own.dtype, i).items():
                faults[row] = fault
        return faults

    def cast_like(self, reference: Arrays) -> ModelStack:
        """Return the same models with the types of ``reference``."""
        layers = cast_like(reference, self.layers)
        return self if layers is None else ModelStack(layers)


Models = ModelList | ModelStack
"""The models of a round, as the server's measurements use them."""


def floating(arrays: Arrays) -> tuple[int, ...]:
    """Return the positions of a model's floating-point arrays.

    >>> floating([np.ones(2, np.float32), np.array(3), np.array([True]), np.zeros(1)])
    (0, 3)
    """
    return tuple(i for i, array in enumerate(arrays) if np.asarray(array).dtype.kind == "f")


def flat(arrays: Arrays, measured: Sequence[int] | None = None) -> FloatArray:
    """Return a model's floating-point numbers in one new array, shape (numbers,).

    Args:
        arrays: The model.
        measured: Positions of the arrays to read; None takes :func:`floating`.
    """
    read = floating(arrays) if measured is None else measured
    return np.concatenate([np.empty(0), *(np.asarray(arrays[i], dtype=np.float64).ravel() for i in read)])


def fault_in_arrays(arrays: Arrays | None, reference: Arrays) -> str:
    """Return the fault of a client's model, compared with the global model; empty if there is none.

    >>> import numpy as np
    >>> fault_in_arrays([np.zeros(2)], [np.zeros(3)])
    'arrays: expected shape (3,) at 0, got (2,)'
    """
    if arrays is None:
        return "arrays: cannot be decoded"
    if wrong := _fault_in_form(reference, arrays):
        return wrong
    for i, (array, own) in enumerate(zip(arrays, reference, strict=True)):
        if wrong := _faults_in_rows(array[None], own.dtype, i).get(0, ""):
            return wrong
    return ""


def cast_like(reference: Arrays, arrays: Arrays) -> Arrays | None:
    """Return a model with the types of the global model; None if the types are equal."""
    # Flower's averages take the type of the first model, so one client's float64 would change the global model's type.
    if all(array.dtype == own.dtype for array, own in zip(arrays, reference, strict=True)):
        return None
    return [array.astype(own.dtype, copy=False) for array, own in zip(arrays, reference, strict=True)]


def _fault_in_form(reference: Arrays, arrays: Arrays) -> str:
    """Return the fault in the number, shapes or types of a model's arrays; empty if there is none."""
    if len(arrays) != len(reference):
        return f"arrays: expected {len(reference)}, got {len(arrays)}"
    for i, (array, own) in enumerate(zip(arrays, reference, strict=True)):
        if array.shape != own.shape:
            return f"arrays: expected shape {own.shape} at {i}, got {array.shape}"
        if array.dtype.kind not in "biuf":
            return f"arrays: expected real numbers at {i}, got {array.dtype}"
        if not np.can_cast(array.dtype, own.dtype, "same_kind"):
            return f"arrays: expected dtype {own.dtype} at {i}, got {array.dtype}"
    return ""


def _faults_in_rows(layer: npt.NDArray[Any], dtype: np.dtype[Any], position: int) -> dict[int, str]:
    """Return row -> fault of its numbers, in the global model's type; rows without a fault are left out."""
    if dtype.kind != "f":
        return {}
    limit = min(LARGEST, float(np.finfo(dtype).max))
    faults = {}
    # A float64 beyond float32 overflows in the cast. That is a fault of the model, not a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        held = layer.astype(dtype, copy=False).reshape(len(layer), -1)
        # One dot product bounds all numbers of a model. The comparison is False for NaN, and then the numbers
        # themselves are checked.
        squares = np.matmul(held[:, np.newaxis], held[:, :, np.newaxis])[:, 0, 0].astype(np.float64)
        for row in np.flatnonzero(~(squares <= limit * limit)).tolist():
            numbers = held[row]
            if not np.isfinite(numbers).all():
                faults[row] = f"arrays: not finite at {position}"
            elif (largest := np.abs(numbers).max()) > limit:
                faults[row] = f"arrays: {largest:.3g} at {position}, beyond {limit:g}"
    return faults


def update_norm(arrays: Arrays, reference: Arrays, measured: Sequence[int] | None = None) -> float:
    """Return the L2 norm of a client's update over its floating-point arrays, computed in float64.

    Args:
        arrays: The client's model, with finite numbers and the global model's shapes.
        reference: The global model that the client received.
        measured: Positions of the arrays to read. None takes those that are floating-point in ``reference``, because a
            client could declare its arrays as integers.

    >>> update_norm([np.ones((2, 2)), np.array([3.0])], [np.zeros((2, 2)), np.zeros(1)])  # sqrt(4 + 9)
    3.605551275463989
    """
    squares = 0.0
    for i in floating(reference) if measured is None else measured:
        difference = np.subtract(arrays[i], reference[i], dtype=np.float64).ravel()
        squares += float(np.dot(difference, difference))
    return math.sqrt(squares)


def fault_in_norm(arrays: Arrays, reference: Arrays, limit: float | None, measured: Sequence[int] | None = None) -> str:
    """Return the fault of an update that is too large; empty if it is not, or if there is no limit."""
    if limit is None or (norm := update_norm(arrays, reference, measured)) <= limit:
        return ""
    return f"update norm: {norm:.6g} is above max_update_norm = {limit:g}"


def with_norm(arrays: Arrays, reference: Arrays) -> Arrays | None:
    """Return a model whose update has a norm of negligible size, if the norm is 0; else None.

    Clipping divides by the norm. In a model's own types, tiny numbers have the norm 0 too.

    >>> bool(with_norm([np.zeros(2, np.float32)], [np.zeros(2, np.float32)])[0].max() < 1e-20)
    True
    """
    if any(np.linalg.norm(np.subtract(a, own, dtype=own.dtype)) for a, own in zip(arrays, reference, strict=True)):
        return None
    changed = list(reference)
    for i, own in enumerate(changed):
        if own.dtype.kind == "f" and own.size:
            changed[i] = own.copy()
            # The number next to 0 has the smallest spacing. The square of the change must not underflow.
            smallest, square = np.abs(own).argmin(), np.finfo(own.dtype).smallest_subnormal
            changed[i].flat[smallest] += max(np.spacing(np.abs(own.flat[smallest])), 2 * np.sqrt(square))
            break
    return changed


@dataclass(frozen=True)
class Validation:
    """Examples on the server, and a function that runs a model on them.

    Args:
        predict: Returns the logits, shape (n_examples, n_classes), of the model with these arrays on ``inputs``.
        inputs: The examples, in the type that ``predict`` takes.
        labels: Their classes, shape (n_examples,).
        predict_stack: Returns the logits of a whole stack of models from their layers, shape (n_models, n_examples,
            n_classes). None runs ``predict`` on one model after the other.

    Raises:
        ParameterError: ``predict`` cannot be called. Or there are no labels, or their number differs from that of the
            examples (if ``inputs`` is an array).

    >>> validation = Validation(lambda arrays, inputs: inputs @ arrays[0], np.eye(2), np.array([0, 1]))
    >>> loss, accuracy = validation.loss_and_accuracy([np.eye(2)])
    >>> round(loss, 4), accuracy
    (0.3133, 1.0)
    """

    predict: Predict
    inputs: Any
    labels: IntArray
    predict_stack: Predict | None = None

    def __post_init__(self) -> None:
        """Check the function, the labels and their lengths."""
        labels = np.asarray(self.labels)
        if not callable(self.predict) or labels.ndim != 1 or not labels.size or labels.dtype.kind not in "iu":
            raise ParameterError(
                f"validation got {type(self.predict).__name__} and labels of shape {labels.shape}. Pass a function "
                "predict(arrays, inputs) -> logits and integer labels, one per example."
            )
        if hasattr(self.inputs, "shape") and len(self.inputs) != len(labels):
            raise ParameterError(
                f"validation got {len(self.inputs)} examples and {len(labels)} labels. Pass one label each"
            )

    def logits(self, arrays: Arrays) -> FloatArray:
        """Return the outputs of the model with these arrays.

        Returns:
            Logits of shape (n_examples, n_classes); all NaN if the model overflows.

        Raises:
            ParameterError: ``predict`` returned another shape, or too few classes for the labels.
        """
        # A diverged model overflows. That is a result, not a warning.
        with np.errstate(all="ignore"):
            logits = np.asarray(self.predict(arrays, self.inputs), dtype=np.float64)
        return self._checked(logits)

    def logits_of(self, models: Models) -> list[FloatArray]:
        """Return the outputs of each model, as :meth:`logits` does; those of a stack in one pass if possible."""
        if self.predict_stack is None or not isinstance(models, ModelStack):
            return [self.logits(arrays) for arrays in models.as_list()]
        with np.errstate(all="ignore"):
            stacked = np.asarray(self.predict_stack(models.layers, self.inputs), dtype=np.float64)
        if len(stacked) != len(models):
            raise ParameterError(f"predict_stack must return logits of {len(models)} models, got shape {stacked.shape}")
        return [self._checked(logits) for logits in stacked]

    def _checked(self, logits: FloatArray) -> FloatArray:
        if logits.ndim != 2 or len(logits) != len(self.labels):
            raise ParameterError(
                f"predict must return logits of shape ({len(self.labels)}, n_classes), got {logits.shape}"
            )
        low, high = np.min(self.labels), np.max(self.labels)
        if low < 0 or high >= logits.shape[1]:
            raise ParameterError(f"labels must lie in 0..{logits.shape[1] - 1}, predict's classes, got {low}..{high}")
        # A model that overflows anywhere has diverged. argmax would take its NaN for the largest logit.
        return logits if np.isfinite(logits).all() else np.full_like(logits, np.nan)

    def loss_and_accuracy(self, arrays: Arrays) -> tuple[float, float]:
        """Return mean cross-entropy in nats and fraction correct; the loss is large but finite if the model overflows.

        Raises:
            ParameterError: As for :meth:`logits`.
        """
        logits = self.logits(arrays)
        return _loss(logits, self.labels), self.accuracy(logits)

    def accuracy(self, logits: FloatArray) -> float:
        """Return the fraction of logits, shape (n_examples, n_classes), largest at the label; 0 if any is NaN."""
        return 0.0 if np.isnan(logits).any() else float((logits.argmax(axis=1) == self.labels).mean())


def _loss(logits: FloatArray, labels: IntArray) -> float:
    """Return the mean cross-entropy in nats, at most :data:`MAX_LOSS`."""
    with np.errstate(over="ignore", invalid="ignore"):
        # The largest logit becomes 0, so exp cannot overflow.
        shifted = logits - logits.max(axis=1, keepdims=True)
        chosen = shifted[np.arange(len(labels)), labels]
        loss = float((np.log(np.exp(shifted).sum(axis=1)) - chosen).mean())
    return min(loss, MAX_LOSS) if math.isfinite(loss) else MAX_LOSS
