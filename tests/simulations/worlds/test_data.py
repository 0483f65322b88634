"""The data sets: sizes, classes and disjointness of the splits, missing files, and the drawn regression."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torchvision import datasets as torchvision_datasets

from fedsel_flwr.clients.objectives import REGRESSION
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.scenario_tables import Synthetic
from fedsel_flwr.simulations.worlds.data import Dataset, Split, load_dataset
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import play


def parts(data: Dataset) -> list[Split]:
    return [data.train, data.validation, data.test]


def lengths(data: Dataset) -> list[int]:
    return [len(part) for part in parts(data)]


def together(data: Dataset) -> tuple[Any, Any]:
    """All examples and all labels."""
    return np.concatenate([one.inputs for one in parts(data)]), np.concatenate([one.labels for one in parts(data)])


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every download fail as it does without a network; return the sets that were asked for."""
    asked: list[str] = []

    def fail(self: object) -> None:
        asked.append(type(self).__name__)
        raise URLError("no network in this test")

    for name in ("MNIST", "EMNIST", "CIFAR10"):
        monkeypatch.setattr(getattr(torchvision_datasets, name), "download", fail)
    monkeypatch.delenv("FEDSEL_DATA", raising=False)
    return asked


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


# ---- synthetic regression -----------------------------------------------------------------------------------------

LARGE = Synthetic(num_examples=20_000, num_features=5, noise=0.5)
LINE = Synthetic(num_examples=1000, num_features=3, noise=0)


def fitted(inputs: Any, numbers: Any) -> tuple[Any, Any]:
    """Least squares by NumPy: weights and bias, and the residuals."""
    design = np.column_stack([inputs, np.ones(len(inputs))]).astype(np.float64)
    weights = np.linalg.lstsq(design, numbers.astype(np.float64), rcond=None)[0]
    return weights, numbers - design @ weights


def test_numbers_are_a_line_of_standard_normal_features_and_noise() -> None:
    inputs, numbers = LARGE.draw(seed=4)
    assert (inputs.shape, inputs.dtype) == ((20_000, 5), np.float32)
    assert (numbers.shape, numbers.dtype) == ((20_000,), np.float32)
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=4 / np.sqrt(20_000))
    np.testing.assert_allclose(np.cov(inputs.T), np.eye(5), atol=0.05)
    weights, residuals = fitted(inputs, numbers)
    assert residuals.std() == pytest.approx(0.5, rel=4 / np.sqrt(40_000))
    assert np.abs(weights).min() > 0.005
    for first, again, other in zip((inputs, numbers), LARGE.draw(4), LARGE.draw(2), strict=True):
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


def test_weights_have_variance_one_over_the_features() -> None:
    """300 seeds of 4 features: 1,200 weights of standard deviation 1/2, 300 biases of 1."""
    drawn = np.array([fitted(*Synthetic(num_examples=9, num_features=4, noise=0).draw(seed))[0] for seed in range(300)])
    assert drawn[:, :4].std() == pytest.approx(0.5, rel=4 / np.sqrt(2400))
    assert drawn[:, 4].std() == pytest.approx(1.0, rel=4 / np.sqrt(600))


def test_splits_are_disjoint_and_keep_rows_together() -> None:
    """Without noise the line is exact, and so it is after splitting."""
    data = load_dataset("synthetic-regression", seed=6, synthetic=LINE)
    assert lengths(data) == [720, 80, 200]
    assert (data.num_classes, data.input_shape, data.task) == (1, (3,), "regression")
    inputs, numbers = together(data)
    assert len(np.unique(inputs, axis=0)) == 1000
    assert np.abs(fitted(inputs, numbers)[1]).max() < 1e-5


@pytest.mark.parametrize("name", ["ben-ami-linear", "ben-ami-unequal"])
def test_ben_amis_scenarios_learn_the_line(name: str) -> None:
    """20 clients, 5 a round, and R² near the best there is, 1 / (1 + .5²) = .8 where w·x has variance 1."""
    scenario = load_scenario(name, {"rounds": 40})
    assert (scenario.num_clients, scenario.clients_per_round, scenario.selector) == (20, 5, "bsfl")
    world = World(scenario)
    assert world.objective is REGRESSION
    test = world.dataset.test
    _, residuals = fitted(test.inputs, test.labels)
    best = 1 - float((residuals**2).mean()) / float(test.labels.var())
    rounds = play(scenario, world).history.rounds
    assert rounds[0].accuracy < best - 0.1
    assert rounds[-1].accuracy == pytest.approx(best, abs=0.02)
    assert rounds[-1].accuracy >= scenario.target_accuracy
    assert len(set(world.num_examples().values())) == (1 if name == "ben-ami-linear" else 20)


@pytest.mark.parametrize("selector", ["random-by-size", "local-accuracy", "bsfl"])
def test_selectors_without_a_validation_set_run_on_numbers(selector: str) -> None:
    history = play(load_scenario("ben-ami-unequal", {"selector": selector, "rounds": 4})).history
    assert [r.num_completed for r in history.rounds] == [5] * 4
    assert history.problem_counts() == {}


def test_an_option_that_a_regression_cannot_have_is_refused_before_round_1() -> None:
    """The class of the selector needs no validation set; the object with this option does."""
    keys = {"rounds": 2, "selector": "active-fl"}
    assert play(load_scenario("ben-ami-linear", keys)).history.problem_counts() == {}
    with pytest.raises(ParameterError, match=r"active-fl \(accuracy\) measures classifiers"):
        play(load_scenario("ben-ami-linear", {**keys, "selectors.active-fl.accuracy_weight": 0.5}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("selector", "gpfl", r"gpfl \(global_accuracy, global_loss\) measures classifiers"),
        ("selector", "pczfl", r"pczfl \(accuracy\) measures classifiers"),
        ("selector", "fedcm-ts", r"fedcm-ts \(kept\) measures classifiers"),
        ("aggregation.filter", "loss", r"FedCA's filter \(aggregation.filter\) measures classifiers"),
        ("model.name", "mlp", "model.name = 'mlp' does not fit .*'synthetic-regression', which has numbers to"),
        ("partition.kind", "dirichlet", "partition.kind = 'dirichlet' .*iid, sizes, sampled"),
        ("data.dataset", "digits", "model.name = 'linear' does not fit data.dataset = 'digits', which has classes"),
    ],
)
def test_what_a_regression_cannot_do_is_said_before_round_1(key: str, value: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        play(load_scenario("ben-ami-linear", {"rounds": 2, key: value}))
