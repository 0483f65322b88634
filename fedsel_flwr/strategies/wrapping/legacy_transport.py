"""Transport of the legacy API: questions, results, and what stands around Flower's client manager and proxies.

:class:`LegacyTransport` sends the roll call and probes to many clients at once, with a bounded wait. The functions read
results into plain types, clean them for a base strategy, and convert the model for checkpoints.

A base strategy gets :class:`ChosenCohort` or :class:`BoundedManager` in place of Flower's client manager. Flower's
server gets a :class:`TimedProxy` for each client. Messages through it may be answered after the timeout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    Parameters,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import ClientManager

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy, Criterion
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.roll_call import Answers
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.rounds.untrusted import decoded, shown, usable_count
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.failure_reasons import NotReached, check_answered, no_answer, reason_in
from fedsel_flwr.strategies.wrapping.grids import FIRST_WINDOW, WINDOW, Transport, grid_of, with_late_replies
from fedsel_flwr.strategies.wrapping.waiting import LateReplies, wait_for

logger = logging.getLogger("fedsel_flwr")
MAX_PARALLEL = 32
"""Number of threads that ask the clients of a deployment."""
Answer = TypeVar("Answer")
FitResult = tuple[ClientProxy, FitRes]
EvaluateResult = tuple[ClientProxy, EvaluateRes]
NUMPY = "numpy.ndarray"
"""Flower's type of parameters that are NumPy arrays."""


@dataclass(frozen=True)
class LegacyTransport(Transport):
    """Reaches the clients of the legacy API for the roll call and for probes of the current model.

    Args:
        clients: Connection -> proxy.
        parameters: The current global model.
        **options: Those of :class:`~fedsel_flwr.strategies.wrapping.grids.Transport`, by keyword.
    """

    clients: Mapping[str, ClientProxy]
    parameters: Parameters
    # Clients without ``get_properties`` answer with a status, not with an error, so all can be asked at once.
    one_first: ClassVar[bool] = False

    @property
    def inner(self) -> Any:
        """The grid of the proxies; None if they have none."""
        return grid_of(self.clients.values())

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Mapping[str, object] | None], list[str]]:
        """Ask clients for their properties."""
        return self._ask(nodes, lambda client: introduce_client(client, self.timeout))

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Let clients evaluate the current model, with the config of the base's own evaluations.

        The metrics of ``evaluate`` are the answer. Without a metric that has the key of the column ``loss``, the
        result's own loss has this key. A metric of the client counts first, because the client names it itself.
        """
        ins = EvaluateIns(self.parameters, bases.evaluate_config(self.base, int(config["round"])) | dict(config))
        said, _ = self._ask(nodes, lambda client: probe_client(client, ins, self.timeout, self.keys.of("loss")))
        self.check_errors(str(one) for one in said.values() if isinstance(one, Exception))
        return {
            node: reason_in(one, self.timeout, None) if isinstance(one, Exception) else one
            for node, one in said.items()
        }

    def _ask(self, nodes: list[str], question: Callable[[ClientProxy], Answer]) -> tuple[dict[str, Answer], list[str]]:
        """Ask clients a question, at most 32 at a time; in a simulation first a few, and after an answer a window.

        Args:
            nodes: The clients to ask.
            question: Asks one client. It may raise only ``TimeoutError``, if no answer came, and ``NotReached``.

        Returns:
            Connection -> answer, and the connections that were asked and did not answer in time.
        """
        timeout, startup = self.timeout, self.startup if self.simulated else None

        def ask(node: str) -> Answer:
            return question(with_late_replies(self.clients[node], timeout, self.late, startup))

        sent = time.monotonic()
        executor = ThreadPoolExecutor(MAX_PARALLEL if startup is None else WINDOW, thread_name_prefix="fedsel-ask")
        first = nodes if startup is None else nodes[:FIRST_WINDOW]
        futures = {node: executor.submit(ask, node) for node in first}
        if startup is not None:
            # Half of the time, so that the other half is left for the others if the first clients hang.
            longest = startup.deadline(sent, timeout) - sent - timeout / 2
            if wait(futures.values(), timeout=longest, return_when=FIRST_COMPLETED).done:
                startup.answered()
            futures |= {node: executor.submit(ask, node) for node in nodes[len(first) :]}
        deadline = sent + timeout if startup is None else startup.deadline(sent, timeout)
        done, _ = wait(futures.values(), timeout=max(0.0, deadline - time.monotonic()))
        # A thread that hangs in a client must not delay the server. Questions that wait for a thread are dropped.
        executor.shutdown(wait=False, cancel_futures=True)
        answered = [node for node, future in futures.items() if future in done and future.exception() is None]
        # These clients never got the question, so they owe no answer.
        unreached = [node for node, f in futures.items() if f in done and isinstance(f.exception(), NotReached)]
        settled = {*answered, *unreached}
        missed = [node for node, future in futures.items() if node not in settled and not future.cancelled()]
        self.late.busy.owe(missed)
        for node in missed:
            futures[node].add_done_callback(partial(_free_if_answered, self.late.busy, node))
        return {node: futures[node].result() for node in answered}, missed


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


def probe_client(client: ClientProxy, ins: EvaluateIns, timeout: float, loss: str) -> dict[str, object] | Exception:
    """Let a client evaluate the current model; return its metrics and its loss, or the error that it raised."""
    try:
        # A copy of the config, because the clients of a simulation share the server's process.
        answer = client.evaluate(EvaluateIns(ins.parameters, dict(ins.config)), timeout, None)
        if answer.status.code != Code.OK:
            raise RuntimeError(f"{answer.status.code.name}: {answer.status.message}")
        return {loss: answer.loss} | dict(answer.metrics or {})
    # A client that fails is data, not an exception.
    except Exception as error:
        check_answered(error)
        return error


class Arrived(NamedTuple):
    """The results and failures of a round or an evaluation.

    Attributes:
        results: Connection -> result.
        failures: Flower's failures.
    """

    results: dict[str, Any]
    failures: list[Any]

    @classmethod
    def of(cls, results: Sequence[FitResult | EvaluateResult], failures: Sequence[object]) -> Arrived:
        """Sort results by connection."""
        return cls({client.cid: (client, res) for client, res in results}, list(failures))

    def failures_with(self, faults: Iterable[str]) -> list[Any]:
        """Return the failures with Flower's own proxies, and an error for each fault of an unusable result."""
        failures = [(unwrapped(one[0]), one[1]) if isinstance(one, tuple) else one for one in self.failures]
        return [*failures, *map(RunError, faults)]


def reply_of(
    base: object, proxy: TimedProxy, arrived: FitResult | None, refused: FitRes | None, model: Parameters | None = None
) -> Reply:
    """Read a client's result into plain types; no content of a result raises an error.

    Args:
        base: The strategy that will aggregate the replies.
        proxy: The proxy of the client.
        arrived: The client's result; None if it did not succeed.
        refused: Its result with a status other than OK; None if there is none.
        model: The global model.
    """
    if refused is not None:
        return Reply(error=f"status: {refused.status.code.name}: {refused.status.message}", observed_s=proxy.elapsed_s)
    if arrived is None:
        reason = reason_in(proxy.error, proxy.timeout_s, proxy.elapsed_s)
        # Without a timeout, a missing answer means a broken connection, not a straggler.
        timed_out = proxy.timeout_s is not None and reason == no_answer(proxy.timeout_s)
        return Reply(error=reason, observed_s=proxy.elapsed_s, timed_out=timed_out)
    res = arrived[1]
    fault = bases.fault_in_metrics(base, res.metrics or {})
    if not fault and bases.payload(base) == "trees" and isinstance(res.parameters, Parameters):
        tensors = res.parameters.tensors
        fault = bases.fault_in_model(base, tensors) if tensors else "arrays: none in the reply"
    if fault:
        return Reply(error=fault, observed_s=proxy.elapsed_s)
    # A client whose whole update is in its metrics sends no arrays.
    nothing = isinstance(res.parameters, Parameters) and not res.parameters.tensors
    return Reply(
        arrays=[] if nothing else decode(res.parameters),
        num_examples=res.num_examples,
        metrics=res.metrics or {},
        observed_s=proxy.elapsed_s,
        sent=None if proxy.sent is None or proxy.sent is model else decode(proxy.sent),
    )


def decode(parameters: Parameters) -> Arrays | None:
    """Return the arrays of ``parameters``; None if they are not NumPy arrays (trees, garbage) or there are none."""
    return decoded(lambda: parameters_to_ndarrays(parameters)) or None


def unwrapped(client: ClientProxy) -> ClientProxy:
    """Return Flower's own proxy."""
    return client.proxy if isinstance(client, TimedProxy) else client


def cleaned(result: FitResult, read: ClientResult, ours: Collection[str], dropped: Collection[str]) -> FitResult:
    """Return a result for a base strategy: with Flower's own proxy, in the model's types, at most max_examples.

    Args:
        result: The client's result, which is not changed.
        read: The result after reading.
        ours: Keys that only this package reads. Keys whose value cannot be used are left out.
        dropped: Keys of metrics that are left out: vectors that the selector asked for, and metrics with NaN.
    """
    client, res = result
    if without := (read.faulty_keys & {*ours}) | ({*dropped} & {*(res.metrics or {})}):
        res = replace(res, metrics={key: value for key, value in res.metrics.items() if key not in without})
    # A claim above max_examples would have too large a weight in the base's average.
    if usable_count(res.num_examples) > read.num_examples:
        res = replace(res, num_examples=read.num_examples)
    if read.converted is not None:
        res = replace(res, parameters=ndarrays_to_parameters(list(read.converted)))
    return unwrapped(client), res


def to_checkpoint(parameters: Parameters) -> tuple[list[str], Arrays]:
    """Return the names and arrays of a model in a checkpoint.

    The names of NumPy arrays are their numbers. Any other model, such as trees, is saved as bytes, one array for each
    tensor. The name of such an array is the tensors' type, a colon and its number.

    Raises:
        RunError: The model has a type that Flower does not have.

    >>> to_checkpoint(ndarrays_to_parameters([np.zeros(2)]))
    (['0'], [array([0., 0.])])
    >>> to_checkpoint(Parameters(tensors=[b"{}"], tensor_type="json"))
    (['json:0'], [array([123, 125], dtype=uint8)])
    """
    if not isinstance(parameters, Parameters):
        raise RunError(
            f"checkpoints cannot save a model of {type(parameters).__name__}, expected flwr.common.Parameters. "
            "Return these from the base, or leave checkpoint_dir out"
        )
    arrays = decode(parameters) if parameters.tensor_type == NUMPY else None
    if arrays is not None:
        return [str(i) for i in range(len(arrays))], arrays
    tensors = [np.frombuffer(tensor, np.uint8) for tensor in parameters.tensors]
    return [f"{parameters.tensor_type}:{i}" for i in range(len(tensors))], tensors


def from_checkpoint(checkpoint: Checkpoint) -> Parameters:
    """Return the model of a checkpoint as Flower's parameters."""
    kind, colon, _ = checkpoint.names[0].rpartition(":") if checkpoint.names else ("", "", "")
    if not colon:
        return ndarrays_to_parameters(checkpoint.model)
    return Parameters(tensors=[array.tobytes() for array in checkpoint.model], tensor_type=kind)


def named_arrays(parameters: object) -> Mapping[str, object] | None:
    """Return name -> array of the initial model, for comparison with a checkpoint; None if it cannot be compared."""
    if not isinstance(parameters, Parameters) or parameters.tensor_type != NUMPY:
        return None
    names, arrays = to_checkpoint(parameters)
    return dict(zip(names, arrays, strict=True)) if ":" not in "".join(names) else None


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
    clients = wait_for(lambda: dict(manager.all()), number, timeout, what="clients", reason=reason)
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
        round: The absolute round, which replaces Flower's number in the client's config; None keeps Flower's number.
        late: Fetches the replies that are late; None drops them.

    Attributes:
        elapsed_s: Duration of ``fit``, seconds; None before it ended.
        error: The error of ``fit``; None if it returned.
        timeout_s: The timeout of the call of ``fit``; None without a timeout or a call.
        sent: The parameters that the client received; None without a call.
    """

    def __init__(self, proxy: ClientProxy, *, round: int | None = None, late: LateReplies | None = None) -> None:
        super().__init__(proxy.cid)
        self.proxy, self._round, self._late = proxy, round, late
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
        start, self.timeout_s, self.sent = time.monotonic(), timeout, ins.parameters
        try:
            proxy = with_late_replies(self.proxy, timeout, self._late)
            return proxy.fit(ins, timeout, group_id if self._round is None else self._round)
        # Stored here because Flower's server passes failures on without the client's identity.
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.elapsed_s = time.monotonic() - start

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
