"""A deployment in this process: Flower's own client apps behind a grid that knows names and keys of its nodes."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.server.compat.grid_client_proxy import GridClientProxy

from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import Federation, fedavg, model
from tests.strategies.message.helpers import FakeGrid, play
from tests.strategies.message.helpers import fedavg as message_fedavg

APIS = ("legacy", "message")
Facts = dict[str, Any]


class Node:
    """A SuperNode with a client app.

    Args:
        api: Whose app it runs.
        registered: ``name`` and ``public_key``, as the SuperLink has them.
        says: What it says of itself when it is asked; None: its app has no function for that.
        reports: Further metrics of its updates.
        fails: Whether it fails to train.
    """

    def __init__(
        self, api: str, registered: Facts, says: Facts | None = None, reports: Facts | None = None, fails: bool = False
    ) -> None:
        self.registered, self.says, self.reports, self.fails = registered, says, reports or {}, fails
        self.ready, self.received = 0.0, list[Message]()
        self._app = {"legacy": _legacy_app, "message": _message_app}[api](self)

    def asked(self, kind: str) -> int:
        return sum(message.metadata.message_type == kind for message in self.received)

    def handle(self, message: Message) -> RecordDict | Error:
        """As Flower's SuperNode does, its words for what an app raises included."""
        try:
            context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})
            content: RecordDict = self._app(message, context).content
            return content
        except Exception as error:
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")


def _legacy_app(node: Node) -> ClientApp:
    class Plain(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            if node.fails:
                raise ValueError("the battery is empty")
            return [array + 1 for array in parameters], 10, dict(node.reports)

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

    if node.says is not None:

        @app.query()
        def query(message: Message, context: Context) -> Message:
            return Message(RecordDict({"who": ConfigRecord(dict(node.says or {}))}), reply_to=message)

    return app


class InMemoryGrid(FakeGrid):
    """A grid with the name of that of Flower's simulation."""


class Deployment:
    """SuperNodes that come and go under a strategy of either API.

    Args:
        api: "legacy" or "message".
        selector: The strategy's selector.
        nodes: Node id -> node.
        grid: The class of the grid.
        **options: Options of the strategy.
    """

    def __init__(
        self, api: str, selector: Any, nodes: dict[int, Node], grid: type[FakeGrid] = FakeGrid, **options: Any
    ) -> None:
        self.api, self.grid = api, grid(nodes)  # type: ignore[arg-type]
        given = {"clock": "server", "max_latency": 9.0, "wait_timeout": 0.4, "min_available": 1, **options}
        cls, base = (LegacyStrategy, fedavg()) if api == "legacy" else (MessageStrategy, message_fedavg())
        self.strategy: Any = cls(selector, base, **given)
        self._federation = Federation(self.strategy) if api == "legacy" else None

    def play(self, rounds: int = 1) -> Deployment:
        """Play rounds with Flower's own loop."""
        if self._federation is None:
            play(self.strategy, self.grid, rounds, initial_arrays=ArrayRecord(model()), timeout=2.0)
            return self
        manager = self._federation.manager
        for cid, proxy in manager.all().copy().items():
            if int(cid) not in self.grid.nodes:
                manager.unregister(proxy)
        for node_id in self.grid.nodes:
            manager.register(GridClientProxy(node_id, self.grid, 7))
        self._federation.play(rounds)
        return self

    def come(self, node_id: int, node: Node) -> Node:
        self.grid.nodes[node_id] = node  # type: ignore[assignment]
        return node

    def go(self, node_id: int) -> None:
        del self.grid.nodes[node_id]

    def questions(self) -> int:
        """How many nodes were asked who they are."""
        kind = "get_properties" if self.api == "legacy" else "query"
        return sum(node.asked(kind) for node in self.grid.nodes.values())  # type: ignore[attr-defined]

    def chosen(self) -> list[list[str]]:
        """The client ids of each round, in id order."""
        return [
            sorted(row.client_id for row in self.strategy.history.clients if row.round == record.round)
            for record in self.strategy.history.rounds
        ]

    def problems(self) -> set[str]:
        return {row.problem for row in self.strategy.history.clients}


def lines(caplog: Any, start: str) -> list[str]:
    """The package's log lines that begin so."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "fedsel_flwr" and record.getMessage().startswith(start)
    ]


def key(letter: str) -> bytes:
    """A public key."""
    return letter.encode() * 32
