"""The user's own data: every form that is read, functions of the seed, flwr-datasets, and what is refused."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, SizePartitioner
from PIL import Image as Pillow
from torch.utils.data import TensorDataset

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.simulations import Comparison, OwnData, compare, load_scenario, simulate
from fedsel_flwr.simulations.worlds import own_data
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.own_data import as_split, from_federated
from fedsel_flwr.simulations.worlds.world import World

INPUTS = np.random.default_rng(0).normal(size=(60, 4))
LABELS = np.arange(60) % 3


# ---- arrays -------------------------------------------------------------------------------------------------------


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
    dataset, again, other = (own.dataset(seed=seed, validation_fraction=0.2) for seed in (1, 1, 2))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (48, 12, 5)
    assert np.bincount(dataset.validation.labels).tolist() == [4, 4, 4]
    together = np.concatenate([dataset.train.inputs, dataset.validation.inputs])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(INPUTS.astype(np.float32), axis=0))
    np.testing.assert_array_equal(again.validation.inputs, dataset.validation.inputs)
    assert (other.validation.inputs != dataset.validation.inputs).any()


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
    numbers = INPUTS, LABELS / 2
    dataset = OwnData(train=numbers, test=numbers, validation=numbers).dataset(seed=1, validation_fraction=0.2)
    assert (dataset.task, dataset.num_classes, dataset.train.labels.dtype) == ("regression", 1, np.float32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": INPUTS}, "train must be a pair (inputs, labels) of arrays, or a torch Dataset of such pairs, got"),
        ({"train": (INPUTS, LABELS[:-1])}, "inputs of shape (n, …) and labels of shape (n,), got (60, 4) and (59,)"),
        ({"train": (INPUTS[:0], LABELS[:0])}, "at least one example"),
        ({"train": (INPUTS[:, 0], LABELS)}, "got (60,) and (60,)"),
        ({"train": (INPUTS.astype(str), LABELS)}, "train must hold numbers, got inputs of <U"),
        ({"train": (INPUTS * np.inf, LABELS)}, "train must hold finite numbers"),
        ({"train": (INPUTS, LABELS - 1)}, "classes must be 0 … C - 1, got -1"),
        ({"train": (INPUTS, LABELS + 1), "test": (INPUTS, LABELS + 1)}, "got 1 … 3. Subtract 1 from every label"),
        ({"test": (INPUTS[:, :3], LABELS)}, "the same shape and kind as train: (4,) with classes, got (3,)"),
        ({"test": (INPUTS, LABELS / 1)}, "got (4,) with numbers to predict"),
        ({"test": TensorDataset(torch.zeros(3, 4))}, "the torch Dataset must have pairs"),
        ({"partition": {0: [1], 2: [2]}}, "partition must hold the clients 0 … 1"),
        ({"partition": [[1], []]}, "client 1 must have at least one row of train in [0, 60), each only once; got flo"),
        ({"train": (np.full((60, 4), 2**24 + 1), LABELS)}, "train must hold inputs that float32 can represent, got"),
        ({"train": (np.full((60, 4), -(2**62)), LABELS)}, "whole number -4611686018427387904. Whole numbers may"),
        ({"test": (np.full((60, 4), 2**63, np.uint64), LABELS)}, "test must hold inputs that float32 can represent"),
        ({"train": (np.where(np.eye(60, 4) > 0, 20_000_001.0, 20_000_000.0), LABELS)}, "whole number 20000001"),
        ({"partition": [[1], [60]]}, "row of train in [0, 60), each only once; got rows from 60 to 60"),
        ({"partition": [[4], [3, 8, 8, 1, 8]]}, "row of train in [0, 60), each only once; row 8 occurs"),
        ({"partition": [[0.5]]}, "got float64"),
    ],
)
def test_what_is_no_data_set_is_refused(changed: dict[str, Any], said: str) -> None:
    own = OwnData(**{"train": (INPUTS, LABELS), "test": (INPUTS, LABELS)} | changed)
    with pytest.raises(ParameterError) as error:
        own.dataset(seed=1, validation_fraction=0.2)
    assert said in str(error.value)


def test_numbers_that_are_no_ids_are_rounded() -> None:
    for inputs in (
        np.full((60, 4), 2**24),
        INPUTS * 1e9,
        np.full((60, 4), 1e30),
        np.full((60, 4), 2.0**25, np.float32),
    ):
        assert as_split((inputs, LABELS), "train").inputs.tolist() == inputs.astype(np.float32).tolist()


# ---- fixed, or functions of the seed; the verdict says which of the two ---------------------------------------------

KEYS = {"rounds": 2, "num_clients": 5, "clients_per_round": 2, "target_accuracy": 0.01}
SMOKE = load_scenario("smoke", KEYS | {"engine": "vectorized"})


def examples(seed):
    inputs = np.random.default_rng(seed).normal(size=(60, 4))
    return inputs, (inputs[:, 0] > 0).astype(int)


def deal(seed):
    rows = np.random.default_rng(seed).permutation(50)
    return [rows[10 * k : 10 * k + 10] for k in range(5)]


def blocks():
    return [range(10 * k, 10 * k + 10) for k in range(5)]


def fixed():
    return OwnData(examples(1), examples(0), partition=blocks())


def dealt():
    return OwnData(examples(1), examples(0), partition=deal)


def by_seed(seed):
    return OwnData(examples(seed), examples(0), partition=deal(seed))


def one_partition(seed):
    return OwnData(examples(seed), examples(0), partition=blocks())


def pair_by_seed(seed):
    return examples(seed), examples(0)


def test_a_partition_may_be_a_function_of_the_seed() -> None:
    for seed in (1, 2):
        world = World(SMOKE.model_copy(update={"seed": seed}), OwnParts(data=dealt()))
        assert [rows.tolist() for rows in world.partitions] == [sorted(rows.tolist()) for rows in deal(seed)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (fixed(), "2 seeds and one partition for all of them:"),
        (dealt(), "2 seeds and partitions:"),
        ((examples(1), examples(0)), "2 seeds and partitions:"),
        (pair_by_seed, "2 seeds, data sets and partitions:"),
        (one_partition, "2 seeds and data sets, with one partition for all of them:"),
        # Named in the scenario.
        ("fixed", "2 seeds and one partition for all of them:"),
        ("by_seed", "2 seeds, data sets and partitions:"),
        ("pair_by_seed", "2 seeds, data sets and partitions:"),
    ],
    ids=["fixed", "dealt", "pair", "pair by seed", "one partition", "./fixed", "./by_seed", "./pair_by_seed"],
)
def test_the_sentence_says_which_it_was(data: Any, said: str, here: Path, no_pictures: None) -> None:
    scenario = SMOKE
    if isinstance(data, str):
        functions = (examples, deal, blocks, fixed, by_seed, pair_by_seed)
        imports = "import numpy as np\nfrom fedsel_flwr.simulations import OwnData\n\n"
        (here / "mine.py").write_text(imports + "\n".join(inspect.getsource(one) for one in functions))
        scenario = load_scenario("smoke", KEYS | {"engine": "vectorized", "data.dataset": f"./mine.py:{data}"})
    given = None if isinstance(data, str) else data
    comparison = compare(scenario, ["round-robin", "random"], seeds=2, data=given, folder="study")
    assert comparison.verdict is not None
    assert f", on the same {said}" in comparison.verdict.sentence
    loaded = Comparison.load("study").verdict
    assert loaded is not None
    assert loaded.sentence == comparison.verdict.sentence
    first, second, third, fourth = (run.result.fingerprints["data"] for run in comparison.runs)
    assert (first, third) == (second, fourth)
    assert (first != third) == (not said.startswith("2 seeds and one"))


def broken(seed):
    raise KeyError(seed)


def nothing(seed):
    """No data."""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (broken, r"data 'broken' cannot be created for seed 1: KeyError: 1"),
        (OwnData(examples(1), examples(0), partition=broken),
         r"the partition of data 'own' cannot be created for seed 1: KeyError: 1"),
        (nothing, r"data 'nothing' must be fedsel_flwr.simulations.OwnData, or a pair .* got NoneT"),
    ],
    ids=["data", "partition", "nothing"],
)  # fmt: skip
def test_a_function_that_fails_is_named_with_the_seed(data: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        compare(SMOKE, ["round-robin"], data=data)


# ---- flwr-datasets' FederatedDataset, without a network -------------------------------------------------------------

CLIENTS, TRAIN, TEST = 6, 120, 30
KINDS = Features({"image": Image(), "label": ClassLabel(num_classes=3), "id": Value("int64")})


def pictures(path: Path, numbers: Any, sides: tuple[int, ...] = (8,)) -> str:
    """Write grey images that tell their class by a bright row, as Parquet like the hub's."""
    images = []
    for number in numbers:
        side = sides[number % len(sides)]
        pixels = np.random.default_rng(number).integers(0, 60, (side, side), dtype=np.uint8)
        pixels[number % 3] = 250
        images.append(Pillow.fromarray(pixels))
    rows = {"image": images, "label": [n % 3 for n in numbers], "id": list(numbers)}
    Dataset.from_dict(rows, features=KINDS).to_parquet(path)
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hub")
    splits = {"train": range(TRAIN), "test": range(1000, 1000 + TEST)}
    return {split: pictures(folder / f"{split}.parquet", numbers) for split, numbers in splits.items()}


@pytest.fixture
def federated(files: dict[str, str], tmp_path: Path) -> Any:
    def make(partitioner: Any, **more: Any) -> FederatedDataset:
        options = {"data_files": files, "cache_dir": str(tmp_path), "shuffle": False, **more}
        return FederatedDataset(dataset="parquet", partitioners={"train": partitioner}, **options)

    return make


@pytest.mark.parametrize("shuffle", [False, True])
def test_clients_hold_what_the_partitioner_gives_them(federated: Any, shuffle: bool) -> None:
    theirs, ours = (
        federated(DirichletPartitioner(CLIENTS, "label", 0.5, min_partition_size=2, seed=3), shuffle=shuffle)
        for _ in range(2)
    )
    data = from_federated(ours)
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
    assert compare(scenario, ["cs-ucb", "random"], seeds=1, data=data).selectors == ["cs-ucb", "random"]


def test_inputs_may_be_numbers_and_a_used_one_is_read_all_the_same(federated: Any) -> None:
    used = federated(IidPartitioner(CLIENTS))
    used.load_partition(0)
    data = from_federated(used, inputs="label", labels="id")
    assert data.train[0].shape == (TRAIN, 1)
    assert data.train[1].tolist() == list(range(TRAIN))
    assert [len(rows) for rows in data.partition] == [TRAIN // CLIENTS] * CLIENTS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": "img"}, "the split 'train' has no column 'img'; it has image, label, id. Name the columns"),
        ({"labels": "y", "inputs": "x"}, "no column 'x' and no 'y'"),
        ({"train": "validation"}, "partitioners for train, but none for train = 'validation'"),
        ({"test": "evaluation"}, "cannot be read: ValueError: .*evaluation"),
    ],
)
def test_what_is_missing_is_named(federated: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        from_federated(federated(IidPartitioner(CLIENTS)), **options)


def test_images_of_several_sizes_and_what_is_no_federated_dataset_are_refused(federated: Any, tmp_path: Path) -> None:
    path = pictures(tmp_path / "odd.parquet", range(TRAIN), (8, 9))
    with pytest.raises(
        ParameterError, match=r"have 2 shapes, such as \(1, 8, 8\), \(1, 9, 9\)\. Make the shapes equal"
    ):
        from_federated(federated(IidPartitioner(CLIENTS), data_files={"train": path, "test": path}))
    with pytest.raises(ParameterError, match=r"must be a flwr_datasets\.FederatedDataset, got dict"):
        from_federated({})


def image_of(mode: str, number: int) -> Any:
    """A picture of 2 x 3 pixels; its first pixel is 0, and its last one is the largest value of the mode."""
    ramp = np.array([[0, 40, 80], [120, 160, 255]], dtype=np.uint8)
    if mode in ("P", "P with transparency"):
        image = Pillow.fromarray(np.array([[0, 0, 0], [0, 1, number % 2]], np.uint8)).convert("P")
        image.putpalette([0, 0, 0, 10, 20, 255])
        image.info |= {"transparency": 0} if mode != "P" else {}
        return image
    if mode == "1":
        return Pillow.fromarray(ramp > 100)
    if mode in ("I;16", "I", "F"):
        largest, kind = {"I;16": (65_535, np.uint16), "I": (2**31 - 1, np.int32), "F": (3.5, np.float32)}[mode]
        return Pillow.fromarray((ramp / 255 * largest).astype(kind))
    channels = len(Pillow.new(mode, (1, 1)).getbands())
    return Pillow.merge(mode, [Pillow.fromarray(ramp)] * channels)


@pytest.mark.parametrize(
    ("mode", "channels", "largest"),
    [
        ("1", 1, 1.0), ("L", 1, 1.0), ("LA", 2, 1.0), ("RGB", 3, 1.0), ("RGBA", 4, 1.0), ("CMYK", 4, 1.0),
        ("I;16", 1, 1.0), ("I", 1, 1.0), ("F", 1, 3.5),
    ],
)  # fmt: skip
def test_pixels_are_divided_by_the_largest_value_of_their_mode(mode: str, channels: int, largest: float) -> None:
    pixels = own_data._pixels(image_of(mode, 0))
    assert (pixels.shape, pixels.dtype) == ((channels, 2, 3), np.float32)
    assert (pixels[:, 0, 0].tolist(), pixels[:, 1, 2].tolist()) == ([0.0] * channels, [largest] * channels)
    if mode != "1":
        np.testing.assert_allclose(pixels[:, 0, 1], largest * 40 / 255, rtol=2e-4)


@pytest.mark.parametrize(("mode", "channels"), [("P", 3), ("P with transparency", 4)])
def test_palettes_become_colours(mode: str, channels: int) -> None:
    pixels = own_data._pixels(image_of(mode, 1))
    assert pixels.shape == (channels, 2, 3)
    assert pixels[:3, 1, 1].tolist() == [np.float32(10 / 255), np.float32(20 / 255), 1.0]
    assert pixels[3:, :, 0].tolist() == [[0.0, 0.0]] * (channels - 3)


@pytest.mark.parametrize(("mode", "shape"), [("I;16", (12, 1, 2, 3)), ("P", (12, 3, 2, 3))])
def test_modes_are_those_of_the_stored_images(federated: Any, mode: str, shape: Any, tmp_path: Path) -> None:
    rows = {"image": [image_of(mode, n) for n in range(12)], "label": [n % 3 for n in range(12)]}
    path = str(tmp_path / "modes.parquet")
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": KINDS["label"]})).to_parquet(path)
    images, _ = from_federated(federated(IidPartitioner(2), data_files={"train": path, "test": path})).train
    assert (images.shape, images.dtype, images.min(), images.max()) == (shape, np.float32, 0.0, 1.0)


def test_signed_pixels_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"mode I must have pixels of at least 0, got -5"):
        own_data._pixels(Pillow.fromarray(np.array([[-5, 7]], np.int32)))


def test_without_flwr_datasets_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(RunError, match=r"need flwr-datasets. Install it with pip install 'fedsel-flwr\[sim\]'"):
        from_federated(None)
