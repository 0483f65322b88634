"""PCZFL against rounds worked by hand and against a plain list of balls, Algorithm 1 of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundReport, create, pczfl
from tests.selectors import rounds
from tests.selectors.oracles import TOLERANCE, Judge, World, follow, miscounted

Point = tuple[float, ...]


@dataclass
class Ball:
    """A closed ball and the mean rewards of its chosen rounds."""

    centre: Point
    radius: float
    prior: Point  # its mean before the first reward
    rewards: list[Point] = field(default_factory=list)

    @property
    def mean(self) -> Point:
        return average(self.rewards) if self.rewards else self.prior

    def uncertainty(self, coefficient: float) -> float:
        """Return u_B = sqrt(2 A / N_B)."""
        return math.sqrt(2 * coefficient / len(self.rewards)) if self.rewards else math.inf


def average(points: Sequence[Point]) -> Point:
    return tuple(sum(values) / len(points) for values in zip(*points, strict=True))


@dataclass
class PCZFLOracle(Judge):
    """A slow reading of Algorithm 1 with warm-up and cap: a list of balls, each with every reward it ever got.

    Domains, bounds, significance scores and fronts are computed anew at every question; numbers in brackets are the
    paper's equations. Without a cap the choice is determined, so exactly that set of clients is demanded. Rounding may
    decide where numbers are equal on paper (a context on a ball's edge, two balls with the same score): such rounds
    are counted in `ambiguous`, and a world for a test is best one that has none.
    """

    m = 3  # for the world: fewer may be there

    uncertainty: float
    warmup_rounds: int = 0
    clients_per_round: int | None = None
    energy_noise: float = 0.05
    t: int = 0
    balls: list[Ball] = field(default_factory=lambda: [Ball(centre=(0.5, 0.5), radius=1.0, prior=(0.0, 0.0))])
    context: dict[int, Point] = field(default_factory=dict)
    chosen: dict[int, list[int]] = field(default_factory=dict)  # ball -> its clients, of the round judged last
    shared: int = 0  # rounds in which a client was in two domains
    ambiguous: int = 0

    def meet(self, num_clients: int, rng: np.random.Generator) -> None:
        """Accuracy grows to a level of each client's own, energy is a draw plus a round's noise."""
        self.level, self.energy = rng.uniform(0.3, 0.9, num_clients), rng.uniform(0.2, 0.95, num_clients)

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        """Place clients that have no model yet."""
        accuracy, energy = rng.uniform(0.08, 0.12, len(clients)), self.energy[clients]
        selector.inform(np.array(clients), accuracy=accuracy, energy_score=energy)
        self.context.update(zip(clients, zip(accuracy.tolist(), energy.tolist(), strict=True), strict=True))

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        accuracy = 0.1 + (self.level[clients] - 0.1) * (1 - np.exp(-t / 25)) + rng.normal(0, 0.02, len(clients))
        energy = self.energy[clients] + self.energy_noise * rng.uniform(-1, 1, len(clients))
        scores = {"accuracy": accuracy, "energy_score": energy}
        return {name: np.where(completed, np.clip(score, 0.0, 1.0), np.nan) for name, score in scores.items()}

    def domain(self, ball: Ball, client: int) -> bool:
        """Tell whether a client is in a ball and in no strictly smaller one (2)."""
        where = self.context[client]
        around = [ball, *(other for other in self.balls if other.radius < ball.radius)]
        self.close_call |= any(abs(math.dist(where, one.centre) - one.radius) <= TOLERANCE for one in around)
        return [one for one in around if math.dist(where, one.centre) <= one.radius] == [ball]

    def upper_bound(self, ball: Ball) -> Point:
        """Return mean + u_B + r_B (4)."""
        return tuple(mean + ball.uncertainty(self.uncertainty) + ball.radius for mean in ball.mean)

    def significance(self, ball: Ball) -> Point:
        """Return r_B + the minimum over all balls of their bound and distance (5)."""
        ways = [
            [bound + math.dist(other.centre, ball.centre) for bound in self.upper_bound(other)] for other in self.balls
        ]
        return tuple(ball.radius + min(way[j] for way in ways) for j in range(len(ball.centre)))

    def front(self, available: Sequence[int]) -> dict[int, list[int]]:
        """Return the balls on the front (all relevant ones during warm-up), each with the clients in its domain."""
        self.close_call = False
        members = {i: [k for k in available if self.domain(ball, k)] for i, ball in enumerate(self.balls)}
        relevant = {i: clients for i, clients in members.items() if clients}
        everyone = [client for clients in relevant.values() for client in clients]
        self.shared += len(everyone) > len(set(everyone))
        dominated = dict.fromkeys(relevant, False)
        if self.t > self.warmup_rounds:
            scores = {i: self.significance(self.balls[i]) for i in relevant}
            for i, mine in scores.items():
                # Balls that are the same in everything are equal in every digit.
                rivals = [scores[j] for j in relevant if j != i and self.balls[i] != self.balls[j]]
                surely = any(all(a < b - TOLERANCE for a, b in zip(mine, one, strict=True)) for one in rivals)
                maybe = any(all(a <= b + TOLERANCE for a, b in zip(mine, one, strict=True)) for one in rivals)
                self.close_call |= surely != maybe
                dominated[i] = any(
                    all(a <= b for a, b in zip(mine, one, strict=True)) and mine != one for one in rivals
                )
        self.ambiguous += self.close_call
        return {i: clients for i, clients in relevant.items() if not dominated[i]}

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.t += 1
        front = self.front(available)
        candidates = {client for clients in front.values() for client in clients}
        size = len(candidates)
        if self.clients_per_round is not None and self.t > self.warmup_rounds:
            size = min(self.clients_per_round, size)
        self.decided += len(candidates) < len(available)
        kept = {i: [client for client in clients if client in chosen] for i, clients in front.items()}
        self.chosen = {i: clients for i, clients in kept.items() if clients}
        if fault := miscounted(chosen, candidates, size):
            doubt = " (rounding may decide: choose another seed)" if self.close_call else ""
            return f"{fault}, on the front {sorted(front)}{doubt}"
        return ""

    def observe(self, report: Any) -> None:
        """Zoom, update the chosen balls in order of creation, then move the clients that answered."""
        rows = zip(report.clients, report.completed, report.accuracy, report.energy_score, strict=True)
        new = {int(client): (float(a), float(e)) for client, done, a, e in rows if done}
        for i in sorted(self.chosen):
            ball = self.balls[i]
            answered = [client for client in sorted(self.chosen[i]) if client in new]
            if not answered:
                continue
            if ball.uncertainty(self.uncertainty) <= ball.radius:  # with the count before this round
                self.balls.append(child(ball, [self.context[client] for client in answered]))
            ball.rewards.append(average([new[client] for client in answered]))
        self.context.update(new)
        self.chosen = {}

    def fault_in_state(self) -> str:
        """Compare every ball's numbers, in order of creation."""
        own = {
            "radius": [ball.radius for ball in self.balls],
            "ball_plays": [len(ball.rewards) for ball in self.balls],
            "centre": [ball.centre for ball in self.balls],
            "ball_mean": [ball.mean for ball in self.balls],
        }
        for key, numbers in own.items():
            held = self.state[key]
            if held.shape != np.shape(numbers) or not np.allclose(held, numbers, rtol=0, atol=TOLERANCE):
                return f"the state's {key} are not {numbers}"
        return ""


def child(ball: Ball, contexts: Sequence[Point]) -> Ball:
    """Return the ball of half the radius around the context nearest to the mean; contexts by client index."""
    middle = average(contexts)
    distances = [math.dist(context, middle) for context in contexts]
    centre = next(c for c, d in zip(contexts, distances, strict=True) if d <= min(distances) + TOLERANCE)
    return Ball(centre=centre, radius=ball.radius / 2, prior=centre)


ROUNDS = 90
WORLD = World(num_clients=10, newcomers={0: 25, 6: 60})
Rewards = dict[int, Point | None]  # client -> (accuracy, energy score), None if it fails
build = partial(create, "pczfl", seed=0)


def inform(selector: Any, contexts: dict[int, Point]) -> None:
    """Place clients that have no model yet."""
    accuracy, energy = zip(*contexts.values(), strict=True)
    selector.inform(np.array(list(contexts)), accuracy=np.array(accuracy), energy_score=np.array(energy))


def report(chosen: Sequence[int], rewards: Rewards) -> RoundReport:
    told = {k: reward for k, reward in rewards.items() if reward is not None}
    accuracy, energy = ({k: reward[j] for k, reward in told.items()} for j in (0, 1))
    return rounds.report(chosen, dict.fromkeys(told, 1.0), accuracy=accuracy, energy_score=energy)


def play(selector: Any, available: Sequence[int], rewards: Rewards) -> set[int]:
    chosen = selector.select(np.array(available))
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
    selector = build()
    inform(selector, {0: (0.1, 0.9), 1: (0.1, 0.6), 2: (0.1, 0.3)})
    for t, given in enumerate(rewards, start=1):
        assert play(selector, [2, 0, 1], given) == set(given), f"round {t}"
    balls = selector.state_dict()
    assert balls["centre"].tolist() == [[0.5, 0.5], [0.5, 0.9], [0.4, 0.3], [0.8, 0.9], [0.45, 0.6]]
    assert balls["radius"].tolist() == [1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("uncertainty", "one", "other", "expected"),
    [
        (0.5, (0.25, 0.5), (1.0, 0.5), {1}),
        (0.51, (0.25, 0.5), (1.0, 0.5), {0, 1}),
        (0.5, (0.25, 0.5), (0.75, 0.5), {0, 1}),
        (0.5, (0.25, 0.5), (0.75 - 2**-20, 0.5), {0, 1}),
        (0.5, (0.25, 0.5), (0.75 + 2**-20, 0.5), {1}),
        (0.5, (0.1, 0.41), (0.4, 0.81), {0, 1}),
    ],
    ids=["zooms", "does not zoom", "on the edge", "inside", "outside", "on the edge but for rounding"],
)
def test_one_zoom_by_hand(uncertainty: float, one: Point, other: Point, expected: set[int]) -> None:
    """Client 0 stays at `one`, 1 waits at `other`; in rounds 1 and 2 client 0 is alone, in round 3 both are there.

    A = .5: u = sqrt(1/N) = 1 = r at N = 1, so round 2 zooms: ball b, centre `one`, radius .5, with its edge .5 away
        (the last case: .3^2 + .4^2 = .5^2, but as floats .5000000000000001). Outside of it client 1 is in a, and
        g_a = 1 + ucb_a dominates g_b = .5 + ucb_a + .25. In b, a is empty, and both go.
    A = .51: u = 1.01 > r: no zoom, both are in a.
    """
    selector = build(uncertainty=uncertainty)
    inform(selector, {0: one, 1: other})
    for _ in range(2):
        assert play(selector, [0], {0: one}) == {0}
    assert set(selector.select(np.arange(2)).tolist()) == expected


@pytest.mark.parametrize(("num_clients", "chunk"), [(1, 7), (50, 1), (50, 7), (50, 64), (3000, pczfl.CHUNK)])
def test_domains_as_definition_2_says(num_clients: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """(2): a client lies in the domain of each ball around it than which no smaller one is around it, or is in none.

    The 150 balls have radii of 1, 1/2, ... 1/32; clients stand anywhere.
    """
    monkeypatch.setattr(pczfl, "CHUNK", chunk)
    selector, rng = build(), np.random.default_rng(5)
    x, y = rng.random((2, num_clients))
    selector.inform(np.arange(num_clients), accuracy=x, energy_score=y)
    radius, centre = np.append(1.0, 0.5 ** rng.integers(1, 6, 149)), np.vstack([[0.5, 0.5], rng.random((149, 2))])
    balls = {"radius": radius, "centre": centre, "ball_plays": np.ones(150, np.int64), "ball_mean": centre}
    selector.load_state_dict(selector.state_dict() | balls)
    clients = np.arange(0, num_clients, 2)
    x, y = x[clients], y[clients]
    around = np.hypot(x[:, None] - centre[:, 0], y[:, None] - centre[:, 1]) <= radius + 1e-12
    expected = around & (radius <= np.where(around, radius, np.inf).min(axis=1, keepdims=True))
    np.testing.assert_array_equal(selector._domains(clients), expected)


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


def test_a_round_without_an_answer_changes_no_ball() -> None:
    """Everybody failed: the state is as before but for the chosen balls, which wait no longer."""
    selector, rng, everybody = build(), np.random.default_rng(1), np.arange(9)
    for _ in range(5):
        play(selector, everybody, {k: (float(rng.uniform(0.1, 0.3)), float(rng.uniform())) for k in range(9)})
    before = selector.state_dict()
    assert len(before["radius"]) > 1
    chosen = selector.select(everybody)
    assert len(selector.state_dict()["chosen_balls"]) > 0
    selector.observe(report(chosen, {}))
    for key, value in selector.state_dict().items():
        np.testing.assert_array_equal(value, before[key] + (key == "round"), err_msg=key)


@pytest.mark.parametrize(("seed", "energy_noise"), [(1, 0.05), (2, 0.0)])
@pytest.mark.parametrize(
    "own",
    [
        *({"uncertainty": a} for a in (0.005, 0.02, 0.1, 0.5)), {"warmup_rounds": 30}, {"clients_per_round": 2},
        {"warmup_rounds": 30, "clients_per_round": 2},
    ],
    ids=str,
)  # fmt: skip
def test_every_choice_is_the_front(own: dict[str, Any], seed: int, energy_noise: float) -> None:
    """Random availability, failures, unreported rounds, newcomers, returning strangers; deep enough zooms.

    A warm-up takes everyone: every relevant ball is updated and zoomed as usual. A cap drops clients of the front: then
    only balls with a surviving client. Without noise, as in the paper, each client's energy score is drawn once.
    """
    oracle = PCZFLOracle(**{"uncertainty": 0.02, "energy_noise": energy_noise} | own)
    assert follow(build(**own, seed=seed), oracle, world=WORLD, rounds=ROUNDS, seed=seed, forget_every=30) == []
    assert min(ball.radius for ball in oracle.balls) <= 1 / 8  # zoomed three times, one inside the other
    assert oracle.decided > (ROUNDS - oracle.warmup_rounds) / 2
    assert oracle.shared > ROUNDS / 10
    assert oracle.ambiguous == 0
