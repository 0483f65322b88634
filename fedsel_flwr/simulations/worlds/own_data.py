"""Data of one's own in a scenario: arrays or torch data sets, and, if wanted, who holds what.

Data sets of Hugging Face: a ``FederatedDataset`` of flwr-datasets becomes data of one's own.
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

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.simulations.worlds.data import Dataset, Split

IntArray = npt.NDArray[np.int64]
Part = Any
"""(inputs, labels), two arrays; or a torch Dataset of such pairs."""


@dataclass(frozen=True, eq=False)
class OwnData:
    """Examples that a scenario does not know by name.

    Args:
        train: What the clients share out: (inputs, labels), arrays of shapes (n, …) and (n,), or a torch ``Dataset`` of
            n such pairs. Whole numbers as labels are classes 0 … C - 1, others are numbers to predict.
        test: What measures the result, and nothing else; of the same form.
        validation: The server's own examples, for selectors and filters that measure models. None: drawn from
            ``train`` by the scenario's ``data.validation_fraction``; where ``partition`` is given, the examples that
            nobody holds, if there are any.
        partition: Client -> rows of ``train``, for each client at least one; the same on every seed. Or a function
            that returns this for a seed. None: as the scenario says.
        name: For messages and files.

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
        """The same with the partition of a seed."""
        if not callable(self.partition):
            return self
        return replace(self, partition=_called(self.partition, seed, f"the partition of data {self.name!r}"))

    def dataset(self, seed: int, validation_fraction: float) -> Dataset:
        """Read and check the examples.

        Args:
            seed: Draws the validation examples, where they are not given.
            validation_fraction: Their share of ``train``.

        Returns:
            The data set; its training examples keep their rows where ``partition`` is given.

        Raises:
            ParameterError: Something is no examples, or the parts do not belong together.
        """
        if callable(self.partition):
            return self.of(seed).dataset(seed, validation_fraction)
        train, test = split_of(self.train, "train"), split_of(self.test, "test")
        rows = np.arange(len(train))
        if self.validation is not None:
            validation = split_of(self.validation, "validation")
        elif self.partition is not None:
            validation = _taken(train, np.setdiff1d(rows, np.concatenate(self.rows(len(train)))))
        else:
            rows, drawn = _drawn(train, seed, validation_fraction)
            validation, train = _taken(train, drawn), _taken(train, rows)
        for name, part in (("test", test), ("validation", validation)):
            _check_alike(train, part, name)
        classes = train.labels.dtype == np.int64
        parts = [part for part in (train, validation, test) if len(part)]
        largest = max((int(part.labels.max()) for part in parts), default=0)
        if classes and largest >= (count := len(train) + len(validation) + len(test)):
            raise ParameterError(
                f"labels must be classes 0 … C - 1, got {largest} among {count} examples: number the classes anew, or "
                "give the labels as floats if they are numbers to predict"
            )
        if classes:
            _check_first_class(parts)
        return Dataset(
            name=self.name,
            train=train,
            validation=validation,
            test=test,
            num_classes=largest + 1 if classes else 1,
            input_shape=train.inputs.shape[1:],
            task="classification" if classes else "regression",
        )

    def rows(self, count: int) -> tuple[IntArray, ...]:
        """The partition, checked.

        Args:
            count: How many training examples there are.

        Returns:
            For each client its rows in ascending order.

        Raises:
            ParameterError: A client is missing or has no example, or a row is out of range or twice with one client.
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
            rows = np.asarray(own)
            if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu":
                raise ParameterError(
                    f"partition: client {client} must have a list of at least one row of train, got {rows.dtype} of "
                    f"shape {rows.shape}"
                )
            rows = np.sort(rows.astype(np.int64))
            if (twice := rows[1:][np.diff(rows) == 0]).size:
                raise ParameterError(
                    f"partition: client {client} must have rows of train in [0, {count}), each once; row {twice[0]} "
                    f"stands there {np.count_nonzero(rows == twice[0])} times"
                )
            if rows[0] < 0 or rows[-1] >= count:
                raise ParameterError(
                    f"partition: client {client} must have rows of train in [0, {count}), each once; got rows from "
                    f"{rows[0]} to {rows[-1]}"
                )
            found.append(rows)
        return tuple(found)


@dataclass(frozen=True, eq=False)
class SeededData:
    """Examples that a function makes for each seed.

    Args:
        make: Called with the seed; returns ``OwnData``, or a pair (train, test).
        name: For messages and files.
    """

    make: Callable[[int], Any]
    name: str = "own"

    @classmethod
    def by(cls, make: Callable[..., Any]) -> SeededData:
        """Name the data by the function that makes them."""
        name = str(getattr(getattr(make, "func", make), "__name__", "own"))
        return cls(make, name if name.isidentifier() else "own")

    def of(self, seed: int) -> OwnData:
        """The examples of a seed.

        Raises:
            ParameterError: The function raises, or returns something else.
        """
        what = f"data {self.name!r}"
        return as_own_data(_called(self.make, seed, what), what).of(seed)


def as_own_data(given: Any, what: str = "data") -> OwnData:
    """Read what a caller gives as data: ``OwnData``, or (train, test) of the forms that it reads."""
    if isinstance(given, OwnData):
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        return OwnData(train=given[0], test=given[1])
    raise ParameterError(
        f"{what} must be fedsel_flwr.simulations.OwnData, or a pair (train, test), got {type(given).__name__}; a "
        "function of the seed may return either"
    )


def _called(make: Callable[[int], Any], seed: int, what: str) -> Any:
    try:
        return make(seed)
    except FedSelError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise ParameterError(f"{what} cannot be made for seed {seed}: {described(error)}") from error


def split_of(part: Part, name: str) -> Split:
    """Read examples and labels.

    Args:
        part: (inputs, labels), or a torch ``Dataset`` of pairs.
        name: What they are, for errors.

    Returns:
        The examples, inputs as float32, labels as int64 or float32.

    Raises:
        ParameterError: They are neither, differ in length, are none, or hold what is no number.
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
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if inputs.ndim < 2 or labels.ndim != 1 or len(inputs) != len(labels) or not len(labels):
        raise ParameterError(
            f"{name} must have at least one example, inputs of shape (n, …) and labels of shape (n,), got "
            f"{inputs.shape} and {labels.shape}"
        )
    if labels.dtype.kind != "f" and labels.min() < 0:
        raise ParameterError(f"{name}: classes must be 0 … C - 1, got {labels.min()}")
    inputs = inputs.astype(np.float32)
    if not np.isfinite(inputs).all() or not np.isfinite(labels).all():
        raise ParameterError(f"{name} must hold finite numbers, got NaN or infinity")
    return Split(inputs, labels.astype(np.float32) if labels.dtype.kind == "f" else labels.astype(np.int64))


def _of_torch(part: Any, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    try:
        pairs = [part[i] for i in range(len(part))]
        return np.stack([_array(pair[0]) for pair in pairs]), np.array([_array(pair[1]) for pair in pairs])
    except Exception as error:  # whatever the user's own code raises
        raise ParameterError(
            f"{name}: the torch Dataset must have pairs (input, label) of one shape, and a length: {described(error)}"
        ) from error


def _array(value: Any) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _taken(split: Split, rows: IntArray) -> Split:
    return Split(split.inputs[rows], split.labels[rows])


def _drawn(train: Split, seed: int, fraction: float) -> tuple[IntArray, IntArray]:
    """Split the rows; classes in proportion where each has two examples."""
    classes = train.labels.dtype == np.int64
    proportion = train.labels if classes and np.unique(train.labels, return_counts=True)[1].min() > 1 else None
    draw = int(np.random.SeedSequence(seed).generate_state(2)[1])
    from sklearn.model_selection import train_test_split  # here, as clients import this module and never split

    try:
        kept, drawn = train_test_split(
            np.arange(len(train)), test_size=fraction, random_state=draw, stratify=proportion
        )
    except ValueError as error:
        raise ParameterError(
            f"data.validation_fraction = {fraction} leaves too few of {len(train)} training examples: {error}"
        ) from error
    return np.sort(kept), np.sort(drawn)


def _check_alike(train: Split, other: Split, name: str) -> None:
    if other.inputs.shape[1:] != train.inputs.shape[1:] or (len(other) and other.labels.dtype != train.labels.dtype):
        raise ParameterError(
            f"{name} must have examples like train's, {train.inputs.shape[1:]} with {_kind(train)}, got "
            f"{other.inputs.shape[1:]} with {_kind(other)}"
        )


def _check_first_class(parts: Sequence[Split]) -> None:
    """Refuse classes that are numbered from 1: every class from 1 on is there, and 0 is not."""
    found = np.unique(np.concatenate([part.labels for part in parts]))
    count = len(found)
    if count > 1 and found[0] == 1 and found[-1] == count:
        raise ParameterError(
            f"labels must be 0 … classes - 1, that is 0 … {count - 1} of {count} classes, got 1 … {count}: subtract 1 "
            "from every label"
        )


def _kind(split: Split) -> str:
    return "classes" if split.labels.dtype == np.int64 else "numbers to predict"


Array = npt.NDArray[Any]


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
    """Read a ``FederatedDataset``, and who holds what.

    Its partitioner of the training split says what each client holds: partition k is client k, so that the scenario's
    ``num_clients`` is the number of partitions.

    Args:
        federated: A ``flwr_datasets.FederatedDataset`` with a partitioner for the training split.
        inputs: The column of the inputs: numbers, lists of numbers, or images, which become (channels, height, width)
            with values in [0, 1].
        labels: The column of the labels: whole numbers are classes, others are numbers to predict.
        train: The split that the clients share out.
        test: The split that measures the result.
        validation: The split of the server's own examples, for selectors and filters that measure models; None: there
            are none. The FederatedDataset's preprocessor can divide a split.
        name: For messages and files.

    Returns:
        The data, for ``simulate(scenario, data=...)`` and ``compare(scenario, selectors, data=...)``.

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
    except ModuleNotFoundError as error:
        raise RunError("data sets of Hugging Face need flwr-datasets: pip install 'fedsel-flwr[sim]'") from error
    if not isinstance(federated, kind):
        raise ParameterError(f"federated must be a flwr_datasets.FederatedDataset, got {type(federated).__name__}")
    try:
        partitioners = federated.partitioners
    except Exception as error:  # of the hub, of the disk
        raise ParameterError(f"the FederatedDataset cannot be read: {described(error)}") from error
    if train not in partitioners:
        raise ParameterError(
            f"the FederatedDataset has partitioners for {', '.join(partitioners) or 'no split'}, but none for train = "
            f"{train!r}: give partitioners={{{train!r}: ...}}"
        )
    try:
        parts = [federated.load_partition(k, train) for k in range(partitioners[train].num_partitions)]
        others = {split: federated.load_split(split) for split in (test, validation) if split is not None}
        read = [_read(part, train, inputs, labels) for part in parts]
        measured = {split: _together([_read(rows, split, inputs, labels)], split) for split, rows in others.items()}
    except FedSelError:
        raise
    except Exception as error:  # of the hub, of the disk, of a partitioner
        raise ParameterError(f"the FederatedDataset cannot be read: {described(error)}") from error
    ends = np.cumsum([0] + [len(own) for _, own in read])
    return OwnData(
        train=_together(read, train),
        test=measured[test],
        validation=None if validation is None else measured[validation],
        partition=[list(range(start, end)) for start, end in itertools.pairwise(ends.tolist())],
        name=name,
    )


def _check_columns(rows: Any, split: str, wanted: Sequence[str]) -> None:
    lacking = [column for column in wanted if column not in rows.column_names]
    if lacking:
        raise ParameterError(
            f"the split {split!r} has no column {' and no '.join(map(repr, lacking))}; it has "
            f"{', '.join(rows.column_names)}: name them with inputs= and labels="
        )


def _read(rows: Any, split: str, inputs: str, labels: str) -> tuple[list[Array], list[Any]]:
    """The inputs of some examples, one array each, and their labels."""
    _check_columns(rows, split, (inputs, labels))
    return [_example(one) for one in rows[inputs]], list(rows[labels])


def _together(parts: Sequence[tuple[list[Array], list[Any]]], split: str) -> tuple[Array, Array]:
    """All inputs, shape (n, …), and all labels, shape (n,)."""
    examples = [one for own, _ in parts for one in own]
    shapes = sorted({one.shape for one in examples})
    if len(shapes) > 1:
        some = ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")
        raise ParameterError(
            f"the inputs of the split {split!r} have {len(shapes)} shapes, such as {some}: bring them to one with the "
            "FederatedDataset's preprocessor"
        )
    stacked = np.stack(examples)
    return stacked[:, None] if stacked.ndim == 1 else stacked, np.asarray([one for _, own in parts for one in own])


def _example(value: Any) -> Array:
    if not hasattr(value, "getbands"):  # no image of Pillow
        return np.asarray(value)
    pixels = np.asarray(value, dtype=np.float32) / 255
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
