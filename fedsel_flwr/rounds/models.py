"""Models of a round, as a list or as a stack of layers: their faults, and the size of their updates.

:class:`ModelList` holds models as they arrive from clients, :class:`ModelStack` models that were trained in one batch.
The server's measurements work on both (:data:`Models`). A fault is a text, empty for a usable model.

What measures a model reads its floating-point arrays only (:func:`floating`). An integer buffer, such as the step
counter of a batch normalization, is no part of an update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray

Arrays = Sequence[npt.NDArray[Any]]
"""One model, an array for each layer."""
LARGEST = 1e18
"""Largest magnitude of a number in a client's model. Its square, and sums of squares, are still finite in float32."""


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
        if all(layer.dtype == own.dtype for layer, own in zip(self.layers, reference, strict=True)):
            return self
        return ModelStack([x.astype(own.dtype, copy=False) for x, own in zip(self.layers, reference, strict=True)])


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
        for row, numbers in enumerate(held):
            # One dot product bounds all numbers. The comparison is False for NaN, and then the numbers themselves are
            # checked.
            if float(np.dot(numbers, numbers)) <= limit * limit:
                continue
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
