"""How often each client was selected and each kind of problem met, kept as rounds go by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.rounds.records import ClientRecord


class Tally:
    """Counts over clients' records.

    Attributes:
        rounds: How many rounds are in it, as its owner counts them.
        problems: Kind -> how often it was met.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.problems: Counter[str] = Counter()
        self._selections = np.zeros(0, dtype=np.int64)  # by row

    def add(self, clients: Sequence[ClientRecord]) -> None:
        """Count some records."""
        self.problems.update(problem.split(":")[0] for row in clients for problem in row.problem.split("; ") if problem)
        more = np.bincount([row.client for row in clients], minlength=self._selections.size).astype(np.int64)
        more[: self._selections.size] += self._selections
        self._selections = more

    def selections(self, num_clients: int) -> IntArray:
        """How often each client was selected, by row, shape (num_clients,) or longer where there are more rows."""
        counts = np.zeros(max(num_clients, self._selections.size), dtype=np.int64)
        counts[: self._selections.size] = self._selections
        return counts
