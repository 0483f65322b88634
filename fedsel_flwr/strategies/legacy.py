"""Selection for Flower's legacy strategy API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import numpy as np
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors._check import real, whole
from fedsel_flwr.strategies import bases
from fedsel_flwr.strategies.cohort import BoundedManager, ChosenCohort, TimedProxy, wait_for_clients
from fedsel_flwr.strategies.core import SelectionCore, Settings
from fedsel_flwr.strategies.history import History, RoundRecord
from fedsel_flwr.strategies.replies import Arrays, ClientResult, MetricKeys, Reply
from fedsel_flwr.strategies.rollcall import RollCall
from fedsel_flwr.strategies.roster import Roster, RowValues

FitFailure = tuple[ClientProxy, FitRes] | BaseException
EvaluateFailure = tuple[ClientProxy, EvaluateRes] | BaseException


class SelectionStrategy(Strategy):
    """Wraps a Flower strategy: a selector decides who trains, ``base`` decides how their updates are aggregated.

    It is the outermost wrapper (differential-privacy wrappers go inside). Each round it waits a bounded time for
    clients, asks new ones who they are (``get_properties``), dispatches what ``base`` configures to exactly the
    chosen clients, drops updates that cannot be used, lets ``base`` aggregate the rest in a fixed order, and tells
    the selector what came back.

    Args:
        selector: The selector; it must not be shared with another strategy.
        base: Any Flower strategy; FedAvg without federated evaluation if None.
        max_latency: Longest wait for a client, seconds; None takes the selector's, else 60.
        min_completed: With fewer usable updates the global model stays as it is.
        min_available: Clients that must be connected before a round; None takes the larger of the base's
            ``min_available_clients`` and ``clients_per_round``.
        wait_timeout: Seconds after which waiting for clients ends in an error.
        channels: Clients that transmit at the same time (Xia's N); a larger cohort goes in waves. None takes
            ``clients_per_round``.
        clock: "virtual" believes the reported latency (simulation); "server" times each client itself.
        clock_slack: On the server's clock, seconds by which a report may undercut the observed time.
        cooldown: Leave a client out for 2^n rounds after n failures in a row.
        max_clients: Refuse newcomers beyond this many clients.
        max_new_per_round: Admit at most this many newcomers a round after the first.
        evict_after: With ``max_clients`` reached, replace clients away for more than this many rounds.
        metric_keys: Names under which clients report.
        roll_call_timeout: Seconds to wait for new clients to say who they are.
        on_round: Called with each finished round's record, after the central evaluation.

    Attributes:
        selector: The selector.
        history: What happened, round by round and client by client.
        base: The wrapped strategy.
        roster: Connections, client ids and rows.

    Raises:
        ParameterError: A parameter is out of its range, or the base can never work with so few clients.

    References:
        Flower 1.41, ``flwr.server.strategy.Strategy``.
    """

    def __init__(
        self,
        selector: Selector,
        base: Strategy | None = None,
        *,
        max_latency: float | None = None,
        min_completed: int = 1,
        min_available: int | None = None,
        wait_timeout: float = 600.0,
        channels: int | None = None,
        clock: Literal["virtual", "server"] = "virtual",
        clock_slack: float = 5.0,
        cooldown: bool = False,
        max_clients: int | None = None,
        max_new_per_round: int | None = None,
        evict_after: int | None = None,
        metric_keys: MetricKeys | None = None,
        roll_call_timeout: float = 60.0,
        on_round: Callable[[RoundRecord], None] | None = None,
        roster: Roster | None = None,
        client_values: tuple[RowValues, ...] = (),
    ) -> None:
        if not isinstance(selector, Selector):
            raise ParameterError(f"selector must be a fedsel_flwr.selectors.Selector, got {type(selector).__name__}")
        if base is not None and not isinstance(base, Strategy):
            raise ParameterError(f"base must be a flwr.server.strategy.Strategy, got {type(base).__name__}")
        self.base = base if base is not None else bases.default_base()
        cohort = selector.clients_per_round
        bases.check_cohort(self.base, cohort)
        self.wait_timeout = real("wait_timeout", wait_timeout, at_least=0.0)
        self.roll_call_timeout = real("roll_call_timeout", roll_call_timeout, above=0.0)
        self.min_available = (
            max(bases.min_available(self.base), cohort)
            if min_available is None
            else whole("min_available", min_available, 1)
        )
        settings = Settings(
            max_latency=_one_max_latency(selector, max_latency),
            min_completed=min_completed,
            channels=cohort if channels is None else channels,
            clock=clock,
            clock_slack=clock_slack,
            cooldown=cooldown,
            keys=metric_keys or MetricKeys(),
        )
        self.roster = roster or Roster()
        for name, value in (
            ("max_clients", max_clients),
            ("max_new_per_round", max_new_per_round),
            ("evict_after", evict_after),
        ):
            if value is not None:
                setattr(self.roster, name, whole(name, value, 1))
        self.core = SelectionCore(selector, settings, self.roster, client_values)
        self._roll_call = RollCall(settings.keys, self.roll_call_timeout)
        self._on_round = on_round
        self._evaluation = np.random.default_rng(0)  # draws the clients of evaluation rounds
        self._reference: Arrays | None = None
        self._dispatched: dict[str, TimedProxy] = {}

    @property
    def selector(self) -> Selector:
        """The selector."""
        return self.core.selector

    @property
    def history(self) -> History:
        """What happened, round by round and client by client."""
        return self.core.history

    def __repr__(self) -> str:
        """Name the selector and the base."""
        return f"{type(self).__name__}(selector={self.selector.name!r}, base={self.base!r})"

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the base's initial model, else that of the first client that answers."""
        parameters = self.base.initialize_parameters(self._bounded(client_manager))
        if parameters is not None:
            return parameters
        clients = wait_for_clients(client_manager, 1, self.wait_timeout, "one to get the initial model from")
        for client in clients.values():
            try:
                answer = client.get_parameters(GetParametersIns(config={}), self.roll_call_timeout, None)
            except Exception:  # the next client may do better
                continue
            if answer.status.code == Code.OK:
                return answer.parameters
        raise RunError("no client returned an initial model: give the base strategy initial_parameters")

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Choose clients and return the base's instructions for exactly these."""
        clients = wait_for_clients(client_manager, self.min_available, self.wait_timeout, "min_available")
        strangers = self.core.strangers(clients)
        if strangers:
            self.core.enroll(self._roll_call.call([clients[cid] for cid in strangers], self.core.round + 1))
        chosen = {cid: clients[cid] for cid in self.core.choose(clients)}
        self._dispatched = {}
        if not chosen:
            self.core.finish(self.core.collect({}, None))
            return []
        self._reference = _decode(parameters)
        instructions = self.base.configure_fit(
            server_round=server_round,
            parameters=parameters,
            client_manager=ChosenCohort(chosen, len(clients)),
        )
        dispatched = sorted(client.cid for client, _ in instructions)
        if dispatched != sorted(chosen):
            raise RunError(
                f"{type(self.base).__name__} dispatched {len(dispatched)} instructions, but the selector chose "
                f"{len(chosen)} clients: this base decides itself who trains and cannot be combined with a selector"
            )
        self._dispatched = {client.cid: TimedProxy(client) for client, _ in instructions}
        return [(self._dispatched[client.cid], ins) for client, ins in instructions]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: list[FitFailure]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Clean the results, let the base aggregate them, and tell the selector what came back."""
        arrived = {client.cid: (client, res) for client, res in results}
        refused = {failure[0].cid: failure[1] for failure in failures if isinstance(failure, tuple)}
        outcome = self.core.collect(
            {cid: reply for cid, proxy in self._proxies(arrived)
             if (reply := self._reply(proxy, arrived, refused)) is not None},
            self._reference,
        )  # fmt: skip
        usable = [_cleaned(arrived[cid], outcome.results[cid]) for cid in outcome.usable]
        garbage = [
            RunError(f"client {cid}: {'; '.join(outcome.results[cid].problems)}")
            for cid in outcome.results
            if cid in arrived and not outcome.results[cid].completed
        ]
        aggregated: tuple[Parameters | None, dict[str, Scalar]] = (None, {})
        if outcome.enough:
            bases.check_survivors(self.base, len(usable), server_round)
            passed = [(_original(f[0]), f[1]) if isinstance(f, tuple) else f for f in failures]
            aggregated = self.base.aggregate_fit(server_round, usable, [*passed, *garbage])
        self.core.finish(outcome)
        return aggregated

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the base's evaluation instructions; waits a bounded time."""
        manager = self._bounded(client_manager)
        return self.base.configure_evaluate(server_round=server_round, parameters=parameters, client_manager=manager)

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: list[EvaluateFailure]
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Let the base aggregate, in id order."""
        return self.base.aggregate_evaluate(server_round, sorted(results, key=lambda r: r[0].cid), failures)

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Let the base evaluate the global model, and enter loss and accuracy into the history."""
        result = self.base.evaluate(server_round, parameters)
        if result is not None:
            loss, metrics = result
            accuracy = metrics.get("accuracy", float("nan"))
            self.history.evaluated(
                server_round, loss=float(loss), accuracy=float(accuracy) if _is_number(accuracy) else float("nan")
            )
        last = self.history.rounds[-1] if self.history.rounds else None
        if self._on_round is not None and last is not None and last.round == server_round:
            self._on_round(last)
        return result

    def _bounded(self, manager: ClientManager) -> BoundedManager:
        return BoundedManager(manager, self.wait_timeout, self._evaluation, self.roster.name)

    def _proxies(self, arrived: dict[str, tuple[ClientProxy, FitRes]]) -> list[tuple[str, ClientProxy]]:
        """The proxies of this round: our own, or, if a caller dispatched others, those that answered."""
        own: dict[str, ClientProxy] = {cid: client for cid, (client, _) in arrived.items()}
        return list((own | self._dispatched).items())

    def _reply(
        self, proxy: ClientProxy, arrived: dict[str, tuple[ClientProxy, FitRes]], refused: dict[str, FitRes]
    ) -> Reply | None:
        """What came from one client, in plain types; None if nothing did."""
        observed = proxy.elapsed_s if isinstance(proxy, TimedProxy) else None
        if proxy.cid in arrived:
            res = arrived[proxy.cid][1]
            return Reply(
                arrays=_decode(res.parameters), num_examples=res.num_examples, metrics=res.metrics or {},
                observed_s=observed,
            )  # fmt: skip
        if proxy.cid in refused:
            status = refused[proxy.cid].status
            return Reply(error=f"status: {status.code.name}: {status.message:.200}", observed_s=observed)
        error = proxy.error if isinstance(proxy, TimedProxy) else None
        if error is not None:
            return Reply(error=f"exception: {type(error).__name__}: {error!s:.200}", observed_s=observed)
        return None


def _one_max_latency(selector: Selector, given: float | None) -> float:
    """One number for strategy and selector."""
    own: float | None = getattr(selector, "max_latency", None)
    if given is None:
        return 60.0 if own is None else own
    if own is not None and own != given:
        raise ParameterError(f"max_latency is {given} for the strategy but {own} for the selector; give it once")
    return given


def _decode(parameters: Parameters) -> Arrays | None:
    """The arrays of ``parameters``; None if they are not NumPy arrays (tree ensembles, garbage)."""
    try:
        arrays = parameters_to_ndarrays(parameters)
    except Exception:  # whatever a client sent
        return None
    return arrays if all(isinstance(array, np.ndarray) for array in arrays) else None


def _original(client: ClientProxy) -> ClientProxy:
    return client.proxy if isinstance(client, TimedProxy) else client


def _cleaned(result: tuple[ClientProxy, FitRes], read: ClientResult) -> tuple[ClientProxy, FitRes]:
    """The result with Flower's own proxy, in the model's types, without our metrics that could not be used."""
    client, res = result
    if read.faulty_keys:
        res = replace(res, metrics={key: value for key, value in res.metrics.items() if key not in read.faulty_keys})
    if read.converted is not None:
        res = replace(res, parameters=ndarrays_to_parameters(list(read.converted)))
    return _original(client), res


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)
