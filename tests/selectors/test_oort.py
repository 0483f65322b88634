"""Oort against rounds worked by hand and a plain recount of the whole history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors.oort import Oort
from tests.selectors import rounds
from tests.selectors.oracle_draws import drawn_one_by_one, frequencies, frozen, p_value
from tests.selectors.oracles import Judge, World, follow, miscounted

Row = tuple[int, bool, float, float]  # client, completed, latency, rms loss (NaN where not told)


@dataclass
class PastRound:
    exploited: set[int]
    rows: list[Row] = field(default_factory=list)


@dataclass
class OortOracle(Judge):
    """A slow reading of Lai et al. (2021), Algorithm 1, with the constants and the pacer of the authors' code.

    It keeps the history. Utilities, the pacer and scores are counted again from round 1 at every question. A choice is
    judged by what it may be: so many clients never tried, and the others among the candidates. Constants are the
    selector's; sizes are known of everybody.
    """

    m: int
    sizes: Sequence[float]
    exploration: float = 0.9
    decay: float = 0.95
    least: float = 0.2
    penalty: float = 2.0
    clip: float = 0.98
    cut_off: float = 0.7
    step: int = 20
    delta: float = 5.0
    percentile: float = 10.0
    score_range: str = "clipped"
    rounds: list[PastRound] = field(default_factory=list)
    decided: int = 0  # rounds in which some tried client was no candidate

    def tried(self, before: int) -> dict[int, tuple[float, float, int]]:
        """Tried client -> (utility, duration, last round), as they stood when round `before` began."""
        found: dict[int, tuple[float, float, int]] = {}
        failures: dict[int, int] = {}
        for number, past in enumerate(self.rounds[: before - 1], start=1):
            for client, completed, latency, loss in past.rows:
                utility = found.get(client, (0.0, 0.0, 0))[0]
                failures[client] = 0 if completed else failures.get(client, 0) + 1
                if completed:
                    utility = utility if math.isnan(loss) else self.sizes[client] * loss
                    found[client] = (utility, latency, number)
                elif failures[client] >= 2:
                    found[client] = (0.0, latency, number)
        return found

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        """Some losses are not told."""
        told = completed & (rng.random(len(clients)) < 0.9)
        return {"rms_loss": np.where(told, rng.exponential(size=len(clients)), np.nan)}

    def observe(self, report: Any) -> None:
        columns = (report.clients, report.completed, report.latency, report.rms_loss)
        self.rounds[-1].rows = list(zip(*(column.tolist() for column in columns), strict=True))

    def fault_in_state(self) -> str:
        percentile = self.threshold(len(self.rounds))
        return "" if self.state["percentile"] == percentile else f"the pacer is not at {percentile}"

    def gain(self, number: int) -> float:
        """Mean utility of the exploited clients that completed round `number`."""
        utility = self.tried(number + 1)
        past = self.rounds[number - 1]
        got = [utility[client][0] for client, completed, _, _ in past.rows if completed and client in past.exploited]
        return sum(got) / len(got) if got else 0.0

    def threshold(self, t: int) -> float:
        """The pacer's percentile in round t."""
        percentile, gains = self.percentile, [self.gain(number) for number in range(1, t)]
        for passed in range(2 * self.step, t, self.step):
            before = sum(gains[passed - 2 * self.step : passed - self.step])
            now = sum(gains[passed - self.step : passed])
            if abs(now - before) <= 0.1 * before:
                percentile = min(100.0, percentile + self.delta)
            elif abs(now - before) >= 5 * before:
                percentile = max(self.delta, percentile - self.delta)
        return percentile

    def scores(self, available: Sequence[int], t: int) -> dict[int, float]:
        """Scores of the tried clients among the available ones."""
        tried = self.tried(t)
        durations = sorted(duration for _, duration, _ in tried.values())
        percentile = self.threshold(t)
        place = min(math.floor(len(durations) * percentile / 100 + 1e-9), len(durations) - 1)
        preferred = math.inf if percentile >= 100 or not durations else durations[place]
        here = {client: tried[client] for client in available if client in tried}
        utilities = sorted(utility for utility, _, _ in here.values() if utility > 0) or [1.0]
        scores = {}
        place = min(math.floor(len(utilities) * self.clip + 1e-9), len(utilities) - 1)
        if self.score_range == "clipped" and self.clip < 1 and len(utilities) > 2 and place == len(utilities) - 1:
            place -= 1
        clipped = utilities[place]
        high = clipped if self.score_range == "clipped" else utilities[-1]
        for client, (utility, duration, last) in here.items():
            low = 0.999 * utilities[0]
            score = max(0.0, (min(utility, clipped) - low) / max(high - low, 1e-4))
            score += math.sqrt(0.1 * math.log(t) / last)
            scores[client] = score * (preferred / duration) ** self.penalty if duration > preferred else score
        return scores

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        t = len(self.rounds) + 1
        scores = self.scores(available, t)
        self.rounds.append(PastRound(exploited=set(chosen) & set(scores)))
        size = min(self.m, len(available))
        if fault := miscounted(chosen, available, size):
            return fault
        epsilon = max(self.least, self.exploration * self.decay ** (t - 1))
        exploit = math.floor(size * (1 - epsilon) + 1e-9)
        exploit = min(len(scores), max(exploit, size - (len(available) - len(scores))))
        if len(self.rounds[-1].exploited) != exploit:
            return f"{len(self.rounds[-1].exploited)} are exploited, not {exploit}"
        if exploit == 0:
            return ""
        least = self.cut_off * sorted(scores.values(), reverse=True)[exploit - 1]
        self.decided += any(score < least for score in scores.values())
        low = {client: scores[client] for client in self.rounds[-1].exploited if scores[client] < least - 1e-9}
        return f"{low} are below {least}" if low else ""


build = partial(Oort, clients_per_round=3, seed=0)
greedy = partial(build, exploration=0.0, exploration_min=0.0)
"""A selector that explores only clients that it must."""


def play(
    selector: Oort, available: list[int], losses: dict[int, float], seconds: dict[int, float] | None = None
) -> list[int]:
    """Choose and report; a client without a loss fails after 5 s."""
    return rounds.play(selector, available, dict.fromkeys(losses, 1.0) | (seconds or {}), late=5.0, rms_loss=losses)


def test_the_defaults_are_those_of_the_authors_code() -> None:
    """training/argParser.py of github.com/SymbioticLab/Oort at 25c8853, by its own names."""
    theirs = {
        "exploration_factor": 0.9, "exploration_decay": 0.95, "exploration_min": 0.2, "round_penalty": 2.0,
        "clip_bound": 0.98, "cut_off_util": 0.7, "pacer_step": 20, "pacer_delta": 5, "round_threshold": 10,
    }  # fmt: skip
    selector = build()
    ours = ("exploration", "exploration_decay", "exploration_min", "penalty", "clip", "cut_off", "pacer_step",
            "pacer_delta", "first_percentile")  # fmt: skip
    assert [getattr(selector, name) for name in ours] == list(theirs.values())


@pytest.mark.parametrize(
    ("score_range", "cut_off", "weights"),
    [
        ("paper", 0.0, {0: 0.1159, 1: 0.4638, 2: 0.2639}), ("paper", 0.5, {1: 0.4638, 2: 0.2639}),
        ("paper", 0.7, {1: 0.4638}), ("clipped", 0.0, {0: 0.3158, 1: 1.2633, 2: 0.2663}),
        ("clipped", 0.2, {0: 0.3158, 1: 1.2633, 2: 0.2663}), ("clipped", 0.22, {0: 0.3158, 1: 1.2633}),
    ],
)  # fmt: skip
def test_scores_and_penalty_by_hand(score_range: str, cut_off: float, weights: dict[int, float]) -> None:
    """Three clients tried in round 1, one to be exploited in round 2.

    Sizes (4, 4, 1), losses (2, 1, 3): U = (8, 4, 3). Clip at rank floor(3 * .5) = 1 from 0: min(U, 4) = (4, 4, 3).
    Lowest: .999 * 3 = 2.997. (min(U, 4) - 2.997)/(8 - 2.997) = (.2005, .2005, .0006); plus sqrt(.1 ln 2/1) = .2633:
    (.4638, .4638, .2639). Durations (4, 1, 2), percentile 50: T = 2. Client 0 is slow: .4638 (2/4)^2 = .1159.
    Rank 1 has .4638: with c = .5 candidates need .2319 (1 and 2), with c = .7 .3246 (1 alone).

    With the range up to the clipped utility: (min(U, 4) - 2.997)/(4 - 2.997) = (1, 1, .0030); plus .2633: (1.2633,
    1.2633, .2663), client 0 1.2633 (2/4)^2 = .3158. With c = .2 candidates need .2527 (all), with c = .22 .2779.
    """
    selector = greedy(clip=0.5, first_percentile=50.0, cut_off=cut_off, score_range=score_range)
    selector.inform(np.arange(3), num_examples=np.array([4.0, 4.0, 1.0]))
    play(selector, [0, 1, 2], {0: 2.0, 1: 1.0, 2: 3.0}, {0: 4.0, 1: 1.0, 2: 2.0})
    selector.clients_per_round = 1
    assert p_value(frequencies(frozen(selector, [0, 1, 2]), 400), drawn_one_by_one(weights, 1)) > 1e-3


@pytest.mark.parametrize("lie", [20.0, 1e30])
def test_one_lie_leaves_the_scores_of_all_others_as_they_are(lie: float) -> None:
    """Twenty clients of losses 1, 1.1, ... 2.9; the one of 2.9 says 20 or 1e30.

    The clipped utility is the second largest, 2.8. Scores: (min(U, 2.8) - .999)/(2.8 - .999), the same whatever it says
    above 2.8. In the authors' way a lie of 1e30 leaves nothing of the others' .95.
    """
    statistical = {}
    for way in ("clipped", "paper"):
        for last in (2.9, lie):
            selector = build(clients_per_round=20, score_range=way)
            play(selector, list(range(20)), {k: 1.0 + 0.1 * k if k < 19 else last for k in range(20)})
            bonus = math.sqrt(0.1 * math.log(selector.round) / 1)
            statistical[way, last] = selector._score(np.arange(20)) - bonus
    utility = np.minimum(1.0 + 0.1 * np.arange(20), 2.8)
    assert statistical["clipped", 2.9] == pytest.approx((utility - 0.999) / (2.8 - 0.999))
    assert statistical["clipped", lie].tolist() == statistical["clipped", 2.9].tolist()
    assert statistical["paper", 2.9][18] == pytest.approx((2.8 - 0.999) / (2.9 - 0.999))
    assert statistical["paper", lie][18] < 0.1


def test_a_spare_has_the_mean_utility_and_its_own_duration() -> None:
    """Clients 0 and 1 are used (utilities 4 * 3 and 2 * 2, mean 8); 2 and 3 are spares of 8 and 2 examples.

    Client 2 answered after 7 s: loss 8/8 = 1, 7 s. Client 3 did not within 4 s: loss 8/2 = 4, at least 4 s; it had 6 s.
    """
    selector = build(clients_per_round=4)
    selector.inform(np.arange(4), num_examples=np.array([4.0, 2.0, 8.0, 2.0]))
    play(selector, [3], {3: 9.0}, {3: 6.0})
    selector.select(np.arange(4))
    seconds, spare = {0: 1.0, 1: 2.0, 2: 7.0}, [False, False, True, True]
    selector.observe(rounds.report(range(4), seconds, late=4.0, spare=spare, rms_loss={0: 3.0, 1: 2.0}))
    state = selector.state_dict()
    assert state["rms_loss"].tolist() == [3.0, 2.0, 1.0, 4.0]
    assert state["duration"].tolist() == [1.0, 2.0, 7.0, 6.0]
    assert state["last_round"].tolist() == [2, 2, 2, 2]
    assert state["failures"].tolist() == [0, 0, 0, 0]
    selector.select(np.arange(4))  # nobody is used: utilities stay
    selector.observe(rounds.report(range(4), {0: 9.0}, late=9.0, spare=[True, False, False, False], rms_loss={}))
    assert selector.state_dict()["rms_loss"].tolist() == [3.0, 2.0, 1.0, 4.0]


def test_a_size_counts_up_to_what_is_trained_on() -> None:
    """Twenty steps of 30 examples: sizes 100 and 5,000 count as 100 and 600; utilities 300 and 600."""
    selector = build(clients_per_round=2, trained_examples=600)
    selector.inform(np.arange(2), num_examples=np.array([100.0, 5000.0]))
    play(selector, [0, 1], {0: 3.0, 1: 1.0})
    assert selector._utility(np.arange(2)).tolist() == [300.0, 600.0]


def test_the_pacer_by_hand() -> None:
    """One client of one example, W = 2, Delta = 20, percentile 10 at first; the utility of a round is its loss.

    Rounds 1 to 4: 1 (explored: counts 0), 1, 1, 1. Before round 5: 0 + 1 and 1 + 1: twice as much      -> 10
    Rounds 5, 6: 1, 1.1. Before round 7: 2 and 2.1: within a tenth                                      -> 30
    Rounds 7, 8: 10, 4. Before round 9: 2.1 and 14: |11.9| >= 5 * 2.1: falls, but not below Delta       -> 20
    Rounds 9, 10: 7, 6.5. Before round 11: 14 and 13.5: within a tenth                                  -> 40
    Rounds 11, 12: both fail: 13.5 and 0                                                                -> 40
    Rounds 13, 14: both fail: 0 and 0: flat                                                             -> 60
    Rounds 15 to 18: both fail                                                                          -> 80, 100
    Round 19: it never passes 100
    """
    selector = build(clients_per_round=1, pacer_step=2, pacer_delta=20.0)
    selector.inform(np.arange(1), num_examples=np.ones(1))
    losses = [1.0, 1.0, 1.0, 1.0, 1.0, 1.1, 10.0, 4.0, 7.0, 6.5]
    seen = []
    for number in range(1, 22):
        play(selector, [0], {0: losses[number - 1]} if number <= len(losses) else {})
        seen.append(selector.state_dict()["percentile"])
    expected = [10.0] * 6 + [30.0] * 2 + [20.0] * 2 + [40.0] * 4 + [60.0] * 2 + [80.0] * 2 + [100.0] * 3
    assert seen == expected


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("score_range", ["clipped", "paper"])
@pytest.mark.parametrize("own", [{}, {"pacer_step": 3, "pacer_delta": 15.0, "cut_off": 0.9}], ids=["code", "quick"])
def test_choices_are_among_the_candidates(seed: int, score_range: str, own: dict[str, Any]) -> None:
    """120 rounds with failures, absences and newcomers; losses that were not told and rounds that nobody observed."""
    sizes = [float(5 + 7 * k % 40) for k in range(12)]
    selector, oracle = build(seed=seed, score_range=score_range, **own), OortOracle(3, sizes, score_range=score_range)
    if own:
        oracle.step, oracle.delta, oracle.cut_off = own.values()
    assert follow(selector, oracle, world=World(num_clients=12, newcomers={0: 20, 5: 60}), rounds=120, seed=seed) == []
    assert oracle.decided > 40
    assert not own or oracle.threshold(120) != 10.0
