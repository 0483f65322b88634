"""Grids around Flower's: one that times each node, one that never lets a base strategy wait for ever."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.strategies.roster import id_order

POLL_S = 0.25


def wait_for_nodes(grid: Grid, number: int, timeout: float, reason: str) -> list[str]:
    """Wait until ``number`` nodes are connected, at most ``timeout`` seconds.

    Args:
        grid: Flower's grid.
        number: How many nodes are needed.
        timeout: Longest wait, seconds.
        reason: What asks for them, for the message.

    Returns:
        The ids of the connected nodes as text, in order.

    Raises:
        RunError: Fewer nodes were connected when the time was over.
    """
    deadline = time.monotonic() + timeout
    while len(nodes := sorted({str(node) for node in grid.get_node_ids()}, key=id_order)) < number:
        if time.monotonic() >= deadline:
            raise RunError(
                f"waited {timeout:g} s for {number} nodes ({reason}), but {len(nodes)} are connected: start more "
                "SuperNodes, lower min_available or clients_per_round, or raise wait_timeout"
            )
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    return nodes


class _Delegate(Grid):
    """Passes everything on to another grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        """Set the run of the inner grid; the argument's type differs between Flower's versions."""
        self._grid.set_run(*args, **kwargs)

    @property
    def run(self) -> Any:
        """The inner grid's run."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message with the inner grid."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """The inner grid's nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the inner grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull from the inner grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send and receive through the inner grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


class TimedGrid(_Delegate):
    """Times each node's round trip; polls four times a second.

    Args:
        grid: Flower's grid.

    Attributes:
        elapsed_s: Node id as text -> seconds from sending the last message to holding its reply; nodes that did not
            answer are missing.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.elapsed_s: dict[str, float] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all messages at once and collect the replies until all are here or the time is over."""
        sent = list(messages)
        start = time.monotonic()
        pending = set(self._grid.push_messages(sent))
        node_of = {message.metadata.message_id: str(message.metadata.dst_node_id) for message in sent}
        self.elapsed_s = {}
        replies: list[Message] = []
        while pending:
            arrived = list(self._grid.pull_messages(pending))
            elapsed = time.monotonic() - start
            for reply in arrived:
                answered = reply.metadata.reply_to_message_id
                pending.discard(answered)
                self.elapsed_s[node_of.get(answered, str(reply.metadata.src_node_id))] = elapsed
            replies.extend(arrived)
            if not pending or (timeout is not None and elapsed >= timeout):
                break
            time.sleep(POLL_S if timeout is None else min(POLL_S, max(0.0, timeout - elapsed)))
        return replies


class CrowdGrid(_Delegate):
    """Shows a base strategy enough nodes for whatever it samples, so that it configures its message at once.

    Its messages are only templates: their destinations are replaced by the chosen nodes.

    Args:
        grid: Flower's grid.
        nodes: The connected nodes.
        at_least: Show at least this many; the difference is made up of ids that no node has.
    """

    def __init__(self, grid: Grid, nodes: Sequence[str], at_least: int) -> None:
        super().__init__(grid)
        real = [int(node) for node in nodes]
        spare = (number for number in range(1, len(real) + at_least + 1) if number not in set(real))
        self._nodes = real + [next(spare) for _ in range(max(0, at_least - len(real)))]

    def get_node_ids(self) -> list[int]:
        """The nodes to show."""
        return list(self._nodes)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse: a base strategy has nothing to send while it configures a round."""
        raise RunError("the base strategy sends messages while it configures a round; it cannot be wrapped")


class SettledGrid(_Delegate):
    """Shows the connected nodes in a stable order, for evaluation rounds.

    Args:
        grid: Flower's grid.
        nodes: The connected nodes, ordered.
    """

    def __init__(self, grid: Grid, nodes: Sequence[str]) -> None:
        super().__init__(grid)
        self._nodes = [int(node) for node in nodes]

    def get_node_ids(self) -> list[int]:
        """The nodes to show."""
        return list(self._nodes)
