"""CS-UCB-Q against rounds worked by hand and against every subset, (26)-(28) of Xia et al. (2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import CSUCBQ, create
from tests.selectors.oracles import CSUCBOracle, World, follow
from tests.selectors.rounds import play


@dataclass(kw_only=True)
class CSUCBQOracle(CSUCBOracle):
    """Xia et al., Algorithm 2: the set that maximizes (28); c is `fairness`, else it follows from (equal) sizes.

    Queues are counted from their start. Where the paper leaves two readings open, this is the selector's: a round that
    is never observed serves nobody, so that every queue grows by c; and the step from t - 1 to t takes the c of round
    t, if c follows from data sizes and a newcomer changes their sum.
    """

    queue_weight: float
    fairness: Mapping[int, float] | None = None
    sizes: Mapping[int, float] | None = None
    fairness_scale: float = 0.5
    first: dict[int, int] = field(default_factory=dict)  # client -> the first round in which it is registered
    played: dict[int, set[int]] = field(default_factory=dict)  # observed round -> who was played in it, failed or not
    rewards: dict[int, list[float]] = field(default_factory=dict)

    def inform(self, clients: Iterable[int]) -> None:
        """Register clients from the next round on."""
        for client in clients:
            self.first.setdefault(int(client), len(self.rounds) + 1)

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        super().tell(selector, clients, rng)
        if self.sizes is not None:
            self.inform(clients)

    def observe(self, report: Any) -> None:
        super().observe(report)
        self.played[len(self.rounds)] = set(report.clients.tolist())
        for client, done, seconds in self.rounds[-1].rows:
            self.rewards.setdefault(client, []).append(self.reward(done, seconds))

    def share(self, client: int, t: int) -> float:
        """Return c_k as it is known in round t: given, or phi m s_k/sum(s) over the clients registered by then."""
        if self.fairness is not None:
            return self.fairness[client]
        roster = [k for k, first in self.first.items() if first <= t]
        sizes = self.sizes or dict.fromkeys(roster, 1.0)
        share = self.fairness_scale * self.m * sizes[client] / sum(sizes[k] for k in roster)
        assert share < 1, "the cap below 1 is not one number; choose sizes that stay below it"
        return share

    def queue(self, client: int) -> float:
        """Return D_k at the beginning of the open round (27), from the client's first round on."""
        length = 0.0
        for t in range(self.first[client], len(self.rounds)):
            played = client in self.played.get(t, ())  # b_k(t)
            length = max(length + self.share(client, t + 1) - played, 0.0)  # (27)
        return length

    def terms(self, client: int) -> tuple[float, ...]:
        """Return what a client adds to the sum in (28)."""
        rewards, optimistic = self.rewards.get(client, []), 1.0
        if rewards:
            bonus = math.sqrt(2 * math.log(len(self.rounds)) / len(rewards))
            optimistic = min(sum(rewards) / len(rewards) + bonus, 1.0)  # (26)
        return ((1 - self.queue_weight) * optimistic + self.queue_weight * self.queue(client),)  # (28)

    def score(self, members: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return (sum(value for (value,) in members),)  # (28)

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.inform(available)
        return super().explain(available, chosen)


ROUNDS = 400
FAIRNESS = {0: 0.7, 1: 0.05, 2: 0.3, 3: 0.25, 4: 0.4, 5: 0.1}  # sum 1.8
build = partial(create, "cs-ucb-q", clients_per_round=2, max_latency=1.0, seed=0)


@pytest.mark.parametrize("as_mapping", [True, False], ids=["mapping", "array"])
def test_rounds_by_hand(as_mapping: bool) -> None:
    """Three clients, m = 2, max_latency 10 s, beta = .25, c = (.8, .1, .6); rounds 1-5 are forced by availability.

    Client 0 always fails (r 0), 1 takes 1 s (r .9), 2 takes 10 s (r 0). Played: {0, 2}, {0, 1} three times, {2}: at
    the beginning of round 6 n = (4, 3, 2), and the queues are
        client 0: 0 0 0 0 0 .8      client 1: 0 .1 0 0 0 .1     client 2: 0 0 .6 1.2 1.8 1.4
    Round 6, .75 yhat + .25 D; yhat_0 = sqrt(2 ln 6/4) = .9465; the others are cut at 1 (.9 + 1.093, 1.339):
        .7099 + .25 * .8 = .9099     .75 + .25 * .1 = .7750     .75 + .25 * 1.4 = 1.1000              -> {0, 2}
    Round 7: n = (5, 3, 3), D = (.6, .2, 1.0), yhat_0 = sqrt(2 ln 7/5) = .8823:
        .6617 + .15 = .8117          .75 + .05 = .8000          .75 + .25 = 1.0000                    -> {0, 2}
    Round 8: n = (6, 3, 4), D = (.4, .3, .6), yhat_0 = sqrt(2 ln 8/6) = .8326, yhat_2 = 1 (1.0197 cut):
        .6244 + .10 = .7244          .75 + .075 = .8250         .75 + .15 = .9000                     -> {1, 2}
    Each of these readings would choose differently in some round: ln(t-1) or (m+1) ln t under the root, no cut at 1,
    beta and 1 - beta exchanged, yhat not weighted by 1 - beta, b = 0 or no play for a failed client, D with this
    round's c.
    """
    c = {0: 0.8, 1: 0.1, 2: 0.6} if as_mapping else np.array([0.8, 0.1, 0.6])
    for seed in range(10):
        selector = CSUCBQ(clients_per_round=2, max_latency=10.0, fairness=c, queue_weight=0.25, seed=seed)
        selector.inform(np.arange(3))
        available = [[0, 2], [0, 1], [1, 0], [0, 1], [2], [0, 1, 2], [2, 0, 1], [1, 0, 2]]
        choices = [play(selector, now, {0: 10.0, 1: 1.0, 2: 10.0}, failed=(0,)) for now in available]
        assert choices == [[0, 2], [0, 1], [0, 1], [0, 1], [2], [0, 2], [0, 2], [1, 2]]


SIZES = dict(enumerate(np.random.default_rng(1).integers(100, 900, 6).tolist()))
GIVEN = [({"fairness": FAIRNESS, "queue_weight": weight}, {}) for weight in (0.0, 0.01, 0.3, 1.0)]
FROM_SIZES = [({"fairness_scale": 0.6, "queue_weight": weight}, {"sizes": SIZES}) for weight in (0.01, 0.3)]
DEFAULTS = [({}, {"queue_weight": 0.01, "fairness_scale": 0.5})]


@pytest.mark.parametrize(("own", "only_oracle"), [*GIVEN, *FROM_SIZES, *DEFAULTS])
@pytest.mark.parametrize(("inform", "seed"), [(True, 0), (False, 1)])
def test_every_choice_maximizes(inform: bool, seed: int, own: dict[str, Any], only_oracle: dict[str, Any]) -> None:
    """Random availability, failures, unreported rounds and two newcomers, against all subsets.

    Fairness is given, or it is c_k = phi m s_k/sum(s) with the sizes that `inform` told, or equal ones.
    """
    selector, oracle = build(**own, seed=seed), CSUCBQOracle(2, 1.0, **own, **only_oracle)
    if inform and "sizes" not in only_oracle:
        selector.inform(np.arange(6))
        oracle.inform(range(6))
    world = World(num_clients=6, newcomers={0: 40, 5: 90}, grid=(0.1, 0.9, 1.0) if inform else ())
    assert follow(selector, oracle, world=world, rounds=ROUNDS, seed=3000 + seed) == []
    # Of weight 0 yhat alone, which is cut at 1 for many rounds, decides: all tie.
    assert oracle.decided > ROUNDS / 2 or own.get("queue_weight") == 0


def queues(selector: CSUCBQ, available: list[int], rounds: int) -> list[list[float]]:
    """The queues at the beginning of each round; no choice is observed, so that nobody is served."""
    found = []
    for _ in range(rounds):
        selector.select(np.array(available))
        found.append(selector.state_dict()["queue"].tolist())
    return found


def test_a_giant_is_capped_below_one() -> None:
    """phi m s_0/sum(s) = .9 * 2 * 1000/1002 = 1.796 is no fraction of rounds: c_0 is capped just below 1."""
    selector = build(fairness_scale=0.9, queue_weight=1.0)
    selector.inform(np.arange(3), num_examples=np.array([1000, 1, 1]))
    first = [queue[0] for queue in queues(selector, [1, 2], 3)]
    assert first == pytest.approx([0.0, 1.0, 2.0], abs=1e-12)
    assert 0.0 < 1.0 - first[1] < 1e-12


def test_the_c_of_the_round_that_opens_enters_the_queue() -> None:
    """(27) with c from sizes, phi = .5, m = 1: (.25, .25) while they are unknown, then (.375, .125), then (.1, .4).

    Told between rounds 1 and 2: D(2) = (.375, .125). Told between 2 and 3: D(3) = (.475, .525). Nobody is served.
    With the c of the round before: D(2) = (.25, .25), D(3) = (.625, .375).
    """
    selector = build(clients_per_round=1, fairness_scale=0.5)
    selector.select(np.arange(2))
    for sizes, queue in ([3.0, 1.0], [0.375, 0.125]), ([1.0, 4.0], [0.475, 0.525]):
        selector.inform(np.arange(2), num_examples=np.array(sizes))
        assert queues(selector, [0, 1], 1)[0] == pytest.approx(queue, abs=1e-12)


@pytest.mark.parametrize("name", ["cs-ucb", "cs-ucb-q"])
def test_a_failure_earns_nothing_whatever_its_latency(name: str) -> None:
    """Client 0 answers in 1 s of 10: r = .9. Client 1 was as fast, but its update could not be used: r = 0."""
    selector = create(name, clients_per_round=2, max_latency=10.0)
    play(selector, [0, 1], 1.0, failed=[1])
    assert selector.state_dict()["mean"] == pytest.approx([0.9, 0.0], abs=1e-12)
    assert selector.state_dict()["plays"].tolist() == [1, 1]


def test_fairness_may_become_known_with_the_fleet() -> None:
    """Empty at first; a newcomer's share enters when it comes, and is refused if it is none or the sum exceeds m."""
    c: dict[int, float] = {}
    selector = build(clients_per_round=1, fairness=c)
    c |= {0: 0.5, 1: 0.25}
    assert queues(selector, [0, 1], 2)[1] == pytest.approx([0.5, 0.25])
    for bad, said in (0.5, r"its sum is 1\.25, but only m = 1"), (1.5, "at most 1, got 1.5"), (-1.0, "at least 0"):
        c[2] = bad
        with pytest.raises(ParameterError, match=f"fairness.*{said}"):
            selector.inform(np.array([2]))
        assert selector.num_clients == 2
    c[2] = 0.25
    selector.inform(np.array([2]))
    assert selector.num_clients == 3
    with pytest.raises(ParameterError, match="fairness covers 3"):
        selector.inform(np.array([3]))


@pytest.mark.parametrize("form", [np.array, list, lambda c: dict(enumerate(c))], ids=["array", "list", "mapping"])
@pytest.mark.parametrize(("c", "total"), [([0.9, 0.8, 0.75], r"2\.45"), ([0.51, 0.5, 0.5, 0.5], r"2\.01")])
def test_infeasible_fairness_is_refused_with_its_sum(form: Callable[..., Any], c: list[float], total: str) -> None:
    with pytest.raises(ParameterError, match=f"fairness.*{total}, but only m = 2"):
        build(fairness=form(c))


@pytest.mark.parametrize("feasible", [[0.55, 0.34, 0.11], [0.28, 0.33, 0.31, 0.08], [1.0, 0.0], None])
def test_a_sum_of_exactly_m_is_feasible(feasible: list[float] | None) -> None:
    """As floats some of these add up to 1.0000000000000002, on paper to m = 1; so does c from sizes with scale 1."""
    assert feasible is None or sum(feasible) >= 1
    build(clients_per_round=1, fairness=feasible, fairness_scale=1.0).select(np.arange(2))


def test_the_given_fairness_is_copied() -> None:
    c = np.array([0.1, 0.9])
    selector = build(clients_per_round=1, fairness=c)
    c[:] = [0.9, 0.1]
    assert queues(selector, [0, 1], 2)[1] == pytest.approx([0.1, 0.9])
    np.testing.assert_array_equal(c, [0.9, 0.1])
