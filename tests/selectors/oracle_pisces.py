"""A slow, plain-Python reading of Pisces that judges a selector's choices.

Nothing is kept but the rows of every report. Which clients are explored, their utilities and their failures are read
off these rows again at every question. A choice is judged by what it may be, and its chances follow by enumeration.

References:
    Jiang et al. (2022), Pisces, with the exploration of the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from tests.selectors.oracle_draws import Chances
from tests.selectors.oracles import Judge

Row = tuple[int, int, bool, bool, float, float]  # round, client, completed, spare, rms loss, staleness


@dataclass
class PiscesOracle(Judge):
    """Constants as the selector's; sizes are known of everybody."""

    m: int
    sizes: Sequence[float]
    beta: float = 0.5
    window: int = 5
    t: int = 0
    rows: list[Row] = field(default_factory=list)
    decided: int = 0  # rounds in which some explored client was left out for another one
    lasts: int = 0  # rounds in which a client that failed repeatedly was there

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        selector.inform(np.array(clients), num_examples=np.array([self.sizes[client] for client in clients]))

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
        if len(set(chosen)) != size or not set(chosen) <= set(available):
            return f"{list(chosen)} is not {size} different clients of {list(available)}"
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
            best = ranked[: size - min(planned, len(new))]
            others = list(combinations(sorted(new), min(len(new), size - len(best))))
            for more in others:
                rest = list(combinations(sorted(last), size - len(best) - len(more)))
                for end in rest:
                    members = frozenset((*best, *more, *end))
                    found[members] = found.get(members, 0.0) + chance / len(others) / len(rest)
        return found
