"""Partitions by sizes, by classes and by samples: what each client holds, what is left over, and faults."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, get_args

import numpy as np
import pytest

from fedsel_flwr.clients.streams import stream
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.scenario_tables import Partition
from fedsel_flwr.simulations.worlds.given_partitions import SampledPartition
from fedsel_flwr.simulations.worlds.partitions import partition_indices, partition_sizes
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import play

LABELS = np.arange(6000) % 10
XIA_6 = (5, 5, 1, 1, 1, 1, 1, 1, 1, 1)
GIVEN: dict[str, dict[str, Any]] = {
    "sizes": {"sizes": (1500, 1000, 500)},
    "classes": {"classes_per_client": (5, 5, 1)},
    "sampled": {"examples_per_client": 120},
}


def test_every_kind_is_here_or_in_test_partitions() -> None:
    kinds = get_args(Partition.model_fields["kind"].annotation)
    assert set(kinds) == {"iid", "dirichlet", "dirichlet-classes", "dirichlet-sizes", "shards", *GIVEN}


@pytest.mark.parametrize("kind", GIVEN)
def test_rows_ascend_and_the_seed_decides(kind: str) -> None:
    first, again, other = (
        partition_indices(LABELS, 3, kind=kind, **GIVEN[kind], seed=seed) for seed in (8, 8, 2**40)
    )  # fmt: skip
    assert len(first) == 3
    assert partition_sizes(first).tolist() == [len(rows) for rows in first]
    for ours, same, another in zip(first, again, other, strict=True):
        assert ours.dtype == np.int64
        assert (np.diff(ours) > 0).all()  # ascending, and no row twice
        assert 0 <= ours[0] <= ours[-1] < 6000
        np.testing.assert_array_equal(ours, same)
        assert not np.array_equal(ours, another)


@pytest.mark.parametrize("kind", GIVEN)
def test_a_spawned_process_draws_the_same(kind: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        theirs = pool.submit(partition_indices, LABELS, 3, kind=kind, **GIVEN[kind], seed=2).result(timeout=120)
    for part, same in zip(partition_indices(LABELS, 3, kind=kind, **GIVEN[kind], seed=2), theirs, strict=True):
        np.testing.assert_array_equal(part, same)


# ---- sizes --------------------------------------------------------------------------------------------------------


def test_xia_figure_4_has_three_clients_of_1500_1000_and_500() -> None:
    parts = partition_indices(LABELS, 3, kind="sizes", sizes=[1500, 1000, 500], seed=1)
    assert [len(part) for part in parts] == [1500, 1000, 500]
    assert len(set(np.concatenate(parts).tolist())) == 3000  # nobody's examples are another's; 3,000 are left over
    for part in parts:  # i.i.d.: a tenth of each class, within 4 deviations of the hypergeometric law
        share = np.bincount(LABELS[part], minlength=10) / len(part)
        assert np.abs(share - 0.1).max() < 4 * np.sqrt(0.09 / len(part))


def test_sizes_may_take_everything() -> None:
    parts = partition_indices(LABELS, 2, kind="sizes", sizes=[5999, 1])
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(6000))


# ---- classes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_xia_figure_6_has_two_clients_of_five_digits_and_eight_of_one(seed: int) -> None:
    """600 of each digit. The first two hold all ten digits between them; eight digits have a second holder: 300 each.

    The first two hold 5 x 300 examples at least, and two digits (600) have one holder only: together 3,600.
    """
    parts = partition_indices(LABELS, 10, kind="classes", classes_per_client=XIA_6, seed=seed)
    digits = [set(LABELS[part].tolist()) for part in parts]
    assert [len(held) for held in digits] == list(XIA_6)
    assert digits[0] | digits[1] == set(range(10))
    assert len(set.union(*digits[2:])) == 8  # no two of the eight hold the same digit
    sizes = [len(part) for part in parts]
    assert sizes[2:] == [300] * 8
    assert sum(sizes[:2]) == 3600
    assert min(sizes[:2]) >= 1500
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(6000))


def test_classes_that_nobody_gets_are_left_out() -> None:
    parts = partition_indices(LABELS, 3, kind="classes", classes_per_client=[2, 1, 1])
    held = [set(LABELS[part].tolist()) for part in parts]
    assert [len(classes) for classes in held] == [2, 1, 1]
    assert len(set.union(*held)) == 4
    assert [len(part) for part in parts] == [1200, 600, 600]


def test_classes_are_shared_equally_and_each_client_gets_distinct_ones() -> None:
    parts = partition_indices(LABELS, 30, kind="classes", classes_per_client=[7] * 30, seed=3)
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    assert ((counts > 0).sum(axis=1) == 7).all()
    assert ((counts > 0).sum(axis=0) == 21).all()  # 210 cards are 21 packs of the ten classes
    for column in counts.T:
        assert set(column[column > 0]) <= {28, 29}  # 600 / 21 = 28.6
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(6000))


def test_every_pack_of_classes_is_shuffled_anew() -> None:
    """20 clients of one class: each ten hold all ten classes, in orders of their own."""
    parts = partition_indices(LABELS, 20, kind="classes", classes_per_client=[1] * 20, seed=5)
    held = [int(LABELS[part][0]) for part in parts]
    assert sorted(held[:10]) == sorted(held[10:]) == list(range(10))
    assert held[:10] != held[10:]


def test_everybody_may_hold_every_class() -> None:
    parts = partition_indices(LABELS, 2, kind="classes", classes_per_client=[10, 10])
    assert [len(part) for part in parts] == [3000, 3000]


# ---- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_comes_from_the_clients_own_stream() -> None:
    parts = partition_indices(LABELS, 50, kind="sampled", examples_per_client=120, seed=9)
    for k in (0, 7, 49):
        expected = np.sort(stream(9, "partition", k).choice(6000, 120, replace=False))
        np.testing.assert_array_equal(parts[k], expected)
    larger = partition_indices(LABELS, 5000, kind="sampled", examples_per_client=120, seed=9)
    np.testing.assert_array_equal(larger[7], parts[7])  # a client stays itself in a larger fleet
    assert len(set(parts[0].tolist()) & set(parts[1].tolist())) < 20  # 120 x 120 / 6,000 = 2.4 in common
    assert len(set(np.concatenate(list(parts)).tolist())) == pytest.approx(6000 * (1 - 0.98**50), rel=0.05)


def test_every_example_is_drawn_equally_often() -> None:
    """1,000 clients of 120 of 6,000: each example 20 times on average, binomial(1000, .02)."""
    drawn = np.bincount(np.concatenate(list(SampledPartition(6000, 1000, 120, seed=4))), minlength=6000)
    assert drawn.mean() == 20
    assert drawn.var() == pytest.approx(1000 * 0.02 * 0.98, rel=0.1)
    assert drawn.max() < 20 + 6 * np.sqrt(19.6)


def test_it_is_a_sequence() -> None:
    parts = SampledPartition(100, 4, 3, seed=1)
    assert len(parts) == len(list(parts)) == 4
    np.testing.assert_array_equal(parts[-1], parts[3])
    assert [rows.tolist() for rows in parts[1:3]] == [parts[1].tolist(), parts[2].tolist()]
    for outside in (4, -5):
        with pytest.raises(IndexError):
            parts[outside]


def test_a_hundred_thousand_clients_keep_nothing() -> None:
    tracemalloc.start()
    parts = partition_indices(LABELS, 100_000, kind="sampled", examples_per_client=120)
    sizes = partition_sizes(parts)
    kept = tracemalloc.get_traced_memory()[0] - sizes.nbytes
    tracemalloc.stop()
    assert kept < 1e6  # rows of 120 x 8 bytes each would be 96 MB
    assert sizes.sum() == 12_000_000
    assert len(parts[99_999]) == 120


# ---- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "sizes", "sizes": (6000, 1, 1)}, r"partition.sizes add up to 6002, but there are 6000 training"),
        ({"kind": "sizes", "sizes": (5, 1)}, r"partition.sizes must hold a number for each of 3 clients, got 2"),
        ({"kind": "sizes"}, r"partition.sizes must hold a number for each of 3 clients, got 0"),
        ({"sizes": (5, 1, 1)}, r"partition.sizes is given, but partition.kind is 'iid'"),
        ({"kind": "classes", "classes_per_client": (11, 1, 1)}, r"gives client 0 11 classes, but there are 10"),
        ({"kind": "classes", "classes_per_client": (1,)}, r"classes_per_client must hold a number for each"),
        ({"kind": "shards", "classes_per_client": (1,) * 3}, r"partition.classes_per_client is given"),
        ({"kind": "sampled", "examples_per_client": 6001}, r"examples_per_client = 6001 is more than the 6000"),
    ],
)  # fmt: skip
def test_faults_say_what_to_change(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        partition_indices(LABELS, 3, **arguments)


def test_more_holders_than_examples_of_a_class() -> None:
    with pytest.raises(ParameterError, match=r"4 clients cannot share the 3 examples of class 1"):
        partition_indices(np.array([0] * 9 + [1] * 3), 4, kind="classes", classes_per_client=[2] * 4)


# ---- through a scenario -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({"partition.kind": "sizes", "partition.sizes": [60, 40, 20]}, [60, 40, 20]),
        ({"partition.kind": "sampled", "partition.examples_per_client": 1000}, [1000, 1000, 1000]),
        ({"partition.kind": "classes", "partition.classes_per_client": [5, 5, 10]}, None),
    ],
)
def test_a_scenario_trains_on_them(overrides: dict[str, Any], sizes: list[int] | None) -> None:
    scenario = load_scenario(
        "smoke", {"num_clients": 3, "selector": "random", "data.local_test_fraction": 0.1, "rounds": 8} | overrides
    )
    world = World(scenario)
    held = world.num_examples()
    for k in range(3):
        rows = world.partitions[k]
        test = min(int(len(rows) * 0.1), len(rows) - 1)
        assert held[k] == len(rows) - test
        assert world.client(k).get_properties({})["num_examples"] == held[k]
    if sizes is not None:
        assert list(held.values()) == [n - n // 10 for n in sizes]
    rounds = play(scenario, world).history.rounds
    assert [r.num_completed for r in rounds] == [3] * 8
    assert rounds[-1].accuracy > 0.4


def test_more_clients_than_examples_where_examples_are_shared() -> None:
    overrides = {"num_clients": 3000, "partition.kind": "sampled", "rounds": 1, "selector": "random"}
    world = World(load_scenario("smoke", overrides))
    assert len(world.num_examples()) == 3000 > len(world.dataset.train)
    labels = world.client(2999).get_properties({})
    assert labels == {"client_id": 2999, "num_examples": 120}


@pytest.mark.parametrize("kind", ["sampled", "dirichlet"])
def test_several_clients_rows_are_those_of_each(kind: str) -> None:
    """Drawn together or one by one, with and without examples to test on."""
    for share in (0.0, 0.25):
        keys = {"num_clients": 40, "partition.kind": kind, "partition.examples_per_client": 12}
        world = World(load_scenario("digits", keys | {"data.local_test_fraction": share}))
        ids = [39, 0, 7]
        for rows, k in zip(world.train_rows_of(ids), ids, strict=True):
            assert rows.tolist() == world.train_rows(k).tolist() == world.partitions[k].tolist()[-len(rows) :]
            assert len(rows) == world.sizes[k] == world.num_examples()[k]
