"""Data of one's own: every form that is read, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.own_data import OwnData, as_split

INPUTS = np.random.default_rng(0).normal(size=(60, 4))
LABELS = np.arange(60) % 3


def test_arrays_tensors_and_torch_data_sets_are_the_same_examples() -> None:
    expected = as_split((INPUTS, LABELS), "train")
    assert (expected.inputs.dtype, expected.labels.dtype) == (np.float32, np.int64)
    tensors = torch.tensor(INPUTS), torch.tensor(LABELS)
    for part in (tensors, TensorDataset(*tensors), [INPUTS.tolist(), LABELS.astype(np.int8)[:, np.newaxis]], expected):
        found = as_split(part, "train")
        np.testing.assert_array_equal(found.inputs, expected.inputs)
        np.testing.assert_array_equal(found.labels, expected.labels)


def test_the_servers_examples_are_drawn_from_the_training_examples_in_proportion() -> None:
    own = OwnData(train=(INPUTS, LABELS), test=(INPUTS[:5], LABELS[:5]))
    dataset = own.dataset(seed=1, validation_fraction=0.2)
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (48, 12, 5)
    assert np.bincount(dataset.validation.labels).tolist() == [4, 4, 4]
    together = np.concatenate([dataset.train.inputs, dataset.validation.inputs])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(INPUTS.astype(np.float32), axis=0))
    again = own.dataset(seed=1, validation_fraction=0.2)
    np.testing.assert_array_equal(again.validation.inputs, dataset.validation.inputs)
    assert (own.dataset(seed=2, validation_fraction=0.2).validation.inputs != dataset.validation.inputs).any()


def test_a_partition_keeps_its_rows_and_leaves_the_rest_to_the_server() -> None:
    own = OwnData(train=(INPUTS, LABELS), test=(INPUTS, LABELS), partition={1: [9, 8], 0: range(8)})
    dataset = own.dataset(seed=1, validation_fraction=0.2)
    assert [rows.tolist() for rows in own.rows(60)] == [list(range(8)), [8, 9]]
    np.testing.assert_array_equal(dataset.train.inputs, INPUTS.astype(np.float32))
    np.testing.assert_array_equal(dataset.validation.inputs, INPUTS[10:].astype(np.float32))
    everything = OwnData(train=(INPUTS, LABELS), test=(INPUTS, LABELS), partition=[range(60)])
    assert len(everything.dataset(seed=1, validation_fraction=0.2).validation) == 0


def test_a_data_set_without_the_class_0_is_taken_if_others_are_lacking_too() -> None:
    """The classes 1 and 3 of four are some of the classes 0 … 3; only 1 … C must be a mistake."""
    labels = np.where(LABELS > 0, 3, 1)
    assert OwnData(train=(INPUTS, labels), test=(INPUTS, labels)).dataset(1, 0.2).num_classes == 4


def test_numbers_to_predict_are_a_regression() -> None:
    own = OwnData(train=(INPUTS, LABELS / 2), test=(INPUTS, LABELS / 2), validation=(INPUTS, LABELS / 2))
    dataset = own.dataset(seed=1, validation_fraction=0.2)
    assert (dataset.task, dataset.num_classes, dataset.train.labels.dtype) == ("regression", 1, np.float32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"train": INPUTS},
            "train must be a pair (inputs, labels) of arrays, or a torch Dataset of such pairs, got nd",
        ),
        ({"train": (INPUTS, LABELS[:-1])}, "inputs of shape (n, …) and labels of shape (n,), got (60, 4) and (59,)"),
        ({"train": (INPUTS[:0], LABELS[:0])}, "at least one example"),
        ({"train": (INPUTS[:, 0], LABELS)}, "got (60,) and (60,)"),
        ({"train": (INPUTS.astype(str), LABELS)}, "train must hold numbers, got inputs of <U"),
        ({"train": (INPUTS * np.inf, LABELS)}, "train must hold finite numbers"),
        ({"train": (INPUTS, LABELS - 1)}, "classes must be 0 … C - 1, got -1"),
        ({"test": (INPUTS[:, :3], LABELS)}, "test must have examples like train's, (4,) with classes, got (3,)"),
        ({"test": (INPUTS, LABELS / 1)}, "got (4,) with numbers to predict"),
        ({"test": TensorDataset(torch.zeros(3, 4))}, "the torch Dataset must have pairs"),
        ({"partition": {0: [1], 2: [2]}}, "partition must hold the clients 0 … 1"),
        ({"partition": [[1], []]}, "client 1 must have a list of at least one row"),
        ({"partition": [[1], [60]]}, "client 1 must have rows of train in [0, 60), each once; got rows from 60 to 60"),
        ({"partition": [[1, 1]]}, "each once"),
        (
            {"partition": [[4], [3, 8, 8, 1, 8]]},
            "client 1 must have rows of train in [0, 60), each once; row 8 occurs",
        ),
        ({"train": (INPUTS, LABELS + 1), "test": (INPUTS, LABELS + 1)}, "got 1 … 3: subtract 1 from every label"),
        ({"partition": [[0.5]]}, "got float64"),
    ],
)
def test_what_is_no_data_set_is_refused(changed: dict[str, Any], said: str) -> None:
    own = OwnData(**{"train": (INPUTS, LABELS), "test": (INPUTS, LABELS)} | changed)
    with pytest.raises(ParameterError) as error:
        own.dataset(seed=1, validation_fraction=0.2)
    assert said in str(error.value)
