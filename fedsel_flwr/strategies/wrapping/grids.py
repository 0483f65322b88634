"""Grids around Flower's: :class:`TimedGrid` times each node, :class:`SnapshotGrid` bounds a base strategy's waiting.

:class:`LateReplyGrid` lets messages of the legacy API outlive their timeout.

The functions read a grid's answers: registrations, accepted and rejected messages, and whether the grid is that of a
simulation. :class:`Transport` is what the questions of both APIs have in common.

In a simulation the SuperLink runs in the server's process. Ten times a second it searches all messages in flight once
for each node, and blocks the process meanwhile. Actors that start at this time get no core. With questions to 500 nodes
in flight, the roll call took 50 s on 2 cores, although Ray and actors start in 20 s. A deployed SuperLink has its own
process. Therefore both APIs limit the questions in flight in simulations.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.common import DEFAULT_TTL
from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.deadlines import Deadline
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roll_call import Registration
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies.wrapping.failure_reasons import NOT_REACHED, NotReached, no_answer
from fedsel_flwr.strategies.wrapping.waiting import LateReplies, ReplyRequests, Startup, repeated, wait_for

POLL_S, LONGEST_POLL_S = 0.25, 3.0
"""Seconds between two requests for replies: the shortest pause, and the longest, which is that of Flower's own grid."""
PAUSE_FACTOR = 4
"""Pause after a request without replies, as a multiple of the request's duration."""
FIRST_WINDOW = 8
"""Questions in flight before the first answer. Each of them slows the start of a simulation's actors."""
WINDOW = 96
"""Questions in flight after that. With 500 nodes, 64 to 128 take about the same time, 32 and 256 longer."""


def wait_for_nodes(grid: Grid, number: int, timeout: float, reason: str) -> list[str]:
    """Wait until ``number`` nodes are connected, at most ``timeout`` seconds.

    Args:
        grid: Flower's grid.
        number: Number of nodes that are needed.
        timeout: Longest wait, seconds.
        reason: The setting that requires them, for the message.

    Returns:
        The ids of the connected nodes as text, in order.

    Raises:
        RunError: Fewer nodes were connected at the end of the wait.
    """

    def connected() -> list[str]:
        return sorted({str(node) for node in repeated(grid.get_node_ids)}, key=id_order)

    return wait_for(connected, number, timeout, what="nodes", reason=reason)


def is_simulation(grid: object) -> bool:
    """Return whether a grid is that of Flower's simulation, in which messages in flight slow down all others.

    Args:
        grid: Flower's grid; None if there is none.
    """
    # By name, because importing the class would load Flower's SuperLink, which a deployed server does not need.
    return type(grid).__name__ == "InMemoryGrid"


def registrations(grid: object) -> Mapping[str, Registration] | None:
    """Return the name and public key of every node, in one call.

    Args:
        grid: Flower's grid; None if a transport has none.

    Returns:
        Node id -> registration; None if the grid knows only ids, as in old versions of Flower.
    """
    get_nodes = getattr(grid, "get_nodes", None)
    if get_nodes is None:
        return None
    return {
        str(info.node_id): Registration(getattr(info, "name", "") or "", getattr(info, "public_key", b"") or b"")
        for info in repeated(get_nodes)
    }


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Reaches clients for the roll call and for probes of the current model; each API has its own.

    Args:
        timeout: Longest wait for all answers, seconds.
        late: Fetches the answers to unanswered questions.
        base: The base strategy, whose config and records a probe has too.
        keys: The names of the metrics.
        startup: The start of a simulation's actors, which does not count as waiting.
        check_errors: Function of the texts of a probe's errors, which may end the run.
    """

    timeout: float
    late: LateReplies = field(default_factory=lambda: LateReplies(Busy()))
    base: object = None
    keys: MetricKeys = field(default_factory=MetricKeys)
    startup: Startup = field(default_factory=Startup)
    check_errors: Callable[[Iterable[str]], None] = lambda errors: None

    @property
    def inner(self) -> Any:
        """Flower's own grid; None if there is none."""
        raise NotImplementedError

    @property
    def simulated(self) -> bool:
        """Whether the clients are those of Flower's simulation."""
        return is_simulation(self.inner)

    def registrations(self) -> Mapping[str, Registration] | None:
        """Return the SuperLink's registrations of its nodes; None if there is no grid."""
        return registrations(self.inner)


def accepted(pushed: Iterable[str]) -> set[str]:
    """Return the ids of accepted messages; a rejected message has the id "", and gets no answer.

    >>> accepted(["a", ""])
    {'a'}
    """
    return {message_id for message_id in pushed if message_id}


def rejected(sent: Sequence[Message], pushed: Sequence[str]) -> list[Message]:
    """Return the messages that a SuperLink did not accept.

    Args:
        sent: The pushed messages.
        pushed: The returned ids, in the same order. A grid may leave out the rejected messages.
    """
    if len(pushed) == len(sent):
        return [message for message, message_id in zip(sent, pushed, strict=True) if not message_id]
    taken = accepted(pushed)
    return [message for message in sent if message.metadata.message_id not in taken]


class _GridWrapper(Grid):
    """Delegates every call to another grid."""

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
        """Return the inner grid's nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner grid's nodes, with their names and keys."""
        return self._grid.get_nodes(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner grid, which may be of a user's own class."""
        return getattr(vars(self).get("_grid"), name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the inner grid."""
        return self._grid.push_messages(messages)

    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Pull from the inner grid; up to flwr 1.42 the only parameter is ``message_ids``, later an old name."""
        # Without an argument, each version applies its own default.
        positional = () if reply_to_message_ids is None else (reply_to_message_ids,)
        named: dict[str, Any] = {} if message_ids is None else {"message_ids": message_ids}
        return self._grid.pull_messages(*positional, **named)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send and receive through the inner grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


@dataclass(frozen=True)
class EarlyEnd:
    """Condition under which a round ends without its stragglers.

    Args:
        answers: Number of replies without an error that end the round; None waits for all.
        deadline: The deadline of the round.
    """

    answers: int | None = None
    deadline: Deadline = field(default_factory=Deadline)

    def straggler_reply(self, times: Sequence[float], elapsed_s: float) -> Reply | None:
        """Return the reply that stands for each straggler if the round ends now; None if it does not.

        Args:
            times: Seconds until each reply without an error.
            elapsed_s: Seconds since the messages were sent.

        >>> early_end = EarlyEnd(answers=2)
        >>> early_end.straggler_reply([4.0], 9.0) is None, early_end.straggler_reply([4.0, 9.0], 9.0).error
        (True, 'late: no answer after 9 s, when 2 others had arrived')
        """
        if self.answers is not None and len(times) >= self.answers:
            error = f"late: no answer after {elapsed_s:.6g} s, when {self.answers} others had arrived"
            return Reply(error=error, spare=True, observed_s=elapsed_s)
        if elapsed_s >= (limit := self.deadline.after(times)):
            return Reply(error=f"late: no answer within round_deadline_s = {limit:g} s", timed_out=True)
        return None


@dataclass(frozen=True)
class Arrival:
    """A reply that has arrived in a buffered round, or the end of the wait for it.

    Attributes:
        node: The node.
        seconds: Seconds since the message was sent.
        reply: The reply, or the reason why there is none.
    """

    node: str
    seconds: float
    reply: Message | Reply


class TimedGrid(_GridWrapper):
    """Grid that times each node's round trip; polls four times a second, a slow SuperLink less often.

    Args:
        grid: Flower's grid.

    Attributes:
        late: Fetches replies that are too late for earlier rounds, with a request every few seconds; None fetches none.
        poll_s: Shortest pause between two requests for replies, seconds.
        buffer: Number of arrivals that end the next :meth:`send_and_receive`, which then resets it; other replies stay
            for later calls. None waits for all replies to the messages of the call.
        patience_s: In a call with ``buffer``, seconds after which a message has no reply.
        arrivals: The arrivals of the last call with ``buffer``.
        early_end: Condition that ends the next :meth:`send_and_receive` early, which then resets it; None waits for
            all.
        on_reply: Function of each reply of the next :meth:`send_and_receive` and its seconds, which that call resets;
            None for none.
        straggler_reply: The reply that stands for missing ones of the last call; None if the call waited for all.
        deadline_s: Seconds after which the last call had to end; infinity without a deadline.
        waited_s: Seconds that the last call took.
        elapsed_s: Node id as text -> seconds from sending the last message to its reply, without nodes that did not
            answer.
        rejected: Node ids as text, of the nodes whose message the SuperLink did not accept, so that no answer can come.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.late: LateReplies | None = None
        self.poll_s = POLL_S
        self.buffer: int | None = None
        self.patience_s = 0.0
        self.arrivals: list[Arrival] = []
        # Message id -> the message and the time when it was sent; and the arrivals that no call has returned yet.
        self._at_work: dict[str, tuple[Message, float]] = {}
        self._further: list[Arrival] = []
        self._requests = ReplyRequests(lambda message_ids: self._grid.pull_messages(message_ids))
        self.early_end: EarlyEnd | None = None
        self.on_reply: Callable[[Message, float], None] | None = None
        self.straggler_reply: Reply | None = None
        self.deadline_s, self.waited_s = math.inf, 0.0
        self.elapsed_s: dict[str, float] = {}
        self.rejected: frozenset[str] = frozenset()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send all messages at once, and collect the replies until all have arrived or the timeout is over."""
        sent = list(messages)
        if (number := self.buffer) is not None:
            # For one round only, because the evaluation that follows waits for all nodes.
            self.buffer = None
            return self._take(sent, number)
        start = time.monotonic()
        pushed = list(self._grid.push_messages(sent))
        pending = accepted(pushed)
        node_of = {message.metadata.message_id: str(message.metadata.dst_node_id) for message in sent}
        self.rejected = frozenset(str(message.metadata.dst_node_id) for message in rejected(sent, pushed))
        self.elapsed_s, self.straggler_reply = {}, None
        # For one round only, because the evaluation that follows waits for all nodes.
        early_end, self.early_end = self.early_end or EarlyEnd(), None
        on_reply, self.on_reply = self.on_reply, None
        if early_end.answers == 0:
            self.straggler_reply = early_end.straggler_reply([], 0.0)
        requests = ReplyRequests(self._grid.pull_messages)
        times, elapsed, limit = list[float](), 0.0, early_end.deadline.after([])
        replies: list[Message] = []
        while pending and self.straggler_reply is None:
            requested = time.monotonic()
            left = min(limit, math.inf if timeout is None else timeout) - elapsed
            arrived = requests.fetch(pending, max(POLL_S, min(LONGEST_POLL_S, left)))
            elapsed = time.monotonic() - start
            for reply in arrived or ():
                if (answered := reply.metadata.reply_to_message_id) not in pending:
                    continue  # a request that was under way at the same time has brought it already
                pending.discard(answered)
                replies.append(reply)
                times += [] if reply.has_error() else [elapsed]
                if on_reply is not None:
                    on_reply(reply, elapsed)
                # The SuperLink answers in place of a disconnected node. The id of the answered message identifies the
                # node.
                self.elapsed_s[node_of.get(answered, str(reply.metadata.src_node_id))] = elapsed
            if pending:
                limit = early_end.deadline.after(times)
                self.straggler_reply = early_end.straggler_reply(times, elapsed)
            if self.straggler_reply is not None or not pending or (timeout is not None and elapsed >= timeout):
                break
            if self.late is not None:
                self.late.fetch_if_due()
            if arrived is None:
                continue  # a request is still under way, and the time has passed in waiting for it
            # If replies have come, others are near, so the next request follows without a longer pause.
            took = 0.0 if arrived else elapsed + start - requested
            until = min(limit, math.inf if timeout is None else timeout) - elapsed
            time.sleep(max(0.0, min(LONGEST_POLL_S, max(self.poll_s, PAUSE_FACTOR * took), until)))
        self.deadline_s, self.waited_s = limit, elapsed
        if self.late is not None:
            self.late.owe((message for message in sent if message.metadata.message_id in pending), since=start)
            self.late.take_over(requests)
        return replies

    def _take(self, sent: Sequence[Message], number: int) -> list[Message]:
        """Send messages, and return the replies of the next ``number`` arrivals, to earlier messages too."""
        now = time.monotonic()
        refused = rejected(sent, list(self._grid.push_messages(sent)))
        self.rejected = frozenset(str(message.metadata.dst_node_id) for message in refused)
        self._further += [
            Arrival(node, 0.0, Reply(error=NOT_REACHED, observed_s=0.0)) for node in sorted(self.rejected)
        ]
        self._at_work |= {one.metadata.message_id: (one, now) for one in sent if one not in refused}
        while len(self._further) < number and self._at_work:
            arrived = self._requests.fetch(self._at_work, LONGEST_POLL_S)
            now = time.monotonic()
            for reply in arrived or ():
                # Another request may have brought it already.
                if (own := self._at_work.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    self._further.append(Arrival(str(own[0].metadata.dst_node_id), now - own[1], reply))
            for key, (message, since) in list(self._at_work.items()):
                if now - since >= self.patience_s:
                    del self._at_work[key]
                    none = Reply(error=no_answer(self.patience_s), timed_out=True, observed_s=now - since)
                    self._further.append(Arrival(str(message.metadata.dst_node_id), now - since, none))
                    if self.late is not None:
                        self.late.owe([message])
            if self.late is not None:
                self.late.fetch_if_due()
            if arrived is not None and len(self._further) < number:
                time.sleep(self.poll_s)
        self.arrivals, self._further = self._further[:number], self._further[number:]
        self.elapsed_s = {one.node: one.seconds for one in self.arrivals}
        return [one.reply for one in self.arrivals if isinstance(one.reply, Message)]


class SnapshotGrid(_GridWrapper):
    """Shows a base strategy the same nodes, in their order, while it configures a round, and bounds its waiting.

    Args:
        grid: Flower's grid.
        nodes: The connected nodes.
        timeout: Seconds after which a base that still asks for nodes is stopped.
    """

    def __init__(self, grid: Grid, nodes: Sequence[str], timeout: float) -> None:
        super().__init__(grid)
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._nodes = [int(node) for node in nodes]
        self._asked = False

    def get_node_ids(self) -> list[int]:
        """Return the nodes to show."""
        # Flower's strategies ask in a loop until they see enough nodes. The first request is always answered.
        if self._asked and time.monotonic() >= self._deadline:
            raise RunError(
                f"the base strategy waits for more than its {len(self._nodes)} nodes, longer than wait_timeout = "
                f"{self._timeout:g} s. Lower the fraction or the number of nodes that it asks for"
            )
        self._asked = True
        return list(self._nodes)

    def get_nodes(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the nodes to show, with their names and keys."""
        own = {one.node_id: one for one in super().get_nodes(*args, **kwargs)}
        return [own[node] for node in self._nodes if node in own]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse, because a base strategy has nothing to send while it configures a round."""
        raise RunError("the base strategy sends messages while it configures a round. Use another base strategy")


class LateReplyGrid(TimedGrid):
    """Sends the messages of one proxy through Flower's grid, and lets them outlive the timeout.

    Flower's messages expire with the timeout. A client that answers later is then refused, and the server does not
    learn that the client is free again.

    Args:
        grid: Flower's grid.
        timeout: Longest wait, seconds.
        late: Fetches the replies to unanswered messages.
    """

    def __init__(self, grid: Any, timeout: float, late: LateReplies) -> None:
        super().__init__(grid)
        self.late = late
        late.grid = grid
        self._timeout = timeout
        # One thread per client polls, so the pause is Flower's own.
        self.poll_s = getattr(grid, "pull_interval", LONGEST_POLL_S)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and collect the replies until all have arrived or the timeout is over.

        Raises:
            NotReached: The SuperLink accepted none of them.
        """
        sent = list(messages)
        for message in sent:
            message.metadata.ttl = self._timeout + DEFAULT_TTL
        replies = super().send_and_receive(sent, timeout=self._timeout)
        if sent and len(self.rejected) == len(sent):
            raise NotReached(NOT_REACHED)
        return replies


@dataclass(frozen=True)
class _Started(EarlyEnd):
    """Ends a wait after the timeout, which begins when the first actor of a simulation answers."""

    startup: Startup = field(default_factory=Startup)
    timeout: float = 0.0

    def straggler_reply(self, times: Sequence[float], elapsed_s: float) -> Reply | None:
        now = time.monotonic()
        over = now >= self.startup.deadline(now - elapsed_s, self.timeout)
        return Reply(error=no_answer(self.timeout), timed_out=True) if over else None


def with_late_replies(
    proxy: ClientProxy, timeout: float | None, late: LateReplies | None, startup: Startup | None = None
) -> ClientProxy:
    """Return a copy of a proxy that sends through :class:`LateReplyGrid`; the proxy itself without grid or timeout.

    Args:
        proxy: Flower's proxy.
        timeout: Longest wait, seconds.
        late: Fetches late replies.
        startup: The start of a simulation's actors, which does not count as waiting; None to wait from the call.
    """
    grid = grid_of([proxy])
    if timeout is None or late is None or grid is None:
        return proxy
    # A copy, because Flower's server keeps the proxy, and threads of other calls may be using it.
    twin = copy.copy(proxy)
    # The wait of a message that is sent now; the condition ends it earlier once an actor has answered.
    longest = timeout if startup is None else startup.deadline(now := time.monotonic(), timeout) - now
    twin.grid = LateReplyGrid(grid, longest, late)  # type: ignore[attr-defined]
    twin.grid.early_end = None if startup is None else _Started(startup=startup, timeout=timeout)  # type: ignore[attr-defined]
    return twin


def grid_of(proxies: Iterable[ClientProxy]) -> Any:
    """Return the grid that proxies send through, which is the same for all of them; None if there is none."""
    return next((proxy.grid for proxy in proxies if hasattr(proxy, "grid")), None)
