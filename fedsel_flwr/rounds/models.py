"""The models of a round: a list of models, or a stack with a layer an array; and which of them can be used.

How far clients' models are from the global one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray

Arrays = Sequence[npt.NDArray[Any]]
"""One model, an array a layer."""
LARGEST = 1e18
"""Largest size of a number in a client's model: in float32, means, squares and distances of such models stay finite."""


class Models(Protocol):
    """What the server measures asks of the models of a round."""

    def __len__(self) -> int:
        """How many there are."""

    def flat(self) -> FloatArray:
        """A new array, shape (n_models, parameters)."""

    def logits(self, logits: Callable[[Arrays], FloatArray]) -> list[FloatArray]:
        """What ``logits`` says of each."""

    def take(self, positions: IntArray) -> Models:
        """Those at ``positions``, shape (n,)."""

    def as_list(self) -> Sequence[Arrays]:
        """Each by itself."""


@dataclass(frozen=True)
class ModelList:
    """Models as they arrive, each a sequence of arrays.

    >>> import numpy as np
    >>> ModelList([[np.ones((1, 2)), np.zeros(1)]]).flat()
    array([[1., 1., 0.]])
    """

    models: Sequence[Arrays]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.models)

    def flat(self) -> FloatArray:
        """A new array, shape (n_models, parameters)."""
        return np.array([flat(arrays) for arrays in self.models])

    def logits(self, logits: Callable[[Arrays], FloatArray]) -> list[FloatArray]:
        """What ``logits`` says of each."""
        return [logits(arrays) for arrays in self.models]

    def take(self, positions: IntArray) -> ModelList:
        """Those at ``positions``, shape (n,)."""
        return ModelList([self.models[i] for i in positions])

    def as_list(self) -> Sequence[Arrays]:
        """Each by itself."""
        return self.models


@dataclass(frozen=True)
class ModelStack:
    """Models trained together: one array a layer, shape (n_models, ...), a row a model.

    >>> import numpy as np
    >>> ModelStack([np.ones((1, 1, 2)), np.zeros((1, 1))]).flat()
    array([[1., 1., 0.]])
    """

    layers: Sequence[npt.NDArray[Any]]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.layers[0]) if self.layers else 0

    def flat(self) -> FloatArray:
        """A new array, shape (n_models, parameters)."""
        parts = [layer.reshape(len(layer), -1) for layer in self.layers]
        return np.concatenate(parts, axis=1).astype(np.float64, copy=False)

    def logits(self, logits: Callable[[Arrays], FloatArray]) -> list[FloatArray]:
        """What ``logits`` says of each."""
        return [logits(arrays) for arrays in self.as_list()]

    def as_list(self) -> Sequence[Arrays]:
        """Each by itself, as views."""
        return [[layer[i] for layer in self.layers] for i in range(len(self))]

    def take(self, positions: IntArray) -> ModelStack:
        """Those at ``positions``, shape (n,)."""
        if len(positions) == len(self) and (positions == np.arange(len(self))).all():
            return self
        return ModelStack([layer[positions] for layer in self.layers])

    def faults(self, reference: Arrays) -> list[str]:
        """What is wrong with each model, empty if nothing; the verdicts of :func:`fault_in_arrays`."""
        if not len(self):
            return []
        if wrong := _fault_in_form(reference, [layer[0] for layer in self.layers]):
            return [wrong] * len(self)
        faults = [""] * len(self)
        for i, (layer, own) in reversed(list(enumerate(zip(self.layers, reference, strict=True)))):
            for row, fault in _faults_in_rows(layer, own.dtype, i).items():
                faults[row] = fault
        return faults

    def cast_like(self, reference: Arrays) -> ModelStack:
        """The same models in the types of ``reference``."""
        if all(layer.dtype == own.dtype for layer, own in zip(self.layers, reference, strict=True)):
            return self
        return ModelStack([x.astype(own.dtype, copy=False) for x, own in zip(self.layers, reference, strict=True)])


def flat(arrays: Arrays) -> FloatArray:
    """A model's numbers in one new array, shape (parameters,)."""
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in arrays])


def fault_in_arrays(arrays: Arrays | None, reference: Arrays) -> str:
    """What is wrong with a client's model beside the global one; empty if nothing.

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
    """A model in the types of the global one; None if it is already.

    Flower's averages would take the type of whoever comes first.
    """
    if all(array.dtype == own.dtype for array, own in zip(arrays, reference, strict=True)):
        return None
    return [array.astype(own.dtype, copy=False) for array, own in zip(arrays, reference, strict=True)]


def _fault_in_form(reference: Arrays, arrays: Arrays) -> str:
    if len(arrays) != len(reference):
        return f"arrays: expected {len(reference)}, got {len(arrays)}"
    for i, (array, own) in enumerate(zip(arrays, reference, strict=True)):
        if array.shape != own.shape:
            return f"arrays: expected shape {own.shape} at {i}, got {array.shape}"
        if array.dtype.kind not in "biuf" or not np.can_cast(array.dtype, own.dtype, "same_kind"):
            return f"arrays: expected dtype {own.dtype} at {i}, got {array.dtype}"
    return ""


def _faults_in_rows(layer: npt.NDArray[Any], dtype: np.dtype[Any], position: int) -> dict[int, str]:
    """What is wrong with the numbers of each row, in the type of the global model; rows of sound ones are left out.

    A sum of squares bounds every number at once; where it is large, the numbers themselves are looked at.
    """
    if dtype.kind != "f":
        return {}
    limit = min(LARGEST, float(np.finfo(dtype).max))
    faults = {}
    with np.errstate(over="ignore", invalid="ignore"):
        held = layer.astype(dtype, copy=False).reshape(len(layer), -1)
        for row, numbers in enumerate(held):
            if float(np.dot(numbers, numbers)) <= limit * limit:  # NaN is not
                continue
            if not np.isfinite(numbers).all():
                faults[row] = f"arrays: not finite at {position}"
            elif (largest := np.abs(numbers).max()) > limit:
                faults[row] = f"arrays: {largest:.3g} at {position}, beyond {limit:g}"
    return faults


def update_norm(arrays: Arrays, reference: Arrays) -> float:
    """The L2 norm of a client's update over all its arrays, computed in float64.

    Args:
        arrays: The client's model, finite and in the form of the global one.
        reference: The global model it received.

    >>> update_norm([np.ones((2, 2)), np.array([3.0])], [np.zeros((2, 2)), np.zeros(1)])  # sqrt(4 + 9)
    3.605551275463989
    """
    squares = 0.0
    for array, own in zip(arrays, reference, strict=True):
        difference = np.subtract(array, own, dtype=np.float64).ravel()
        squares += float(np.dot(difference, difference))
    return math.sqrt(squares)


def fault_in_norm(arrays: Arrays, reference: Arrays, limit: float | None) -> str:
    """Why an update is too large; empty if it is not, or there is no limit."""
    if limit is None or (norm := update_norm(arrays, reference)) <= limit:
        return ""
    return f"update norm: {norm:.6g} is above max_update_norm = {limit:g}"
