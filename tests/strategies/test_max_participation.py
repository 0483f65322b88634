"""``max_participation``: no client is asked in a larger share of its last 20 rounds, in both of Flower's APIs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.eligibility import SHARE_MIN_ROUNDS, SHARE_WINDOW, Participation
from fedsel_flwr.selectors import CSUCBQ, GPFL, Random, Selector
from fedsel_flwr.strategies import CSUCBQ as CSUCBQStrategy
from fedsel_flwr.strategies import SelectionStrategy
from fedsel_flwr.strategies.message import CSUCBQ as MessageCSUCBQ
from tests.rounds.written import Written, core_of, facts
from tests.strategies.scripted import APIS, play_scripted, two_examples


class First(Selector):
    """Chooses the first clients there are, or all of them in its opening, and keeps whom it was offered."""

    may_exceed_clients_per_round = True

    def __init__(self, clients_per_round: int | None = 1, opening: int = 0) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=0)
        self.opening = opening
        self.offered: list[list[int]] = []

    def _select(self, available: Any) -> Any:
        self.offered.append(available.tolist())
        return available if self.round <= self.opening else available[: self.clients_per_round or 1]


def asked(core: Any, rounds: int, connected: str = "abcd") -> list[list[str]]:
    """Whom the core asks in some rounds; nobody answers."""
    everyone, found = Written(facts(*connected)), []
    for _ in range(rounds):
        found.append(core.choose(list(connected), None, everyone))
        core.collect({})
        core.finish()
    return found


@APIS
def test_no_client_is_asked_above_the_cap(api: str) -> None:
    """By hand, cap .5: 0 in rounds 1 to 5, then 5/5 > .5; 1 in 6 to 10 (0: 5/10); 0 in 11 (6/11); 1 in 12."""
    selector = First()
    strategy, _ = play_scripted(
        api, selector, lambda k, t, w: w, 60, start=[1.0], clients=4, max_participation=0.5
    )  # fmt: skip
    rows = np.array([row.client for row in strategy.history.clients])
    assert rows[:12].tolist() == [0] * 5 + [1] * 5 + [0, 1]
    assert np.bincount(rows[20:], minlength=4).max() <= 0.55 * 40
    free, _ = play_scripted(api, First(), lambda k, t, w: w, 10, start=[1.0], clients=4)
    assert {row.client for row in free.history.clients} == {0}


def test_the_share_counts_from_the_fifth_round_and_over_the_last_twenty() -> None:
    cap, everybody = Participation(0.25), np.arange(2)
    for number in range(1, SHARE_MIN_ROUNDS + 1):
        assert cap.eligible(everybody, 1).all()
        cap.note(everybody, np.array([0]))
        assert cap.eligible(everybody, 1).tolist() == [number < SHARE_MIN_ROUNDS, True]
    for number in range(SHARE_MIN_ROUNDS + 1, SHARE_WINDOW + 1):
        cap.note(everybody, np.array([1]))
        assert cap.eligible(everybody, 0)[0] == (number == SHARE_WINDOW), number  # 5 of 20 at last
    cap.note(everybody, np.array([0]))  # one more, and one of 20 rounds ago that no longer counts
    assert cap.eligible(everybody, 0).tolist() == [True, False]


def test_only_rounds_in_which_a_client_was_available_count() -> None:
    cap = Participation(0.5)
    for _ in range(5):
        cap.note(np.arange(2), np.array([0]))
    for _ in range(50):
        cap.note(np.array([1, 2]), np.array([1]))
    assert cap.eligible(np.arange(3), 1).tolist() == [False, False, True]


def test_rounds_that_ask_everybody_do_not_count() -> None:
    core = core_of(First(opening=30), max_participation=0.5)
    assert asked(core, 31)[-2:] == [["a", "b", "c", "d"], ["a"]]
    warm = core_of(First(), max_participation=0.5, warmup_rounds=30)
    assert asked(warm, 36)[-7:] == [["a", "b", "c", "d"], *[["a"]] * 5, ["b"]]


def test_enough_clients_are_offered_whatever_the_cap() -> None:
    """Three of four places a round under a cap of .1: of those above it the least asked are offered too."""
    selector = First(3)
    core = core_of(selector, max_participation=0.1)
    found = asked(core, 60)
    assert {len(chosen) for chosen in found} == {3}
    counts = [sum(client in chosen for chosen in found) for client in "abcd"]
    assert max(counts) - min(counts) <= 6, counts
    lonely = First(None)  # no clients_per_round: one is enough
    asked(core_of(lonely, max_participation=0.1), 30)
    assert min(map(len, lonely.offered)) == 1


def test_over_selection_has_its_spares() -> None:
    core = core_of(First(2), max_participation=0.1, over_selection=0.5)
    core.parts.selector._select = lambda available: available[:3]  # type: ignore[method-assign]
    assert {len(chosen) for chosen in asked(core, 30)} == {3}


def test_a_run_that_goes_on_keeps_the_shares_and_a_newcomer_has_none() -> None:
    whole = asked(core_of(First(), max_participation=0.3), 40)
    before = core_of(First(), max_participation=0.3)
    half = asked(before, 23)
    after = core_of(First(), max_participation=0.3)
    after.load_state_dict(before.state_dict())
    assert half + asked(after, 17) == whole
    cap = after.parts.participation
    cap.note(np.arange(4), np.array([0]))
    cap.forget(np.array([0, 99]))
    assert cap.state_dict()["asked"][0] == cap.state_dict()["rounds"][0] == 0


def test_without_a_cap_nothing_is_kept() -> None:
    core = core_of(First())
    asked(core, 10)
    assert core.parts.participation.state_dict()["rounds"].size == 0


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan"), "0.5", True])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ParameterError, match="max_participation"):
        SelectionStrategy(Random(clients_per_round=1), max_participation=value)


def test_a_cap_below_a_clients_fairness_is_refused() -> None:
    given = {"clients_per_round": 1, "max_latency": 5.0, "fairness": {"a": 0.4, "b": 0.2}}
    message = r"max_participation = 0.3 is below the fairness 0.4 of client a"
    for strategy in (CSUCBQStrategy, MessageCSUCBQ):
        strategy(**given, max_participation=0.4)
        with pytest.raises(ParameterError, match=message):
            strategy(**given, max_participation=0.3)
    selector = CSUCBQ(clients_per_round=1, max_latency=5.0, fairness=[0.2, 0.4])
    with pytest.raises(ParameterError, match="of client 1"):
        SelectionStrategy(selector, max_participation=0.3)
    SelectionStrategy(CSUCBQ(clients_per_round=1, max_latency=5.0), max_participation=0.3)


def test_gpfls_opening_asks_everybody_and_does_not_count() -> None:
    selector = GPFL(clients_per_round=1, total_rounds=10, seed=0)
    core = core_of(selector, max_participation=0.5, learning_rate=0.1, validation=two_examples())
    assert core.choose(["a", "b"], [np.eye(2)], Written(facts("a", "b"))) == ["a", "b"]
    core.collect({})
    core.finish()
    assert core.parts.participation.state_dict()["rounds"].tolist() == [0, 0]
