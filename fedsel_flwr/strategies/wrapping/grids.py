"""Grids around Flower's: one that times each node, one that never lets a base strategy wait for ever."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.strategies.wrapping.failure_reasons import accepted, rejected
from fedsel_flwr.strategies.wrapping.waiting import LateAnswers, wait_for

POLL_S, LONGEST_POLL_S = 0.25, 3.0
"""Seconds between two looks; the longest is that of Flower's own grid."""
SPARING = 4
"""After a look that found nothing a SuperLink is left in peace for so many times as long as that took."""


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
    return wait_for(
        lambda: sorted({str(node) for node in grid.get_node_ids()}, key=id_order),
        number, timeout, what="nodes", start="SuperNodes", reason=reason, poll_s=POLL_S,
    )  # fmt: skip


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

    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Pull from the inner grid; up to flwr 1.42 the one parameter is ``message_ids``, later an old name."""
        positional = () if reply_to_message_ids is None else (reply_to_message_ids,)
        named: dict[str, Any] = {} if message_ids is None else {"message_ids": message_ids}
        return self._grid.pull_messages(*positional, **named)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send and receive through the inner grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


@dataclass(frozen=True)
class Until:
    """When a round ends before everybody has answered.

    Args:
        answers: Replies without an error that are enough; None: all of them.
        seconds: The longest wait; None sets none.
    """

    answers: int | None = None
    seconds: float | None = None

    def missed(self, answers: int, elapsed_s: float) -> Reply | None:
        """What to say of those who are missing, if the round ends now; None if it goes on.

        >>> Until(answers=2).missed(1, 9.0) is None, Until(answers=2).missed(2, 9.0).error
        (True, 'late: no answer after 9 s, when 2 others were there')
        """
        if self.answers is not None and answers >= self.answers:
            error = f"late: no answer after {elapsed_s:.6g} s, when {self.answers} others were there"
            return Reply(error=error, spare=True, observed_s=elapsed_s)
        if self.seconds is not None and elapsed_s >= self.seconds:
            return Reply(error=f"late: no answer within round_deadline_s = {self.seconds:g} s", timed_out=True)
        return None


class TimedGrid(_Delegate):
    """Times each node's round trip; polls four times a second, a slow SuperLink less often.

    Args:
        grid: Flower's grid.

    Attributes:
        late: Looks for the answers that came too late for earlier rounds, a request every few seconds; None: nobody.
        until: When to stop waiting in the next :meth:`send_and_receive`, which takes it away; None waits for all.
        missed: What to say of a node whose answer the last one did not wait for; None if it waited for all.
        elapsed_s: Node id as text -> seconds from sending the last message to holding its reply; nodes that did not
            answer are missing.
        rejected: Node ids as text, of the nodes whose message the SuperLink did not take: no answer can come.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.late: LateAnswers | None = None
        self.until: Until | None = None
        self.missed: Reply | None = None
        self.elapsed_s: dict[str, float] = {}
        self.rejected: frozenset[str] = frozenset()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all messages at once and collect the replies until all are here or the time is over."""
        sent = list(messages)
        start = time.monotonic()
        pushed = list(self._grid.push_messages(sent))
        pending = accepted(pushed)
        node_of = {message.metadata.message_id: str(message.metadata.dst_node_id) for message in sent}
        self.rejected = frozenset(str(message.metadata.dst_node_id) for message in rejected(sent, pushed))
        self.elapsed_s, self.missed = {}, None
        until, self.until = self.until, None
        answers = 0
        replies: list[Message] = []
        while pending:
            asked = time.monotonic()
            arrived = list(self._grid.pull_messages(pending))
            elapsed = time.monotonic() - start
            took = 0.0 if arrived else elapsed + start - asked
            for reply in arrived:
                answered = reply.metadata.reply_to_message_id
                pending.discard(answered)
                answers += not reply.has_error()
                self.elapsed_s[node_of.get(answered, str(reply.metadata.src_node_id))] = elapsed
            replies.extend(arrived)
            self.missed = until.missed(answers, elapsed) if pending and until is not None else None
            if self.missed is not None:
                break
            if not pending or (timeout is not None and elapsed >= timeout):
                break
            if self.late is not None:
                self.late.look_now_and_then()
            ends = [end - elapsed for end in (timeout, None if until is None else until.seconds) if end is not None]
            time.sleep(max(0.0, min([LONGEST_POLL_S, max(POLL_S, SPARING * took), *ends])))
        return replies


class ShownGrid(_Delegate):
    """Shows a base strategy given nodes, in their order, while it configures a round; it never waits for ever.

    Args:
        grid: Flower's grid.
        nodes: The connected nodes.
        timeout: Seconds after which a base that still asks for nodes is stopped.
        at_least: Show at least this many; the difference is made up of ids that no node has. For training, where
            messages are only templates whose destinations are replaced by the chosen nodes.
    """

    def __init__(self, grid: Grid, nodes: Sequence[str], timeout: float, at_least: int = 0) -> None:
        super().__init__(grid)
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        real = [int(node) for node in nodes]
        spare = (number for number in range(1, len(real) + at_least + 1) if number not in set(real))
        self._nodes = real + [next(spare) for _ in range(max(0, at_least - len(real)))]
        self._asked = False

    def get_node_ids(self) -> list[int]:
        """The nodes to show."""
        if self._asked and time.monotonic() >= self._deadline:
            raise RunError(
                f"the base strategy waits for more than the {len(self._nodes)} nodes there are, for longer than "
                f"wait_timeout = {self._timeout:g} s: lower the fraction or the number of nodes it asks for"
            )
        self._asked = True
        return list(self._nodes)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse: a base strategy has nothing to send while it configures a round."""
        raise RunError("the base strategy sends messages while it configures a round; it cannot be wrapped")
