"""The partitions: everything handed out once, nobody without, reproducible, and as unlike as asked."""

from __future__ import annotations

import time
from collections.abc import Sequence

import datasets
import numpy as np
import numpy.typing as npt
import pytest
from flwr_datasets.common import telemetry
from flwr_datasets.partitioner import IidPartitioner

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds import partitions
from fedsel_flwr.simulations.worlds.partitions import partition_indices

IntArray = npt.NDArray[np.int64]
LABELS = np.arange(2000) % 10
HANDED_OUT = ("iid", "dirichlet", "shards", "dirichlet-classes")
"""The kinds that hand out every example once."""


def assert_partition(parts: Sequence[IntArray], num_clients: int, num_examples: int) -> None:
    assert len(parts) == num_clients
    assert min(len(part) for part in parts) >= 1
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples))


def histograms(parts: Sequence[IntArray], labels: IntArray) -> IntArray:
    return np.array([np.bincount(labels[part], minlength=10) for part in parts])


def skew(parts: Sequence[IntArray], labels: IntArray) -> float:
    """Return the mean over clients of the total variation distance between its classes and everybody's."""
    counts = histograms(parts, labels)
    return float(
        np.abs(counts / counts.sum(axis=1, keepdims=True) - counts.sum(axis=0) / counts.sum()).sum() / 2
    ) / len(parts)


@pytest.mark.parametrize("kind", HANDED_OUT)
@pytest.mark.parametrize(("num_clients", "num_examples"), [(1, 30), (7, 100), (20, 40), (200, 1293)])
def test_every_example_goes_to_exactly_one_client(kind: str, num_clients: int, num_examples: int) -> None:
    parts = partition_indices(LABELS[:num_examples], num_clients, kind=kind, alpha=0.3, seed=4)
    assert_partition(parts, num_clients, num_examples)


def test_iid_clients_have_equal_sizes_and_all_classes() -> None:
    parts = partition_indices(LABELS, 19, seed=1)
    assert {len(part) for part in parts} == {105, 106}  # 2000 / 19 = 105.3
    counts = histograms(parts, LABELS)
    # hypergeometric: 105 draws, a tenth of each class, deviation sqrt(105 * .1 * .9 * (1 - 105 / 2000)) = 3.0
    assert counts.min() >= 1
    assert abs(counts.std() - 3.0) < 0.6


def test_iid_does_not_depend_on_the_order_of_the_file() -> None:
    parts = partition_indices(np.sort(LABELS), 10)
    assert skew(parts, np.sort(LABELS)) < 0.15  # contiguous parts of a sorted file would have 0.9


def test_small_alpha_is_more_skewed() -> None:
    values = [skew(partition_indices(LABELS, 20, kind="dirichlet", alpha=alpha), LABELS) for alpha in (0.05, 0.5, 50.0)]
    assert values[0] > 0.7 > 0.6 > values[1] > 0.3 > 0.15 > values[2]


def test_whole_number_alpha_is_the_same_as_its_float() -> None:
    whole = partition_indices(LABELS, 5, kind="dirichlet", alpha=1)
    for ours, theirs in zip(whole, partition_indices(LABELS, 5, kind="dirichlet", alpha=1.0), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 1e300])
def test_extreme_alpha(alpha: float) -> None:
    assert_partition(partition_indices(LABELS, 100, kind="dirichlet", alpha=alpha), 100, 2000)


def test_clients_that_the_draw_leaves_empty_get_one_example() -> None:
    parts = partition_indices(LABELS, 50, kind="dirichlet", alpha=1e-6, seed=2)
    sizes = np.sort([len(part) for part in parts])
    # alpha -> 0: each class goes to one client as a whole: at most 10 clients have any; the others got one each
    assert (sizes[:40] == 1).all()
    assert sizes.sum() == 2000
    assert sizes[-1] >= 160  # 200, less the examples given away


def test_as_many_clients_as_examples() -> None:
    for kind in ("iid", "dirichlet"):
        assert [len(part) for part in partition_indices(LABELS[:30], 30, kind=kind)] == [1] * 30
    parts = partition_indices(LABELS[:30], 30, kind="shards", shards_per_client=1)
    assert [len(part) for part in parts] == [1] * 30


@pytest.mark.parametrize("shards_per_client", [1, 2, 3])
def test_shards_hold_few_labels_and_equal_numbers(shards_per_client: int) -> None:
    parts = partition_indices(LABELS, 20, kind="shards", shards_per_client=shards_per_client, seed=6)
    assert_partition(parts, 20, 2000)
    # 2000 / 20 clients = 100 each; with 3 shards of 33, the 20 left over go to the smallest holders of their class
    assert all(99 <= len(part) <= 100 + 3 * (shards_per_client == 3) for part in parts)
    labels = [len(set(LABELS[part])) for part in parts]
    limit = shards_per_client if shards_per_client < 3 else 2 * shards_per_client  # a shard of 33 may span two classes
    assert max(labels) <= limit
    assert max(labels) >= shards_per_client


def test_shards_that_do_not_divide_the_examples_leave_nobody_out_and_add_no_class() -> None:
    labels = np.sort(LABELS[:1437])
    parts = partition_indices(labels, 200, kind="shards", seed=3)  # 400 shards of 3; 237 examples are left over
    assert_partition(parts, 200, 1437)
    sizes = [len(part) for part in parts]
    assert (min(sizes), max(sizes)) == (6, 8)
    assert max(len(set(labels[part])) for part in parts) <= 4
    # two shards of 3 are two labels, or three where a shard lies on one of the 9 borders between classes
    assert sum(len(set(labels[part])) > 2 for part in parts) <= 9


@pytest.mark.parametrize("kind", HANDED_OUT)
def test_seed_decides(kind: str) -> None:
    first, again, other = (partition_indices(LABELS, 20, kind=kind, seed=seed) for seed in (8, 8, 9))
    for ours, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert any(not np.array_equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", HANDED_OUT)
def test_nothing_is_printed_sent_or_changed(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    labels = LABELS.copy()
    labels.flags.writeable = False
    sending = telemetry.state["executor"]
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (this is the state that must stay)
    partition_indices(labels, 50, kind=kind)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert capfd.readouterr() == ("", "")
    assert telemetry.state["executor"] is sending  # what sends flwr-datasets' telemetry was not started for it


@pytest.mark.parametrize("kind", HANDED_OUT)
def test_labels_need_not_be_consecutive(kind: str) -> None:
    parts = partition_indices(LABELS[:300] * 7 - 5, 12, kind=kind, seed=3)
    for ours, theirs in zip(parts, partition_indices(LABELS[:300], 12, kind=kind, seed=3), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", HANDED_OUT)
def test_fashion_mnist_size_over_500_clients_takes_seconds(kind: str) -> None:
    labels = np.arange(54_000) % 10
    start = time.perf_counter()
    parts = partition_indices(labels, 500, kind=kind, alpha=0.3)
    elapsed = time.perf_counter() - start
    assert_partition(parts, 500, 54_000)
    assert elapsed < 20.0  # about 1 s on an idle core


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 41}, r"41 clients cannot share 40 examples"),
        ({"kind": "shards", "num_clients": 21}, r"21 clients with 2 shards each need 42 examples"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        partition_indices(**{"labels": LABELS[:40], "num_clients": 4} | arguments)


@pytest.mark.parametrize(("count", "num_clients"), [(10, 3), (17, 17), (1293, 10), (100, 7)])
def test_iid_is_what_flwr_datasets_gives(count: int, num_clients: int) -> None:
    """It is cut here, as importing flwr-datasets takes a second."""
    rows = np.random.default_rng(3).permutation(count)
    partitioner = IidPartitioner(num_clients)
    partitioner.dataset = datasets.Dataset.from_dict({"row": rows})
    theirs = [list(partitioner.load_partition(client)["row"]) for client in range(num_clients)]
    assert partitions._draw(rows, np.zeros(count, dtype=np.int64), num_clients, "iid", 1.0, 1, 0) == theirs
