"""Transport of the legacy API: sends the roll call and probes to many clients at once, with a bounded wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

from flwr.common import Code, EvaluateIns, GetPropertiesIns, Parameters

from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.probing import Answers
from fedsel_flwr.rounds.roll_call import Registration
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.client_manager import grid_of, with_late_replies
from fedsel_flwr.strategies.wrapping.failure_reasons import NotReached, check_answered, reason_in
from fedsel_flwr.strategies.wrapping.grids import FIRST_WINDOW, WINDOW, is_simulation, registrations
from fedsel_flwr.strategies.wrapping.waiting import LateReplies, Startup

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
        base: The base strategy, whose evaluation config a probe carries too.
        keys: The names of the metrics.
        startup: The start of a simulation's actors, which does not count as waiting.
        check_errors: Function of the texts of a probe's errors, which may end the run.
    """

    clients: Mapping[str, ClientProxy]
    parameters: Parameters
    timeout: float
    late: LateReplies = field(default_factory=lambda: LateReplies(Busy()))
    base: object = None
    keys: MetricKeys = field(default_factory=MetricKeys)
    startup: Startup = field(default_factory=Startup)
    check_errors: Callable[[Iterable[str]], None] = lambda errors: None
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

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Let clients evaluate the current model, with the config of the base's own evaluations.

        The metrics of ``evaluate`` are the answer. Without a metric that has the key of the column ``loss``, the
        result's own loss has this key. A metric of the client counts first, because the client names it itself.
        """
        ins = EvaluateIns(self.parameters, bases.evaluate_config(self.base, int(config["round"])) | dict(config))
        said, _ = self._ask(nodes, lambda client: probe_client(client, ins, self.timeout))
        self.check_errors(str(one) for one in said.values() if isinstance(one, Exception))
        loss = self.keys.of("loss")
        return {
            node: reason_in(one, self.timeout, None) if isinstance(one, Exception) else {loss: one.loss} | one.metrics
            for node, one in said.items()
        }

    def _ask(self, nodes: list[str], question: Callable[[ClientProxy], Answer]) -> tuple[dict[str, Answer], list[str]]:
        asked = [self.clients[node] for node in nodes]
        timeout, late, startup = self.timeout, self.late, self.startup if self.simulated else None
        return ask_all(
            asked, lambda one: question(with_late_replies(one, timeout, late, startup)), timeout, late.busy, startup
        )


def ask_all(
    clients: Iterable[ClientProxy], question: Callable[[ClientProxy], Answer], timeout: float, busy: Busy,
    startup: Startup | None = None,
) -> tuple[dict[str, Answer], list[str]]:  # fmt: skip
    """Ask clients a question, at most 32 at a time; in a simulation first a few, and after an answer a window.

    Args:
        clients: The clients to ask.
        question: Asks one client. It may raise only ``TimeoutError``, if no answer came, and ``NotReached``.
        timeout: Longest wait for all of them, seconds.
        busy: Tracks the clients that did not answer in time, and frees clients that answer later.
        startup: The start of a simulation's actors, which does not count as waiting; None in a deployment.

    Returns:
        Connection -> answer, and the connections that were asked and did not answer in time.
    """
    asked = list(clients)
    sent = time.monotonic()
    executor = ThreadPoolExecutor(MAX_PARALLEL if startup is None else WINDOW, thread_name_prefix="fedsel-ask")
    futures: dict[str, Future[Answer]] = {}
    first = asked if startup is None else asked[:FIRST_WINDOW]
    futures |= {client.cid: executor.submit(question, client) for client in first}
    if startup is not None:
        # Half of the time, so that the other half is left for the others if the first clients hang.
        longest = startup.deadline(sent, timeout) - sent - timeout / 2
        if wait(futures.values(), timeout=longest, return_when=FIRST_COMPLETED).done:
            startup.answered()
        futures |= {client.cid: executor.submit(question, client) for client in asked[len(first) :]}
    deadline = sent + timeout if startup is None else startup.deadline(sent, timeout)
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


class Evaluated(NamedTuple):
    """A client's evaluation of the current model."""

    loss: float
    metrics: dict[str, object]


def probe_client(client: ClientProxy, ins: EvaluateIns, timeout: float) -> Evaluated | Exception:
    """Let a client evaluate the current model; return the error of a client that fails."""
    try:
        # A copy of the config, because the clients of a simulation share the server's process.
        answer = client.evaluate(EvaluateIns(ins.parameters, dict(ins.config)), timeout, None)
        if answer.status.code != Code.OK:
            raise RuntimeError(f"{answer.status.code.name}: {answer.status.message}")
        return Evaluated(answer.loss, dict(answer.metrics or {}))
    # A client that fails is data, not an exception.
    except Exception as error:
        check_answered(error)
        return error
