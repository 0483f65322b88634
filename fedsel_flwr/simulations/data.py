"""Data sets, split into training, server-validation and test examples.

Selection and filtering see the validation split at most, never the test split. scikit-learn's digits and synthetic data
need no file and no network; MNIST, EMNIST, Fashion-MNIST and CIFAR-10 come through torchvision, from a folder of yours
or from the network.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import one_of, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.dataset import Dataset, FloatArray, Split
from fedsel_flwr.simulations.image_files import IMAGE_SETS, find_folder, read_digits, read_image_set
from fedsel_flwr.simulations.synthetic import Synthetic

__all__ = ["DATASETS", "Dataset", "Split", "cached_dataset", "load_dataset"]

IntArray = npt.NDArray[np.int64]

DATASETS = ("digits", *IMAGE_SETS, "synthetic-regression")
"""The names that `load_dataset` knows."""


def load_dataset(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.2,
    synthetic: Synthetic = Synthetic(),  # noqa: B008 (frozen)
) -> Dataset:
    """Load a data set and split it, with the classes in the same proportions in every drawn part.

    Args:
        name: "digits", "mnist", "fashion-mnist", "emnist" (the balanced split, 47 classes), "cifar-10" or
            "synthetic-regression".
        data_dir: The folder with the files as torchvision lays them out. None: the environment variable FEDSEL_DATA;
            without it, a cache folder in the home directory, filled from the network. "digits" and synthetic data need
            none.
        seed: Draws the splits; the same seed gives the same splits in every process.
        validation_fraction: Share of the examples outside the test set that become the server's validation set.
        test_fraction: Share of all examples that become the test set. For "digits" and synthetic data only: the others
            have an official test set, which is used as it is.
        synthetic: Size and noise of synthetic data.

    Returns:
        The data set: pixels in [0, 1] for "digits", standardised per channel for the other images.

    Raises:
        ParameterError: For an unknown name, a folder that does not exist, files that are neither there nor to be had
            from the network, damaged files, a negative seed, or a fraction outside (0, 1).

    Examples:
        >>> digits = load_dataset("digits")
        >>> len(digits.train), len(digits.validation), len(digits.test), digits.input_shape
        (1293, 144, 360, (1, 8, 8))
    """
    one_of("data set", name, DATASETS)
    seed = whole("seed", seed, 0)
    validation_fraction = _fraction("validation_fraction", validation_fraction)
    test_fraction = _fraction("test_fraction", test_fraction)
    test_seed, validation_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    if name == "synthetic-regression":
        inputs, numbers = synthetic.draw(seed)
        rows, test_rows = _drawn(np.arange(len(numbers)), None, test_fraction, test_seed, "test_fraction")
        rows, validation_rows = _drawn(rows, None, validation_fraction, validation_seed, "validation_fraction")
        train, validation, test = (Split(inputs[part], numbers[part]) for part in (rows, validation_rows, test_rows))
        return Dataset(name, train, validation, test, num_classes=1, input_shape=inputs.shape[1:], task="regression")
    full: float = 16.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    if name == "digits":
        pixels, labels = read_digits()
        rows, test_rows = _drawn(np.arange(len(labels)), labels, test_fraction, test_seed, "test_fraction")
        test_pixels, test_labels = pixels[test_rows], labels[test_rows]
    else:
        (pixels, labels), (test_pixels, test_labels) = read_image_set(name, find_folder(data_dir))
        rows = np.arange(len(labels))
        full, mean, std = 255.0, IMAGE_SETS[name].mean, IMAGE_SETS[name].std
    rows, validation_rows = _drawn(rows, labels, validation_fraction, validation_seed, "validation_fraction")
    return Dataset(
        name=name,
        train=Split(_scaled(pixels[rows], full, mean, std), labels[rows]),
        validation=Split(_scaled(pixels[validation_rows], full, mean, std), labels[validation_rows]),
        test=Split(_scaled(test_pixels, full, mean, std), test_labels),
        num_classes=int(labels.max()) + 1,
        input_shape=tuple(int(size) for size in pixels.shape[1:]),
    )


@functools.lru_cache(maxsize=2)
def cached_dataset(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.2,
    synthetic: Synthetic = Synthetic(),  # noqa: B008 (frozen)
) -> Dataset:
    """Load a data set once per process: `load_dataset`, with arrays that nobody can write to.

    Args:
        name: See `load_dataset`, also for the other arguments, the result and the errors.
        data_dir: The folder with the files. FEDSEL_DATA is read at the first call only.
        seed: Draws the splits.
        validation_fraction: Share of the examples outside the test set.
        test_fraction: Share of all examples, for "digits" and synthetic data.
        synthetic: Size and noise of synthetic data.

    Returns:
        The data set: the same object for the same arguments (the two last used are kept).
    """
    dataset = load_dataset(
        name,
        data_dir=data_dir,
        seed=seed,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        synthetic=synthetic,
    )
    for split in (dataset.train, dataset.validation, dataset.test):
        split.inputs.flags.writeable = False
        split.labels.flags.writeable = False
    return dataset


def _fraction(name: str, value: float) -> float:
    fraction = real(name, value)
    if not 0.0 < fraction < 1.0:
        raise ParameterError(f"{name} must lie between 0 and 1, both excluded, got {value!r}")
    return fraction


def _drawn(rows: IntArray, labels: IntArray | None, fraction: float, seed: int, key: str) -> tuple[IntArray, IntArray]:
    """Split rows in two, the second part of the given share; where there are classes, each in proportion."""
    from sklearn.model_selection import train_test_split

    try:
        kept, drawn = train_test_split(
            rows, test_size=fraction, random_state=seed, stratify=None if labels is None else labels[rows]
        )
    except ValueError as problem:
        raise ParameterError(f"{key} = {fraction!r} leaves too few of {len(rows)} examples: {problem}") from problem
    return kept, drawn


def _scaled(pixels: npt.NDArray[Any], full: float, mean: Sequence[float], std: Sequence[float]) -> FloatArray:
    """Return pixels of 0 … full as (pixel / full - mean) / std per channel, a new float32 array."""
    inputs = pixels.astype(np.float32)
    inputs /= np.float32(full)
    inputs -= np.asarray(mean, dtype=np.float32)[:, np.newaxis, np.newaxis]
    inputs /= np.asarray(std, dtype=np.float32)[:, np.newaxis, np.newaxis]
    return inputs
