"""How Flower's proxy of the legacy API waits: no longer than the timeout, and its message stays known after that."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.common import DEFAULT_TTL

from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.strategies.late import LateAnswers
from fedsel_flwr.strategies.silence import NotReached, accepted

POLL_S = 3.0
"""Seconds between two looks over the network, as Flower's own."""


class Patience:
    """Sends for one proxy through Flower's grid.

    Flower has the message expire with the timeout: a client that answers later is refused, and nobody learns that it is
    free again. Here the message lives on.

    Args:
        grid: Flower's grid.
        timeout: Longest wait, seconds.
        late: Told of messages that were not answered.
    """

    def __init__(self, grid: Any, timeout: float, late: LateAnswers) -> None:
        self._grid, self._timeout, self._late = grid, timeout, late

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and collect the replies until all are here or the time is over.

        Raises:
            NotReached: The SuperLink took none of them.
        """
        sent = list(messages)
        for message in sent:
            message.metadata.ttl = self._timeout + DEFAULT_TTL
        pending, deadline = accepted(self._grid.push_messages(sent)), time.monotonic() + self._timeout
        if sent and not pending:
            raise NotReached
        replies: list[Message] = []
        while pending:
            arrived = list(self._grid.pull_messages(pending))
            pending -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            left = deadline - time.monotonic()
            if not pending or left <= 0:
                break
            self._late.look_now_and_then()
            time.sleep(max(0.0, min(getattr(self._grid, "pull_interval", POLL_S), left)))
        self._late.grid = self._grid
        self._late.owe([message for message in sent if message.metadata.message_id in pending])
        return replies


def grid_of(proxies: Iterable[ClientProxy]) -> Any:
    """The grid that proxies send through, from which late answers can be fetched; None if there is none."""
    grids = (getattr(proxy, "grid", None) for proxy in proxies)
    return next((grid for grid in grids if hasattr(grid, "pull_messages")), None)


def patient(proxy: ClientProxy, timeout: float | None, late: LateAnswers | None) -> ClientProxy:
    """A copy of a proxy that waits as :class:`Patience` does; the proxy itself where there is no grid or no timeout."""
    grid = grid_of([proxy])
    if timeout is None or late is None or grid is None:
        return proxy
    twin = copy.copy(proxy)
    twin.grid = Patience(grid, timeout, late)  # type: ignore[attr-defined]
    return twin
