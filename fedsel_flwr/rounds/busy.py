"""Who still works on something earlier."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import saving


class Busy:
    """Connections that have not answered a question, and are not asked again until they do or a bound has passed.

    A SuperNode works off one message after the other. One that hangs answers nobody, and one that trains for longer
    than the server waits comes to the next question only after that.

    A run of Flower that begins anew forgets them: what was asked in the one before is answered to nobody, so that
    nothing would free them before the bound. The first question finds out.

    Args:
        timeout: Seconds after which a connection that never answered may be asked again; None: it may not.
        clock: Seconds that go on from one process to the next.

    >>> busy = Busy(timeout=60.0)
    >>> busy.owe(["a", "b"])
    >>> busy.answered("b")
    >>> busy.free(["a", "b", "c"])
    ['b', 'c']
    """

    def __init__(self, timeout: float | None = 3600.0, clock: Callable[[], float] = time.time) -> None:
        self._timeout, self._clock = inf if timeout is None else timeout, clock
        self._until: dict[str, float] = {}  # connection -> when it may be asked again

    def __contains__(self, node: object) -> bool:
        """Whether a connection is busy."""
        return isinstance(node, str) and self._clock() < self._until.get(node, -inf)

    def owe(self, nodes: Iterable[str]) -> None:
        """The server gave up waiting for these."""
        self._until |= dict.fromkeys(nodes, self._clock() + self._timeout)

    def answered(self, node: str) -> None:
        """An answer came late, or the word that none will come."""
        self._until.pop(node, None)

    def free(self, nodes: Iterable[str]) -> list[str]:
        """Those of ``nodes`` that are not busy."""
        return [node for node in nodes if node not in self] if self._until else list(nodes)

    def ready(self, nodes: Sequence[str]) -> BoolArray:
        """Which of ``nodes`` are not busy, shape (n,)."""
        if not self._until:
            return np.ones(len(nodes), dtype=np.bool_)
        return np.array([node not in self for node in nodes], dtype=np.bool_)

    def release(self, connected: Collection[str]) -> None:
        """Forget connections that are gone: whoever comes back has begun anew."""
        for node in self._until.keys() - connected if self._until else ():
            self._until.pop(node, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._until.clear()

    def state_dict(self) -> saving.State:
        """When each may be asked again, seconds; infinite where the answer is waited for."""
        return {"until": dict(self._until)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, self.state_dict())
        until = state["until"]
        if not isinstance(until, Mapping):
            raise StateError(f"until must be a mapping from connection to seconds, got {until!r:.80}")
        self._until = {str(node): saving.plain_number("until", end) or 0.0 for node, end in until.items()}

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""
