"""Late updates and automatic deadlines: by hand, and against a walk through seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds.deadlines import Deadline, Deadlines, usual_time
from fedsel_flwr.rounds.late import importance
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors import Everyone
from tests.rounds.written import Written, core_of, facts, play_round, reply
from tests.strategies.either_api import base_of, private, selection
from tests.strategies.scripted import play_scripted


def test_without_updates_in_time_only_staleness_counts() -> None:
    late, tau = np.ones((2, 3)), np.array([1, 3])
    for fresh in (np.zeros((0, 0)), np.zeros((2, 3)), np.array([[1.0, 0, 0], [-1.0, 0, 0]])):
        assert importance(fresh, late, tau).tolist() == [0.65 / 2, 0.65 / 4]
    # Equal updates differ by nothing: 1 - exp(0) = 0.
    assert importance(np.ones((2, 3)), late, tau).tolist() == [0.65 / 2, 0.65 / 4]
    assert importance(np.ones((2, 3)), late, tau, 10.0).tolist() == pytest.approx([0.65 / 2 + 0.315, 0.65 / 4 + 0.315])


# ---- a course by hand ---------------------------------------------------------------------------------------------


def _course(api: str, rounds: int, **options: Any) -> tuple[Any, list[Any]]:
    """Three clients take 2, 3 and 7.5 s and change the number that they get by 1, 3 and 8; rounds last up to 4 s."""
    seconds, change = (2.0, 3.0, 7.5), (1.0, 3.0, 8.0)
    return play_scripted(
        api, Everyone(), lambda k, t, w: w + change[k], rounds, start=[0.0], clients=3, round_deadline_s=4.0,
        report=lambda k, t: {"latency_s": seconds[k], "energy_j": 10.0 * (k + 1)}, **options,
    )  # fmt: skip


def test_a_late_update_enters_the_round_in_which_it_arrives(api: str) -> None:
    """Round 1 ends after 4 s. Round 2, 4 to 7 s, asks 0 and 1. In round 3, 7 to 10 s, the update of round 1 arrives."""
    strategy, models = _course(api, 4, late="use")
    # Rounds 1 and 2: the mean of 1 and 3. Round 3: u-hat = 2, u = 8, n = 2, tau = 2; one late update has Lambda_max.
    weight = 0.65 / 3 + 0.35 * (1 - math.exp(-1))
    third = 4.0 + (1 + 3 + weight * 8) / (2 + weight)
    assert [one[0] for one in models] == pytest.approx([2.0, 4.0, third, third + 2.0])
    history = strategy.history
    assert [one.num_selected for one in history.rounds] == [3, 2, 2, 3]
    assert [one.round_s for one in history.rounds] == [4.0, 3.0, 3.0, 4.0]
    assert [(one.num_late, one.late_j) for one in history.rounds] == [(0, 0.0), (0, 0.0), (1, 30.0), (0, 0.0)]
    assert [one.deadline_s for one in history.rounds] == [4.0] * 4
    note = "2 of 2 clients in 3 s (deadline 4 s); 2: late by 3.5 s, used with weight"
    assert history.rounds[2].note == f"{note} {weight:.2g}"
    # The selector and the records of the clients hear what they heard without late updates.
    assert [row.completed for row in history.clients if row.client_id == "2"] == [False, False]


@pytest.mark.parametrize(
    ("options", "third"),
    [
        ({"late": "damped"}, 4.0 + (1 + 3 + 8 / math.sqrt(3)) / 3),
        ({"late": "use", "late_scale_coff": 10.0},
         4.0 + (4 + 8 * (w := 0.65 / 3 + 0.35 * (1 - math.exp(-1) / 10))) / (2 + w)),
        ({"late": "use", "max_staleness": 1}, 6.0),
        ({"late": "drop"}, 6.0),
    ],
)  # fmt: skip
def test_how_a_late_update_counts(api: str, options: dict[str, Any], third: float) -> None:
    _, models = _course(api, 3, **options)
    assert models[2][0] == pytest.approx(third, rel=2e-6)


def test_a_client_beyond_max_latency_is_late_too(api: str) -> None:
    """Its reply takes 7.5 s and max_latency is 3.5 s: the selector sees a failure, and the model gets the update."""
    _, kept = _course(api, 3, late="damped", max_latency=3.5)
    _, dropped = _course(api, 3, max_latency=3.5)
    assert kept[2][0] != dropped[2][0] == 6.0


# ---- against a walk through the seconds ---------------------------------------------------------------------------


class _Walk:
    """Rounds of everyone, written once more: who trains since when, and one number as the model."""

    def __init__(self, seconds: Any, changes: Any, options: Mapping[str, Any]) -> None:
        self.seconds, self.changes, self.options = seconds, changes, options
        self.model, self.now, self.number = 0.0, 0.0, 0
        self.under_way: list[tuple[float, int, int, float]] = []

    def round(self) -> list[int]:
        self.number += 1
        busy = {k for arrival, k, _, _ in self.under_way if arrival > self.now + 1e-9}
        asked = [k for k in range(len(self.seconds[0])) if k not in busy]
        if not asked:
            self.now = min(arrival for arrival, *_ in self.under_way if arrival > self.now + 1e-9)
            return []
        times = {k: self.seconds[self.number - 1][k] for k in asked}
        order = sorted((seconds, k) for k, seconds in times.items())
        limit, wanted = self.options.get("round_deadline_s", math.inf), self.options.get("wait_for", math.inf)
        here = [k for seconds, k in order if seconds <= limit][: int(min(wanted, 99))]
        end = min(limit, max(times.values())) if len(here) < min(wanted, len(asked)) else times[here[-1]]
        self.now += end
        fresh = [self.changes[self.number - 1][k] for k in here]
        late = [one for one in self.under_way if one[0] <= self.now + 1e-9]
        if fresh or late:
            self.under_way = [one for one in self.under_way if one[0] > self.now + 1e-9]
        mean = sum(fresh) / len(fresh) if fresh else 0.0
        gaps = [((mean - (u + len(fresh) * mean) / (len(fresh) + 1)) / mean) ** 2 if mean else 0.0 for *_, u in late]
        total, weights = sum(fresh), float(len(fresh))
        for (_, _, number, u), gap in zip(late, gaps, strict=True):
            tau = self.number - number
            if self.options["late"] == "damped":
                total, weights = total + u / math.sqrt(1 + tau), weights + 1.0
                continue
            boost = 0.35 * (1 - math.exp(-gap / (max(gaps) or 1.0))) if mean else 0.0
            weight = 0.65 / (tau + 1) + boost
            total, weights = total + weight * u, weights + weight
        self.model += total / weights if weights else 0.0
        self.under_way += [
            (self.now - end + times[k], k, self.number, self.changes[self.number - 1][k])
            for k in asked if k not in here
        ]  # fmt: skip
        return asked


@settings(max_examples=60, deadline=None)
@example(753716, 1, {"round_deadline_s": 4.0}, "use")  # sums of times that differ in their last bits
@given(
    st.integers(0, 10**6), st.integers(1, 6),
    st.sampled_from([{"round_deadline_s": 4.0}, {"wait_for": 2}, {"wait_for": 1, "round_deadline_s": 6.0}]),
    st.sampled_from(["use", "damped"]),
)  # fmt: skip
def test_courses_equal_the_walk(seed: int, clients: int, options: dict[str, Any], late: str) -> None:
    draw, rounds = np.random.default_rng(seed), 14
    seconds, changes = draw.uniform(0.5, 30.0, (rounds, clients)), draw.normal(1.0, 2.0, (rounds, clients))
    walk, nodes = _Walk(seconds, changes, options | {"late": late}), [str(k) for k in range(clients)]
    core = core_of(Everyone(), max_latency=31.0, late=late, **options)
    model = [np.zeros(1)]
    for number in range(rounds):
        asked = core.choose(nodes, model, Written(facts(*nodes)))
        assert asked == [str(k) for k in walk.round()]
        if asked:
            outcome = core.collect({
                k: reply(seconds[number][int(k)], [model[0] + changes[number][int(k)]]) for k in asked
            })  # fmt: skip
            if outcome.enough:
                weights, models = outcome.weights, [one[0] for one in outcome.models.as_list()]
                model = [np.average(models, axis=0, weights=weights)]
            core.finish(model)
        assert core.parts.history.rounds[-1].simulated_s == pytest.approx(walk.now)
        assert model[0][0] == pytest.approx(walk.model)
        # Between any two rounds the state can be saved, and refuses what does not fit.
        if number == rounds // 2:
            state = core.state_dict()
            assert isinstance(state["late"], dict)
            held = [{**one, name: 1} for one in state["late"]["held"] for name in ("change", "metrics")]
            for wrong in ([{"row": 1}], 3, *([one] for one in held)):
                with pytest.raises(StateError):
                    core.load_state_dict(state | {"late": {"held": wrong}})
            core = core_of(Everyone(), max_latency=31.0, late=late, **options)
            core.load_state_dict(state)


def test_an_evicted_client_takes_its_late_update_along() -> None:
    core = core_of(Everyone(), late="use", wait_for=1)
    play_round(core, ["0", "1"], {"0": reply(1.0), "1": reply(2.0)})
    late = core.parts.late
    assert late is not None
    assert late.free(np.arange(2), 1.0).tolist() == [True, False]
    late.forget(np.array([1]))
    assert late.free(np.arange(2), 1.0).tolist() == [True, True]


# ---- the automatic deadline ---------------------------------------------------------------------------------------


def test_the_usual_time_by_hand() -> None:
    # median 12, deviations 2, 0, 18: MAD 2 < 3 s; median 60 has 10 % = 6 s; a spread of 20, 0, 20 around 100: MAD 20
    assert usual_time([[10.0, 12.0, 30.0], [60.0, 60.0, 60.0], [80.0, 100.0, 120.0]]).tolist() == [21.0, 78.0, 160.0]


@given(st.lists(st.floats(0.1, 300.0), min_size=1, max_size=9), st.integers(1, 9))
def test_the_first_round_walks_through_its_answers(times: list[float], answers: int) -> None:
    """Second by second at every arrival: once k are there, the round ends at the usual time of those that are."""
    here: list[float] = []
    for moment in sorted(times):
        if len(here) >= answers and moment > max(here[-1], usual_time([here])[0]):
            break
        here.append(moment)
    ended = max(here[-1], float(usual_time([here])[0])) if len(here) >= answers else math.inf
    assert Deadline(answers=answers).settled(sorted(times)) == ended


def test_a_course_of_automatic_deadlines() -> None:
    """a and b take 10 and 12 s, c 100 s at first. The dead d raises nothing, and who is always slow is waited for."""
    core = core_of(Everyone(), round_deadline_s="auto", cooldown=False, max_latency=500.0)
    usual = {"a": reply(10.0), "b": reply(12.0), "c": reply(100.0), "d": Reply(error="gone")}
    for replies in [usual] * 3 + [usual | {"c": reply(300.0)}] * 8:
        play_round(core, sorted(usual), replies)
    found = [one.deadline_s for one in core.parts.history.rounds]
    # Round 1 has no times: three of four are more than half. 10, 12 and 100 s: 12 + 9 s, but the third comes after
    # 100 s. From round 2 on c's own time counts: 100 + 30 s. From round 4 on, at 360 s, c takes 300 s, which the server
    # knows in rounds 6, 7 and 8. Then 100 s and 300 s are three of each: median 200, MAD 100. Later median 300, MAD 0.
    assert found == [100.0] + [130.0] * 7 + [500.0] + [390.0] * 2
    completed = [row.completed for row in core.parts.history.clients if row.client_id == "c"]
    assert completed == [True] * 3 + [False] * 5 + [True] * 3


def test_clients_without_times_are_judged_by_the_round_itself() -> None:
    trips = Deadlines()
    settings_of = core_of(Everyone(), round_deadline_s="auto").settings
    rows = np.arange(4)
    assert Deadline.of(rows, settings_of, trips) == Deadline(math.inf, 3)
    trips.note(np.array([0, 1]), np.array([10.0, 20.0]), np.zeros(2), 0.0)
    assert Deadline.of(rows, settings_of, trips) == Deadline(29.0, 3)
    trips.note(np.array([2]), np.array([5.0]), np.array([50.0]), 0.0)  # known only after 50 s
    assert Deadline.of(rows, settings_of, trips) == Deadline(29.0, 3)
    trips.note(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), 50.0)
    assert Deadline.of(rows, settings_of, trips) == Deadline(29.0)
    restored = Deadlines()
    restored.load_state_dict(trips.state_dict())
    assert Deadline.of(rows, settings_of, restored) == Deadline(29.0)
    restored.forget(np.array([1]))
    assert Deadline.of(rows, settings_of, restored) == Deadline(19.0, 3)
    for name in ("trips", "coming"):
        with pytest.raises(StateError, match=name):
            restored.load_state_dict(trips.state_dict() | {name: np.zeros(3)})


def test_which_bases_may_get_moved_models(api: str) -> None:
    """A subclass may send what it likes; one with its own aggregation, a median or privacy is refused."""
    kind: Any = type(base_of(api))
    own = {"aggregate_fit": lambda self, *args: None, "aggregate_train": lambda self, *args: None}
    sends = type("Sends", (kind,), {"configure_fit": kind.__dict__.get("configure_fit"), "note": lambda self: 1})
    selection(api, Everyone(), sends(), wait_for=1, late="use")
    for base, why in (
        (type("Own", (kind,), own)(), "return the model that they got"),
        (base_of(api, "FedMedian"), "FedMedian may not expect"),
        (private(api, base_of(api)), "return the model that they got"),
    ):
        with pytest.raises(ParameterError, match=why):
            selection(api, Everyone(), base, wait_for=1, late="use")
