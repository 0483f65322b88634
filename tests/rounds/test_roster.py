"""Ids, bindings and numbers by client, without Flower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds.roster import ClientValues, Roster, canonical_id, id_order


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


def test_digits_sort_as_integers_before_other_ids() -> None:
    ids = ["b", "10", "9", "a10", "100", "a9", "-1", "\u0663"]
    assert sorted(ids, key=id_order) == ["9", "10", "100", "-1", "a10", "a9", "b", "\u0663"]


@given(st.lists(st.text(max_size=6)))
def test_the_order_of_ids_is_total(ids: list[str]) -> None:
    assert sorted(ids, key=id_order) == sorted(reversed(ids), key=id_order)


def enroll(roster: Roster, claims: dict[str, str], number: int) -> tuple[dict[int, str], list[int]]:
    new, evicted = roster.register(claims, number)
    return new, evicted.tolist()


def here(roster: Roster, connected: Any) -> dict[int, str]:
    present = roster.present(connected)
    assert present.nodes_of(present.rows) == dict(zip(present.rows.tolist(), present.nodes, strict=True))
    return present.nodes_of(present.rows)


def test_a_connection_is_bound_once() -> None:
    roster = Roster()
    assert enroll(roster, {"n1": "b", "n2": "a"}, 1) == ({0: "n2", 1: "n1"}, [])
    assert roster.ids == ["a", "b"]
    assert here(roster, ["n1", "n2"]) == {0: "n2", 1: "n1"}
    assert roster.unregistered(["n1", "n2", "n3"]) == ["n3"]
    assert enroll(roster, {"n3": "a"}, 2) == ({}, [])
    assert list(roster.refused) == ["n3"]
    assert here(roster, ["n1", "n2", "n3"]) == {0: "n2", 1: "n1"}
    assert roster.unregistered(["n1", "n2", "n3"]) == []


def test_rows_stay_when_connections_go() -> None:
    roster = Roster()
    roster.register({"n1": "a", "n2": "b"}, 1)
    roster.release(["n2"])
    assert here(roster, ["n1", "n2"]) == {1: "n2"}
    assert enroll(roster, {"n9": "a"}, 2) == ({}, [])
    assert here(roster, ["n2", "n9"]) == {0: "n9", 1: "n2"}


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


NAMES = st.sampled_from(["", "", "name p", "name q", "name r"])


@given(
    st.lists(
        st.dictionaries(st.sampled_from("uvwxyz"), st.tuples(st.sampled_from(["a", "b", "1"]), NAMES), max_size=5),
        max_size=7,
    ),
    st.booleans(),
)
def test_a_row_that_somebody_held_by_name_is_nobody_elses(
    calls: list[dict[str, tuple[str, str]]], evicts: bool
) -> None:
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


def test_values_by_row_follow_the_ids() -> None:
    roster = Roster()
    values = ClientValues("data_weights", {"b": 2.0, "a": 1.0, 10: 3.0}, roster)
    roster.register({"n1": "b", "n2": "10"}, 1)
    roster.register({"n3": "a"}, 2)
    assert {row: values[row] for row in values} == {0: 3.0, 1: 2.0, 2: 1.0}
    assert 3 not in values
    assert -1 not in values
    assert values.covers("10")
    assert not values.covers("c")
    with pytest.raises(KeyError):
        values[3]


@pytest.mark.parametrize("given_", [{True: 1.0}, {1: 1.0, "1": 2.0}, {"": 1.0}, [[1.0], [2.0]], 3.0])
def test_values_that_do_not_name_each_client_once(given_: Any) -> None:
    with pytest.raises(ParameterError, match="data_weights"):
        ClientValues("data_weights", given_, Roster())


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
    with pytest.raises(StateError, match=f"{part} must be printable texts"):
        Roster().load_state_dict(state)
