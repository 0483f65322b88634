"""Data sets of Hugging Face: a ``FederatedDataset`` of flwr-datasets becomes data of one's own."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.simulations.own_data import OwnData

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
