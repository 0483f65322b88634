"""A SuperLink and its SuperNodes as both of Flower's APIs see them: a node works off one message after the other.

The legacy API is played with Flower's own ``GridClientProxy``, and clients are apps of Flower's in both.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from math import inf
from threading import RLock
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg as MessageFedAvg

from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import Federation, initial
from tests.strategies.message.helpers import FakeGrid
from tests.strategies.message.models import arrays_of


class Client(NumPyClient):
    """Adds 1 to the model."""

    def __init__(self, number: int) -> None:
        self.facts = {"client_id": f"c{number}", "num_examples": 10}

    def get_properties(self, config: Any) -> Any:
        return self.facts

    def fit(self, parameters: Any, config: Any) -> Any:
        return [array + 1 for array in parameters], 10, {"latency_s": 1.0}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.5, 10, {"loss": 0.5, "latency_s": 1.0}


def app_of(api: str, number: int) -> ClientApp:
    """The client in either API."""
    client = Client(number)
    if api == "legacy":
        from flwr.client import ClientApp as LegacyApp

        return LegacyApp(client_fn=lambda context: client.to_client())
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"facts": ConfigRecord(client.facts)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record: ArrayRecord = message.content["arrays"]
        arrays = ArrayRecord({name: Array(array.numpy() + 1) for name, array in record.items()})
        metrics = MetricRecord({"num-examples": 10, "latency_s": 1.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "loss": 0.5, "latency_s": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class SuperNode:
    """A SuperNode.

    Args:
        api: Of its app.
        number: Of its client.
        works: Kind of message -> seconds that it takes for each, in order; then and else none. Infinite: it hangs.
    """

    def __init__(self, api: str, number: int, **works: list[float]) -> None:
        self.number, self._works, self._app = number, works, app_of(api, number)
        self._free_at = 0.0
        self.received: list[str] = []

    def handle(self, message: Message) -> tuple[float, Message]:
        """When it is done with a message, and its reply."""
        kind = "query" if message.metadata.message_type == "get_properties" else message.metadata.message_type
        self.received.append(kind)
        takes = self._works.get(kind) or [0.0]
        self._free_at = max(self._free_at, time.monotonic()) + (takes.pop(0) if len(takes) > 1 else takes[0])
        context = Context(run_id=7, node_id=2, node_config={}, state=RecordDict(), run_config={})
        return self._free_at, self._app(message, context)


class SuperLink(FakeGrid):
    """A grid over SuperNodes; messages expire, and those to nodes that are gone are answered for them.

    Args:
        api: Of the apps.
        count: How many nodes; the client of node 2 + k is number k.
        works: Client's number -> what its messages take.
    """

    pull_interval = 0.02  # seconds, as Flower's grid in memory has 0.1

    def __init__(self, api: str, count: int, works: dict[int, dict[str, list[float]]]) -> None:
        super().__init__()
        self.api, self.late_looks, self._lock = api, 0, RLock()
        self.clients = [SuperNode(api, k, **works.get(k, {})) for k in range(count)]
        self.connected = {2 + k: node for k, node in enumerate(self.clients)}
        self._waiting: dict[str, tuple[float, Message, Message]] = {}

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.connected)

    def get_nodes(self) -> Iterable[Any]:
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        with self._lock:
            ids = []
            for message in messages:
                self._number += 1
                ids.append(f"message-{self._number}")
                message.metadata.__dict__["_message_id"] = ids[-1]
                there = copy.deepcopy(message)
                self._waiting[ids[-1]] = (*self.connected[message.metadata.dst_node_id].handle(there), there)
            return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        with self._lock:
            arrived = []
            for one in [one for one in message_ids if one in self._waiting]:
                ready, reply, asked = self._waiting[one]
                expires = asked.metadata.created_at + asked.metadata.ttl
                if asked.metadata.dst_node_id not in self.connected:
                    reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=asked)
                elif time.time() >= expires:
                    reply = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable"), reply_to=asked)
                elif time.monotonic() < ready:
                    continue
                del self._waiting[one]
                arrived.append(reply)
            return arrived

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        pending, start = set(self.push_messages(messages)), time.monotonic()
        replies: list[Message] = []
        while pending and time.monotonic() - start < (inf if timeout is None else timeout):
            arrived = self.pull_messages(pending)
            pending -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            time.sleep(self.pull_interval if pending else 0.0)
        return replies

    def asked(self, kind: str = "train") -> list[int]:
        """How often each client got a message of a kind."""
        return [node.received.count(kind) for node in self.clients]


class Fleet:
    """A strategy of either API over a SuperLink.

    Args:
        link: The nodes.
        selector: Who chooses.
        timeout: Of a round, seconds.
        between: Called with the link before each round.
        evaluating: The share of nodes that evaluate.
        options: Of the strategy.
    """

    def __init__(
        self, link: SuperLink, selector: Selector, timeout: float = 0.25, *, evaluating: float = 0.0, **options: Any
    ) -> None:
        self.link, self.timeout = link, timeout
        usual = {"identity": "claim", "max_latency": 9.0, "min_available": len(link.clients), "wait_timeout": 2.0}
        options = usual | options
        if link.api == "legacy":
            base: Any = LegacyFedAvg(fraction_evaluate=evaluating, initial_parameters=initial())
            self.strategy: Any = LegacyStrategy(selector, base, **options)
            self._federation = Federation(self.strategy, [], timeout=timeout)
        else:
            base = MessageFedAvg(fraction_evaluate=evaluating)
            self.strategy = MessageStrategy(selector, base, **options)

    def play(self, rounds: int, between: Any = None) -> list[list[str]]:
        """Play rounds.

        Args:
            rounds: How many.
            between: Called with the number of each round before it.

        Returns:
            The clients that were chosen, round by round.
        """
        if self.link.api == "legacy":
            for number in range(1, rounds + 1):
                self._before(number, between)
                self._federation.play()
        else:
            configure = self.strategy.configure_train

            def configured(server_round: int, *args: Any) -> Any:
                self._before(server_round, between)
                return configure(server_round, *args)

            self.strategy.configure_train = configured
            self.strategy.start(self.link, arrays_of(), rounds, timeout=self.timeout)
        history = self.strategy.history
        return [
            [row.client_id for row in history.clients if row.round == entry.round] for entry in history.rounds
        ]  # fmt: skip

    def _before(self, number: int, between: Any) -> None:
        if between is not None:
            between(number)
        if self.link.api == "legacy":
            manager = self._federation.manager
            here = {str(node): node for node in self.link.get_node_ids()}
            for cid, client in list(manager.all().items()):
                if cid not in here:
                    manager.unregister(client)
            for cid in here.keys() - manager.all().keys():
                manager.register(GridClientProxy(here[cid], self.link, 7))
