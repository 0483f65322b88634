"""PCZFL against rounds worked by hand and against a plain list of balls, Algorithm 1 of the paper."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors import RoundReport, create, pczfl
from tests.selectors.oracle_pczfl import PCZFLOracle, Point, Replay, follow
from tests.selectors.oracles import World

ROUNDS = 120
WORLD = World(num_clients=10, newcomers={0: 25, 6: 60})
Rewards = dict[int, Point | None]  # client -> (accuracy, energy score), None if it fails


def build(**parameters: Any) -> Any:
    """Make the selector by its name."""
    return create("pczfl", **{"seed": 0} | parameters)


def inform(selector: Any, contexts: dict[int, Point]) -> None:
    """Place clients that have no model yet."""
    accuracy, energy = zip(*contexts.values(), strict=True)
    selector.inform(np.array(list(contexts)), accuracy=np.array(accuracy), energy_score=np.array(energy))


def report(chosen: np.ndarray, rewards: Rewards) -> RoundReport:
    """Report those rewards of the chosen clients."""
    rows = np.array([rewards[client] or (np.nan, np.nan) for client in chosen.tolist()]).reshape(-1, 2)
    completed = ~np.isnan(rows[:, 0])
    return RoundReport(
        clients=chosen,
        completed=completed,
        latency=np.where(completed, 1.0, 5.0),
        accuracy=rows[:, 0],
        energy_score=rows[:, 1],
    )


def play(selector: Any, available: list[int], rewards: Rewards) -> set[int]:
    """Choose and report; returns the choice."""
    chosen = selector.select(np.array(available, dtype=np.int64))
    selector.observe(report(chosen, rewards))
    return set(chosen.tolist())


def test_rounds_by_hand() -> None:
    """Three clients, A = .02, so u = .2, .1414, .1155 at N = 1, 2, 3. Ball a: centre (.5, .5), radius 1.

    Round 1: contexts (.1, .9), (.1, .6), (.1, .3), all in a, the only ball                              -> {0, 1, 2}
        u_a infinite: no zoom. Rewards (.5, .9), (.3, .6), (.4, .3): mean_a = (.4, .6), N_a = 1.
    Round 2: all in a                                                                                    -> {0, 1, 2}
        2 fails. u_a = .2 <= 1: zoom on 0 and 1, at (.5, .9) and (.3, .6): two are equally far from their mean, the
        lower index wins: ball b, centre (.5, .9), radius .5, N = 0. Rewards (.9, .9), (.35, .6), on average
        (.625, .75): mean_a = (.5125, .675), N_a = 2.
    Round 3: 0 at (.9, .9) is .4 from b's centre, 1 at (.35, .6) .3354: in b. 2 stayed at (.4, .3), .6083: in a.
        ucb_a = mean + .1414 + 1 = (1.6539, 1.8164); ucb_b infinite. g_a = 1 + ucb_a = (2.6539, 2.8164);
        g_b = .5 + ucb_a + distance .4 = (2.5539, 2.7164): dominated                                     -> {2}
        It fails: nothing changes.
    Round 4: the same                                                                                    -> {2}
        Zoom: ball c, centre (.4, .3), radius .5. Reward (.8, .3): mean_a = (.6083, .55), N_a = 3.
    Round 5: 2 at (.8, .3) is .4 from c's centre; 1 is .3041 from it: in b and c, equal radii. Nobody is left in a,
        which still bounds: ucb_a = (1.7238, 1.6655); g_b = .5 + ucb_a + .4 = (2.6238, 2.5655);
        g_c = .5 + ucb_a + .2236 = (2.4474, 2.3891): dominated                                           -> {0, 1}
        N_b = 0: no zoom. Rewards (.8, .9), (.5, .6): mean_b = (.65, .75), N_b = 1.
    Round 6: g_b = .5 + mean_b + .2 + .5 = (1.85, 1.95); g_c as before, as b is .6083 away: b dominated   -> {1, 2}
        Rewards (.45, .6), (.875, .3): mean_c = (.6625, .45), N_c = 1.
    Round 7: ucb_c = (1.3625, 1.15): g_c = (1.8625, 1.65), g_b = (1.85, 1.95): neither dominates         -> {0, 1, 2}
        Both zoom (u = .2 <= .5), by the contexts at selection: d, centre (.8, .9) of 0 (before 1), and e, centre
        (.45, .6) of 1 (before 2), radius .25. Rewards (.85, .9), (.6, .6), (.8, .4): mean_b = (.6875, .75),
        mean_c = (.68125, .475), N = 2.
    Round 8: 0 in d, 1 in e, 2 in c; ucb_b = (1.3289, 1.3914), ucb_c = (1.3227, 1.1164).
        g_d = .25 + ucb_b + .3 = (1.8789, 1.9414)
        g_e = .25 + min(ucb_b, ucb_c) + .3041 = (1.8768, 1.6706)
        g_c = .5 + ucb_c = (1.8227, 1.6164): both dominated by d                                         -> {0}
    """
    oracle = PCZFLOracle(0.02)
    for selector in build(), build(uncertainty=0.02, seed=5), Replay(oracle):
        inform(selector, {0: (0.1, 0.9), 1: (0.1, 0.6), 2: (0.1, 0.3)})
        rewards: list[Rewards] = [
            {0: (0.5, 0.9), 1: (0.3, 0.6), 2: (0.4, 0.3)},
            {0: (0.9, 0.9), 1: (0.35, 0.6), 2: None},
            {2: None},
            {2: (0.8, 0.3)},
            {0: (0.8, 0.9), 1: (0.5, 0.6)},
            {1: (0.45, 0.6), 2: (0.875, 0.3)},
            {0: (0.85, 0.9), 1: (0.6, 0.6), 2: (0.8, 0.4)},
            {0: (0.5, 0.5)},
        ]
        for t, given in enumerate(rewards, start=1):
            assert play(selector, [2, 0, 1], given) == set(given), f"round {t}"
    centres = [(0.5, 0.5), (0.5, 0.9), (0.4, 0.3), (0.8, 0.9), (0.45, 0.6)]
    assert [(ball.centre, ball.radius) for ball in oracle.balls] == list(zip(centres, [1, 0.5, 0.5, 0.25, 0.25]))  # noqa: B905
    assert oracle.ambiguous == 0


@pytest.mark.parametrize(("uncertainty", "expected"), [(0.5, {1}), (0.51, {0, 1})])
def test_zoom_where_uncertainty_equals_radius(uncertainty: float, expected: set[int]) -> None:
    """A = .5: u = sqrt(1/N) = 1 = r at N = 1, so round 2 zooms; A = .51: u = 1.01 does not.

    Client 0 stays at (.25, .5), client 1 at (1, .5). Round 2, only client 0 available: ball b, centre (.25, .5), radius
    .5. Round 3: client 1 is .75 away from it, so in a; g_a = 1 + ucb_a, g_b = .5 + .25 + ucb_a: dominated.
    """
    selector = build(uncertainty=uncertainty)
    inform(selector, {0: (0.25, 0.5), 1: (1.0, 0.5)})
    for _ in range(2):
        assert play(selector, [0], {0: (0.25, 0.5)}) == {0}
    assert play(selector, [0, 1], {0: (0.25, 0.5), 1: (1.0, 0.5)}) == expected


@pytest.mark.parametrize(("where", "expected"), [(0.75, {0, 1}), (0.75 - 2**-20, {0, 1}), (0.75 + 2**-20, {1})])
def test_balls_are_closed(where: float, expected: set[int]) -> None:
    """A = .5; client 0 stays at (.25, .5), client 1 waits at `where`; all numbers are exact in binary.

    Rounds 1, 2, client 0 alone: u_a = 1 <= 1 at N_a = 1, so ball b, centre (.25, .5), radius .5; its edge is at .75.
    Round 3: mean_a = (.25, .5), ucb_a = mean_a + .7071 + 1 = (1.9571, 2.2071); ucb_b infinite;
        g_a = 1 + ucb_a = (2.9571, 3.2071), g_b = .5 + ucb_a + .25 = (2.7071, 2.9571).
        Client 1 in b, its edge included: a is empty, both go. Outside: it is in a, which dominates b.
    """
    selector = build(uncertainty=0.5)
    inform(selector, {0: (0.25, 0.5), 1: (where, 0.5)})
    for _ in range(2):
        assert play(selector, [0], {0: (0.25, 0.5)}) == {0}
    assert set(selector.select(np.arange(2)).tolist()) == expected


def test_a_distance_that_rounds_above_the_radius_is_on_the_surface() -> None:
    """Client 0 stays at (.1, .41), 1 waits at (.4, .81): .3^2 + .4^2 = .5^2, but as floats .5000000000000001.

    A = .5, rounds as above: ball b has centre (.1, .41) and radius .5, so 1 is in b, a is empty, and both go.
    """
    assert math.hypot(0.4 - 0.1, 0.81 - 0.41) > 0.5
    selector = build(uncertainty=0.5)
    inform(selector, {0: (0.1, 0.41), 1: (0.4, 0.81)})
    for _ in range(2):
        assert play(selector, [0], {0: (0.1, 0.41)}) == {0}
    assert selector.state_dict()["radius"].tolist() == [1.0, 0.5]
    assert selector.select(np.arange(2)).tolist() == [0, 1]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 clients, 40 rounds: choices and state are those of one piece."""

    def run() -> tuple[list[list[int]], dict[str, Any]]:
        selector, rng = build(uncertainty=0.005), np.random.default_rng(3)
        selector.inform(np.arange(300), accuracy=rng.random(300), energy_score=rng.random(300))
        choices = []
        for _ in range(40):
            chosen = selector.select(np.flatnonzero(rng.random(300) < 0.9))
            rewards: Rewards = {k: (float(rng.random()), float(rng.random())) for k in chosen.tolist()}
            selector.observe(report(chosen, rewards))
            choices.append(chosen.tolist())
        return choices, selector.state_dict()

    choices, state = run()
    assert len(state["radius"]) > 20
    monkeypatch.setattr(pczfl, "CHUNK", chunk)
    again, state_again = run()
    assert again == choices
    for key, value in state.items():
        np.testing.assert_array_equal(state_again[key], value, err_msg=key)


def zoomed(num_clients: int, num_balls: int) -> Any:
    """A selector with so many balls of radii 1, 1/2, ... 1/32, over clients that stand anywhere."""
    selector, rng = build(), np.random.default_rng(5)
    selector.inform(np.arange(num_clients), accuracy=rng.random(num_clients), energy_score=rng.random(num_clients))
    state = selector.state_dict()
    state["radius"] = np.append(1.0, 0.5 ** rng.integers(1, 6, num_balls - 1))
    state["centre"] = np.vstack([[0.5, 0.5], rng.random((num_balls - 1, 2))])
    state["ball_plays"] = rng.integers(0, 9, num_balls)
    state["ball_mean"] = rng.random((num_balls, 2))
    selector.load_state_dict(state)
    return selector


@pytest.mark.parametrize("num_clients", [1, 50, 3000])
def test_domains_as_definition_2_says(num_clients: int) -> None:
    """(2): a client lies in the domain of each ball around it than which no smaller one is around it, or is in none."""
    selector = zoomed(num_clients, 150)
    clients = np.arange(0, num_clients, 2)
    x, y = selector._accuracy[clients], selector._energy_score[clients]
    centre, radius = selector._centre, selector._radius
    around = np.hypot(x[:, None] - centre[:, 0], y[:, None] - centre[:, 1]) <= radius + 1e-12
    expected = around & (radius <= np.where(around, radius, np.inf).min(axis=1, keepdims=True))
    np.testing.assert_array_equal(selector._domains(clients), expected)


def test_the_distances_of_a_large_fleet_are_not_held_together() -> None:
    """20,000 clients and 400 balls: 8 MB say who lies where; the distances would take 64 MB."""
    selector = zoomed(20_000, 400)
    tracemalloc.start()
    selector._domains(np.arange(20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_a_round_without_an_answer_changes_no_ball() -> None:
    """Everybody failed: the state is as before but for the chosen balls, which wait no longer."""
    selector, _ = after(5)
    before = selector.state_dict()
    chosen = selector.select(np.arange(9))
    assert len(selector.state_dict()["chosen_balls"]) > 0
    selector.observe(report(chosen, dict.fromkeys(chosen.tolist())))
    for key, value in selector.state_dict().items():
        np.testing.assert_array_equal(value, before[key] + (key == "round"), err_msg=key)


def test_the_order_of_report_rows_does_not_matter() -> None:
    """Two clients are equally far from their mean: the new ball is client 0's, (.2, .6), whoever is reported first.

    Round 3: the context of 0 is unchanged; 1, at (.8, .4) after round 2, is .6325 away from the ball's centre, in the
    first ball, which dominates (it is larger, and the new one is bounded through it at a distance of .3162)  -> {1}
    """
    for order in ([0, 1], [1, 0]):
        selector = build()
        inform(selector, {0: (0.2, 0.6), 1: (0.3, 0.5)})
        for rewards in ({0: (0.2, 0.6), 1: (0.3, 0.5)}, {0: (0.2, 0.6), 1: (0.8, 0.4)}):
            assert selector.select(np.arange(2)).tolist() == [0, 1]
            selector.observe(report(np.array(order), rewards))
        assert selector.select(np.arange(2)).tolist() == [1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("uncertainty", [0.005, 0.02, 0.1, 0.5])
def test_every_choice_is_the_front(uncertainty: float, seed: int) -> None:
    """Random availability, failures, unreported rounds, newcomers, returning strangers; deep enough zooms."""
    oracle = PCZFLOracle(uncertainty)
    selector = build(uncertainty=uncertainty, seed=seed)
    faults = follow(
        selector, oracle, RoundReport, world=WORLD, rounds=ROUNDS, seed=seed, forget_every=30, check_state=True
    )
    assert faults == []
    assert min(ball.radius for ball in oracle.balls) <= 1 / 8  # zoomed three times, one inside the other
    assert oracle.decided > ROUNDS / 2
    assert oracle.shared > ROUNDS / 10
    assert oracle.ambiguous == 0


@pytest.mark.parametrize(("uncertainty", "seed"), [(0.005, 1), (0.1, 0), (0.1, 2), (0.5, 1)])
def test_every_choice_is_the_front_with_fixed_energy(uncertainty: float, seed: int) -> None:
    """The paper's setting: each client's energy score is drawn once."""
    oracle = PCZFLOracle(uncertainty)
    selector = build(uncertainty=uncertainty, seed=seed)
    world = {"world": WORLD, "rounds": ROUNDS, "seed": seed, "energy_noise": 0.0, "forget_every": 30}
    assert follow(selector, oracle, RoundReport, **world) == []
    assert min(ball.radius for ball in oracle.balls) <= 1 / 8
    assert oracle.ambiguous == 0


@pytest.mark.parametrize("cap", [None, 2], ids=["all", "cap"])
@pytest.mark.parametrize("seed", range(2))
def test_warmup_takes_everyone_and_learns(seed: int, cap: int | None) -> None:
    """30 warm-up rounds: everyone available, every relevant ball updated and zoomed as usual; then the front."""
    oracle = PCZFLOracle(0.02, warmup_rounds=30, clients_per_round=cap)
    selector = build(warmup_rounds=30, clients_per_round=cap, seed=seed)
    assert follow(selector, oracle, RoundReport, world=WORLD, rounds=ROUNDS, seed=seed, check_state=True) == []
    assert oracle.decided > (ROUNDS - 30) / 2


def test_warmup_returns_everyone() -> None:
    """Also with a cap, also when balls would be dominated; the first round after it keeps to the cap."""
    for cap in (None, 3):
        selector = build(warmup_rounds=6, clients_per_round=cap)
        inform(selector, {k: (0.1, 0.05 + k / 10) for k in range(10)})
        for t in range(6):
            available = list(range(10)) if t else [3, 4, 8]
            chosen = play(selector, available, {k: (0.1 + k / 12, 0.95 - k / 11) for k in range(10)})
            assert chosen == set(available)
        assert len(selector.select(np.arange(10))) < 10


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_drops_clients_of_the_front(seed: int) -> None:
    """min(cap, clients of the front) of them; only balls with a surviving client are updated."""
    oracle = PCZFLOracle(0.02, clients_per_round=2)
    selector = build(clients_per_round=2, seed=seed)
    assert follow(selector, oracle, RoundReport, world=WORLD, rounds=ROUNDS, seed=seed, check_state=True) == []
    assert min(ball.radius for ball in oracle.balls) <= 1 / 8


def test_a_cap_drops_at_random() -> None:
    """Four clients in the first ball, two go: each of the six pairs 100 times in 600 seeds (4.5 sd = 41)."""
    pairs = Counter(tuple(build(clients_per_round=2, seed=seed).select(np.arange(4)).tolist()) for seed in range(600))
    assert len(pairs) == 6
    assert max(abs(count - 100) for count in pairs.values()) < 41


def test_the_seed_does_not_matter_without_a_cap() -> None:
    """No draw is made: two seeds choose alike."""
    runs = []
    for seed in (1, 2):
        selector = build(seed=seed)
        inform(selector, {k: (0.1, 0.5 + k / 25) for k in range(9)})
        rewards: Rewards = {k: (0.2 + k * k / 100, 0.5 + k / 25) for k in range(9)}
        runs.append([play(selector, list(range(9)), rewards) for _ in range(30)])
    assert runs[0] == runs[1]
    assert min(len(chosen) for chosen in runs[0]) < 9


def test_saved_between_choice_and_report() -> None:
    """What is saved after `select` and loaded elsewhere goes on as if never stopped."""
    for cap in (None, 2):
        straight, resumed = build(clients_per_round=cap), build(clients_per_round=cap, seed=9)
        for selector in (straight, resumed):
            inform(selector, {k: (0.1, 0.5 + k / 25) for k in range(9)})
        rng = np.random.default_rng(1)
        for t in range(40):
            rewards: Rewards = {k: (float(rng.uniform(0.1, 0.3) + k / 20), float(rng.uniform(0, 1))) for k in range(9)}
            chosen = straight.select(np.arange(9))
            if t == 20:
                resumed.load_state_dict(straight.state_dict())
            elif t > 20:
                np.testing.assert_array_equal(resumed.select(np.arange(9)), chosen)
            for selector in (straight, resumed) if t >= 20 else (straight,):
                selector.observe(report(chosen, rewards))


def after(played: int) -> tuple[Any, list[Rewards]]:
    """A selector that has played some rounds (after two there are two balls), and the rewards of rounds to come."""
    selector = build()
    inform(selector, {k: (0.1, 0.5 + k / 25) for k in range(9)})
    rng = np.random.default_rng(1)
    rewards: list[Rewards] = [
        {k: (float(rng.uniform(0.1, 0.3) + k / 20), float(rng.uniform(0, 1))) for k in range(9)} for _ in range(30)
    ]
    for one in rewards[:played]:
        play(selector, list(range(9)), one)
    return selector, rewards[played:]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("radius", ["a", "b"], "finite float64 numbers"),
        ("radius", "a", "finite float64 numbers"),
        ("radius", [1.0, math.nan], "finite float64 numbers"),
        ("radius", [1.0, math.inf], "finite float64 numbers"),
        ("radius", [[1.0], [0.5, 0.5]], "finite float64 numbers"),
        ("radius", None, "finite float64 numbers"),
        ("radius", 1.0, "shape"),
        ("centre", [[0.5, math.nan], [0.2, 0.2]], "finite float64 numbers"),
        ("centre", [0.5, 0.5], "shape"),
        ("ball_mean", [[0.5, 0.5j], [0.2, 0.2]], "finite float64 numbers"),
        ("ball_plays", [1.5, 0.0], "finite int64 numbers"),
        ("chosen_balls", [2**64 - 1], "finite int64 numbers"),
        ("chosen_balls", 0, "one-dimensional"),
        ("chosen_balls", [[0]], "one-dimensional"),
        ("chosen_balls", ["0"], "finite int64 numbers"),
        ("chosen_balls", [0.0], "finite int64 numbers"),
    ],
)
def test_balls_that_do_not_fit_change_nothing(name: str, value: Any, said: str) -> None:
    """A state with two balls, one array of it damaged, is refused by name; the selector plays on as its twin does.

    The state is a round further, so that whatever was taken over of it would show.
    """
    (selector, rewards), (twin, _), (other, _) = after(1), after(1), after(2)
    state = other.state_dict()
    assert len(state["radius"]) == 2
    with pytest.raises(StateError, match=f"^state '{name}' must .*{re.escape(said)}"):
        selector.load_state_dict(state | {name: value})
    for key, kept in twin.state_dict().items():
        np.testing.assert_array_equal(selector.state_dict()[key], kept)
    for one in rewards:
        assert play(selector, list(range(9)), one) == play(twin, list(range(9)), one)


def test_a_state_of_other_keys_is_refused_by_its_keys() -> None:
    """Missing or foreign keys are named, even where an array does not fit either; nothing changes."""
    (selector, rewards), (twin, _), (other, _) = after(1), after(1), after(2)
    state = other.state_dict() | {"chosen_balls": [7]}
    short = {key: value for key, value in state.items() if key != "radius"}
    for foreign, said in (
        (short, "missing ['radius'], unexpected []"),
        (state | {"surprise": 1}, "missing [], unexpected ['surprise']"),
        ({}, "missing ['accuracy', 'ball_mean'"),
        (create("round-robin", clients_per_round=2).state_dict(), "unexpected ['"),
    ):
        with pytest.raises(StateError, match="does not belong to pczfl") as refused:
            selector.load_state_dict(foreign)
        assert said in str(refused.value)
    for one in rewards:
        assert play(selector, list(range(9)), one) == play(twin, list(range(9)), one)


def test_a_state_may_be_of_lists() -> None:
    """As JSON would give it back: lists of numbers, an empty one included."""
    (straight, rewards), resumed = after(5), build(seed=9)
    state = straight.state_dict()
    assert not state["chosen_balls"].size
    resumed.load_state_dict(state | {name: state[name].tolist() for name in ("centre", "radius", "chosen_balls")})
    for one in rewards:
        assert play(resumed, list(range(9)), one) == play(straight, list(range(9)), one)


def test_a_loaded_state_is_a_copy() -> None:
    """Playing on does not change what was loaded."""
    (straight, rewards), resumed = after(5), build()
    state = straight.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    resumed.load_state_dict(state)
    for one in rewards:
        play(resumed, list(range(9)), one)
    for key, value in before.items():
        np.testing.assert_array_equal(state[key], value)


def test_first_round_takes_clients_nobody_told_about() -> None:
    """The first ball covers the whole space, so whatever context is assumed, everyone is in it."""
    assert build().select(np.array([5, 2, 9])).tolist() == [2, 5, 9]


@pytest.mark.parametrize("column", ["accuracy", "energy_score"])
def test_a_score_outside_the_unit_interval_hides_no_client(column: str) -> None:
    """Contexts live in [0, 1]: a score of 2.5 lies in no ball; refused by name, or the client still takes part."""
    selector = build(warmup_rounds=1)
    try:
        selector.inform(np.arange(2), **{"accuracy": [0.1, 0.1], "energy_score": [0.5, 0.5], column: [0.5, 2.5]})
    except ValueError as error:
        assert column in str(error)  # noqa: PT017
    else:
        assert selector.select(np.arange(2)).tolist() == [0, 1]


@pytest.mark.parametrize("column", ["accuracy", "energy_score"])
def test_needs_both_objectives(column: str) -> None:
    """A report without one of them is refused by name."""
    selector = build()
    assert selector.needs - {"latency"} == {"accuracy", "energy_score"}
    chosen = selector.select(np.arange(2))
    columns = {"accuracy": [0.5, 0.5], "energy_score": [0.5, 0.5]}
    del columns[column]
    with pytest.raises(ValueError, match=column):
        selector.observe(RoundReport(clients=chosen, completed=[True, True], latency=[1.0, 1.0], **columns))


@pytest.mark.parametrize(
    ("name", "value"),
    [("uncertainty", -0.1), ("uncertainty", math.nan), ("warmup_rounds", -1), ("clients_per_round", 0)],
)
def test_wrong_parameters_are_refused_by_name(name: str, value: float) -> None:
    """The message names the parameter."""
    with pytest.raises(ValueError, match=name):
        build(**{name: value})
