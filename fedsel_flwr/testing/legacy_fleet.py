"""The fleet in Flower's legacy API: proxies, and the rounds as Flower's server goes through them."""

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
from fedsel_flwr.testing.course import Course, Given
from fedsel_flwr.testing.fleet import Model, Silence

OK = Status(Code.OK, "")
NO_ANSWER = "Expected one Message but got: 0"
"""What Flower's own proxy raises where nothing came."""


class FleetProxy(ClientProxy):
    """A connection of a client of the fleet.

    Args:
        node: Its name.
        course: Where it notes what it is asked.
    """

    def __init__(self, node: str, course: Course) -> None:
        super().__init__(node)
        self._course = course
        self.grid = SimpleNamespace(get_nodes=course.fleet.nodes)

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Say who it is."""
        return GetPropertiesRes(OK, self._course.fleet.introduction(self.cid))

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Return the initial model."""
        return GetParametersRes(OK, ndarrays_to_parameters(self._course.fleet.plan.arrays))

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Train, or be broken."""
        course, config = self._course, dict(ins.config)
        course.now.configs[self.cid] = config
        try:
            answer = course.fleet.trained(self.cid, parameters_to_ndarrays(ins.parameters), config)
        except Silence:
            raise ValueError(NO_ANSWER) from None
        course.now.sent[self.cid] = answer
        metrics = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in answer.metrics.items()}
        garbage = isinstance(answer.arrays, bytes)
        parameters = (
            Parameters([answer.arrays], "numpy.ndarray")  # type: ignore[list-item]
            if garbage
            else ndarrays_to_parameters(list(answer.arrays))  # type: ignore[arg-type]
        )
        status = Status(Code.FIT_NOT_IMPLEMENTED, answer.refused) if answer.refused else OK
        return FitRes(status, parameters, answer.num_examples, metrics)

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Evaluate, for the base strategy or for a probe."""
        config = dict(ins.config)
        if "probe" not in config:
            self._course.now.evaluated[self.cid] = config
        loss, examples, metrics = self._course.fleet.measured(self.cid, config)
        sent = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in metrics.items()}
        return EvaluateRes(OK, loss, examples, sent)

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing."""
        return DisconnectRes("")


def play_legacy(course: Course, rounds: int) -> None:
    """Play rounds as Flower's server does: what a client raises is a failure, what the strategy raises is raised."""
    strategy, manager, proxies = course.strategy, SimpleClientManager(), dict[str, FleetProxy]()
    parameters: Any = None
    for number in range(1, rounds + 1):
        course.begin_round()
        for node in [node for node in proxies if node not in course.fleet.connected]:
            manager.unregister(proxies.pop(node))
        for node in course.fleet.connected:
            if node not in proxies:
                manager.register(proxies.setdefault(node, FleetProxy(node, course)))
        if parameters is None:
            _check_initial(strategy.initialize_parameters(manager), course.fleet.plan.arrays)
            parameters = ndarrays_to_parameters(course.model)
        asked = {"server_round": number, "parameters": parameters, "client_manager": manager}
        instructions = strategy.configure_fit(**asked)
        course.asks([client.cid for client, _ in instructions])
        new = None
        if instructions:
            new, _ = strategy.aggregate_fit(number, *_answers(course, instructions, "fit", number))
        course.end_round(None if new is None else parameters_to_ndarrays(new))
        parameters = parameters if new is None else new
        strategy.evaluate(number, parameters)
        if instructions := strategy.configure_evaluate(**{**asked, "parameters": parameters}):
            strategy.aggregate_evaluate(number, *_answers(course, instructions, "evaluate", number))


def watch_legacy(course: Course) -> None:
    """Keep what the base strategy configures and what it is given."""
    base = course.strategy.base
    configure, aggregate, evaluation = base.configure_fit, base.aggregate_fit, base.configure_evaluate

    def configure_fit(*args: Any, **kwargs: Any) -> Any:
        instructions = configure(*args, **kwargs)
        course.now.base_config = dict(instructions[0][1].config) if instructions else {}
        return instructions

    def aggregate_fit(server_round: int, results: Any, failures: Any) -> Any:
        course.now.given = [Given(client.cid, _decoded(res.parameters), res.num_examples) for client, res in results]
        course.now.failures = len(failures)
        new, metrics = aggregate(server_round, results, failures)
        course.now.base_model = None if new is None else _decoded(new)
        return new, metrics

    def configure_evaluate(*args: Any, **kwargs: Any) -> Any:
        instructions = evaluation(*args, **kwargs)
        course.now.base_evaluated = {client.cid: dict(ins.config) for client, ins in instructions}
        return instructions

    vars(base).update(
        configure_fit=configure_fit, aggregate_fit=aggregate_fit, configure_evaluate=configure_evaluate
    )  # fmt: skip


def _answers(course: Course, instructions: Any, call: str, number: int) -> tuple[list[Any], list[Any]]:
    """Results and failures, in the order in which they happen to arrive."""
    results, failures = list[Any](), list[Any]()
    for client, ins in course.fleet.shuffled(instructions):
        try:
            result = getattr(client, call)(ins, None, number)
        except Exception as error:  # as Flower's server does
            failures.append(error)
            continue
        (results if result.status.code == Code.OK else failures).append((client, result))
    return results, failures


def _decoded(parameters: Parameters) -> Model:
    try:
        return parameters_to_ndarrays(parameters)
    except Exception:  # whatever a client sent
        return []


def _check_initial(parameters: Parameters, arrays: Model) -> None:
    got, wanted = [a.shape for a in _decoded(parameters)], [a.shape for a in arrays]
    if got != wanted:
        raise ParameterError(
            f"arrays must be the strategy's initial model: its base starts from arrays of shapes {got}, arrays has "
            f"{wanted}; give both the same"
        )
