"""State of every shape and type: saved, loaded, refused, grown and forgotten."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import numpy as np
import pytest

from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors import Random, RoundReport
from tests.selectors.rounds import report


class Keeper(Random):
    """Keeps a bit of everything."""

    client_state: ClassVar[dict[str, Any]] = {
        "_flag": False, "_plays": 0, "_mean": 0.5, "_context": np.array([0.25, -1.0]),
        "_table": np.zeros((2, 3), dtype=np.int32), "_hash": np.uint64(7), "_half": np.float32(1.5),
    }  # fmt: skip
    scalar_state = ("_best", "_count", "_ready")
    free_state: ClassVar[dict[str, Any]] = {"_centre": (float, (2,)), "_bits": (bool, ()), "_wide": (np.uint64, ())}

    def __init__(self, *, clients_per_round: int = 2, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self._best, self._count, self._ready = 0.0, 0, False

    def _observe(self, report: RoundReport) -> None:
        k = report.clients
        self._context[k] += report.latency[:, None]
        self._hash[k] = 2**64 - 1 - k.astype(np.uint64)
        self._plays[k] += 1
        self._best, self._count, self._ready = float(report.latency.max()), self._count + 1, True
        self._centre = np.vstack([self._centre, self._context[k]])
        self._bits = np.append(self._bits, report.completed)
        self._wide = np.append(self._wide, self._hash[k])


def played(rounds: int = 3, seed: int = 1) -> Keeper:
    selector = Keeper(seed=seed)
    for t in range(rounds):
        chosen = selector.select(np.arange(5))
        selector.observe(report(chosen, [1.0 + t, 2.0], failed=chosen[1:]))
    return selector


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key], err_msg=key)
        assert np.asarray(value).dtype == np.asarray(other[key]).dtype, key
        assert type(value) is type(other[key]), key


def test_rows_have_the_shape_and_type_of_a_newcomers_value() -> None:
    selector = Keeper()
    selector.inform(np.array([3]))
    state = selector.state_dict()
    assert {key: (value.shape, str(value.dtype)) for key, value in state.items() if np.ndim(value)} == {
        "registered": ((4,), "bool"), "generator": ((6,), "uint64"), "flag": ((4,), "bool"), "plays": ((4,), "int64"),
        "mean": ((4,), "float64"), "context": ((4, 2), "float64"), "table": ((4, 2, 3), "int32"),
        "hash": ((4,), "uint64"), "half": ((4,), "float32"), "centre": ((0, 2), "float64"), "bits": ((0,), "bool"),
        "wide": ((0,), "uint64"),
    }  # fmt: skip
    assert state["context"].tolist() == [[0.25, -1.0]] * 4
    assert state["hash"].tolist() == [7] * 4


@pytest.mark.parametrize("as_lists", [False, True], ids=["arrays", "JSON"])
def test_everything_survives(as_lists: bool) -> None:
    straight, resumed = played(), Keeper(seed=9)
    state = straight.state_dict()
    if as_lists:
        state = json.loads(json.dumps({key: np.asarray(value).tolist() for key, value in state.items()}))
    resumed.load_state_dict(state)
    assert_same(resumed.state_dict(), straight.state_dict())
    for _ in range(20):
        assert resumed.select(np.arange(9)).tolist() == straight.select(np.arange(9)).tolist()


MISFITS: dict[str, list[Any]] = {
    "registered": [np.ones((2, 2), dtype=bool), [1, 0, 1, 1, 0]],
    "round": [1.5, -1, [1]],
    "generator": [np.zeros(5, np.uint64), -np.ones(6, np.int64), np.full(6, 2, np.uint64)],
    "flag": [np.zeros(5, dtype=int)],
    "plays": [
        np.full(5, 0.5), np.full(5, 1.0), np.zeros(4, dtype=int), np.full(5, 2**63, np.uint64), ["a"] * 5, [None] * 5,
    ],
    "mean": [[0.5, 0.5, 0.5, 0.5, np.nan], [0.5, 0.5, 0.5, 0.5, np.inf], np.full(5, 2**53 + 1)],
    "half": [np.full(5, 1e300), np.full(5, 0.1)],
    "context": [np.zeros(5), np.zeros((5, 3)), np.zeros((5, 2), dtype=complex)],
    "centre": [np.zeros((4, 3)), [[0.5], [0.5, 0.5]], [[0.5, np.nan]]],
    "bits": [[0, 1]],
    "best": ["a", np.nan, [1.0]],
    "count": [2.5, 2**70],
    "ready": [1],
}  # fmt: skip


@pytest.mark.parametrize("key", [*MISFITS, "surprise"])
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(key: str) -> None:
    """The foreign state is from a later round, so that whatever was taken over would show."""
    selector, before = played(), played().state_dict()
    foreign = played(5, seed=2).state_dict()
    cases = [foreign | {key: value} for value in MISFITS.get(key, [1])]
    cases.append({name: value for name, value in foreign.items() if name != key} if key in foreign else cases[0])
    for case in cases:
        with pytest.raises(StateError, match=f"'{key}'"):
            selector.load_state_dict(case)
        assert_same(selector.state_dict(), before)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("plays", [0.5] * 5, "must hold finite int64 numbers"),
        ("flag", [1] * 5, "must hold bool values"),
        ("registered", [[True]], "must be one-dimensional, got bool of shape (1, 1)"),
        ("centre", np.zeros((4, 3)), "must be float64 of shape (any, 2)"),
    ],
)
def test_a_refusal_says_what_was_expected(key: str, value: Any, said: str) -> None:
    with pytest.raises(StateError) as refused:
        played().load_state_dict(played().state_dict() | {key: value})
    assert str(refused.value).startswith(f"state {key!r} {said}")


def test_forget_resets_rows_of_any_shape_and_no_others() -> None:
    selector = played(6)
    kept = selector.state_dict()
    assert kept["plays"].min() > 0
    selector.forget(np.array([1, 3, 77]))
    state, fresh = selector.state_dict(), Keeper()
    fresh.inform(np.arange(5))
    for key, new in fresh.state_dict().items():
        if np.ndim(new) and key not in ("generator", "centre", "bits", "wide"):
            expected = kept[key].copy()
            expected[[1, 3]] = False if key == "registered" else new[[1, 3]]
            np.testing.assert_array_equal(state[key], expected, err_msg=key)
    assert selector.num_clients == 3
