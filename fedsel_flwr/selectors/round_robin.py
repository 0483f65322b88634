"""Round-robin selection, a baseline of Xia et al."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.selectors.base import Selector


class RoundRobin(Selector):
    """Takes the clients in turn, by index; a client that is away when its turn comes waits for the next cycle.

    Deviations: the paper's groups of N are taken here by index; where m does not divide K, as in its Fig. 6 (K = 10,
    N = 4), of which it says nothing, a round runs on into the next cycle; a client that is away is skipped. The first
    cycle begins after a common warm-up.

    Args:
        clients_per_round: How many clients to choose each round (m).
        seed: Accepted for uniformity; nothing is drawn.

    References:
        Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B.

    >>> import numpy as np
    >>> selector = RoundRobin(clients_per_round=2)
    >>> [selector.select(np.arange(3)).tolist() for _ in range(3)]
    [[0, 1], [0, 2], [1, 2]]
    """

    name: ClassVar[str] = "round-robin"
    scalar_state: ClassVar[tuple[str, ...]] = ("_next",)

    def __init__(self, *, clients_per_round: int, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self._next = 0  # the index whose turn it is

    def _select(self, available: IntArray) -> IntArray:
        turn = np.roll(available, -int(np.searchsorted(available, self._next)))
        chosen = turn[: self.asked_per_round]
        self._next = int(chosen[-1]) + 1
        return chosen
