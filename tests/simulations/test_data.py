"""The data sets: sizes, classes and disjointness of the splits, and what a user is told when files are missing."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torchvision import datasets as torchvision_datasets

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.worlds import image_files
from fedsel_flwr.simulations.worlds.data import Split, load_dataset

DATA_DIR = os.environ.get("FEDSEL_DATA")  # before a test removes it


def shared_folder(file: str) -> Path:
    """Return the data folder of this machine, or skip the test."""
    folder = Path(DATA_DIR) if DATA_DIR else Path(__file__).parents[2].parent / "shared" / "data"
    if not (folder / file).exists():
        pytest.skip(f"{folder / file} is not there; set FEDSEL_DATA to a folder with the image sets")
    return folder


def rows_as_bytes(split: Split) -> list[bytes]:
    return [example.tobytes() for example in split.inputs]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every download fail as it does without a network; return the sets that were asked for."""
    asked: list[str] = []

    def fail(self: object) -> None:
        asked.append(type(self).__name__)
        raise URLError("no network in this test")

    monkeypatch.setattr(torchvision_datasets.MNIST, "download", fail)
    monkeypatch.setattr(torchvision_datasets.EMNIST, "download", fail)
    monkeypatch.setattr(torchvision_datasets.CIFAR10, "download", fail)
    monkeypatch.delenv("FEDSEL_DATA", raising=False)
    return asked


def test_digits_sizes_shapes_and_range() -> None:
    digits = load_dataset("digits")
    assert [len(part) for part in (digits.train, digits.validation, digits.test)] == [1293, 144, 360]
    assert (digits.name, digits.num_classes, digits.input_shape) == ("digits", 10, (1, 8, 8))
    assert digits.train.inputs.shape == (1293, 1, 8, 8)
    assert (digits.train.inputs.dtype, digits.train.labels.dtype) == (np.float32, np.int64)
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0.0, 1.0)


def test_digits_splits_are_disjoint_and_together_everything() -> None:
    digits = load_dataset("digits", seed=3)
    original = (load_digits().images / 16.0).astype(np.float32).reshape(-1, 64)
    parts = [digits.train, digits.validation, digits.test]
    pixels = np.concatenate([part.inputs.reshape(-1, 64) for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    together = sorted((row.tobytes(), int(label)) for row, label in zip(pixels, labels, strict=True))
    expected = sorted((row.tobytes(), int(label)) for row, label in zip(original, load_digits().target, strict=True))
    assert together == expected  # each of the 1,797 examples once, with its label
    assert len(set(rows_as_bytes(digits.train)) & set(rows_as_bytes(digits.test))) == 0


def test_digits_splits_keep_the_class_proportions() -> None:
    digits = load_dataset("digits", seed=1)
    share = np.bincount(load_digits().target) / 1797
    for part in (digits.train, digits.validation, digits.test):
        assert np.abs(np.bincount(part.labels) - share * len(part)).max() <= 1.0


def test_fractions_set_the_sizes() -> None:
    digits = load_dataset("digits", validation_fraction=0.25, test_fraction=0.5)
    assert [len(part) for part in (digits.train, digits.validation, digits.test)] == [673, 225, 899]


def test_seed_decides_the_split() -> None:
    first, again, other = (load_dataset("digits", seed=seed) for seed in (5, 5, 6))
    assert rows_as_bytes(first.train) == rows_as_bytes(again.train)
    assert rows_as_bytes(first.validation) == rows_as_bytes(again.validation)
    assert rows_as_bytes(first.test) != rows_as_bytes(other.test)
    assert rows_as_bytes(first.validation) != rows_as_bytes(other.validation)


def test_global_random_state_is_untouched() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (this is the state that must stay)
    load_dataset("digits", seed=9)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_a_fraction_that_leaves_too_few_examples() -> None:
    with pytest.raises(ParameterError, match=r"validation_fraction = 0.005 leaves too few of 1437"):
        load_dataset("digits", validation_fraction=0.005)


@pytest.mark.parametrize("through", ["argument", "variable"])
def test_a_missing_folder_is_an_error_and_stays_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str], through: str
) -> None:
    missing = tmp_path / "nowhere"
    if through == "variable":
        monkeypatch.setenv("FEDSEL_DATA", str(missing))
    origin = "--data-dir" if through == "argument" else "FEDSEL_DATA"
    with pytest.raises(ParameterError, match=rf"nowhere \(from {origin}\) does not exist"):
        load_dataset("mnist", data_dir=missing if through == "argument" else None)
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
    message = str(caught.value)
    for part in (str(tmp_path / file), "--data-dir", "FEDSEL_DATA", "network", "no network in this test"):
        assert part in message
    assert "\n" not in message
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
    raw.mkdir(parents=True)
    for half in ("train", "t10k"):
        (raw / f"{half}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 28, 0, 0, 0, 28]))
        (raw / f"{half}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]))
    with pytest.raises(ParameterError, match=r"mnist in the data folder .* are damaged"):
        load_dataset("mnist", data_dir=tmp_path)


def write_idx_files(folder: Path) -> None:
    """Write a Fashion-MNIST of 100 + 20 images, image i uniformly grey with value i, class i mod 10."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for half, count in (("train", 100), ("t10k", 20)):
        grey = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28)
        header = np.array([0x803, count, 28, 28], dtype=">u4").tobytes()
        (raw / f"{half}-images-idx3-ubyte").write_bytes(header + grey.tobytes())
        header = np.array([0x801, count], dtype=">u4").tobytes()
        (raw / f"{half}-labels-idx1-ubyte").write_bytes(header + bytes(i % 10 for i in range(count)))


@pytest.mark.parametrize("through", ["argument", "variable"])
def test_small_idx_files_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str], through: str
) -> None:
    write_idx_files(tmp_path)
    if through == "variable":
        monkeypatch.setenv("FEDSEL_DATA", str(tmp_path))
    fashion = load_dataset("fashion-mnist", data_dir=tmp_path if through == "argument" else None)
    assert [len(part) for part in (fashion.train, fashion.validation, fashion.test)] == [90, 10, 20]
    np.testing.assert_array_equal(np.bincount(fashion.validation.labels), np.ones(10))
    np.testing.assert_array_equal(fashion.test.labels, np.arange(20) % 10)  # the official order
    # image i: (i / 255 - 0.2860) / 0.3530
    np.testing.assert_allclose(fashion.test.inputs[19], np.full((1, 28, 28), (19 / 255 - 0.2860) / 0.3530), rtol=1e-5)
    greys = np.rint((fashion.train.inputs[:, 0, 0, 0] * 0.3530 + 0.2860) * 255).astype(int)
    np.testing.assert_array_equal(greys % 10, fashion.train.labels)  # images and labels stay together
    assert len(set(greys)) == 90
    assert no_network == []


def test_a_download_is_tried_with_a_timeout_that_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []

    def download(self: torchvision_datasets.FashionMNIST) -> None:
        seen.append(socket.getdefaulttimeout())
        write_idx_files(Path(self.root))

    monkeypatch.setattr(torchvision_datasets.MNIST, "download", download)
    before = socket.getdefaulttimeout()
    assert len(load_dataset("fashion-mnist", data_dir=tmp_path).train) == 90  # what was missing has come
    assert seen == [30.0]
    assert socket.getdefaulttimeout() == before


def test_every_name_has_a_reader() -> None:
    for name, source in image_files.IMAGE_SETS.items():
        assert load_scenario("smoke", {"data.dataset": name}).data.dataset == name
        assert len(source.mean) == len(source.std) == source.shape[0]
        assert hasattr(torchvision_datasets, source.torchvision_name)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_real_idx_sets(name: str, folder: str, no_network: list[str]) -> None:
    root = shared_folder(f"{folder}/raw/train-images-idx3-ubyte")
    loaded = load_dataset(name, data_dir=root)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [54_000, 6_000, 10_000]
    assert (loaded.num_classes, loaded.input_shape) == (10, (1, 28, 28))
    counts = np.bincount(loaded.train.labels) + np.bincount(loaded.validation.labels)
    expected = {
        "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        "fashion-mnist": [6000] * 10,
    }
    np.testing.assert_array_equal(counts, expected[name])
    assert abs(float(loaded.train.inputs.mean(dtype=np.float64))) < 0.005  # standardised
    assert abs(float(loaded.train.inputs.std(dtype=np.float64)) - 1.0) < 0.005


def test_small_emnist_files_by_hand(tmp_path: Path, no_network: list[str]) -> None:
    """EMNIST's files hold rows as columns: here a bright stroke in the first file row, the first column to the eye."""
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for half, count in (("train", 470), ("test", 94)):
        pixels = np.zeros((count, 28, 28), dtype=np.uint8)
        pixels[:, 0, :] = 255
        header = np.array([0x803, count, 28, 28], dtype=">u4").tobytes()
        (raw / f"emnist-balanced-{half}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = np.array([0x801, count], dtype=">u4").tobytes()
        (raw / f"emnist-balanced-{half}-labels-idx1-ubyte").write_bytes(header + bytes(i % 47 for i in range(count)))
    emnist = load_dataset("emnist", data_dir=tmp_path)
    assert [len(part) for part in (emnist.train, emnist.validation, emnist.test)] == [423, 47, 94]
    assert (emnist.num_classes, emnist.input_shape, emnist.task) == (47, (1, 28, 28), "classification")
    np.testing.assert_array_equal(emnist.test.labels, np.arange(94) % 47)
    bright = emnist.test.inputs[5, 0]
    np.testing.assert_allclose(bright[:, 0], (1 - 0.1751) / 0.3332, rtol=1e-5)
    np.testing.assert_allclose(bright[:, 1:], -0.1751 / 0.3332, rtol=1e-5)
    assert no_network == []


def test_real_emnist(no_network: list[str]) -> None:
    root = shared_folder("EMNIST/raw/emnist-balanced-train-images-idx3-ubyte")
    loaded = load_dataset("emnist", data_dir=root)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [101_520, 11_280, 18_800]
    assert (loaded.num_classes, loaded.input_shape) == (47, (1, 28, 28))
    assert abs(float(loaded.train.inputs.mean(dtype=np.float64))) < 0.01
    assert abs(float(loaded.train.inputs.std(dtype=np.float64)) - 1.0) < 0.01


def test_real_cifar_10(no_network: list[str]) -> None:
    root = shared_folder("cifar-10-batches-py/data_batch_1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_dataset("cifar-10", data_dir=root)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [45_000, 5_000, 10_000]
    assert (loaded.num_classes, loaded.input_shape) == (10, (3, 32, 32))
    np.testing.assert_array_equal(np.bincount(loaded.train.labels), [4500] * 10)
    np.testing.assert_allclose(loaded.train.inputs.mean(axis=(0, 2, 3), dtype=np.float64), 0.0, atol=0.01)
    np.testing.assert_allclose(loaded.train.inputs.std(axis=(0, 2, 3), dtype=np.float64), 1.0, atol=0.01)
