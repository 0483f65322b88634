"""What a data set is: its three disjoint parts, and what its labels are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError

FloatArray = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Classes, or numbers to predict."""
Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class Split:
    """Examples and their labels.

    Args:
        inputs: The examples, float32 of shape (n, ...); images are of shape (n, channels, height, width).
        labels: The class of each example, int64 of shape (n,), or the number to predict, float32 of shape (n,).

    Raises:
        ParameterError: If the two differ in length or are of other types.
    """

    inputs: FloatArray
    labels: Labels

    def __post_init__(self) -> None:
        """Check lengths and types."""
        if self.labels.ndim != 1 or len(self.inputs) != len(self.labels):
            raise ParameterError(
                f"expected one label per example; got inputs of shape {self.inputs.shape} "
                f"and labels of shape {self.labels.shape}"
            )
        if self.inputs.dtype != np.float32 or self.labels.dtype not in (np.int64, np.float32):
            raise ParameterError(
                "expected float32 inputs and int64 labels (classes) or float32 ones (numbers to predict); got "
                f"{self.inputs.dtype} and {self.labels.dtype}"
            )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in its three disjoint parts.

    Args:
        name: The name it was loaded by.
        train: What the clients share out among themselves.
        validation: The server's own examples, for filters and selectors that measure models.
        test: The examples that measure the result, and nothing else.
        num_classes: The number of classes, labels are 0 … num_classes - 1; or 1, of a regression.
        input_shape: The shape of one example; of an image (channels, height, width).
        task: Whether labels are classes or numbers to predict; says which loss and which quality belong to the data.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]
    task: Task = "classification"
