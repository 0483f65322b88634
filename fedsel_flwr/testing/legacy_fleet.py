"""The fleet in Flower's legacy API: client proxies, and a loop of rounds as in Flower's server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    ReconnectIns,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import SimpleClientManager

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.testing.fleet import Model, NoReply
from fedsel_flwr.testing.observed_run import ObservedRun, ReceivedUpdate

OK = Status(Code.OK, "")
NO_ANSWER = "Expected one Message but got: 0"
"""Message of the error that Flower's own proxy raises if no reply came."""


class FleetProxy(ClientProxy):
    """The proxy of a connected client of the fleet.

    Args:
        node: The node id.
        run: The run, which records the configs and replies.
    """

    def __init__(self, node: str, run: ObservedRun) -> None:
        super().__init__(node)
        self._run = run
        self.grid = SimpleNamespace(get_nodes=run.fleet.nodes)

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Return the client's id and number of examples."""
        return GetPropertiesRes(OK, self._run.fleet.properties_of(self.cid))

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Return the initial model."""
        return GetParametersRes(OK, ndarrays_to_parameters(self._run.fleet.plan.arrays))

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Return the client's update, or whatever its fault makes of it."""
        run, config = self._run, dict(ins.config)
        run.now.configs[self.cid] = config
        try:
            reply = run.fleet.training_reply(self.cid, parameters_to_ndarrays(ins.parameters), config)
        except NoReply:
            raise ValueError(NO_ANSWER) from None
        run.now.sent[self.cid] = reply
        metrics = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in reply.metrics.items()}
        # Flower's encoder refuses what is no array, so bytes go into Parameters as they are.
        garbage = isinstance(reply.arrays, bytes)
        parameters = (
            Parameters([reply.arrays], "numpy.ndarray")  # type: ignore[list-item]
            if garbage
            else ndarrays_to_parameters(list(reply.arrays))  # type: ignore[arg-type]
        )
        status = Status(Code.FIT_NOT_IMPLEMENTED, reply.refused) if reply.refused else OK
        return FitRes(status, parameters, reply.num_examples, metrics)

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Return an evaluation for the base strategy, or the answer to a probe."""
        config = dict(ins.config)
        if "probe" not in config:
            self._run.now.evaluated[self.cid] = config
        loss, examples, metrics = self._run.fleet.evaluation_reply(self.cid, config)
        sent = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in metrics.items()}
        return EvaluateRes(OK, loss, examples, sent)

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Return at once: the fleet decides who is connected."""
        return DisconnectRes("")


def play_legacy(run: ObservedRun, rounds: int) -> None:
    """Play rounds as Flower's server does: a client's exception is a failure, the strategy's own is raised."""
    strategy, manager, proxies = run.strategy, SimpleClientManager(), dict[str, FleetProxy]()
    parameters: Any = None
    for number in range(1, rounds + 1):
        run.begin_round()
        for node in [node for node in proxies if node not in run.fleet.connected]:
            manager.unregister(proxies.pop(node))
        for node in run.fleet.connected:
            if node not in proxies:
                manager.register(proxies.setdefault(node, FleetProxy(node, run)))
        if parameters is None:
            _check_initial(strategy.initialize_parameters(manager), run.fleet.plan.arrays)
            parameters = ndarrays_to_parameters(run.model)
        asked = {"server_round": number, "parameters": parameters, "client_manager": manager}
        instructions = strategy.configure_fit(**asked)
        run.record_asked([client.cid for client, _ in instructions])
        new = None
        if instructions:
            new, _ = strategy.aggregate_fit(number, *_replies(run, instructions, "fit", number))
        run.end_round(None if new is None else parameters_to_ndarrays(new))
        parameters = parameters if new is None else new
        strategy.evaluate(number, parameters)
        if instructions := strategy.configure_evaluate(**{**asked, "parameters": parameters}):
            strategy.aggregate_evaluate(number, *_replies(run, instructions, "evaluate", number))


def record_legacy_base(run: ObservedRun) -> None:
    """Record the configs that the base strategy sends and the updates it receives."""
    base = run.strategy.base
    configure, aggregate, evaluation = base.configure_fit, base.aggregate_fit, base.configure_evaluate

    def configure_fit(*args: Any, **kwargs: Any) -> Any:
        instructions = configure(*args, **kwargs)
        run.now.base_config = dict(instructions[0][1].config) if instructions else {}
        return instructions

    def aggregate_fit(server_round: int, results: Any, failures: Any) -> Any:
        run.now.given = [
            ReceivedUpdate(client.cid, _decoded(res.parameters), res.num_examples) for client, res in results
        ]
        run.now.failures = len(failures)
        new, metrics = aggregate(server_round, results, failures)
        run.now.base_model = None if new is None else _decoded(new)
        return new, metrics

    def configure_evaluate(*args: Any, **kwargs: Any) -> Any:
        instructions = evaluation(*args, **kwargs)
        run.now.base_evaluated = {client.cid: dict(ins.config) for client, ins in instructions}
        return instructions

    vars(base).update(
        configure_fit=configure_fit, aggregate_fit=aggregate_fit, configure_evaluate=configure_evaluate
    )  # fmt: skip


def _replies(run: ObservedRun, instructions: Any, call: str, number: int) -> tuple[list[Any], list[Any]]:
    """Return results and failures in the order in which they arrive."""
    results, failures = list[Any](), list[Any]()
    for client, ins in run.fleet.in_arrival_order(instructions):
        try:
            result = getattr(client, call)(ins, None, number)
        except Exception as error:
            # Flower's server too counts any exception of a proxy as a failure.
            failures.append(error)
            continue
        (results if result.status.code == Code.OK else failures).append((client, result))
    return results, failures


def _decoded(parameters: Parameters) -> Model:
    try:
        return parameters_to_ndarrays(parameters)
    except Exception:
        # A fault may have sent anything; undecodable bytes equal no update.
        return []


def _check_initial(parameters: Parameters, arrays: Model) -> None:
    got, wanted = [a.shape for a in _decoded(parameters)], [a.shape for a in arrays]
    if got != wanted:
        raise ParameterError(
            f"arrays must be the strategy's initial model, but its base starts from shapes {got} and arrays has shapes "
            f"{wanted}. Give both the same model"
        )
