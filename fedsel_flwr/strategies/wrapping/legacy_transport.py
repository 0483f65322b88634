"""Transport of the legacy API: sends the roll call and probes to many clients at once, with a bounded wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar

from flwr.common import Code, EvaluateIns, GetPropertiesIns, Parameters, Scalar

from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.roll_call import Registration
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.strategies.wrapping.client_manager import grid_of, with_late_replies
from fedsel_flwr.strategies.wrapping.failure_reasons import NotReached, check_answered
from fedsel_flwr.strategies.wrapping.grids import FIRST_WINDOW, WINDOW, is_simulation, registrations
from fedsel_flwr.strategies.wrapping.waiting import LateReplies

logger = logging.getLogger("fedsel_flwr")
MAX_PARALLEL = 32
"""Number of threads that ask the clients of a deployment."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LegacyTransport:
    """Reaches the clients of the legacy API for the roll call and for probes of the current model.

    Args:
        clients: Connection -> proxy.
        parameters: The current global model.
        timeout: Longest wait for all answers, seconds.
        late: Fetches the answers to unanswered questions.
    """

    clients: Mapping[str, ClientProxy]
    parameters: Parameters
    timeout: float
    late: LateReplies = field(default_factory=lambda: LateReplies(Busy()))
    # Clients without ``get_properties`` answer with a status, not with an error, so all can be asked at once.
    one_first: ClassVar[bool] = False

    @property
    def simulated(self) -> bool:
        """Whether the clients are those of Flower's simulation."""
        return is_simulation(grid_of(self.clients.values()))

    def registrations(self) -> Mapping[str, Registration] | None:
        """Return the SuperLink's registrations of its nodes; None if the proxies have no grid."""
        return registrations(grid_of(self.clients.values()))

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Mapping[str, object] | None], list[str]]:
        """Ask clients for their properties."""
        return self._ask(nodes, lambda client: introduce_client(client, self.timeout))

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Mapping[str, Mapping[str, object]]:
        """Let clients evaluate the current model."""
        sent = dict[str, Scalar](config)
        answers, _ = self._ask(nodes, lambda client: probe_client(client, self.parameters, sent, self.timeout))
        return {node: answer for node, answer in answers.items() if answer is not None}

    def _ask(self, nodes: list[str], question: Callable[[ClientProxy], Answer]) -> tuple[dict[str, Answer], list[str]]:
        asked = [self.clients[node] for node in nodes]
        timeout, late = self.timeout, self.late
        return ask_all(asked, lambda one: question(with_late_replies(one, timeout, late)), timeout, late.busy)


def ask_all(
    clients: Iterable[ClientProxy], question: Callable[[ClientProxy], Answer], timeout: float, busy: Busy
) -> tuple[dict[str, Answer], list[str]]:
    """Ask clients a question, at most 32 at a time; in a simulation first a few, and after an answer a window.

    Args:
        clients: The clients to ask.
        question: Asks one client. It may raise only ``TimeoutError``, if no answer came, and ``NotReached``.
        timeout: Longest wait for all of them, seconds.
        busy: Tracks the clients that did not answer in time, and frees clients that answer later.

    Returns:
        Connection -> answer, and the connections that were asked and did not answer in time.
    """
    asked = list(clients)
    deadline = time.monotonic() + timeout
    simulated = is_simulation(grid_of(asked))
    executor = ThreadPoolExecutor(WINDOW if simulated else MAX_PARALLEL, thread_name_prefix="fedsel-ask")
    futures: dict[str, Future[Answer]] = {}
    first = asked[:FIRST_WINDOW] if simulated else asked
    futures |= {client.cid: executor.submit(question, client) for client in first}
    if len(first) < len(asked):
        # Half of the time, so that the other half is left for the others if the first clients hang.
        wait(futures.values(), timeout=timeout / 2, return_when=FIRST_COMPLETED)
        futures |= {client.cid: executor.submit(question, client) for client in asked[len(first) :]}
    done, _ = wait(futures.values(), timeout=max(0.0, deadline - time.monotonic()))
    # A thread that hangs in a client must not delay the server. Questions that wait for a thread are dropped.
    executor.shutdown(wait=False, cancel_futures=True)
    answered = [cid for cid, future in futures.items() if future in done and future.exception() is None]
    # These clients never got the question, so they owe no answer.
    unreached = [cid for cid, f in futures.items() if f in done and isinstance(f.exception(), NotReached)]
    settled = {*answered, *unreached}
    missed = [cid for cid, future in futures.items() if cid not in settled and not future.cancelled()]
    busy.owe(missed)
    for cid in missed:
        futures[cid].add_done_callback(partial(_free_if_answered, busy, cid))
    return {cid: futures[cid].result() for cid in answered}, missed


def _free_if_answered(busy: Busy, cid: str, future: Future[Answer]) -> None:
    if future.exception() is None:
        busy.answered(cid)


def introduce_client(client: ClientProxy, timeout: float) -> dict[str, object] | None:
    """Ask a client for its properties, which are empty without ``get_properties``; None for an error."""
    try:
        answer = client.get_properties(GetPropertiesIns(config={}), timeout, None)
        return dict(answer.properties) if answer.status.code == Code.OK else {}
    # A client that fails is data, not an exception.
    except Exception as error:
        check_answered(error)
        logger.warning("roll call: client %s answered with %s", client.cid, shown(error))
        return None


def probe_client(
    client: ClientProxy, parameters: Parameters, config: dict[str, Scalar], timeout: float
) -> dict[str, object] | None:
    """Let a client evaluate the current model; None if it fails.

    The metrics of ``evaluate`` are the answer. If they have no ``loss``, the result's loss is added.
    """
    try:
        answer = client.evaluate(EvaluateIns(parameters, dict(config)), timeout, None)
        if answer.status.code != Code.OK:
            raise ValueError(f"{answer.status.code.name}: {answer.status.message}")
        metrics: dict[str, object] = dict(answer.metrics or {})
    # A client that fails is data, not an exception.
    except Exception as error:
        check_answered(error)
        logger.warning("probe: client %s answered with %s", client.cid, shown(error))
        return None
    return {"loss": answer.loss} | metrics
