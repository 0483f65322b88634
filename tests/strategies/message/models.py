"""The tests' model as a record of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from tests.strategies.helpers import model

NAMES = ("layer.weight", "layer.bias")


def arrays_of(value: float = 0.0, names: Sequence[str] = NAMES) -> ArrayRecord:
    """The tests' model as a record."""
    return named(model(value), names)


def named(arrays: Iterable[Any], names: Sequence[str] = NAMES) -> ArrayRecord:
    """Arrays under their names."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in zip(names, arrays, strict=True)})
