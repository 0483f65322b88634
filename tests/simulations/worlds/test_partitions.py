"""Partitions: what each client holds, what is left over, that the seed alone decides, and faults."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any, get_args

import datasets
import numpy as np
import numpy.typing as npt
import pytest
from flwr_datasets.common import telemetry
from flwr_datasets.partitioner import IidPartitioner
from scipy import stats

from fedsel_flwr.clients.streams import stream
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.scenario_tables import Partition
from fedsel_flwr.simulations.worlds import partitions
from fedsel_flwr.simulations.worlds.partitions import least_norm_sizes, partition_indices, partition_sizes
from fedsel_flwr.simulations.worlds.world import World

IntArray = npt.NDArray[np.int64]
LABELS = np.arange(2000) % 10
MORE = np.arange(6000) % 10
SIX_CLASSES = np.arange(6000) % 6
HANDED_OUT = ("iid", "dirichlet", "shards", "dirichlet-classes")
"""The kinds that hand out every example once, to any number of clients."""
OPTIONS: dict[str, dict[str, Any]] = {kind: {} for kind in HANDED_OUT} | {
    "dirichlet-sizes": {"num_clients": 40, "alpha": 2.0},
    "sizes": {"sizes": (1500, 1000, 500)},
    "classes": {"classes_per_client": (5, 5, 1)},
    "sampled": {"examples_per_client": 120},
    "writers": {"writers": np.arange(6000) // 40},
}
"""Every kind, and what it needs; three clients if it says no other number."""
EVERY_KIND = pytest.mark.parametrize("kind", OPTIONS)


def assert_partition(parts: Sequence[IntArray], num_clients: int, num_examples: int) -> None:
    assert len(parts) == num_clients
    assert min(len(part) for part in parts) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples))


def assert_same(ours: Sequence[IntArray], theirs: Sequence[IntArray]) -> None:
    np.testing.assert_equal([*ours], [*theirs])


def drawn(kind: str, seed: int, labels: IntArray = MORE) -> Sequence[IntArray]:
    return partition_indices(labels, **{"num_clients": 3} | OPTIONS[kind], kind=kind, seed=seed)


# ---- every kind ---------------------------------------------------------------------------------------------------


def test_every_kind_is_here() -> None:
    assert set(get_args(Partition.model_fields["kind"].annotation)) == set(OPTIONS)


@EVERY_KIND
def test_rows_ascend_and_the_seed_decides(kind: str) -> None:
    first, again, other = (drawn(kind, seed) for seed in (8, 8, 2**40))
    assert partition_sizes(first).tolist() == [len(rows) for rows in first]
    for ours, another in zip(first, other, strict=True):
        assert ours.dtype == np.int64
        assert (np.diff(ours) > 0).all()  # ascending, and no row twice
        assert 0 <= ours[0] <= ours[-1] < 6000
        assert not np.array_equal(ours, another)
    assert_same(first, again)


@EVERY_KIND
def test_labels_need_not_be_consecutive_and_nothing_is_printed_sent_or_changed(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = MORE * 7 - 5
    labels.flags.writeable = False
    sending = telemetry.state["executor"]
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (this is the state that must stay)
    assert_same(drawn(kind, 1, labels), drawn(kind, 1))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert capfd.readouterr() == ("", "")
    assert telemetry.state["executor"] is sending  # what sends flwr-datasets' telemetry was not started for it


@pytest.mark.parametrize("kind", HANDED_OUT)
@pytest.mark.parametrize(
    ("num_clients", "num_examples"), [(1, 30), (7, 100), (20, 40), (30, 30), (200, 1293), (500, 54_000)]
)
def test_every_example_goes_to_exactly_one_client(kind: str, num_clients: int, num_examples: int) -> None:
    labels, shards = np.arange(num_examples) % 10, 1 if num_clients == num_examples else 2
    parts = partition_indices(labels, num_clients, kind=kind, alpha=0.3, seed=4, shards_per_client=shards)
    assert_partition(parts, num_clients, num_examples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 6001}, r"6001 clients cannot share 6000 examples"),
        ({"kind": "shards", "num_clients": 3001}, r"3001 clients with 2 shards each need 6002 examples"),
        ({"kind": "sizes", "sizes": (6000, 1, 1)}, r"partition.sizes add up to 6002, but there are 6000 training"),
        ({"kind": "sizes", "sizes": (5, 1)}, r"partition.sizes must hold a number for each of 3 clients, got 2"),
        ({"kind": "sizes"}, r"partition.sizes must hold a number for each of 3 clients, got 0"),
        ({"sizes": (5, 1, 1)}, r"partition.sizes is set, but partition.kind is 'iid'"),
        ({"kind": "classes", "classes_per_client": (11, 1, 1)}, r"gives client 0 11 classes, but there are 10"),
        ({"kind": "classes", "classes_per_client": (1,)}, r"classes_per_client must hold a number for each"),
        ({"kind": "shards", "classes_per_client": (1,) * 3}, r"partition.classes_per_client is set"),
        ({"kind": "sampled", "examples_per_client": 6001}, r"examples_per_client = 6001 is more than the 6000"),
        (
            {"labels": np.array([0] * 9 + [1] * 3), "kind": "classes", "num_clients": 4, "classes_per_client": [2] * 4},
            r"4 clients cannot share the 3 examples of class 1",
        ),
        (
            {"kind": "writers", "writers": np.arange(6000) // 3000},
            r"3 clients cannot share 2 writers, .* Use at most 2 clients",
        ),
        ({"kind": "writers"}, r"the writer of each of 6000 examples, got none"),
        ({"kind": "writers", "writers": np.arange(60)}, r"the writer of each of 6000 examples, got 60"),
    ],
)
def test_faults_say_what_to_change(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        partition_indices(**{"labels": MORE, "num_clients": 3} | arguments)


# ---- i.i.d., Dirichlet, shards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "num_clients"), [(17, 17), (1293, 10)])
def test_iid_is_what_flwr_datasets_gives(count: int, num_clients: int) -> None:
    """It is cut here, as importing flwr-datasets takes a second."""
    partitioner = IidPartitioner(num_clients)
    partitioner.dataset = datasets.Dataset.from_dict({"row": np.random.default_rng(3).permutation(count)})
    theirs = [list(partitioner.load_partition(client)["row"]) for client in range(num_clients)]
    rng = np.random.default_rng(3)
    assert partitions._assign_all(np.zeros(count, dtype=np.int64), num_clients, "iid", 1.0, 1, rng) == theirs


@pytest.mark.parametrize("alpha", [1, 1e-300, 1e-6, 1e300])
def test_a_whole_and_an_extreme_alpha(alpha: float) -> None:
    parts = partition_indices(LABELS, 100, kind="dirichlet", alpha=alpha)
    assert_partition(parts, 100, 2000)
    assert_same(parts, partition_indices(LABELS, 100, kind="dirichlet", alpha=float(alpha)))


def test_clients_that_the_draw_leaves_empty_get_one_example() -> None:
    """alpha -> 0: each class goes to one client as a whole, so at most 10 clients have any."""
    sizes = np.sort([len(part) for part in partition_indices(LABELS, 50, kind="dirichlet", alpha=1e-6, seed=2)])
    assert (sizes[:40] == 1).all()
    assert sizes.sum() == 2000
    assert sizes[-1] >= 160  # 200, less the examples given away


@pytest.mark.parametrize("shards_per_client", [1, 2, 3])
def test_shards_hold_few_labels_and_equal_numbers(shards_per_client: int) -> None:
    parts = partition_indices(LABELS, 20, kind="shards", shards_per_client=shards_per_client, seed=6)
    assert_partition(parts, 20, 2000)
    # 2000 / 20 clients = 100 each; with 3 shards of 33, the 20 left over go to the smallest holders of their class
    assert all(99 <= len(part) <= 100 + 3 * (shards_per_client == 3) for part in parts)
    labels = [len(set(LABELS[part])) for part in parts]
    limit = shards_per_client if shards_per_client < 3 else 2 * shards_per_client  # a shard of 33 may span two classes
    assert shards_per_client <= max(labels) <= limit


def test_shards_that_do_not_divide_the_examples_leave_nobody_out_and_add_no_class() -> None:
    labels = np.sort(LABELS[:1437])
    parts = partition_indices(labels, 200, kind="shards", seed=3)  # 400 shards of 3; 237 examples are left over
    assert_partition(parts, 200, 1437)
    sizes = [len(part) for part in parts]
    assert (min(sizes), max(sizes)) == (6, 8)
    classes = [len(set(labels[part])) for part in parts]
    assert max(classes) <= 4
    # two shards of 3 are two labels, or three where a shard lies on one of the 9 borders between classes
    assert sum(count > 2 for count in classes) <= 9


# ---- mixtures of classes: Kim's class heterogeneity, and GPFL's quadratic program ---------------------------------


@pytest.mark.parametrize(("num_clients", "alpha"), [(1, 0.1), (7, 0.1), (20, 0.001), (6000, 0.1)])
def test_clients_with_mixtures_of_their_own_have_equal_sizes(num_clients: int, alpha: float) -> None:
    """With alpha .001 some mixtures hold only classes that are used up: those clients get what is left."""
    parts = partitions.by_dirichlet_classes(SIX_CLASSES, num_clients, alpha, np.random.default_rng(3))
    assert_partition(parts, num_clients, 6000)
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= 1


def test_classes_follow_the_clients_own_draws() -> None:
    """With plenty of every class, the shares of client 0 are those of a multinomial draw from q ~ Dir(alpha 1)."""
    for alpha, low, high in ((0.1, 0.45, 1.0), (100.0, 0.0, 0.1)):
        largest = []
        for seed in range(20):
            parts = partitions.by_dirichlet_classes(SIX_CLASSES, 20, alpha, np.random.default_rng(seed))
            counts = np.bincount(SIX_CLASSES[parts[0]], minlength=6)
            q = np.random.default_rng(seed)
            for _ in range(6):  # the order of the examples comes first
                q.permutation(1000)
            shares = q.dirichlet(np.full(6, alpha))
            keep = shares * 300 >= 5
            if keep.sum() > 1:  # the chance that honest counts are so far off is one in a million
                expected = shares[keep] / shares[keep].sum() * counts[keep].sum()
                assert stats.chisquare(counts[keep], expected).pvalue > 1e-6
            largest.append((counts / 300).max() - 1 / 6)
        assert low <= np.mean(largest) + 1 / 6 - (1 / 6 if alpha > 1 else 0) <= high


@pytest.mark.parametrize("seed", range(5))
def test_the_sizes_solve_the_quadratic_program(seed: int) -> None:
    """Against brute force: of all sets of clients with x > 0, the least-norm solution of Q x = d on that set."""
    q = np.random.default_rng(seed).dirichlet([0.5] * 3, size=7).T
    d = np.array([40, 50, 30])
    best, norm = None, np.inf
    for size in range(3, 8):
        for chosen in itertools.combinations(range(7), size):
            part = np.linalg.pinv(q[:, chosen]) @ d
            if (part >= -1e-9).all() and np.allclose(q[:, chosen] @ part, d, atol=1e-6) and part @ part < norm:
                best, norm = dict(zip(chosen, part, strict=True)), part @ part
    if best is None:
        with pytest.raises(ParameterError, match="class"):
            least_norm_sizes(q, d)
        return
    np.testing.assert_allclose(least_norm_sizes(q, d), [best.get(k, 0.0) for k in range(7)], atol=0.05)


def test_every_class_is_handed_out_in_the_clients_shares() -> None:
    parts = partitions.by_dirichlet_sizes(SIX_CLASSES, 40, 2.0, np.random.default_rng(1))
    assert_partition(parts, 40, 6000)
    mixtures = np.random.default_rng(1).dirichlet(2.0 * np.full(6, 1 / 6), size=40)
    for rows, q in zip(parts, mixtures, strict=True):
        assert (np.abs(np.bincount(SIX_CLASSES[rows], minlength=6) - q * len(rows)) <= 6).all()


def test_a_class_that_is_in_no_mixture_is_named() -> None:
    with pytest.raises(ParameterError, match="class 1: 30 of 30 are left"):
        least_norm_sizes(np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([30, 30]))


# ---- given sizes and classes --------------------------------------------------------------------------------------


def test_xia_figure_4_has_three_clients_of_1500_1000_and_500() -> None:
    parts = partition_indices(MORE, 3, kind="sizes", sizes=[1500, 1000, 500], seed=1)
    assert [len(part) for part in parts] == [1500, 1000, 500]
    assert len(set(np.concatenate(parts).tolist())) == 3000  # nobody's examples are another's; 3,000 are left over
    for part in parts:  # i.i.d.: a tenth of each class, within 4 deviations of the hypergeometric law
        assert np.abs(np.bincount(MORE[part], minlength=10) / len(part) - 0.1).max() < 4 * np.sqrt(0.09 / len(part))
    assert_partition(partition_indices(MORE, 2, kind="sizes", sizes=[5999, 1]), 2, 6000)


@pytest.mark.parametrize("seed", range(5))
def test_xia_figure_6_has_two_clients_of_five_digits_and_eight_of_one(seed: int) -> None:
    """600 of each digit. The first two hold all ten digits between them; eight digits have a second holder: 300 each.

    The first two hold 5 x 300 examples at least, and two digits (600) have one holder only: together 3,600.
    """
    given = (5, 5, 1, 1, 1, 1, 1, 1, 1, 1)
    parts = partition_indices(MORE, 10, kind="classes", classes_per_client=given, seed=seed)
    assert_partition(parts, 10, 6000)
    digits = [set(MORE[part].tolist()) for part in parts]
    assert [len(held) for held in digits] == list(given)
    assert digits[0] | digits[1] == set(range(10))
    assert len(set.union(*digits[2:])) == 8  # no two of the eight hold the same digit
    sizes = [len(part) for part in parts]
    assert sizes[2:] == [300] * 8
    assert sum(sizes[:2]) == 3600
    assert min(sizes[:2]) >= 1500


@pytest.mark.parametrize(
    ("given", "sizes"), [([2, 1, 1], [1200, 600, 600]), ([10, 10], [3000, 3000])], ids=["some left out", "all"]
)
def test_classes_that_nobody_gets_are_left_out(given: list[int], sizes: list[int]) -> None:
    parts = partition_indices(MORE, len(given), kind="classes", classes_per_client=given)
    held = [set(MORE[part].tolist()) for part in parts]
    assert [len(classes) for classes in held] == given
    assert len(set.union(*held)) == min(10, sum(given))
    assert [len(part) for part in parts] == sizes


def test_classes_are_shared_equally_and_each_client_gets_distinct_ones() -> None:
    parts = partition_indices(MORE, 30, kind="classes", classes_per_client=[7] * 30, seed=3)
    assert_partition(parts, 30, 6000)
    counts = np.array([np.bincount(MORE[part], minlength=10) for part in parts])
    assert ((counts > 0).sum(axis=1) == 7).all()
    assert ((counts > 0).sum(axis=0) == 21).all()  # 210 cards are 21 packs of the ten classes
    assert set(counts[counts > 0]) <= {28, 29}  # 600 / 21 = 28.6


def test_every_pack_of_classes_is_shuffled_anew() -> None:
    """20 clients of one class: each ten hold all ten classes, in orders of their own."""
    parts = partition_indices(MORE, 20, kind="classes", classes_per_client=[1] * 20, seed=5)
    held = [int(MORE[part][0]) for part in parts]
    assert sorted(held[:10]) == sorted(held[10:]) == list(range(10))
    assert held[:10] != held[10:]


# ---- writers ------------------------------------------------------------------------------------------------------


def test_a_few_writers_by_hand() -> None:
    """Seven examples of four writers, two clients: the draw orders the writers, and each client gets two of them."""
    writers = np.array([30, 30, 9, 11, 9, 4, 30])
    rows_of_writer = {4: [5], 9: [2, 4], 11: [3], 30: [0, 1, 6]}
    order = [[4, 9, 11, 30][i] for i in stream(6, "partition", 0).permutation(4)]
    expected = [sorted(rows_of_writer[a] + rows_of_writer[b]) for a, b in (order[:2], order[2:])]
    parts = partition_indices(np.zeros(7, dtype=np.int64), 2, kind="writers", writers=writers, seed=6)
    assert [rows.tolist() for rows in parts] == expected


@pytest.mark.parametrize("num_clients", [1, 7, 20, 61])
def test_each_writer_belongs_to_one_client_and_clients_have_equally_many(num_clients: int) -> None:
    writers = np.random.default_rng(2).integers(61, size=2000) * 13
    parts = partition_indices(LABELS, num_clients, kind="writers", writers=writers, seed=4)
    assert_partition(parts, num_clients, 2000)
    owned = [set(writers[rows].tolist()) for rows in parts]
    assert sum(map(len, owned)) == len(set.union(*owned)) == 61
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


# ---- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_comes_from_the_clients_own_stream() -> None:
    parts = partition_indices(MORE, 50, kind="sampled", examples_per_client=120, seed=9)
    for k in (0, 7, 49):
        np.testing.assert_array_equal(parts[k], np.sort(stream(9, "partition", k).choice(6000, 120, replace=False)))
    larger = partition_indices(MORE, 5000, kind="sampled", examples_per_client=120, seed=9)
    np.testing.assert_array_equal(larger[7], parts[7])  # a client stays itself in a larger fleet
    assert len(set(parts[0].tolist()) & set(parts[1].tolist())) < 20  # 120 x 120 / 6,000 = 2.4 in common


def test_it_is_a_sequence() -> None:
    parts = partitions.SampledPartition(100, 4, 3, seed=1)
    assert len(parts) == len(list(parts)) == 4
    np.testing.assert_array_equal(parts[-1], parts[3])
    assert [rows.tolist() for rows in parts[1:3]] == [parts[1].tolist(), parts[2].tolist()]
    for outside in (4, -5):
        with pytest.raises(IndexError):
            parts[outside]


def test_a_hundred_thousand_clients_keep_nothing() -> None:
    tracemalloc.start()
    parts = partition_indices(MORE, 100_000, kind="sampled", examples_per_client=120)
    sizes = partition_sizes(parts)
    kept = tracemalloc.get_traced_memory()[0] - sizes.nbytes
    tracemalloc.stop()
    assert kept < 1e6  # rows of 120 x 8 bytes each would be 96 MB
    assert sizes.sum() == 12_000_000
    assert len(parts[99_999]) == 120


# ---- through a scenario -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "given", "num_clients", "sizes"),
    [
        ("sizes", {"partition.sizes": [60, 40, 20]}, 3, [60, 40, 20]),
        ("sampled", {"partition.examples_per_client": 120}, 3000, [120] * 3000),  # more clients than examples
        ("classes", {"partition.classes_per_client": [5, 5, 10]}, 3, None),
        ("dirichlet", {}, 40, None),
    ],
    ids=["sizes", "sampled", "classes", "dirichlet"],
)
def test_a_scenarios_clients_hold_them(
    kind: str, given: dict[str, Any], num_clients: int, sizes: list[int] | None, share: float
) -> None:
    """Drawn together or one by one, with and without examples to test on."""
    keys = {"num_clients": num_clients, "clients_per_round": 3, "selector": "random", "partition.kind": kind}
    world = World(load_scenario("digits", keys | given | {"data.local_test_fraction": share}))
    held = world.num_examples()
    if sizes is not None:
        assert list(held.values()) == [n - int(n * share) for n in sizes]
    ids = [num_clients - 1, 0, 2]
    for rows, k in zip(world.train_rows_of(ids), ids, strict=True):
        whole = world.partitions[k]
        assert held[k] == len(whole) - min(int(len(whole) * share), len(whole) - 1)
        assert rows.tolist() == world.train_rows(k).tolist() == whole.tolist()[-len(rows) :]
        assert len(rows) == world.sizes[k] == held[k]
        assert world.client(k).get_properties({}) == {"client_id": k, "num_examples": held[k]}
