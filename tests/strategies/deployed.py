"""A deployment in this process: Flower's own client apps behind a grid that knows names and keys of its nodes."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.server.client_manager import ClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy

from fedsel_flwr.selectors import Random
from tests.strategies.either_api import base_of, make
from tests.strategies.helpers import Federation, chosen, model
from tests.strategies.message.helpers import FakeGrid, play

Facts = dict[str, Any]


class Node:
    """A SuperNode with a client app that adds 1 to the model.

    Args:
        api: Whose app it runs.
        registered: ``name`` and ``public_key``, as the SuperLink has them.
        says: What it says of itself when it is asked; None: its app has no function for that.
        reports: Further metrics of its updates.
        fails: Whether it fails to train.
        works: Behind a :class:`SuperLink`: kind of message -> seconds that it takes for each, in order; then and else
            none. Infinite: it hangs.
    """

    def __init__(
        self, api: str, registered: Facts | None = None, says: Facts | None = None, reports: Facts | None = None,
        fails: bool = False, works: Mapping[str, list[float]] | None = None,
    ) -> None:  # fmt: skip
        self.registered, self.says, self.reports, self.fails = registered or {}, says, reports or {}, fails
        self.ready, self.free_at, self.received = 0.0, 0.0, list[Message]()
        self._works, self._app = works or {}, {"legacy": _legacy_app, "message": _message_app}[api](self)

    def asked(self, kind: str) -> int:
        """How many messages of a kind it got."""
        return sum(_kind(message) == kind for message in self.received)

    def done_at(self, message: Message) -> float:
        """When it is done with a message: it works off one after the other."""
        takes = self._works.get(_kind(message)) or [0.0]
        self.free_at = max(self.free_at, time.monotonic()) + (takes.pop(0) if len(takes) > 1 else takes[0])
        return self.free_at

    def handle(self, message: Message) -> RecordDict | Error:
        """As Flower's SuperNode does, its words for what an app raises included."""
        try:
            context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})
            content: RecordDict = self._app(message, context).content
            return content
        except Exception as error:
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")


def _kind(message: Message) -> str:
    kind = message.metadata.message_type
    return "query" if kind == "get_properties" else kind


def _legacy_app(node: Node) -> ClientApp:
    class Plain(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            if node.fails:
                raise ValueError("the battery is empty")
            return [array + 1 for array in parameters], 10, dict(node.reports)

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return 0.5, 10, {"loss": 0.5, "latency_s": 1.0}

    class Telling(Plain):
        def get_properties(self, config: Any) -> Any:
            return node.says

    cls = Plain if node.says is None else Telling
    return ClientApp(client_fn=lambda context: cls().to_client())


def _message_app(node: Node) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if node.fails:
            raise ValueError("the battery is empty")
        arrays: Any = message.content["arrays"]
        trained = ArrayRecord([array + 1 for array in arrays.to_numpy_ndarrays()])
        renamed = ArrayRecord(dict(zip(arrays, trained.values(), strict=True)))
        metrics = MetricRecord({"num-examples": 10, **node.reports})
        return Message(RecordDict({"arrays": renamed, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "loss": 0.5, "latency_s": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    if node.says is not None:

        @app.query()
        def query(message: Message, context: Context) -> Message:
            return Message(RecordDict({"who": ConfigRecord(dict(node.says or {}))}), reply_to=message)

    return app


class InMemoryGrid(FakeGrid):
    """A grid with the name of that of Flower's simulation."""


class SuperLink(FakeGrid):
    """A grid whose nodes take their time; messages expire, and those to nodes that are gone are answered for them."""

    pull_interval = 0.02  # seconds, as Flower's grid in memory has 0.1

    def __init__(self, nodes: Any) -> None:
        super().__init__(nodes, seed=None)
        self._lock, self._arrived = RLock(), dict[str, Message]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        with self._lock:
            return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self._lock:
            ids = [one for one in message_ids if one in self._replies]
            for one, asked in [(one, self._arrived[one]) for one in ids]:
                if asked.metadata.dst_node_id not in self.nodes:
                    self._answer(one, Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"))
                elif time.time() >= asked.metadata.created_at + asked.metadata.ttl:
                    self._answer(one, Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable"))
            return super().pull_messages(ids)

    def _deliver(self, message: Message) -> None:
        there, node = copy.deepcopy(message), self.nodes[message.metadata.dst_node_id]
        node.received.append(there)
        self._arrived[there.metadata.message_id] = there
        self._answer(there.metadata.message_id, node.handle(there), node.done_at(there))

    def _answer(self, message_id: str, content: Any, ready: float = 0.0) -> None:
        self._replies[message_id] = ready, Message(content, reply_to=self._arrived[message_id])


class Deployment:
    """SuperNodes that come and go under a strategy of either API.

    Args:
        api: "legacy" or "message".
        selector: The strategy's selector, or the name of a paper's strategy.
        nodes: Node id -> node.
        grid: The class of the grid.
        timeout: Of a round, seconds.
        evaluating: The share of nodes that evaluate.
        **options: Options of the strategy.
    """

    def __init__(
        self, api: str, selector: Any, nodes: dict[int, Node], grid: type[FakeGrid] = FakeGrid,
        timeout: float | None = None, evaluating: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        self.api, self.timeout, self.grid = api, timeout, grid(nodes)  # type: ignore[arg-type]
        given = {"clock": "server", "max_latency": 9.0, "wait_timeout": 0.4, "min_available": 1, **options}
        self.strategy = make(api, selector, base_of(api, fraction_evaluate=evaluating), **given)
        self._federation = Federation(self.strategy, timeout=timeout) if api == "legacy" else None

    def play(self, rounds: int = 1, between: Any = id) -> Deployment:
        """Play rounds with Flower's own loop; ``between`` is called with the number of each before it."""
        if self._federation is not None:
            for number in range(1, rounds + 1):
                between(number)
                self._connect(self._federation.manager)
                self._federation.play()
            return self
        configure = self.strategy.configure_train

        def configured(server_round: int, *args: Any) -> Any:
            between(server_round)
            return configure(server_round, *args)

        self.strategy.configure_train = configured
        play(self.strategy, self.grid, rounds, initial_arrays=ArrayRecord(model()), timeout=self.timeout or 2.0)
        self.strategy.configure_train = configure
        return self

    def _connect(self, manager: ClientManager) -> None:
        for cid, proxy in manager.all().copy().items():
            if int(cid) not in self.grid.nodes:
                manager.unregister(proxy)
        for node_id in self.grid.nodes:
            manager.register(GridClientProxy(node_id, self.grid, 7))

    def come(self, node_id: int, node: Node) -> Node:
        self.grid.nodes[node_id] = node  # type: ignore[assignment]
        return node

    def go(self, node_id: int) -> None:
        del self.grid.nodes[node_id]

    def asked(self, kind: str) -> list[int]:
        """How often each node got a message of a kind."""
        return [node.asked(kind) for node in self.grid.nodes.values()]  # type: ignore[attr-defined]

    def chosen(self) -> list[list[str]]:
        """The client ids of each round, in id order."""
        return [sorted(ids) for ids in chosen(self.strategy)]

    def problems(self) -> set[str]:
        return {row.problem for row in self.strategy.history.clients}


def lines(caplog: Any, start: str = "") -> list[str]:
    """The package's log lines that begin so."""
    said = [record.getMessage() for record in caplog.records if record.name == "fedsel_flwr"]
    return [line for line in said if line.startswith(start)]


def everybody() -> Random:
    """A selector that chooses all clients."""
    return Random(clients_per_round=100, seed=0)


def key(letter: str) -> bytes:
    """A public key."""
    return letter.encode() * 32
