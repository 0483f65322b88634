"""When a connection is asked who it is."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger("fedsel_flwr")


class RollCall:
    """Remembers who did not answer: they are asked last, and ever more rarely, so that one cannot hold up every round.

    Args:
        timeout: How long an answer is waited for, seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._in_vain: dict[str, int] = {}  # connection -> how often it did not answer
        self._not_before: dict[str, int] = {}  # connection -> round in which it is asked again

    def due(self, connections: Iterable[str], round: int) -> list[str]:
        """The connections to ask before ``round``, those that hung before last."""
        due = [name for name in connections if self._not_before.get(name, 0) <= round]
        return sorted(due, key=lambda name: self._in_vain.get(name, 0))

    def missed(self, connections: Iterable[str], round: int) -> None:
        """Note who was asked before ``round`` and did not answer."""
        for name in connections:
            self._in_vain[name] = self._in_vain.get(name, 0) + 1
            self._not_before[name] = round + 2 ** min(self._in_vain[name] - 1, 30)
            logger.warning(
                "roll call: client %s did not answer within %g s and is left out of this round", name, self.timeout
            )
