"""When a run has spent what it may, before its rounds are over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsel_flwr.checks import real
from fedsel_flwr.rounds.history import History


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may spend; it ends with the round in which one of them is used up.

    Args:
        simulated_s: Seconds on the strategy's clock, above 0; infinite for no limit.
        joules: Joules of all clients, above 0; infinite for no limit.

    Raises:
        ParameterError: A limit is not above 0.

    >>> history = History()
    >>> _ = history.append(round=1, num_available=1, round_s=2.0, clients=[])
    >>> Budget(simulated_s=2.0).spent(history), Budget(simulated_s=3.0).spent(history)
    (True, False)
    """

    simulated_s: float = math.inf
    joules: float = math.inf

    def __post_init__(self) -> None:
        """Check both limits."""
        for name, value in (("simulated_s", self.simulated_s), ("joules", self.joules)):
            if value != math.inf:
                real(name, value, above=0.0)

    def spent(self, history: History) -> bool:
        """Whether nothing is left."""
        if not history.rounds:
            return False
        last = history.rounds[-1]
        return last.simulated_s >= self.simulated_s or last.total_energy_j >= self.joules
