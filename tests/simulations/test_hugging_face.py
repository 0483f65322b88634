"""A local data set through flwr-datasets' FederatedDataset, without a network: the same examples, held by the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, SizePartitioner
from PIL import Image as Pillow

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.simulations import compare, load_scenario, simulate
from fedsel_flwr.simulations.worlds.own_data import from_federated

CLIENTS, TRAIN, TEST = 6, 120, 30


def picture(number: int, side: int = 8) -> Pillow.Image:
    """A grey image that tells its class: a bright row."""
    pixels = np.random.default_rng(number).integers(0, 60, (side, side), dtype=np.uint8)
    pixels[number % 3] = 250
    return Pillow.fromarray(pixels)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two Parquet files of images and labels, as the hub has them."""
    folder = tmp_path_factory.mktemp("hub")
    kinds = Features({"image": Image(), "label": ClassLabel(num_classes=3), "id": Value("int64")})
    for split, numbers in (("train", range(TRAIN)), ("test", range(1000, 1000 + TEST))):
        rows = {"image": [picture(n) for n in numbers], "label": [n % 3 for n in numbers], "id": list(numbers)}
        Dataset.from_dict(rows, features=kinds).to_parquet(folder / f"{split}.parquet")
    return {split: str(folder / f"{split}.parquet") for split in ("train", "test")}


@pytest.fixture
def federated(files: dict[str, str], tmp_path: Path) -> Any:
    """Makes a FederatedDataset of the files."""

    def make(partitioner: Any, **more: Any) -> FederatedDataset:
        options = {"data_files": files, "cache_dir": str(tmp_path), "shuffle": False, **more}
        return FederatedDataset(dataset="parquet", partitioners={"train": partitioner}, **options)

    return make


@pytest.mark.parametrize("shuffle", [False, True])
def test_clients_hold_what_the_partitioner_gives_them(federated: Any, shuffle: bool) -> None:
    def partitioner() -> DirichletPartitioner:
        return DirichletPartitioner(CLIENTS, "label", alpha=0.5, min_partition_size=2, seed=3)

    theirs, data = federated(partitioner(), shuffle=shuffle), from_federated(federated(partitioner(), shuffle=shuffle))
    images, labels = data.train
    assert (images.shape, images.dtype, images.max()) == ((TRAIN, 1, 8, 8), np.float32, np.float32(250 / 255))
    assert sorted(row for rows in data.partition for row in rows) == list(range(TRAIN))
    for client, rows in enumerate(data.partition):
        part = theirs.load_partition(client)
        assert labels[rows].tolist() == list(part["label"])
        expected = np.stack([np.asarray(one, dtype=np.float32)[None] / 255 for one in part["image"]])
        np.testing.assert_array_equal(images[rows], expected)
    assert len({len(rows) for rows in data.partition}) > 1
    assert data.test[1].tolist() == [n % 3 for n in (theirs.load_split("test")["id"])]


def test_a_scenario_learns_from_it(federated: Any) -> None:
    scenario = load_scenario("smoke", {"engine": "vectorized", "num_clients": CLIENTS, "rounds": 15, "seed": 2})
    data = from_federated(federated(SizePartitioner([15] * 4 + [30] * 2)), validation="test")
    result = simulate(scenario, data=data)
    assert {row.num_examples for row in result.history.clients} == {15, 30}
    assert result.history.rounds[-1].accuracy > 0.9
    comparison = compare(scenario, ["cs-ucb", "random"], seeds=1, data=data)
    assert comparison.selectors == ["cs-ucb", "random"]


def test_inputs_may_be_numbers(federated: Any) -> None:
    data = from_federated(federated(IidPartitioner(CLIENTS)), inputs="label", labels="id")
    assert data.train[0].shape == (TRAIN, 1)
    assert data.train[1].tolist() == list(range(TRAIN))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": "img"}, "the split 'train' has no column 'img'; it has image, label, id: name them with inputs="),
        ({"labels": "y", "inputs": "x"}, "no column 'x' and no 'y'"),
        ({"train": "validation"}, "partitioners for train, but none for train = 'validation'"),
        ({"test": "evaluation"}, "cannot be read: ValueError: .*evaluation"),
    ],
)
def test_what_is_missing_is_named(federated: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        from_federated(federated(IidPartitioner(CLIENTS)), **options)


def test_images_of_several_sizes_are_refused(files: dict[str, str], federated: Any, tmp_path: Path) -> None:
    rows = {"image": [picture(n, 8 + n % 2) for n in range(TRAIN)], "label": [0] * TRAIN}
    path = str(tmp_path / "odd.parquet")
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(num_classes=3)})).to_parquet(path)
    odd = federated(IidPartitioner(CLIENTS), data_files={"train": path, "test": path})
    with pytest.raises(
        ParameterError,
        match=r"have 2 shapes, such as \(8, 8\), \(9, 9\): bring them",
    ):
        from_federated(odd)


def test_what_is_no_federated_dataset_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"must be a flwr_datasets\.FederatedDataset, got dict"):
        from_federated({})


def test_one_that_was_used_before_is_read_all_the_same(federated: Any) -> None:
    used = federated(IidPartitioner(CLIENTS))
    used.load_partition(0)
    assert [len(rows) for rows in from_federated(used).partition] == [TRAIN // CLIENTS] * CLIENTS


def test_without_flwr_datasets_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(RunError, match=r"need flwr-datasets: pip install 'fedsel-flwr\[sim\]'"):
        from_federated(None)
