"""Ids, bindings, and selector parameters given by client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds.roster import ClientValues, Roster, canonical_id, id_order, in_id_order
from fedsel_flwr.strategies import BSFL, SelectionStrategy
from tests.strategies.helpers import FakeProxy, Federation, fedavg, fleet


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (7, "7"), (np.int64(7), "7"), (7.0, "7"), (np.float32(7), "7"), ("7", "7"), (" phone ", "phone"), (0, "0"),
        (-3, "-3"), (2**63, str(2**63)), (True, None), (np.bool_(True), None), (7.5, None), (float("inf"), None),
        (None, None), ("", None), (b"7", None), ([7], None), ("a\x00b", None), ("a\u202eb", None),
        ("x" * 256, "x" * 256), ("x" * 257, None),
    ],
)  # fmt: skip
def test_canonical_id(claim: Any, expected: str | None) -> None:
    assert canonical_id(claim) == expected


@given(st.lists(st.text(max_size=6)))
def test_digits_sort_as_integers_before_other_ids_and_the_order_is_total(texts: list[str]) -> None:
    ids = ["b", "10", "9", "a10", "100", "a9", "-1", "\u0663"]
    assert sorted(ids, key=id_order) == ["9", "10", "100", "-1", "a10", "a9", "b", "\u0663"]
    assert sorted(texts, key=id_order) == sorted(reversed(texts), key=id_order)


@example(["7", "07", "7"])
@given(st.lists(st.from_regex("[0-9]{1,20}", fullmatch=True) | st.sampled_from(["7", "07", "b", "", "\u0663"])))
def test_many_ids_get_the_order_of_single_ones(texts: list[str]) -> None:
    assert in_id_order(texts) == sorted(texts, key=id_order)


@given(
    st.dictionaries(st.sampled_from("pqrstuvwxyz"), st.sampled_from(["a", "b", "1", "2", "01", "10", "9"]), max_size=6),
    st.sampled_from([None, 2, 6]),
    st.booleans(),
)
def test_the_first_roll_call_binds_as_one_by_one(claims: dict[str, str], max_clients: int | None, held: bool) -> None:
    """It binds all at once; one by one is the way of a roster that has a client already."""
    holders = {node: f"name {node}" for node in "pqrst" if held}
    at_once, later = Roster(max_clients=max_clients), Roster(max_clients=max_clients and max_clients + 1)
    later.register({"first": "0"}, 1)
    new, evicted = at_once.register(claims, 1, holders)
    one_by_one, _ = later.register(claims, 1, holders)
    assert not evicted.size
    assert list(new.items()) == [(row - 1, node) for row, node in one_by_one.items()]
    assert (at_once.ids, at_once.holders) == (later.ids[1:], later.holders[1:])
    assert list(at_once.refused) == list(later.refused)
    bound = later.state_dict()["bound"].items()
    assert at_once.state_dict()["bound"] == {node: row - 1 for node, row in bound if node != "first"}
    assert at_once.present(claims).nodes == later.present(claims).nodes
    again = Roster(max_clients=max_clients)
    again.load_state_dict(at_once.state_dict())
    assert again.register({"late": "b"}, 2)[0].keys() == at_once.register({"late": "b"}, 2)[0].keys()


def here(roster: Roster, connected: Any) -> dict[int, str]:
    present = roster.present(connected)
    assert present.nodes_of(present.rows) == dict(zip(present.rows.tolist(), present.nodes, strict=True))
    return present.nodes_of(present.rows)


@given(
    st.lists(st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from(["a", "b", "1", "2"]), max_size=5), max_size=6),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.integers(1, 2)),
)
def test_never_two_connections_on_one_row_nor_two_rows_of_one_id(
    calls: list[dict[str, str]], max_clients: int | None, max_new: int | None
) -> None:
    roster = Roster(max_clients=max_clients, max_new_per_round=max_new, evict_after=1)
    for number, claims in enumerate(calls, start=1):
        roster.release(claims)
        asked = roster.unregistered(claims)
        roster.register({node: claims[node] for node in asked}, number)
        present = here(roster, claims)
        roster.seen(np.array(list(present), dtype=np.int64), number)
        assert len(set(present.values())) == len(present)
        assert len(set(roster.ids)) == len(roster.ids)
        assert max_clients is None or len(roster.ids) <= max_clients
        assert all(0 <= row < len(roster.ids) for row in present)
        assert list(present) == sorted(present)
        # A connection is bound or refused once.
        assert not {*roster.unregistered(claims)} & {*present.values(), *roster.refused}


CLAIMS = st.tuples(st.sampled_from(["a", "b", "1"]), st.sampled_from(["", "", "name p", "name q", "name r"]))


@given(st.lists(st.dictionaries(st.sampled_from("uvwxyz"), CLAIMS, max_size=5), max_size=7), st.booleans())
def test_a_row_that_somebody_held_by_name_is_his(calls: list[dict[str, tuple[str, str]]], evicts: bool) -> None:
    """Whoever claims its id, in whatever order they come and go, and after saving and loading; unless it is evicted."""
    roster = Roster(max_clients=2, evict_after=1) if evicts else Roster()
    owner: dict[int, str] = {}
    bound: dict[str, str] = {}  # connection -> name with which it was bound; a node keeps its name while connected
    for number, claims in enumerate(calls, start=1):
        roster.release(claims, number)
        bound = {node: name for node, name in bound.items() if node in claims}
        asked = {node: claims[node] for node in roster.unregistered(claims)}
        _, evicted = roster.register(
            {node: one for node, (one, _) in asked.items()}, number, {node: name for node, (_, name) in asked.items()}
        )
        for row in evicted.tolist():
            owner.pop(row, None)
        for row, node in here(roster, claims).items():
            name = bound.setdefault(node, claims[node][1])
            assert owner.get(row, name) == name
            if name:
                owner[row] = name
        assert [roster.holders[row] for row in sorted(owner)] == [owner[row] for row in sorted(owner)]
        again = Roster(max_clients=roster.max_clients, evict_after=roster.evict_after)
        again.load_state_dict(roster.state_dict())
        roster = again


def test_who_is_present_is_looked_up_once_while_nobody_comes_or_goes() -> None:
    roster = Roster()
    roster.register({"x": "a", "y": "b"}, 1)
    present = roster.present(["x", "y"])
    assert roster.present({"y": 0, "x": 1}) is present
    roster.release(["x", "y"], 2)
    assert roster.unregistered(["x", "y"]) == []
    assert roster.present(["x", "y"]) is present
    assert roster.present(["x"]).nodes == ("x",)
    roster.release(["x", "z"], 3)
    assert roster.unregistered(["x", "z"]) == ["z"]
    roster.register({"z": "c"}, 3)
    assert roster.present(["x", "z"]).nodes == ("x", "z")
    assert roster.unregistered(["x", "y", "z"]) == ["y"]  # its binding is gone, its row stays


@pytest.mark.parametrize(
    ("part", "text"),
    [("ids", "\x00"), ("ids", ""), ("ids", "a\nb"), ("ids", "\ud800"), ("ids", "x" * 257), ("holders", "\x1b[31m")],
)
def test_a_state_with_texts_that_no_client_can_have_is_refused(part: str, text: str) -> None:
    """As in a checkpoint that was written by hand; they would reach the log and the tables."""
    roster = Roster()
    roster.register({"n1": "a", "n2": "b"}, 1)
    state = roster.state_dict()
    state[part] = [text, "c"]
    with pytest.raises(StateError, match="must be printable texts"):
        Roster().load_state_dict(state)


def test_as_a_mapping_values_follow_the_ids_of_those_enrolled() -> None:
    roster = Roster()
    values = ClientValues("data_weights", {"b": 2.0, "a": 1.0, 10: 3.0}, roster)
    assert (len(values), list(values), dict(values), list(values.items())) == (0, [], {}, [])
    roster.register({"n1": "b", "n2": "10", "n3": "stranger"}, 1)
    roster.register({"n4": "a"}, 2)
    assert roster.ids == ["10", "b", "stranger", "a"]
    assert (len(values), dict(values), list(values.values())) == (3, {0: 3.0, 1: 2.0, 3: 1.0}, [3.0, 2.0, 1.0])
    assert [row in values for row in (-1, 0, 2, 4)] == [False, True, False, False]
    assert (values.get(2), values.covers("10"), values.covers("c")) == (None, True, False)
    assert values.given == {"b": 2.0, "a": 1.0, "10": 3.0}
    for row in (2, 4):
        with pytest.raises(KeyError):
            values[row]


def _weighted(weights: Any, min_available: int = 2) -> SelectionStrategy:
    return BSFL(
        clients_per_round=2, min_latency=0.1, alpha=1000.0, data_weights=weights, seed=0, base=fedavg(),
        min_available=min_available,
    )  # fmt: skip


def _play(strategy: SelectionStrategy, ids: Sequence[Any], rounds: int) -> None:
    Federation(strategy, [FakeProxy(f"node-{i}", client_id, number=i) for i, client_id in enumerate(ids)]).play(rounds)


@pytest.mark.parametrize(
    ("weights", "ids", "shares"),
    [
        ({"d": 2.0, "a": 1.0, "c": 3.0, "b": 2.0}, "cdba", [1, 2, 3, 2]),
        ({0: 1.0, "1": 3.0, 2: 2.0, 3: 2.0}, [3, 1, 0, 2], [1, 3, 2, 2]),  # integer keys mean the same clients
        (np.array([1.0, 3.0, 2.0, 2.0]), [3, 2, 1, 0], [1, 3, 2, 2]),
    ],
    ids=["by id", "integers", "array"],
)
def test_data_weights_go_by_client_id_not_by_connection(weights: Any, ids: Any, shares: list[int]) -> None:
    strategy, before = _weighted(weights), str(weights)
    _play(strategy, ids, 40)
    counts = strategy.history.selection_counts(4).tolist()
    assert counts == pytest.approx([2 * 40 * share / 8 for share in shares], abs=2)  # m t d_k / sum(d)
    assert str(weights) == before


@pytest.mark.parametrize(
    ("weights", "ids"),
    [([1.0, 2.0, 3.0], "abc"), ([1.0, 2.0, 3.0], [1, 2, 3]), ([1.0, 2.0], [0, 1, 2]), ({"a": 1.0, "b": 2.0}, "abc")],
)
def test_data_weights_that_do_not_fit_the_ids_are_refused(weights: Any, ids: Sequence[Any]) -> None:
    strategy = _weighted(weights, min_available=3)
    with pytest.raises(ParameterError, match="data_weights"):
        _play(strategy, ids, 1)


@pytest.mark.parametrize(
    "weights",
    [
        {"a": -1.0, "b": 2.0}, {"a": 0.0, "b": 0.0}, [[1.0, 2.0]], {0: 1.0, "0": 2.0}, {True: 1.0}, {"": 1.0}, 3.0,
    ],
)  # fmt: skip
def test_impossible_data_weights_are_refused_before_anybody_is_enrolled(weights: Any) -> None:
    with pytest.raises(ParameterError, match="data_weights"):
        _weighted(weights)


def test_a_newcomer_without_a_weight_is_refused_and_the_run_goes_on(caplog: Any) -> None:
    strategy = _weighted({"0": 1.0, "1": 1.0, "2": 2.0, "9": 1.0})
    federation = Federation(strategy, fleet(3)).play(3)
    stranger, expected = FakeProxy("node-s", "stranger", number=5), FakeProxy("node-9", "9", number=9)
    federation.manager.register(stranger)
    federation.manager.register(expected)
    federation.play(5)
    assert len(strategy.history.rounds) == 8
    assert stranger.fits == []
    assert expected.fits
    assert any("stranger" in record.getMessage() for record in caplog.records)
