"""The data sets: sizes, classes and disjointness of the splits, missing files, and the writers of MNIST."""

from __future__ import annotations

import gzip
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torchvision import datasets as torchvision_datasets

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.scenario_tables import Synthetic
from fedsel_flwr.simulations.worlds.data import Dataset, Split, load_dataset
from fedsel_flwr.simulations.worlds.image_files import read_writers
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.own_data import OwnData
from fedsel_flwr.simulations.worlds.world import World


def parts(data: Dataset) -> list[Split]:
    return [data.train, data.validation, data.test]


def lengths(data: Dataset) -> list[int]:
    return [len(part) for part in parts(data)]


def together(data: Dataset) -> tuple[Any, Any]:
    return np.concatenate([one.inputs for one in parts(data)]), np.concatenate([one.labels for one in parts(data)])


# ---- digits -------------------------------------------------------------------------------------------------------


def test_digits_sizes_shapes_range_and_class_proportions() -> None:
    digits = load_dataset("digits")
    assert lengths(digits) == [1293, 144, 360]
    assert (digits.name, digits.num_classes, digits.input_shape) == ("digits", 10, (1, 8, 8))
    assert digits.train.inputs.shape == (1293, 1, 8, 8)
    assert (digits.train.inputs.dtype, digits.train.labels.dtype) == (np.float32, np.int64)
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0.0, 1.0)
    share = np.bincount(load_digits().target) / 1797
    for part in parts(digits):
        assert np.abs(np.bincount(part.labels) - share * len(part)).max() <= 1.0


def test_digits_splits_are_disjoint_and_together_everything() -> None:
    inputs, labels = together(load_dataset("digits", seed=3))
    original = (load_digits().images / 16.0).astype(np.float32)
    expected = sorted((row.tobytes(), int(label)) for row, label in zip(original, load_digits().target, strict=True))
    assert sorted((row.tobytes(), int(label)) for row, label in zip(inputs, labels, strict=True)) == expected
    assert len({row for row, _ in expected}) == 1797  # so that no example can be in two splits


def test_fractions_set_the_sizes() -> None:
    assert lengths(load_dataset("digits", validation_fraction=0.25, test_fraction=0.5)) == [673, 225, 899]
    with pytest.raises(ParameterError, match=r"validation_fraction = 0.005 leaves too few of 1437"):
        load_dataset("digits", validation_fraction=0.005)


def test_the_validation_set_may_come_from_the_test_set() -> None:
    """360 of 1,797 digits are the test set (20 %). A fifth of them are 72; all others, 1,437, are the clients'."""
    before, digits = load_dataset("digits"), load_dataset("digits", validation_from="test", validation_fraction=0.2)
    assert lengths(digits) == [1437, 72, 288]
    for part in parts(digits):
        share = np.bincount(load_digits().target) / 1797
        assert np.abs(np.bincount(part.labels) - share * len(part)).max() <= 1.0

    def rows(*splits: Split) -> list[bytes]:
        return sorted(row.tobytes() for split in splits for row in split.inputs)

    assert rows(digits.validation, digits.test) == rows(before.test)
    assert rows(digits.train) == rows(before.train, before.validation)
    assert len(set(rows(*parts(digits)))) == 1797  # no example is in two parts
    other = load_dataset("digits", validation_from="test", validation_fraction=0.2, seed=1)
    assert rows(other.validation) != rows(digits.validation)
    line = Synthetic(num_examples=1000, num_features=3, noise=0)
    numbers = load_dataset("synthetic-regression", synthetic=line, validation_from="test", validation_fraction=0.25)
    assert lengths(numbers) == [800, 50, 150]
    with pytest.raises(ParameterError, match=r"validation_fraction = 0.02 leaves too few of 360"):
        load_dataset("digits", validation_from="test", validation_fraction=0.02)


def test_the_clients_of_a_scenario_then_hold_every_training_image(tmp_path: Path, no_network: list[str]) -> None:
    write_fashion(tmp_path)
    keys = {"data.dataset": "fashion-mnist", "data.data_dir": str(tmp_path), "data.validation_fraction": 0.5}
    world = World(load_scenario("smoke", {**keys, "data.validation_from": "test"}))
    greys = [np.rint((split.inputs[:, 0, 0, 0] * 0.3530 + 0.2860) * 255).astype(int) for split in parts(world.dataset)]
    assert greys[0].tolist() == list(range(100))  # image i has the grey value i
    assert [len(one) for one in greys[1:]] == [10, 10]
    assert sorted([*greys[1], *greys[2]]) == list(range(20))
    for split, grey in zip(parts(world.dataset), greys, strict=True):
        np.testing.assert_array_equal(split.labels, grey % 10)
    assert sum(world.num_examples().values()) == 100


def test_the_seed_alone_decides_the_split() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (this is the state that must stay)
    first, again, other = (parts(load_dataset("digits", seed=seed)) for seed in (5, 5, 6))
    for one, same, another in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one.inputs, same.inputs)
        assert not np.array_equal(one.inputs, another.inputs)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


# ---- image files --------------------------------------------------------------------------------------------------


def write_idx(folder: Path, name: str, images: Any, num_classes: int) -> None:
    """Write images in the format of MNIST, image i of class i mod num_classes; % in the name is the kind of content."""
    folder.mkdir(parents=True, exist_ok=True)
    header = np.array([0x803, *images.shape], dtype=">u4").tobytes()
    (folder / name.replace("%", "images-idx3")).write_bytes(header + images.astype(np.uint8).tobytes())
    header = np.array([0x801, len(images)], dtype=">u4").tobytes()
    labels = bytes(i % num_classes for i in range(len(images)))
    (folder / name.replace("%", "labels-idx1")).write_bytes(header + labels)


def write_fashion(folder: Path) -> None:
    """Write a Fashion-MNIST of 100 + 20 images, image i uniformly grey with value i."""
    for half, count in (("train", 100), ("t10k", 20)):
        grey = np.broadcast_to(np.arange(count)[:, None, None], (count, 28, 28))
        write_idx(folder / "FashionMNIST" / "raw", f"{half}-%-ubyte", grey, 10)


@pytest.mark.parametrize("origin", ["--data-dir", "FEDSEL_DATA"])
def test_a_missing_folder_is_an_error_and_stays_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str], origin: str
) -> None:
    missing = tmp_path / "nowhere"
    if origin == "FEDSEL_DATA":
        monkeypatch.setenv("FEDSEL_DATA", str(missing))
    with pytest.raises(ParameterError, match=rf"nowhere \(from {origin}\) does not exist"):
        load_dataset("mnist", data_dir=missing if origin == "--data-dir" else None)
    assert not missing.exists()
    assert no_network == []  # not even tried


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("fashion-mnist", "FashionMNIST/raw/train-images-idx3-ubyte"),
        ("emnist", "EMNIST/raw/emnist-balanced-train-images-idx3-ubyte"),
        ("cifar-10", "cifar-10-batches-py/data_batch_1"),
    ],
)
def test_missing_files_name_folder_file_and_way_out(
    tmp_path: Path, no_network: list[str], name: str, file: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        load_dataset(name, data_dir=tmp_path)
    for part in (str(tmp_path / file), "--data-dir", "FEDSEL_DATA", "network", "no network in this test"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(no_network) == 1  # the download was tried once


def test_without_a_folder_the_cache_in_the_home_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ParameterError, match=r"\.cache/fedsel-flwr/MNIST/raw/train-images-idx3-ubyte"):
        load_dataset("mnist")
    assert no_network == ["MNIST"]


def test_a_truncated_file_is_called_damaged(tmp_path: Path, no_network: list[str]) -> None:
    raw = tmp_path / "MNIST" / "raw"
    for half in ("train", "t10k"):
        write_idx(raw, f"{half}-%-ubyte", np.zeros((9, 28, 28)), 10)
        path = raw / f"{half}-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:16])
    with pytest.raises(ParameterError, match=r"mnist in the data folder .* are damaged"):
        load_dataset("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("through", ["argument", "variable"])
def test_small_idx_files_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str], through: str
) -> None:
    write_fashion(tmp_path)
    if through == "variable":
        monkeypatch.setenv("FEDSEL_DATA", str(tmp_path))
    fashion = load_dataset("fashion-mnist", data_dir=tmp_path if through == "argument" else None)
    assert lengths(fashion) == [90, 10, 20]
    np.testing.assert_array_equal(np.bincount(fashion.validation.labels), np.ones(10))
    np.testing.assert_array_equal(fashion.test.labels, np.arange(20) % 10)  # the official order
    # image i: (i / 255 - 0.2860) / 0.3530
    np.testing.assert_allclose(fashion.test.inputs[19], np.full((1, 28, 28), (19 / 255 - 0.2860) / 0.3530), rtol=1e-5)
    greys = np.rint((fashion.train.inputs[:, 0, 0, 0] * 0.3530 + 0.2860) * 255).astype(int)
    np.testing.assert_array_equal(greys % 10, fashion.train.labels)  # images and labels stay together
    assert len(set(greys)) == 90
    assert no_network == []


def test_small_emnist_files_by_hand(tmp_path: Path, no_network: list[str]) -> None:
    """EMNIST's files hold rows as columns: here a bright stroke in the first file row, the first column to the eye."""
    for half, count in (("train", 470), ("test", 94)):
        pixels = np.zeros((count, 28, 28))
        pixels[:, 0, :] = 255
        write_idx(tmp_path / "EMNIST" / "raw", f"emnist-balanced-{half}-%-ubyte", pixels, 47)
    emnist = load_dataset("emnist", data_dir=tmp_path)
    assert lengths(emnist) == [423, 47, 94]
    assert (emnist.num_classes, emnist.input_shape, emnist.task) == (47, (1, 28, 28), "classification")
    np.testing.assert_array_equal(emnist.test.labels, np.arange(94) % 47)
    bright = emnist.test.inputs[5, 0]
    np.testing.assert_allclose(bright[:, 0], (1 - 0.1751) / 0.3332, rtol=1e-5)
    np.testing.assert_allclose(bright[:, 1:], -0.1751 / 0.3332, rtol=1e-5)
    assert no_network == []


def test_a_download_is_tried_with_a_timeout_that_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []

    def download(self: torchvision_datasets.FashionMNIST) -> None:
        seen.append(socket.getdefaulttimeout())
        write_fashion(Path(self.root))

    monkeypatch.setattr(torchvision_datasets.MNIST, "download", download)
    before = socket.getdefaulttimeout()
    assert len(load_dataset("fashion-mnist", data_dir=tmp_path).train) == 90  # what was missing has come
    assert seen == [30.0]
    assert socket.getdefaulttimeout() == before


# ---- the writers of MNIST -----------------------------------------------------------------------------------------

WRITERS = {"data.dataset": "mnist", "partition.kind": "writers", "clients_per_round": 1}


def write_mnist(folder: Path, writers: Any, digits: Any = None) -> Path:
    """Write an MNIST of len(writers) + 20 images, image i of digit i mod 10, and QMNIST's table; return its path."""
    for half, count in (("train", len(writers)), ("t10k", 20)):
        write_idx(folder / "MNIST" / "raw", f"{half}-%-ubyte", np.zeros((count, 28, 28)), 10)
    table = np.full((len(writers), 8), 77)
    table[:, 0] = np.arange(len(writers)) % 10 if digits is None else digits
    table[:, 2] = writers
    path = folder / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(np.array([0xC02, len(writers), 8, *table.ravel()], dtype=">i4").tobytes()))
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_a_client_of_the_partition_writers_has_all_training_images_of_its_writers(
    tmp_path: Path, packed: bool, no_network: list[str]
) -> None:
    """100 images by 20 writers; the server's 10 are left out before the writers are shared among 6 clients."""
    by = np.random.default_rng(1).permutation(np.arange(100) % 20) * 3
    path = write_mnist(tmp_path, by)
    if not packed:
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    world = World(load_scenario("smoke", {**WRITERS, "data.data_dir": str(tmp_path), "num_clients": 6}))
    rows = world.dataset.file_rows
    assert rows is not None
    np.testing.assert_array_equal(rows % 10, world.dataset.train.labels)
    assert len(set(rows.tolist())) == len(rows) == 90
    assert np.sort(np.concatenate(list(world.partitions))).tolist() == list(range(90))
    owned = [set(by[rows[part]].tolist()) for part in world.partitions]
    assert sorted(map(len, owned)) == [3, 3, 3, 3, 4, 4]
    assert sum(map(len, owned)) == len(set.union(*owned))


@pytest.mark.parametrize(
    ("keys", "fault", "message"),
    [
        ({"data.dataset": "fashion-mnist"}, "", r"'writers' needs data\.dataset = 'mnist', got 'fashion-mnist'"),
        ({"data.dataset": "digits"}, "", r"'writers' needs data\.dataset = 'mnist', got 'digits'"),
        ({"data.dataset": "synthetic-regression", "model.name": "linear"}, "", r"got 'synthetic-regression'"),
        ({"num_clients": 21}, "", r"21 clients cannot share 20 writers"),
        ({}, "missing", r"qmnist-train-labels-idx2-int\.gz, which does not exist\. Copy https://.*--data-dir"),
        ({}, "other digits", r"are not the labels in MNIST/raw"),
        ({}, "short", r"are not the labels in MNIST/raw"),
        ({}, "truncated", r"qmnist-train-labels-idx2-int\.gz is damaged"),
        ({}, "header", r"is damaged \(ValueError: the header does not fit"),
    ],
)
def test_faults_of_the_partition_writers(
    tmp_path: Path, no_network: list[str], keys: dict[str, Any], fault: str, message: str
) -> None:
    path = write_mnist(tmp_path, np.arange(100) % 20, np.ones(100) if fault == "other digits" else None)
    write_fashion(tmp_path)
    content = gzip.decompress(path.read_bytes())
    if fault == "missing":
        path.unlink()
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    if fault == "header":
        path.write_bytes(gzip.compress(content + content[12:44]))
    if fault == "short":
        content = np.array([0xC02, 50, 8], dtype=">i4").tobytes() + content[12 : 12 + 50 * 32]
        path.write_bytes(gzip.compress(content))
    with pytest.raises(ParameterError, match=message):
        World(load_scenario("smoke", {**WRITERS, "data.data_dir": str(tmp_path), "num_clients": 6, **keys}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (WRITERS | {"data.validation_fraction": 0.5}, r"'writers' needs data\.dataset = 'mnist'"),
        ({"data.validation_from": "test"}, r"validation_from = 'test' .* 'mnist' is your own .*OwnData\(validation="),
    ],
)
def test_the_users_data_have_no_writers_and_their_own_validation_examples(keys: dict[str, Any], said: str) -> None:
    data = OwnData(train=(np.zeros((40, 3)), np.arange(40) % 10), test=(np.zeros((9, 3)), np.arange(9)), name="mnist")
    with pytest.raises(ParameterError, match=said):
        World(load_scenario("smoke", keys), OwnParts(data=data))


def test_the_real_writers(shared_data: Path) -> None:
    """The counts of QMNIST's authors' file: 539 writers of 19 to 131 images, 116 in the median."""
    if not (shared_data / "QMNIST").exists() or not (shared_data / "MNIST").exists():
        pytest.skip(f"{shared_data} holds no QMNIST/raw or MNIST/raw; set FEDSEL_DATA to a folder with both")
    digits, writers = read_writers(shared_data)
    assert np.bincount(digits).tolist() == DIGITS
    images = np.unique(writers, return_counts=True)[1]
    assert (len(images), images.min(), images.max(), np.median(images)) == (539, 19, 131, 116)
    world = World(load_scenario("smoke", {**WRITERS, "data.data_dir": str(shared_data), "num_clients": 539}))
    assert world.dataset.file_rows is not None
    owned = [np.unique(writers[world.dataset.file_rows[part]]) for part in world.partitions]
    assert np.sort(np.concatenate(owned)).tolist() == np.unique(writers).tolist()
    assert {len(one) for one in owned} == {1}


# ---- real files ---------------------------------------------------------------------------------------------------

DIGITS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("name", "file", "shape", "sizes", "counts", "atol"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte", (1, 28, 28), [54_000, 6_000, 10_000], DIGITS, 0.005),
        ("fashion-mnist", "FashionMNIST/raw/train-images-idx3-ubyte", (1, 28, 28), [54_000, 6_000, 10_000],
         [6000] * 10, 0.005),
        ("emnist", "EMNIST/raw/emnist-balanced-train-images-idx3-ubyte", (1, 28, 28), [101_520, 11_280, 18_800],
         [2400] * 47, 0.01),
        ("cifar-10", "cifar-10-batches-py/data_batch_1", (3, 32, 32), [45_000, 5_000, 10_000], [5000] * 10, 0.01),
    ],
    ids=["mnist", "fashion-mnist", "emnist", "cifar-10"],
)  # fmt: skip
def test_real_sets(
    name: str, file: str, shape: Any, sizes: Any, counts: Any, atol: float, shared_data: Path, no_network: list[str]
) -> None:
    if not (shared_data / file).exists():
        pytest.skip(f"{shared_data / file} is not there; set FEDSEL_DATA to a folder with the image sets")
    loaded = load_dataset(name, data_dir=shared_data)
    assert (lengths(loaded), loaded.num_classes, loaded.input_shape) == (sizes, len(counts), shape)
    np.testing.assert_array_equal(np.bincount(np.concatenate([loaded.train.labels, loaded.validation.labels])), counts)
    pixels = loaded.train.inputs
    np.testing.assert_allclose(pixels.mean(axis=(0, 2, 3), dtype=np.float64), 0.0, atol=atol)  # standardised
    np.testing.assert_allclose(pixels.std(axis=(0, 2, 3), dtype=np.float64), 1.0, atol=atol)
