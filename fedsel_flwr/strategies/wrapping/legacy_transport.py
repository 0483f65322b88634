"""Questions to many clients at once, with a bounded wait: the core's transport in the legacy API.

How Flower's proxy of the legacy API waits: no longer than the timeout, and its message stays known after that.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from flwr.app import Message
from flwr.common import DEFAULT_TTL, Code, EvaluateIns, GetPropertiesIns, Parameters, Scalar

from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.roll_call import Registration
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.strategies.wrapping.failure_reasons import NotReached, accepted, check_answered, registrations
from fedsel_flwr.strategies.wrapping.waiting import FIRST, WINDOW, LateAnswers, crowds

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


logger = logging.getLogger("fedsel_flwr")
MAX_PARALLEL = 32
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Asking:
    """The clients that can be asked, and the model a probe is about.

    Args:
        clients: Connection -> proxy.
        parameters: The current global model.
        timeout: Longest wait for all answers, seconds.
        late: Told of questions that were not answered in time.
    """

    clients: Mapping[str, ClientProxy]
    parameters: Parameters
    timeout: float
    late: LateAnswers = field(default_factory=lambda: LateAnswers(Busy()))
    one_first: ClassVar[bool] = False

    @property
    def simulated(self) -> bool:
        """Whether the clients are those of Flower's simulation."""
        return crowds(self._grid)

    def registrations(self) -> Mapping[str, Registration] | None:
        """What the SuperLink says of its nodes; None where there is no grid behind the proxies."""
        return registrations(self._grid)

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Mapping[str, object] | None], list[str]]:
        """Ask clients who they are."""
        return self._ask(nodes, lambda client: introduce(client, self.timeout))

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Mapping[str, Mapping[str, object]]:
        """Have clients evaluate the current model."""
        sent = dict[str, Scalar](config)
        answers, _ = self._ask(nodes, lambda client: probe(client, self.parameters, sent, self.timeout))
        return {node: answer for node, answer in answers.items() if answer is not None}

    def _ask(self, nodes: list[str], question: Callable[[ClientProxy], Answer]) -> tuple[dict[str, Answer], list[str]]:
        asked = [self.clients[node] for node in nodes]
        return ask_all(asked, lambda one: question(patient(one, self.timeout, self.late)), self.timeout, self.late.busy)

    @property
    def _grid(self) -> object:
        """Flower's grid, on which the proxies stand: all on the same, if on any."""
        return next((client.grid for client in self.clients.values() if hasattr(client, "grid")), None)


def ask_all(
    clients: Iterable[ClientProxy], question: Callable[[ClientProxy], Answer], timeout: float, busy: Busy
) -> tuple[dict[str, Answer], list[str]]:
    """Put a question to clients, at most 32 at a time; in Flower's simulation a few, and after an answer a window.

    Args:
        clients: Whom to ask.
        question: Asks one client; raises nothing but ``TimeoutError``, if no answer came, and ``NotReached``.
        timeout: Longest wait for all of them, seconds.
        busy: Told of clients that did not answer in time, and of those among them that do so later.

    Returns:
        Connection -> answer, and the connections that were asked and did not answer in time.
    """
    asked = list(clients)
    deadline = time.monotonic() + timeout
    simulated = bool(asked) and crowds(getattr(asked[0], "grid", None))
    executor = ThreadPoolExecutor(WINDOW if simulated else MAX_PARALLEL, thread_name_prefix="fedsel-ask")
    futures: dict[str, Future[Answer]] = {}
    first = asked[:FIRST] if simulated else asked
    futures |= {client.cid: executor.submit(question, client) for client in first}
    if len(first) < len(asked):
        wait(futures.values(), timeout=timeout / 2, return_when=FIRST_COMPLETED)
        futures |= {client.cid: executor.submit(question, client) for client in asked[len(first) :]}
    done, _ = wait(futures.values(), timeout=max(0.0, deadline - time.monotonic()))
    executor.shutdown(wait=False, cancel_futures=True)
    answered = [cid for cid, future in futures.items() if future in done and future.exception() is None]
    asked_in_vain = [cid for cid, future in futures.items() if future in done and _not_reached(future)]
    left = {*answered, *asked_in_vain}
    missed = [cid for cid, future in futures.items() if cid not in left and not future.cancelled()]
    busy.owe(missed)
    for cid in missed:
        futures[cid].add_done_callback(partial(_came_late, busy, cid))
    return {cid: futures[cid].result() for cid in answered}, missed


def _not_reached(future: Future[Answer]) -> bool:
    return isinstance(future.exception(), NotReached)


def _came_late(busy: Busy, cid: str, future: Future[Answer]) -> None:
    if future.exception() is None:
        busy.answered(cid)


def introduce(client: ClientProxy, timeout: float) -> dict[str, object] | None:
    """Ask a client who it is: its properties (without ``get_properties`` it has none), None for an error."""
    try:
        answer = client.get_properties(GetPropertiesIns(config={}), timeout, None)
        return dict(answer.properties) if answer.status.code == Code.OK else {}
    except Exception as error:  # a client that fails is data
        check_answered(error)
        logger.warning("roll call: client %s answered with %s", client.cid, shown(error))
        return None


def probe(
    client: ClientProxy, parameters: Parameters, config: dict[str, Scalar], timeout: float
) -> dict[str, object] | None:
    """Have a client evaluate the current model; None if it fails.

    The metrics of ``evaluate`` count; without ``loss`` among them, the result's loss.
    """
    try:
        answer = client.evaluate(EvaluateIns(parameters, dict(config)), timeout, None)
        if answer.status.code != Code.OK:
            raise ValueError(f"{answer.status.code.name}: {answer.status.message}")
        metrics: dict[str, object] = dict(answer.metrics or {})
    except Exception as error:  # a client that fails is data
        check_answered(error)
        logger.warning("probe: client %s answered with %s", client.cid, shown(error))
        return None
    return {"loss": answer.loss} | metrics
