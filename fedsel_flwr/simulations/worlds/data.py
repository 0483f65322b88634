"""Data sets: their training, server-validation and test examples.

Selectors and filters may see the validation split, but never the test split. scikit-learn's digits and synthetic data
need no file and no network. MNIST, EMNIST, Fashion-MNIST and CIFAR-10 come through torchvision, from a local folder or
from the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_tables import Synthetic
from fedsel_flwr.simulations.worlds.image_files import (
    IMAGE_SETS,
    ImageSet,
    find_data_folder,
    read_digits,
    read_image_set,
    sent_or_read,
)

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Classes, or numbers to predict."""
Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class Split:
    """Examples and their labels.

    Args:
        inputs: The examples, float32 of shape (n, ...). Images have the shape (n, channels, height, width).
        labels: The class of each example, int64 of shape (n,), or the number to predict, float32 of shape (n,).
    """

    inputs: Inputs
    labels: Labels

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Data set with three disjoint parts.

    Args:
        name: Name of the data set.
        train: The examples that are partitioned among the clients.
        validation: The server's examples, for filters and selectors that measure models.
        test: The examples that measure the result, and are used for nothing else.
        num_classes: The number of classes; labels are 0 … num_classes - 1. 1 for a regression.
        input_shape: The shape of one example, for an image (channels, height, width).
        task: Whether labels are classes or numbers to predict. It determines loss and quality.
        file_rows: The row of each training example in the files of an image set, shape (n,). None for other data.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]
    task: Task = "classification"
    file_rows: IntArray | None = None

    def read_only(self) -> Dataset:
        """Make the arrays read-only and return this data set."""
        # Several worlds of a process share the arrays, so a client that wrote to them would change the data of others.
        for split in (self.train, self.validation, self.test):
            split.inputs.flags.writeable = split.labels.flags.writeable = False
        return self


def load_dataset(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    validation_fraction: float = 0.1,
    validation_from: Literal["train", "test"] = "train",
    test_fraction: float = 0.2,
    synthetic: Synthetic = Synthetic(),  # noqa: B008 (frozen)
) -> Dataset:
    """Load a data set and split it; classes have the same proportions in all parts that are drawn.

    Args:
        name: "digits", "mnist", "fashion-mnist", "emnist" (the balanced split, 47 classes), "cifar-10" or
            "synthetic-regression".
        data_dir: Folder with the files in torchvision's layout. If None, the folder in the environment variable
            FEDSEL_DATA. If the variable is not set, a cache folder in the home directory, filled from the network.
            "digits" and synthetic data need no folder.
        seed: Seed that draws the splits. The same seed gives the same splits in every process.
        validation_fraction: Share of the examples that become the server's validation set. It is the share of the
            training or of the test examples, see ``validation_from``.
        validation_from: The set that the validation examples are taken from. With "test", the clients keep all
            training examples. The test set is then what remains of the test examples.
        test_fraction: Share of all examples that become the test set, for "digits" and synthetic data only. The other
            data sets have an official test set.
        synthetic: Size and noise of synthetic data.

    Returns:
        The data set. Pixels are in [0, 1] for "digits", and standardised per channel for the other images.

    Raises:
        ParameterError: The folder does not exist, or a fraction leaves too few examples. Also raised if the files are
            damaged, or are missing and cannot be downloaded.

    Examples:
        >>> digits = load_dataset("digits")
        >>> len(digits.train), len(digits.validation), len(digits.test), digits.input_shape
        (1293, 144, 360, (1, 8, 8))
    """
    # Each split has its seed, so that another test fraction does not change how the rest is divided.
    test_seed, validation_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    images, regression = IMAGE_SETS.get(name), name == "synthetic-regression"
    labels: Labels
    test_labels: Labels
    if images is not None:
        (inputs, labels), (test_inputs, test_labels) = sent_or_read(
            name, lambda: read_image_set(name, find_data_folder(data_dir))
        )
        rows, test_rows = np.arange(len(labels)), np.arange(len(test_labels))
    else:
        inputs, labels = test_inputs, test_labels = synthetic.draw(seed) if regression else read_digits()
        everything, classes = np.arange(len(labels)), None if regression else labels
        rows, test_rows = split_rows(everything, classes, test_fraction, test_seed, "test_fraction")
    from_test = validation_from == "test"
    source, source_labels = (test_inputs, test_labels) if from_test else (inputs, labels)
    kept, drawn = split_rows(
        test_rows if from_test else rows, None if regression else source_labels, validation_fraction, validation_seed,
        "validation_fraction",
    )  # fmt: skip
    rows, test_rows = (rows, kept) if from_test else (kept, test_rows)
    parts = (inputs, labels, rows), (source, source_labels, drawn), (test_inputs, test_labels, test_rows)
    train, validation, test = (
        Split(one[own] if images is None else _standardise(one[own], images), its[own]) for one, its, own in parts
    )
    return Dataset(
        name, train, validation, test, num_classes=1 if regression else int(labels.max()) + 1,
        input_shape=tuple(int(size) for size in inputs.shape[1:]), file_rows=None if images is None else rows,
        task="regression" if regression else "classification",
    )  # fmt: skip


def split_rows(
    rows: IntArray, classes: Labels | None, fraction: float, seed: int, key: str
) -> tuple[IntArray, IntArray]:
    """Split rows at random into two parts; the second part has the given share.

    Args:
        rows: The rows, shape (n,).
        classes: The class of each row of the data set, for equal proportions in both parts. If None, classes do not
            matter.
        fraction: Share of the second part.
        seed: Seed that draws the parts.
        key: The fraction's name in messages.

    Returns:
        The two parts, in random order.

    Raises:
        ParameterError: A part would be empty, or would lack a class.
    """
    # Imported here to save a second in the clients' processes, which import this module but never split.
    from sklearn.model_selection import train_test_split

    try:
        kept, drawn = train_test_split(
            rows, test_size=fraction, random_state=seed, stratify=None if classes is None else classes[rows]
        )
    except ValueError as problem:
        raise ParameterError(
            f"{key} = {fraction!r} leaves too few of {len(rows)} examples ({problem}). Choose another fraction."
        ) from problem
    return kept, drawn


def _standardise(pixels: npt.NDArray[Any], images: ImageSet) -> Inputs:
    """Return pixels of 0 … 255 as (pixel / 255 - mean) / std per channel, a new float32 array."""
    # Computed in place after one copy, because CIFAR-10 in float32 takes 600 MB, and so would each temporary array.
    inputs = pixels.astype(np.float32)
    inputs /= np.float32(255)
    inputs -= np.asarray(images.mean, dtype=np.float32)[:, np.newaxis, np.newaxis]
    inputs /= np.asarray(images.std, dtype=np.float32)[:, np.newaxis, np.newaxis]
    return inputs
