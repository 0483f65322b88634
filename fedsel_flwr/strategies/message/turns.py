"""Messages to many nodes of a simulation, few of them on their way at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

from flwr.app import Message
from flwr.serverapp import Grid

from fedsel_flwr.strategies.congestion import FIRST, POLL_S, WINDOW
from fedsel_flwr.strategies.silence import accepted


def send_in_turn(
    grid: Grid, messages: Sequence[Message], timeout: float, *, first: int = FIRST, window: int = WINDOW
) -> tuple[list[Message], list[Message]]:
    """Send messages and wait for the replies; each reply makes room for two more, up to a window.

    Args:
        grid: Flower's grid.
        messages: What to send, in this order.
        timeout: Longest wait for all replies, seconds.
        first: Messages on their way before the first reply; after half the time the window opens without one.
        window: Messages on their way at most.

    Returns:
        The replies, and the messages that were sent; the others found no room in time.
    """
    patience, deadline = time.monotonic() + timeout / 2, time.monotonic() + timeout
    waiting = iter(messages)
    sent: list[Message] = []
    replies: list[Message] = []
    pending: set[str] = set()
    while True:
        opened = window if time.monotonic() >= patience else min(window, first + len(replies))
        room = opened - len(pending)
        if batch := list(islice(waiting, max(0, room))):
            sent += batch
            pending |= accepted(grid.push_messages(batch))
        arrived = list(grid.pull_messages(pending)) if pending else []
        pending -= {reply.metadata.reply_to_message_id for reply in arrived}
        replies += arrived
        if not pending and len(sent) == len(messages):
            return replies, sent
        if (left := deadline - time.monotonic()) <= 0:
            return replies, sent
        if not arrived:
            time.sleep(min(POLL_S, left))
