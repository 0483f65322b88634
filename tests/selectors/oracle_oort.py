"""A slow, plain-Python reading of Oort that judges a selector's choices.

Nothing is kept but the complete history; utilities, the pacer and scores are counted again from round 1 at every
question. A choice is judged by what it may be: so many clients never tried, and the others among the candidates.

References:
    Lai et al. (2021), Oort, Algorithm 1, with the constants and the pacer of the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.selectors.oracles import Judge

Row = tuple[int, bool, float, float]  # client, completed, latency, rms loss (NaN where not told)


@dataclass
class PastRound:
    exploited: set[int]
    rows: list[Row] = field(default_factory=list)


@dataclass
class OortOracle(Judge):
    """Constants as the selector's; sizes are known of everybody."""

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

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        selector.inform(np.array(clients), num_examples=np.array([self.sizes[client] for client in clients]))

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
        if len(set(chosen)) != size or not set(chosen) <= set(available):
            return f"{list(chosen)} is not {size} different clients of {list(available)}"
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
