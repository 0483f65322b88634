"""In-process clients: play one round of a strategy with functions in place of a fleet.

For examples and unit tests. :func:`fedsel_flwr.testing.check_strategy` plays whole runs with clients that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
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
    ReconnectIns,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import SimpleClientManager
from flwr.serverapp import Grid

from fedsel_flwr.flower import ClientProxy, task_identity

Model = list[npt.NDArray[Any]]
Fit = Callable[[Model, dict[str, Any]], tuple[Model, int, dict[str, Any]]]
"""A client's training on the global model with the round's config, as ``fit`` of Flower's ``NumPyClient``."""

RUN, TASK, SERVER = 1, 1, 0
"""Flower's numbers of the run, of its task and of the server's node."""


def play_round(strategy: Any, clients: Sequence[Fit], model: Sequence[npt.ArrayLike], server_round: int = 1) -> Model:
    """Play one round of a strategy of either API.

    Args:
        strategy: One of :mod:`fedsel_flwr.strategies` or of :mod:`fedsel_flwr.strategies.message`.
        clients: The connected clients; the position of a client is its ``client_id``.
        model: The global model before the round.
        server_round: Flower's number of the round.

    Returns:
        The global model after the round; the one before it if the strategy returned none.

    >>> from fedsel_flwr.selectors import RoundRobin
    >>> from fedsel_flwr.strategies import SelectionStrategy
    >>> strategy = SelectionStrategy(RoundRobin(clients_per_round=2))
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5}) for k in range(4)]
    >>> play_round(strategy, clients, [np.zeros(2)])
    [array([0.5, 0.5])]
    """
    before = [np.asarray(array) for array in model]
    if hasattr(strategy, "configure_train"):
        return _play_messages(strategy, clients, before, server_round)
    manager = SimpleClientManager()
    for number, fit in enumerate(clients):
        manager.register(InProcessProxy(number, fit))
    instructions = strategy.configure_fit(server_round, ndarrays_to_parameters(before), manager)
    results = [(proxy, proxy.fit(ins, None, server_round)) for proxy, ins in instructions]
    after, _ = strategy.aggregate_fit(server_round, results, [])
    return before if after is None else parameters_to_ndarrays(after)


def _play_messages(strategy: Any, clients: Sequence[Fit], before: Model, server_round: int) -> Model:
    grid = InProcessGrid(clients)
    arrays = ArrayRecord({str(i): Array(array) for i, array in enumerate(before)})
    # Flower makes no message outside of a run
    with task_identity(RUN, TASK, SERVER):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        after, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    return before if after is None else [array.numpy() for array in after.values()]


class InProcessProxy(ClientProxy):
    """The legacy API's connection to a client that is a function.

    Args:
        number: Its ``client_id``; its connection is named alike.
        fit: Its training.
    """

    def __init__(self, number: int, fit: Fit) -> None:
        super().__init__(str(number))
        self._fit = fit

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Return its id."""
        return GetPropertiesRes(Status(Code.OK, ""), {"client_id": int(self.cid)})

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Refuse: the caller has the initial model."""
        raise NotImplementedError

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Train."""
        arrays, num_examples, metrics = self._fit(parameters_to_ndarrays(ins.parameters), dict(ins.config))
        return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), num_examples, metrics)

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Refuse: a round of training evaluates nothing."""
        raise NotImplementedError

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing."""
        return DisconnectRes("")


class InProcessGrid(Grid):
    """The Message API's grid over clients that are functions; each message is answered at once.

    Args:
        clients: The clients' training.
    """

    def __init__(self, clients: Sequence[Fit]) -> None:
        # node 0 is the server, so a node's number is one above its client's id
        self._clients: Mapping[int, Fit] = dict(enumerate(clients, 1))
        self._replies: dict[str, Message] = {}
        self._number = 0

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        """Ignore: there is one run."""

    @property
    def run(self) -> Any:
        """Return the run."""
        return SimpleNamespace(run_id=RUN)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse, as Flower does."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """Return the connected nodes."""
        return list(self._clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages and keep the replies."""
        sent = []
        for message in messages:
            self._number += 1
            # Flower's own grid numbers a message when it is pushed, and replies refer to this number
            vars(message.metadata)["_message_id"] = f"message-{self._number}"
            sent.append(message.metadata.message_id)
            self._replies[sent[-1]] = Message(self._answer(message), reply_to=message)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to some messages."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Deliver messages and return the replies."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> RecordDict:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == MessageType.QUERY:
            return RecordDict({"facts": ConfigRecord({"client_id": node - 1})})
        (record,) = message.content.array_records.values()
        config = {key: value for found in message.content.config_records.values() for key, value in found.items()}
        arrays, num_examples, metrics = self._clients[node]([array.numpy() for array in record.values()], config)
        trained = ArrayRecord({name: Array(array) for name, array in zip(record, arrays, strict=True)})
        return RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": num_examples, **metrics})})
