"""Pisces against rounds worked by hand and a plain recount of all reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors.pisces import Pisces
from tests.selectors import rounds
from tests.selectors.oracle_draws import Chances, frequencies, frozen, p_value, then_uniformly
from tests.selectors.oracles import Judge, World, follow, miscounted

Row = tuple[int, int, bool, bool, float, float]  # round, client, completed, spare, rms loss, staleness


@dataclass
class PiscesOracle(Judge):
    """A slow reading of Jiang et al. (2022), with the exploration of the authors' code, that judges choices.

    It keeps the rows of every report. Who is explored, utilities and failures are read off them again at every
    question. Constants are the selector's; sizes are known of everybody.
    """

    m: int
    sizes: Sequence[float]
    beta: float = 0.5
    window: int = 5
    t: int = 0
    rows: list[Row] = field(default_factory=list)
    decided: int = 0  # rounds in which some explored client was left out for another one
    lasts: int = 0  # rounds in which a client that failed repeatedly was there

    def forget(self, client: int) -> None:
        self.rows = [row for row in self.rows if row[1] != client]

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        """A few are spares, of whom some report no loss; whoever failed has NaN."""
        spare = rng.random(len(clients)) < 0.15
        told = completed & ~(spare & (rng.random(len(clients)) < 0.5))
        return {
            "spare": spare,
            "rms_loss": np.where(told, rng.exponential(size=len(clients)), np.nan),
            "staleness": np.where(completed, rng.integers(0, 9, len(clients)), np.nan),
        }

    def observe(self, report: Any) -> None:
        columns = (report.clients, report.completed, report.spare, report.rms_loss, report.staleness)
        self.rows += [(self.t, *row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def is_last(self, client: int, t: int) -> bool:
        """Whether two or more failures in a row, at least one of them recent, put the client behind all others."""
        mine = [row for row in self.rows if row[1] == client]
        since = max((i for i, row in enumerate(mine) if row[2]), default=-1)
        failed = [row[0] for row in mine[since + 1 :] if not row[3]]
        return len(failed) >= 2 and t <= failed[-1] + 2 ** len(failed)

    def utility(self, client: int) -> float | None:
        """|B_i| rms / (1 + tau)^beta from all that the client ever reported; None if it is not explored."""
        mine = [row for row in self.rows if row[1] == client]
        losses = [row[4] for row in mine if not math.isnan(row[4])]
        late = [row[5] for row in mine if row[2] and not row[3]][-self.window :]
        if not losses:
            return None
        expected = sum(late) / len(late) if late else 0.0
        return self.sizes[client] * losses[-1] / (1 + expected) ** self.beta

    def parts(self, available: Sequence[int], t: int) -> tuple[dict[int, float], set[int], set[int]]:
        """Explored clients with their utilities, unexplored ones, and those that come last."""
        last = {client for client in available if self.is_last(client, t)}
        utilities = {client: self.utility(client) for client in available if client not in last}
        tried = {client: utility for client, utility in utilities.items() if utility is not None}
        return tried, set(utilities) - set(tried), last

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.t += 1
        tried, new, last = self.parts(available, self.t)
        size = min(self.m, len(available))
        if fault := miscounted(chosen, available, size):
            return fault
        inside, outside = set(tried) & set(chosen), set(tried) - set(chosen)
        self.decided += bool(inside and outside)
        self.lasts += bool(last)
        if len(last & set(chosen)) != max(0, size - len(tried) - len(new)):
            return f"{last & set(chosen)} failed repeatedly, and others were left"
        worst, best = (pick((tried[k] for k in part), default=0.0) for pick, part in ((min, inside), (max, outside)))
        return f"{worst} was exploited before {best}" if inside and outside and worst < best - 1e-9 else ""

    def chances(self, available: Sequence[int], epsilon: float) -> Chances:
        """Chance of each set of the next round: a binomial number of places is for unexplored clients."""
        tried, new, last = self.parts(available, self.t + 1)
        size, ranked, found = min(self.m, len(available)), sorted(tried, key=lambda k: -tried[k]), Chances()
        for planned in range(size + 1):
            chance = math.comb(size, planned) * epsilon**planned * (1 - epsilon) ** (size - planned)
            best = {frozenset(ranked[: size - min(planned, len(new))]): chance}
            for members, share in then_uniformly(then_uniformly(best, new, size), last, size).items():
                found[members] = found.get(members, 0.0) + share
        return found


build = partial(Pisces, clients_per_round=2, seed=0)
greedy = partial(build, exploration=0.0, exploration_min=0.0)
"""A selector that explores only clients that it must."""


def play(
    selector: Pisces, available: Iterable[int], losses: dict[int, float], late: dict[int, float] | None = None
) -> list[int]:
    """Choose and report; a client without a loss fails, and one without a staleness has 0."""
    staleness = dict.fromkeys(losses, 0.0) | (late or {})
    return rounds.play(selector, available, dict.fromkeys(losses, 1.0), rms_loss=losses, staleness=staleness)


@pytest.mark.parametrize(("beta", "chosen"), [(0.0, [0, 1]), (0.5, [0, 2]), (1.0, [2, 3])])
def test_utilities_by_hand(beta: float, chosen: list[int]) -> None:
    """Sizes (10, 4, 2, 2), losses (2, 4, 5, 4): 20, 16, 10, 8 with beta = 0.

    Staleness (3, 8, 0, 0): 1 + tau = (4, 9, 1, 1). beta = .5: 20/2, 16/3, 10, 8 = (10, 5.33, 10, 8) -> 0, 2.
    beta = 1: (5, 1.78, 10, 8) -> 2, 3.
    """
    selector = greedy(staleness_penalty=beta, clients_per_round=4)
    selector.inform(np.arange(4), num_examples=np.array([10.0, 4.0, 2.0, 2.0]))
    play(selector, range(4), {0: 2.0, 1: 4.0, 2: 5.0, 3: 4.0}, {0: 3.0, 1: 8.0})
    selector.clients_per_round = 2
    assert selector.select(np.arange(4)).tolist() == chosen


def test_a_report_without_staleness_has_zeros_and_speed_does_not_count() -> None:
    told = rounds.report([0, 1], {0: 1.0, 1: 50.0}, rms_loss={0: 1.0, 1: 2.0})
    assert told.staleness is not None
    assert (told.staleness.dtype, told.staleness.tolist()) == (np.float64, [0.0, 0.0])
    selector = greedy()
    selector.select(np.arange(2))
    selector.observe(told)
    selector.clients_per_round = 1
    assert selector.select(np.arange(2)).tolist() == [1]


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("available", [range(8), [0, 3, 4, 5, 6, 7], [0, 1, 5, 7]], ids=["all", "few tried", "last"])
def test_sets_have_the_chances_of_an_enumeration(epsilon: float, available: Iterable[int]) -> None:
    """Clients 0 to 3 are explored, 4 to 6 are not, and 7 has failed twice in a row."""
    selector = greedy(clients_per_round=3, exploration=epsilon, exploration_decay=1.0)
    oracle = PiscesOracle(3, [1.0] * 8)
    selector.inform(np.arange(8), num_examples=np.ones(8))
    for here, losses in [([0, 1, 2], {0: 1.0, 1: 3.0, 2: 2.0}), ([3], {3: 0.5}), ([7], {}), ([7], {})]:
        chosen = selector.select(np.array(here))
        told = rounds.report(chosen, dict.fromkeys(losses, 1.0), rms_loss=losses, staleness={1: 3.0, 0: 0, 2: 1, 3: 0})
        oracle.t += 1
        oracle.observe(told)
        selector.observe(told)
    assert p_value(frequencies(frozen(selector, available), 600), oracle.chances(list(available), epsilon)) > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_choices_are_those_of_a_recount(seed: int, epsilon: float) -> None:
    """200 rounds with failures, spares, absences, newcomers, clients that are forgotten, and unobserved rounds."""
    selector = build(clients_per_round=3, exploration=epsilon, exploration_min=epsilon, seed=seed)
    oracle = PiscesOracle(3, [float(5 + 7 * k % 40) for k in range(12)])
    world = World(num_clients=12, newcomers={0: 20, 5: 60}, failure=0.3)
    assert follow(selector, oracle, world=world, rounds=200, seed=seed, forget_every=25) == []
    assert oracle.decided > 100
    assert oracle.lasts > 20


def test_the_decay_begins_after_a_common_warm_up() -> None:
    selector = build(clients_per_round=1, exploration=0.8, exploration_decay=0.5, exploration_min=0.0)
    selector.plan_rounds(warmup_rounds=2)
    losses = {0: 1.0, 1: 2.0, 2: 3.0}
    assert [play(selector, range(3), losses) for _ in range(2)] == [[0, 1, 2]] * 2
    for number in range(3):
        assert play(selector, range(3), losses) == [2]  # all were explored in the warm-up
        assert selector._exploration_share() == 0.8 * 0.5**number
