"""Clients in this process, in either of Flower's APIs: a client proxy, a grid, and one round played with functions.

The clients are plain functions in examples and unit tests (:func:`play_round`). In whole runs they are the fleet of
:func:`fedsel_flwr.testing.check_strategy`, and the rounds are those of Flower's loop (:data:`FlowerRounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersRes,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import SimpleClientManager
from flwr.serverapp import Grid

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.flower import ClientProxy, ErrorCode, task_identity
from fedsel_flwr.testing.fleet import Fleet, Model, NoReply, ReceivedUpdate, Reply

if TYPE_CHECKING:
    # The harness chooses the API, and plays runs with it.
    from fedsel_flwr.testing.harness import ObservedRun

Fit = Callable[[Model, dict[str, Any]], tuple[Model, int, dict[str, Any]]]
"""A client's training on the global model with the round's config, as ``fit`` of Flower's ``NumPyClient``."""
RUN, TASK, SERVER = 7, 1, 1
"""Flower's numbers of the run, of its task and of the server's node."""
OK = Status(Code.OK, "")
NO_ANSWER = "Expected one Message but got: 0"
"""Message of the error that Flower's own proxy raises without a reply."""
NO_TEXT = [1.0, 2.0]
"""A list instead of a number. It stands for a text, which a MetricRecord cannot hold."""


def play_round(strategy: Any, clients: Sequence[Fit], model: Sequence[npt.ArrayLike], server_round: int = 1) -> Model:
    """Play one round of a strategy of either API.

    Args:
        strategy: A strategy of :mod:`fedsel_flwr.strategies` or of :mod:`fedsel_flwr.strategies.message`.
        clients: The connected clients. The position of a client is its ``client_id``. A client that raises has failed,
            and so has a client whose reply Flower cannot send.
        model: The global model before the round.
        server_round: Flower's number of the round.

    Returns:
        The global model after the round, or the model before the round if the strategy returned none.

    >>> from fedsel_flwr.selectors import RoundRobin
    >>> from fedsel_flwr.strategies import SelectionStrategy
    >>> strategy = SelectionStrategy(RoundRobin(clients_per_round=2))
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5}) for k in range(4)]
    >>> play_round(strategy, clients, [np.zeros(2)])
    [array([0.5, 0.5])]
    """
    fleet = Functions(clients, [np.asarray(array) for array in model])
    after: Any
    if hasattr(strategy, "configure_train"):
        grid, arrays = InProcessGrid(fleet), record_of(fleet.arrays)
        # Flower refuses to construct messages outside of a run.
        with task_identity(RUN, TASK, SERVER):
            messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
            after, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        return fleet.arrays if after is None else arrays_of(after)
    parameters = ndarrays_to_parameters(fleet.arrays)
    instructions = strategy.configure_fit(server_round, parameters, manager_of(fleet))
    after, _ = strategy.aggregate_fit(server_round, *legacy_replies(fleet, instructions, "fit", server_round))
    return fleet.arrays if after is None else parameters_to_ndarrays(after)


class Functions:
    """Clients that are functions and always connected. The methods are those of the fleet.

    Args:
        clients: The functions.
        arrays: The model at the beginning of the round.
    """

    def __init__(self, clients: Sequence[Fit], arrays: Model) -> None:
        self.arrays = arrays
        # Flower reserves the node ids 0 and 1.
        self.connected = {str(number + 2): number for number in range(len(clients))}
        self._clients = clients

    def nodes(self) -> list[SimpleNamespace]:
        """Return the server's view of the connections, which have no names."""
        return [SimpleNamespace(node_id=int(node), name="") for node in self.connected]

    def in_arrival_order(self, items: Sequence[Any]) -> list[Any]:
        """Return the items in their order."""
        return list(items)

    def properties_of(self, node: str) -> dict[str, Any]:
        """Return the id of a client."""
        return {"client_id": self.connected[node]}

    def training_reply(self, node: str, model: Model, config: dict[str, Any]) -> Reply:
        """Train a client."""
        arrays, num_examples, metrics = self._clients[self.connected[node]](model, config)
        return Reply(arrays, num_examples, metrics)

    def evaluation_reply(self, node: str, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Raise, because a function only trains."""
        raise NotImplementedError("these clients only train")


Clients = Fleet | Functions
"""The clients behind the transports of both APIs."""


# ---- the legacy API -------------------------------------------------------------------------------------------------


class InProcessProxy(ClientProxy):
    """The legacy API's connection to one of the clients.

    Args:
        node: The node id.
        clients: The clients.
    """

    def __init__(self, node: str, clients: Clients) -> None:
        super().__init__(node)
        self._clients = clients
        self.grid = SimpleNamespace(get_nodes=clients.nodes)

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Return the client's properties."""
        return GetPropertiesRes(OK, self._clients.properties_of(self.cid))

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Return the initial model."""
        return GetParametersRes(OK, ndarrays_to_parameters(self._clients.arrays))

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Return the client's update, changed by its fault."""
        try:
            reply = self._clients.training_reply(self.cid, parameters_to_ndarrays(ins.parameters), dict(ins.config))
        except NoReply:
            raise ValueError(NO_ANSWER) from None
        if isinstance(reply.arrays, bytes):
            # Flower's encoder refuses bytes, so they go into Parameters without it.
            parameters = Parameters([reply.arrays], "numpy.ndarray")
        else:
            parameters = ndarrays_to_parameters(reply.arrays)
        status = Status(Code.FIT_NOT_IMPLEMENTED, reply.refused) if reply.refused else OK
        result = FitRes(status, parameters, reply.num_examples, _scalars(reply.metrics))
        # Flower's client writes its reply into records, and raises for the same values.
        ConfigRecord({**result.metrics, "num_examples": result.num_examples})
        return result

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Return an evaluation for the base strategy, or the answer to a probe."""
        loss, examples, metrics = self._clients.evaluation_reply(self.cid, dict(ins.config))
        return EvaluateRes(OK, loss, examples, _scalars(metrics))

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Return at once, because the clients decide which of them are connected."""
        return DisconnectRes("")


def manager_of(clients: Clients) -> SimpleClientManager:
    """Return Flower's client manager with the connected clients."""
    manager = SimpleClientManager()
    manager.clients = {node: InProcessProxy(node, clients) for node in clients.connected}
    return manager


def legacy_replies(clients: Clients, instructions: Any, call: str, server_round: int) -> tuple[list[Any], list[Any]]:
    """Ask proxies by ``fit`` or ``evaluate``; return results and failures in arrival order, as Flower's server does."""
    results, failures = list[Any](), list[Any]()
    for client, ins in clients.in_arrival_order(instructions):
        try:
            result = getattr(client, call)(ins, None, server_round)
        except Exception as error:
            # Flower's server counts any exception of a proxy as a failure too.
            failures.append(error)
            continue
        (results if result.status.code == Code.OK else failures).append((client, result))
    return results, failures


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in metrics.items()}


# ---- the Message API ------------------------------------------------------------------------------------------------


class InProcessGrid(Grid):
    """The Message API's grid over the clients. Replies are ready as soon as a message is pushed.

    Args:
        clients: The clients.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients, self._replies, self._number = clients, dict[str, Message](), 0

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the call, because there is only one run."""

    @property
    def run(self) -> Any:
        """The run, with its id."""
        return SimpleNamespace(run_id=RUN)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Raise, as Flower does."""
        raise NotImplementedError("Grid.create_message is deprecated. Construct the Message itself")

    def get_node_ids(self) -> list[int]:
        """Return the ids of the connected nodes."""
        return [int(node) for node in self._clients.connected]

    def get_nodes(self) -> list[Any]:
        """Return the connected nodes with their registered names."""
        return self._clients.nodes()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages, make the replies, and return the messages' ids."""
        ids = []
        for message in messages:
            self._number += 1
            # Flower's grid sets the id in the same private field, because the metadata has no setter.
            vars(message.metadata)["_message_id"] = f"message-{self._number}"
            ids.append(message.metadata.message_id)
            if (content := self._reply_to(message)) is not None:
                self._replies[ids[-1]] = Message(content, reply_to=message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the existing replies to these messages, in the order of their arrival."""
        here = sorted(one for one in message_ids if one in self._replies)
        return self._clients.in_arrival_order([self._replies.pop(one) for one in here])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push messages and pull the replies, without waiting for clients that never answer."""
        return self.pull_messages(self.push_messages(messages))

    def _reply_to(self, message: Message) -> RecordDict | Error | None:
        node, clients, kind = str(message.metadata.dst_node_id), self._clients, message.metadata.message_type
        if node not in clients.connected:
            return Error(ErrorCode.NODE_UNAVAILABLE, "no such node")
        config = config_of(message)
        try:
            if kind == MessageType.QUERY:
                return RecordDict({"facts": ConfigRecord(clients.properties_of(node))})
            if kind == MessageType.EVALUATE:
                loss, examples, metrics = clients.evaluation_reply(node, config)
                # The fleet's clients report their loss under the name that they have for it.
                unnamed = {} if isinstance(clients, Fleet) else {"loss": loss}
                return _content({"num-examples": examples, **unnamed, **metrics})
            (record,) = message.content.array_records.values()
            reply = clients.training_reply(node, [array.numpy() for array in record.values()], config)
            if not reply.refused:
                content = _content({"num-examples": reply.num_examples, **reply.metrics})
                content["arrays"] = _encoded(reply, list(record))
                return content
        except NoReply:
            return None
        except Exception as error:
            # Flower's ClientApp turns any exception into an error reply too.
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")
        return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.refused)


def config_of(message: Message) -> dict[str, Any]:
    """Return the entries of all config records of a message."""
    return {key: value for record in message.content.config_records.values() for key, value in record.items()}


def record_of(arrays: Model) -> ArrayRecord:
    """Return a model as a record, with numbers as names of the arrays."""
    return ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)})


def arrays_of(record: ArrayRecord) -> Model:
    """Return the arrays of a record whose names are numbers, in their order."""
    return [record[name].numpy() for name in sorted(record, key=lambda name: (len(name), name))]


def _content(metrics: dict[str, Any]) -> RecordDict:
    """Return metrics as records: each vector in an ArrayRecord, all other metrics in one MetricRecord."""
    vectors = {key: ArrayRecord({"0": Array(v)}) for key, v in metrics.items() if isinstance(v, np.ndarray)}
    numbers = {k: NO_TEXT if isinstance(v, str) else v for k, v in metrics.items() if k not in vectors}
    return RecordDict({**vectors, "metrics": MetricRecord(numbers)})


def _encoded(reply: Reply, names: list[str]) -> ArrayRecord:
    if isinstance(reply.arrays, bytes):
        garbage = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=reply.arrays)
        return ArrayRecord(dict.fromkeys(names, garbage))
    more = [*names, *(f"more-{i}" for i in range(len(reply.arrays)))]
    return ArrayRecord({name: Array(array) for name, array in zip(more, reply.arrays, strict=False)})


TIMEOUT_S = 0.3
"""Seconds that the strategy waits for clients that never answer, if the strategy times clients."""


class LegacyRounds:
    """The legacy API, with a loop of rounds as in Flower's server.

    Attributes:
        configure: Name of the strategy's method that configures training.
        aggregate: Name of the method that aggregates the replies.
    """

    configure, aggregate = "configure_fit", "aggregate_fit"

    def configs(self, instructions: Any) -> list[tuple[str, dict[str, Any]]]:
        """Return the node id and the config of each instruction."""
        return [(client.cid, dict(ins.config)) for client, ins in instructions]

    def updates(self, *replies: Any) -> tuple[list[ReceivedUpdate], int]:
        """Return the updates, and the number of failures, that ``aggregate`` was called with."""
        results, failures = replies
        received = [ReceivedUpdate(client.cid, self.model(res.parameters), res.num_examples) for client, res in results]
        return received, len(failures)

    def model(self, aggregated: Parameters) -> Model:
        """Return the arrays of the model that ``aggregate`` returned."""
        try:
            return parameters_to_ndarrays(aggregated)
        except Exception:
            # A fault may have sent anything; undecodable bytes equal no update.
            return []

    def play(self, run: ObservedRun, rounds: int) -> None:
        """Play rounds as Flower does. The run's strategy must already be watched."""
        strategy, fleet = run.strategy, run.fleet
        parameters = ndarrays_to_parameters(run.model)
        for number in range(1, rounds + 1):
            run.begin_round()
            asked = {"server_round": number, "client_manager": manager_of(fleet)}
            if number == 1:
                self._check_initial(strategy.initialize_parameters(asked["client_manager"]), fleet.arrays)
            if instructions := strategy.configure_fit(**asked, parameters=parameters):
                new, _ = strategy.aggregate_fit(number, *legacy_replies(fleet, instructions, "fit", number))
                parameters = parameters if new is None else new
            strategy.evaluate(number, parameters)
            if instructions := strategy.configure_evaluate(**asked, parameters=parameters):
                strategy.aggregate_evaluate(number, *legacy_replies(fleet, instructions, "evaluate", number))

    def _check_initial(self, parameters: Parameters, arrays: Model) -> None:
        got, wanted = [a.shape for a in self.model(parameters)], [a.shape for a in arrays]
        if got != wanted:
            raise ParameterError(
                f"arrays must be the strategy's initial model, but its base starts from shapes {got} and arrays has "
                f"shapes {wanted}. Give both the same model"
            )


class MessageRounds:
    """The Message API, with Flower's own loop of rounds. Attributes and methods are those of :class:`LegacyRounds`."""

    configure, aggregate = "configure_train", "aggregate_train"

    def configs(self, instructions: Iterable[Message]) -> list[tuple[str, dict[str, Any]]]:
        """Return the node id and the config of each instruction."""
        return [(str(message.metadata.dst_node_id), config_of(message)) for message in instructions]

    def updates(self, *replies: Any) -> tuple[list[ReceivedUpdate], int]:
        """Return the updates, and the number of failures, that ``aggregate`` was called with."""
        (messages,) = replies
        good = [message for message in messages if message.has_content()]
        return [self._update(message) for message in good], len(messages) - len(good)

    def model(self, aggregated: ArrayRecord) -> Model:
        """Return the arrays of the model that ``aggregate`` returned."""
        return arrays_of(aggregated)

    def play(self, run: ObservedRun, rounds: int) -> None:
        """Play rounds as Flower does. The run's strategy must already be watched."""
        run.begin_with(self.configure)
        # Flower refuses to construct messages outside of a run.
        with task_identity(RUN, TASK, SERVER):
            # By name, because a base's own ``start`` may take some of these as further keywords only.
            run.strategy.start(
                grid=InProcessGrid(run.fleet), initial_arrays=record_of(run.model), num_rounds=rounds,
                timeout=TIMEOUT_S, train_config=ConfigRecord({"fleet-train": 1}),
                evaluate_config=ConfigRecord({"fleet-evaluate": 2}),
                evaluate_fn=lambda number, arrays: MetricRecord({"loss": 1.0 / (number + 1), "accuracy": 0.5}),
            )  # fmt: skip

    def _update(self, message: Message) -> ReceivedUpdate:
        (metrics,) = message.content.metric_records.values()
        try:
            arrays = arrays_of(next(iter(message.content.array_records.values())))
        except Exception:
            # A fault may have sent anything; undecodable bytes equal no update.
            arrays = []
        return ReceivedUpdate(str(message.metadata.src_node_id), arrays, metrics.get("num-examples", float("nan")))


FlowerRounds = LegacyRounds | MessageRounds
"""One of Flower's APIs, as the harness uses it."""
