"""Inputs of scenarios that another process has sent: data sets and files, for a node of a Ray cluster without them.

The process that starts the runs reads each data set once. The nodes get it through Ray's object store, and small files
next to the code of this package. A run on a node therefore needs no data folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

import fedsel_flwr

Read = TypeVar("Read")
SENT_FILES = "fedsel_sent_files"
"""Folder of the sent files, next to the folder of this package."""


class SentInputs:
    """Data sets that another process has read, by name; empty unless this process is on a node of a cluster."""

    def __init__(self) -> None:
        self._sent: Mapping[str, Callable[[], Any]] = {}

    def accept(self, sent: Mapping[str, Callable[[], Any]]) -> None:
        """Take the place of all earlier inputs.

        Args:
            sent: Name of an input -> function that returns it.
        """
        self._sent = sent

    def read(self, name: str, read: Callable[[], Read]) -> Read:
        """Return the sent input with a name; if there is none, read it here.

        >>> SentInputs().read("digits", lambda: 3)
        3
        """
        return cast(Read, self._sent[name]()) if name in self._sent else read()


SENT_INPUTS = SentInputs()


def sent_file(path: str) -> Path:
    """Return where a file has arrived on this node, if it was sent.

    Args:
        path: The path that the scenario names.
    """
    name = hashlib.sha256(path.encode()).hexdigest()[:16]
    return Path(fedsel_flwr.__file__).resolve().parent.parent / SENT_FILES / name


def without_gaps(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """Return an array in the order of its memory, and the order of axes that turns it back.

    Pickles lose the order in memory, on which the rounding of later sums depends.

    >>> turned, axes = without_gaps(np.zeros((2, 4, 5, 3)).transpose(0, 3, 1, 2))
    >>> turned.shape, turned.transpose(axes).shape, turned.transpose(axes).strides
    ((2, 4, 5, 3), (2, 3, 4, 5), (480, 8, 120, 24))
    """
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return array.transpose(order), tuple(int(axis) for axis in np.argsort(order))
