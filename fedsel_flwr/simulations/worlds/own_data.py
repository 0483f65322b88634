"""Your own data: arrays, torch data sets, or a ``FederatedDataset`` of flwr-datasets (Hugging Face).

The partition assigns examples to clients. It comes with the data or from the scenario.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError, RunError, refusing_faults
from fedsel_flwr.simulations.worlds.data import Dataset, Split, split_rows

Array = npt.NDArray[Any]
LARGEST_WHOLE = 2**24
"""Number up to which float32 represents all whole numbers."""
DEPTHS = {"1": 1, "I": 2**31 - 1, "F": 1}
"""Mode of an image -> largest value of a pixel. In modes that begin with I;16 it is 65,535, and in all others 255."""
Part = Any
"""(inputs, labels), two arrays; or a torch Dataset of such pairs."""


@dataclass(frozen=True, eq=False)
class OwnData:
    """Your own examples, which replace the data set that the scenario names.

    Args:
        train: The clients' examples: (inputs, labels), arrays of shapes (n, …) and (n,), or a torch ``Dataset`` of n
            such pairs. Whole numbers as labels are classes 0 … C - 1. Other numbers are numbers to predict.
        test: The examples that measure the result, and are used for nothing else; in the same form.
        validation: The server's examples, for selectors and filters that measure models. If None, a share of ``train``
            is drawn, which the scenario's ``data.validation_fraction`` sets. If None and ``partition`` is set, the
            examples that no client holds, if there are any.
        partition: Client -> rows of ``train``, at least one row per client, the same for every seed. Or a function that
            returns this mapping for a seed. If None, the scenario's partition.
        name: Name in messages and files.

    Example:
        >>> inputs, labels = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> OwnData(train=(inputs, labels), test=(inputs, labels)).dataset(seed=1, validation_fraction=0.1).num_classes
        2
    """

    train: Part
    test: Part
    validation: Part | None = None
    partition: Mapping[int, Sequence[int]] | Sequence[Sequence[int]] | Callable[[int], Any] | None = None
    name: str = "own"

    def of(self, seed: int) -> OwnData:
        """Return the same data with the partition for a seed."""
        if not callable(self.partition):
            return self
        return replace(self, partition=_call_with_seed(self.partition, seed, f"the partition of data {self.name!r}"))

    def dataset(self, seed: int, validation_fraction: float) -> Dataset:
        """Read and check the examples.

        Args:
            seed: Seed that draws the validation examples, if ``validation`` is None.
            validation_fraction: Share of ``train`` that becomes the validation examples.

        Returns:
            The data set. Its training examples keep their rows if ``partition`` is set.

        Raises:
            ParameterError: A part holds no usable examples, or the parts do not fit together.
        """
        train, test = as_split(self.train, "train"), as_split(self.test, "test")
        rows = np.arange(len(train))
        if self.validation is not None:
            validation = as_split(self.validation, "validation")
        elif (own := self.of(seed)).partition is not None:
            # `train` stays complete, because the partition refers to its rows.
            validation = _take(train, np.setdiff1d(rows, np.concatenate(own.rows(len(train)))))
        else:
            rows, drawn = _draw_validation(train, seed, validation_fraction)
            validation, train = _take(train, drawn), _take(train, rows)
        for name, part in (("test", test), ("validation", validation)):
            _check_alike(train, part, name)
        classes = train.labels.dtype == np.int64
        parts = [part for part in (train, validation, test) if len(part)]
        largest = max((int(part.labels.max()) for part in parts), default=0)
        # If there are more classes than examples, the labels are probably numbers to predict, or identifiers. Without
        # this check the model's last layer would get millions of outputs.
        if classes and largest >= (count := len(train) + len(validation) + len(test)):
            raise ParameterError(
                f"labels must be classes 0 … C - 1, got {largest} among {count} examples. Number the classes from 0, "
                "or give the labels as floats if they are numbers to predict."
            )
        found = np.unique(np.concatenate([part.labels for part in parts]))
        # Without the class 0, but with all classes from 1.
        if classes and found[0] == 1 and 1 < len(found) == found[-1]:
            raise ParameterError(
                f"labels must be 0 … {len(found) - 1} for {len(found)} classes, got 1 … {len(found)}. Subtract 1 from "
                "every label"
            )
        return Dataset(
            self.name, train, validation, test, num_classes=largest + 1 if classes else 1,
            input_shape=train.inputs.shape[1:], task="classification" if classes else "regression",
        )  # fmt: skip

    def rows(self, count: int) -> tuple[IntArray, ...]:
        """Check the partition and return each client's rows.

        Args:
            count: The number of training examples.

        Returns:
            For each client, its rows in ascending order.

        Raises:
            ParameterError: A client is missing or has no example, or a row is out of range or twice in one client.
        """
        given: Any = self.partition
        if not isinstance(given, Mapping | Sequence) or isinstance(given, str) or not given:
            raise ParameterError(
                "partition must be a mapping from client to rows of train, or a list of such rows for each client, got "
                f"{type(given).__name__}{'' if isinstance(given, np.ndarray) else f' {given!r}'}"
            )
        if isinstance(given, Mapping):
            if set(given) != set(range(len(given))):
                came = ", ".join(map(repr, list(given)[:5]))
                raise ParameterError(
                    f"partition must hold the clients 0 … {len(given) - 1}, as integers, got {came}, …"
                )
            given = [given[client] for client in range(len(given))]
        found = []
        for client, own in enumerate(given):
            rows, fault = np.asarray(own), ""
            if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu":
                fault = f"got {rows.dtype} of shape {rows.shape}. Leave out a client without rows"
            elif rows.min() < 0 or rows.max() >= count:
                fault = f"got rows from {rows.min()} to {rows.max()}"
            elif (times := np.bincount(rows.astype(np.int64))).max() > 1:
                fault = f"row {times.argmax()} occurs {times.max()} times"
            if fault:
                raise ParameterError(
                    f"partition: client {client} must have at least one row of train in [0, {count}), each only once; "
                    f"{fault}"
                )
            found.append(np.sort(rows.astype(np.int64)))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class SeededData:
    """Your own examples, which a function makes for each seed.

    Args:
        make: Function of the seed that returns ``OwnData`` or a pair (train, test).
        name: Name in messages and files.
    """

    make: Callable[[int], Any]
    name: str = "own"

    def of(self, seed: int) -> OwnData:
        """Return the examples of a seed.

        Raises:
            ParameterError: The function raises an error, or returns another type.
        """
        what = f"data {self.name!r}"
        return as_own_data(_call_with_seed(self.make, seed, what), what).of(seed)


def as_data(given: Any) -> OwnData | SeededData:
    """Convert the user's data: examples, or a function of the seed that makes them, whose name the data get."""
    if isinstance(given, SeededData):
        return given
    if not callable(given):
        return as_own_data(given)
    # functools.partial has no name, but its function has one. A lambda's "<lambda>" cannot be part of a file name.
    name = str(getattr(getattr(given, "func", given), "__name__", "own"))
    return SeededData(given, name if name.isidentifier() else "own")


def as_own_data(given: Any, what: str = "data") -> OwnData:
    """Convert the user's data, ``OwnData`` or a pair (train, test), to ``OwnData``."""
    if isinstance(given, OwnData):
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        return OwnData(train=given[0], test=given[1])
    raise ParameterError(
        f"{what} must be fedsel_flwr.simulations.OwnData, or a pair (train, test), got {type(given).__name__}; a "
        "function of the seed may return either"
    )


def _call_with_seed(make: Callable[[int], Any], seed: int, what: str) -> Any:
    """Call the user's function, and report its exceptions as errors of the data."""
    with refusing_faults(f"{what} cannot be created for seed {seed}"):
        return make(seed)


def as_split(part: Part, name: str) -> Split:
    """Read examples and labels.

    Args:
        part: (inputs, labels), or a torch ``Dataset`` of such pairs.
        name: The part's name in messages.

    Returns:
        The examples: inputs as float32, labels as int64 or float32.

    Raises:
        ParameterError: ``part`` has another type, or its arrays differ in length, are empty, or hold values that are
            not numbers. Or the inputs hold whole numbers beyond 2**24, which float32 would round.
    """
    if isinstance(part, Split):
        return part
    if isinstance(part, torch.utils.data.Dataset):
        inputs, labels = _of_torch(part, name)
    elif isinstance(part, Sequence) and len(part) == 2:
        try:
            inputs, labels = (_array(one) for one in part)
        except (TypeError, ValueError) as error:
            raise ParameterError(f"{name} must be two arrays, but the examples differ in shape: {error}") from error
    else:
        raise ParameterError(
            f"{name} must be a pair (inputs, labels) of arrays, or a torch Dataset of such pairs, got "
            f"{type(part).__name__}"
        )
    if inputs.dtype.kind not in "fiub" or labels.dtype.kind not in "fiub":
        raise ParameterError(f"{name} must hold numbers, got inputs of {inputs.dtype} and labels of {labels.dtype}")
    # Labels from data frames and regression code often have the shape of a column.
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if inputs.ndim < 2 or labels.ndim != 1 or len(inputs) != len(labels) or not len(labels):
        raise ParameterError(
            f"{name} must have at least one example, inputs of shape (n, …) and labels of shape (n,), got "
            f"{inputs.shape} and {labels.shape}"
        )
    if labels.dtype.kind != "f" and labels.min() < 0:
        raise ParameterError(f"{name}: classes must be 0 … C - 1, got {labels.min()}")
    _check_whole(inputs, name)
    # In the usual order of memory, because another order would round differently, and other processes lose it.
    inputs = inputs.astype(np.float32, order="C")
    if not np.isfinite(inputs).all() or not np.isfinite(labels).all():
        raise ParameterError(f"{name} must hold finite numbers, got NaN or infinity")
    return Split(inputs, labels.astype(np.float32) if labels.dtype.kind == "f" else labels.astype(np.int64))


def _check_whole(inputs: Array, name: str) -> None:
    """Refuse whole numbers that float32 would round, because they are probably ids."""
    large = inputs[(inputs > LARGEST_WHOLE) | (inputs < -LARGEST_WHOLE)]
    # Data frames turn ids into float64. Above 2^53 all numbers of this type are whole.
    ids = (large == np.rint(large)) & (np.abs(large) < 2.0**53)
    if large.size and (inputs.dtype.kind in "iu" or (ids.all() and (large != large.astype(np.float32)).any())):
        raise ParameterError(
            f"{name} must hold inputs that float32 can represent, got the whole number {large[0]:.0f}. Whole numbers "
            f"may have at most {LARGEST_WHOLE:,}. Number ids from 0, or divide the inputs by their unit."
        )


def _of_torch(part: Any, name: str) -> tuple[Array, Array]:
    """Read every pair of a torch ``Dataset``."""
    with refusing_faults(f"{name}: the torch Dataset must have pairs (input, label) of one shape, and a length"):
        pairs = [part[i] for i in range(len(part))]
        return np.stack([_array(pair[0]) for pair in pairs]), np.array([_array(pair[1]) for pair in pairs])


def _array(value: Any) -> Array:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _take(split: Split, rows: IntArray) -> Split:
    return Split(split.inputs[rows], split.labels[rows])


def _draw_validation(train: Split, seed: int, fraction: float) -> tuple[IntArray, IntArray]:
    """Return the rows of the clients and the rows of the server, each in ascending order."""
    # A class with one example cannot be in both parts, so the draw then ignores classes.
    classes = train.labels.dtype == np.int64 and np.unique(train.labels, return_counts=True)[1].min() > 1
    # The second word, as in `load_dataset`, where the first word draws test sets.
    draw = int(np.random.SeedSequence(seed).generate_state(2)[1])
    rows = np.arange(len(train))
    kept, drawn = split_rows(rows, train.labels if classes else None, fraction, draw, "data.validation_fraction")
    return np.sort(kept), np.sort(drawn)


def _check_alike(train: Split, other: Split, name: str) -> None:
    """Refuse examples whose shape or labels do not match the training examples."""
    if other.inputs.shape[1:] != train.inputs.shape[1:] or (len(other) and other.labels.dtype != train.labels.dtype):
        raise ParameterError(
            f"{name} must have examples of the same shape and kind as train: {train.inputs.shape[1:]} with "
            f"{_kind(train)}, got {other.inputs.shape[1:]} with {_kind(other)}"
        )


def _kind(split: Split) -> str:
    return "classes" if split.labels.dtype == np.int64 else "numbers to predict"


def from_federated(
    federated: Any,
    *,
    inputs: str = "image",
    labels: str = "label",
    train: str = "train",
    test: str = "test",
    validation: str | None = None,
    name: str = "federated",
) -> OwnData:
    """Read a ``FederatedDataset`` with its partition.

    The partitioner of the training split assigns examples to clients. Client k holds partition k, so the scenario's
    ``num_clients`` must equal the number of partitions.

    Args:
        federated: A ``flwr_datasets.FederatedDataset`` with a partitioner for the training split.
        inputs: Column of the inputs: numbers, lists of numbers, or images. Images become (channels, height, width). A
            pixel is divided by the largest value of the image's mode, so that it is in [0, 1]. This value is 1 in mode
            1, 255 in L, LA, RGB, RGBA and CMYK, 65,535 in I;16, and 2**31 - 1 in I. Mode F has no such value and stays
            as it is. Palette images (P) become RGB, or RGBA if they have transparency.
        labels: Column of the labels. Whole numbers are classes, other numbers are numbers to predict.
        train: The split that is partitioned among the clients.
        test: The split that measures the result.
        validation: The split with the server's examples, for selectors and filters that measure models. If None, the
            server has no examples. The preprocessor of the FederatedDataset can divide a split.
        name: Name in messages and files.

    Returns:
        The data for ``simulate(scenario, data=...)`` and ``compare(scenario, selectors, data=...)``.

    Raises:
        RunError: flwr-datasets is not installed.
        ParameterError: A split, a column or the partitioner is missing, the data set cannot be loaded, or its examples
            differ in shape.

    Example::

        federated = FederatedDataset(dataset="mnist", partitioners={"train": DirichletPartitioner(100, "label", 0.5)})
        comparison = compare(scenario, ["bsfl", "random"], data=from_federated(federated))
    """
    try:
        kind = importlib.import_module("flwr_datasets").FederatedDataset
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise RunError(
            "Hugging Face data sets need flwr-datasets. Install it with pip install 'fedsel-flwr[sim]'"
        ) from error
    if not isinstance(federated, kind):
        raise ParameterError(f"federated must be a flwr_datasets.FederatedDataset, got {type(federated).__name__}")
    # The first access downloads the data set. Network, hub, disk and partitioners raise errors of many kinds, for
    # example if there are more partitions than examples.
    with refusing_faults("the FederatedDataset cannot be read"):
        partitioners = federated.partitioners
        if train not in partitioners:
            raise ParameterError(
                f"the FederatedDataset has partitioners for {', '.join(partitioners) or 'no split'}, but none for "
                f"train = {train!r}. Give partitioners={{{train!r}: ...}}"
            )
        parts = [federated.load_partition(k, train) for k in range(partitioners[train].num_partitions)]
        others = {split: federated.load_split(split) for split in (test, validation) if split is not None}
        examples = _read_columns(datasets.concatenate_datasets(parts), train, inputs, labels)
        measured = {split: _read_columns(rows, split, inputs, labels) for split, rows in others.items()}
    # Examples are stored client by client, and client k has the rows from ends[k] to ends[k + 1].
    ends = np.cumsum([0] + [len(part) for part in parts])
    rows = [list(range(start, end)) for start, end in itertools.pairwise(ends.tolist())]
    served = None if validation is None else measured[validation]
    return OwnData(train=examples, test=measured[test], validation=served, partition=rows, name=name)


def _read_columns(rows: Any, split: str, inputs: str, labels: str) -> tuple[Array, Array]:
    """Return the inputs of a data set, shape (n, …), and its labels; images as (channels, height, width)."""
    lacking = [column for column in (inputs, labels) if column not in rows.column_names]
    if lacking:
        raise ParameterError(
            f"the split {split!r} has no column {' and no '.join(map(repr, lacking))}; it has "
            f"{', '.join(rows.column_names)}. Name the columns with inputs= and labels="
        )
    arrays = rows.with_format("numpy")
    # As images, because arrays of different modes would become one array without the modes.
    is_image = type(rows.features[inputs]).__name__ == "Image"
    examples: Any = list(map(_pixels, rows.with_format(None)[inputs])) if is_image else arrays[inputs][:]
    if is_image and len({one.shape for one in examples}) == 1:
        examples = np.stack(examples)
    # If examples have several shapes, NumPy makes an array of objects.
    if not isinstance(examples, np.ndarray) or examples.dtype == object:
        shapes = sorted({np.shape(one) for one in examples})
        some = ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")
        raise ParameterError(
            f"the inputs of the split {split!r} have {len(shapes)} shapes, such as {some}. Make the shapes equal "
            "with the FederatedDataset's preprocessor"
        )
    return examples[:, None] if examples.ndim == 1 else examples, arrays[labels][:]


def _pixels(image: Any) -> Array:
    """Return an image of PIL as (channels, height, width), float32, with the mode's largest value as 1."""
    # Palettes are different in each image, so their indices mean nothing.
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB")
    mode, pixels = image.mode, np.asarray(image)
    if mode == "I" and pixels.min(initial=0) < 0:
        raise ParameterError(
            f"an image of mode I must have pixels of at least 0, got {pixels.min()}. Convert the images with the "
            "FederatedDataset's preprocessor."
        )
    pixels = pixels.astype(np.float32) / (65_535 if mode.startswith("I;16") else DEPTHS.get(mode, 255))
    return pixels[np.newaxis] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
