"""What a base strategy and Flower's server see instead of the real client manager and the real client proxies."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping

import numpy as np
from flwr.common import (
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    ReconnectIns,
)
from flwr.server import ClientManager

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy, Criterion
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.strategies.wrapping.legacy_transport import patient
from fedsel_flwr.strategies.wrapping.waiting import LateAnswers, wait_for

POLL_S = 0.1


def wait_for_clients(manager: ClientManager, number: int, timeout: float, reason: str) -> dict[str, ClientProxy]:
    """Wait until ``number`` clients are connected, at most ``timeout`` seconds.

    Args:
        manager: Flower's client manager.
        number: How many clients are needed.
        timeout: Longest wait, seconds.
        reason: What asks for them, for the message.

    Returns:
        A copy of the connected clients, in id order.

    Raises:
        RunError: Fewer clients were connected when the time was over.
    """
    wait_for(manager.all, number, timeout, what="clients", start="clients", reason=reason, poll_s=POLL_S)
    clients = dict(manager.all())
    return {cid: clients[cid] for cid in sorted(clients, key=id_order)}


class _View(ClientManager):
    """A client manager that cannot be changed."""

    def register(self, client: ClientProxy) -> bool:
        """Refuse: clients register with Flower's own manager."""
        return False

    def unregister(self, client: ClientProxy) -> None:
        """Ignore: clients leave Flower's own manager."""


class ChosenCohort(_View):
    """Hands out the chosen clients, whatever number is asked for.

    Args:
        chosen: Id -> proxy of the clients the selector chose.
        num_connected: How many clients are connected, for strategies that scale by it.
    """

    def __init__(self, chosen: Mapping[str, ClientProxy], num_connected: int) -> None:
        self._chosen, self._num_connected = dict(chosen), num_connected

    def num_available(self) -> int:
        """How many clients are connected."""
        return self._num_connected

    def all(self) -> dict[str, ClientProxy]:
        """The chosen clients."""
        return dict(self._chosen)

    def wait_for(self, num_clients: int, timeout: int = 0) -> bool:
        """Return at once: the wait has been done."""
        return True

    def sample(
        self, num_clients: int, min_num_clients: int | None = None, criterion: Criterion | None = None
    ) -> list[ClientProxy]:
        """The chosen clients."""
        return list(self._chosen.values())


class BoundedManager(_View):
    """Flower's client manager with a bounded wait and a generator of its own, for evaluation rounds.

    Args:
        manager: Flower's client manager.
        timeout: Longest wait, seconds.
        generator: Draws the samples.
        name: The stable identity behind a connection; samples do not depend on connections' own names.
        busy: Who is not asked, as it has not answered yet.
    """

    def __init__(
        self,
        manager: ClientManager,
        timeout: float,
        generator: np.random.Generator,
        name: Callable[[str], str] = str,
        busy: Container[str] = (),
    ) -> None:
        self._manager, self._timeout, self._generator, self._name = manager, timeout, generator, name
        self._busy = busy

    def num_available(self) -> int:
        """How many clients are connected."""
        return self._manager.num_available()

    def all(self) -> dict[str, ClientProxy]:
        """A copy of the connected clients."""
        return dict(self._manager.all())

    def wait_for(self, num_clients: int, timeout: int | None = None) -> bool:
        """Wait at most ``timeout`` seconds, and never longer than the bound."""
        limit = self._timeout if timeout is None else min(self._timeout, timeout)
        try:
            wait_for_clients(self._manager, num_clients, limit, "asked for by the base strategy")
        except RunError:
            return False
        return True

    def sample(
        self, num_clients: int, min_num_clients: int | None = None, criterion: Criterion | None = None
    ) -> list[ClientProxy]:
        """Draw ``num_clients`` clients, as Flower does, but reproducibly and without waiting for ever.

        Raises:
            RunError: Too few clients were connected when the time was over.
        """
        needed = num_clients if min_num_clients is None else min_num_clients
        clients = wait_for_clients(self._manager, needed, self._timeout, "evaluation by the base strategy")
        ordered = sorted(clients.values(), key=lambda client: id_order(self._name(client.cid)))
        eligible = [client for client in ordered if criterion is None or criterion.select(client)]
        if num_clients > len(eligible):
            return []
        free = [client for client in eligible if client.cid not in self._busy]
        drawn = self._generator.permutation(len(free))[:num_clients]
        return [free[i] for i in sorted(drawn)]


class TimedProxy(ClientProxy):
    """Delegates to a client proxy, times ``fit`` and keeps what it raised with the client's identity.

    It waits no longer than the timeout, and late answers can be heard where the proxy has a grid.

    Args:
        proxy: Flower's own proxy.
        clock: Monotonic seconds.
        round: The absolute round, which the client is told in place of Flower's number; None leaves that.
        late: Told of what was not answered in time; None: nobody.

    Attributes:
        elapsed_s: Seconds ``fit`` took; None before it ended.
        error: What ``fit`` raised; None if it returned.
        timeout_s: The timeout that ``fit`` was called with; None if there is none, or it was not called.
    """

    def __init__(
        self,
        proxy: ClientProxy,
        clock: Callable[[], float] = time.monotonic,
        *,
        round: int | None = None,
        late: LateAnswers | None = None,
    ) -> None:
        super().__init__(proxy.cid)
        self.proxy, self._clock, self._round, self._late = proxy, clock, round, late
        self.elapsed_s: float | None = None
        self.error: BaseException | None = None
        self.timeout_s: float | None = None
        if hasattr(proxy, "node_id"):
            self.node_id = proxy.node_id
        self.properties = proxy.properties

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Train on the client."""
        start, self.timeout_s = self._clock(), timeout
        try:
            proxy = patient(self.proxy, timeout, self._late)
            return proxy.fit(ins, timeout, group_id if self._round is None else self._round)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.elapsed_s = self._clock() - start

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Evaluate on the client."""
        return patient(self.proxy, timeout, self._late).evaluate(ins, timeout, group_id)

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Ask the client for its properties."""
        return self.proxy.get_properties(ins, timeout, group_id)

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Ask the client for its parameters."""
        return self.proxy.get_parameters(ins, timeout, group_id)

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Ask the client to reconnect."""
        return self.proxy.reconnect(ins, timeout, group_id)
