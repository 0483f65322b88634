"""Client managers and client proxies around Flower's, for the legacy API.

A base strategy gets :class:`ChosenCohort` or :class:`BoundedManager` in place of Flower's client manager. Flower's
server gets a :class:`TimedProxy` for each client. Messages through it may be answered after the timeout.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.common import DEFAULT_TTL, EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server import ClientManager

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy, Criterion
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.strategies.wrapping.failure_reasons import NOT_REACHED, NotReached, no_answer
from fedsel_flwr.strategies.wrapping.grids import LONGEST_POLL_S, EarlyEnd, TimedGrid
from fedsel_flwr.strategies.wrapping.waiting import LateReplies, Startup, wait_for


def wait_for_clients(manager: ClientManager, number: int, timeout: float, reason: str) -> dict[str, ClientProxy]:
    """Wait until ``number`` clients are connected, at most ``timeout`` seconds.

    Args:
        manager: Flower's client manager.
        number: Number of clients that are needed.
        timeout: Longest wait, seconds.
        reason: The setting that requires them, for the message.

    Returns:
        A copy of the connected clients, in id order.

    Raises:
        RunError: Fewer clients were connected at the end of the wait.
    """
    wait_for(manager.all, number, timeout, what="clients", reason=reason)
    clients = dict(manager.all())
    return {cid: clients[cid] for cid in sorted(clients, key=id_order)}


class _ReadOnlyManager(ClientManager):
    """A client manager that cannot be changed, because clients register with Flower's own."""

    def register(self, client: ClientProxy) -> bool:
        """Refuse to register a client."""
        return False

    def unregister(self, client: ClientProxy) -> None:
        """Ignore the removal of a client."""


class ChosenCohort(_ReadOnlyManager):
    """Client manager that returns the chosen clients, whatever number is requested.

    Args:
        chosen: Id -> proxy of the clients that the selector chose.
        num_connected: Number of connected clients, for strategies that scale by it.
    """

    def __init__(self, chosen: Mapping[str, ClientProxy], num_connected: int) -> None:
        self._chosen, self._num_connected = dict(chosen), num_connected

    def num_available(self) -> int:
        """Return the number of connected clients."""
        return self._num_connected

    def all(self) -> dict[str, ClientProxy]:
        """Return the chosen clients."""
        return dict(self._chosen)

    def wait_for(self, num_clients: int, timeout: int = 0) -> bool:
        """Return at once, because the strategy has waited before its choice."""
        return True

    def sample(
        self, num_clients: int, min_num_clients: int | None = None, criterion: Criterion | None = None
    ) -> list[ClientProxy]:
        """Return the chosen clients."""
        return list(self._chosen.values())


@dataclass(eq=False)
class BoundedManager(_ReadOnlyManager):
    """Flower's client manager with a bounded wait and its own random generator, for evaluation rounds.

    Args:
        manager: Flower's client manager.
        timeout: Longest wait, seconds.
        generator: Draws the samples.
        name: Returns the stable identity of a connection, so that samples do not depend on connections' own names.
        busy: The connections that are not asked, because they have not answered yet.
    """

    manager: ClientManager
    timeout: float
    generator: np.random.Generator
    name: Callable[[str], str] = str
    busy: Container[str] = ()

    def num_available(self) -> int:
        """Return the number of connected clients."""
        return self.manager.num_available()

    def all(self) -> dict[str, ClientProxy]:
        """Return a copy of the connected clients."""
        return dict(self.manager.all())

    def wait_for(self, num_clients: int, timeout: int | None = None) -> bool:
        """Wait at most ``timeout`` seconds, and never longer than the bound."""
        limit = self.timeout if timeout is None else min(self.timeout, timeout)
        try:
            wait_for_clients(self.manager, num_clients, limit, "asked for by the base strategy")
        except RunError:
            return False
        return True

    def sample(
        self, num_clients: int, min_num_clients: int | None = None, criterion: Criterion | None = None
    ) -> list[ClientProxy]:
        """Draw ``num_clients`` clients, as Flower does, but reproducibly and with a bounded wait.

        Raises:
            RunError: Too few clients were connected at the end of the wait.
        """
        needed = num_clients if min_num_clients is None else min_num_clients
        clients = wait_for_clients(self.manager, needed, self.timeout, "evaluation by the base strategy")
        # Connections come in the order of their arrival, which no seed reproduces.
        ordered = sorted(clients.values(), key=lambda client: id_order(self.name(client.cid)))
        eligible = [client for client in ordered if criterion is None or criterion.select(client)]
        # Flower's own manager returns no clients in this case, and base strategies expect that.
        if num_clients > len(eligible):
            return []
        free = [client for client in eligible if client.cid not in self.busy]
        drawn = self.generator.permutation(len(free))[:num_clients]
        return [free[i] for i in sorted(drawn)]


class TimedProxy(ClientProxy):
    """Client proxy that times ``fit``, and stores its error together with the client's identity.

    The proxy waits no longer than the timeout. If it has a grid, its late replies are fetched.

    Args:
        proxy: Flower's own proxy.
        clock: Returns monotonic seconds.
        round: The absolute round, which replaces Flower's number in the client's config; None keeps Flower's number.
        late: Fetches the replies that are late; None drops them.

    Attributes:
        elapsed_s: Duration of ``fit``, seconds; None before it ended.
        error: The error of ``fit``; None if it returned.
        timeout_s: The timeout of the call of ``fit``; None without a timeout or a call.
        sent: The parameters that the client received; None without a call.
    """

    def __init__(
        self, proxy: ClientProxy, clock: Callable[[], float] = time.monotonic, *,
        round: int | None = None, late: LateReplies | None = None,
    ) -> None:  # fmt: skip
        super().__init__(proxy.cid)
        self.proxy, self._clock, self._round, self._late = proxy, clock, round, late
        self.elapsed_s: float | None = None
        self.error: BaseException | None = None
        self.timeout_s: float | None = None
        self.sent: Parameters | None = None
        # Flower's server and its strategies read these attributes, if a proxy has them.
        if hasattr(proxy, "node_id"):
            self.node_id = proxy.node_id
        self.properties = proxy.properties

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Train on the client."""
        start, self.timeout_s, self.sent = self._clock(), timeout, ins.parameters
        try:
            proxy = with_late_replies(self.proxy, timeout, self._late)
            return proxy.fit(ins, timeout, group_id if self._round is None else self._round)
        # Stored here because Flower's server passes failures on without the client's identity.
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.elapsed_s = self._clock() - start

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Evaluate on the client."""
        return with_late_replies(self.proxy, timeout, self._late).evaluate(ins, timeout, group_id)

    def get_properties(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the client for its properties."""
        return self.proxy.get_properties(*args, **kwargs)

    def get_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the client for its parameters."""
        return self.proxy.get_parameters(*args, **kwargs)

    def reconnect(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the client to reconnect."""
        return self.proxy.reconnect(*args, **kwargs)


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

    def straggler_reply(self, answers: int, elapsed_s: float) -> Reply | None:
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
