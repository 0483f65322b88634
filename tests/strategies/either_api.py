"""The same fake clients behind a server of either of Flower's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.common import FitRes, Parameters, ndarrays_to_parameters
from flwr.server import strategy as legacy_bases
from flwr.serverapp import strategy as message_bases

from fedsel_flwr import strategies as legacy
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import message
from tests.strategies import helpers
from tests.strategies.helpers import Arrays, FakeProxy, Federation, initial, model, update
from tests.strategies.message import helpers as message_helpers
from tests.strategies.message.helpers import NAMES, FakeGrid, FakeNode, named, node_id

APIS = ("legacy", "message")
PACKAGES: dict[str, Any] = {"legacy": legacy, "message": message}
BASES: dict[str, Any] = {"legacy": legacy_bases, "message": message_bases}
RECORDING: dict[str, Any] = {"legacy": helpers.RecordingBase, "message": message_helpers.RecordingBase}
"""FedAvg that keeps what it was given."""
SPELLED = {
    "fraction_train": "fraction_fit",
    "min_train_nodes": "min_fit_clients",
    "min_evaluate_nodes": "min_evaluate_clients",
    "min_available_nodes": "min_available_clients",
    "num_malicious_nodes": "num_malicious_clients",
}
"""The Message API's name of an option -> the legacy API's."""


def base_of(api: str, name: Any = "FedAvg", **options: Any) -> Any:
    """A base by name or class, without federated evaluation; options are spelled as in the Message API."""
    own = {"initial_parameters": initial()} if api == "legacy" else {}
    cls = getattr(BASES[api], name) if isinstance(name, str) else name
    spelled = {SPELLED.get(key, key) if api == "legacy" else key: value for key, value in options.items()}
    return cls(**{"fraction_evaluate": 0.0, **own, **spelled})


def bagging(api: str) -> Any:
    """Flower's base whose models are boosted trees, before the first tree."""
    return base_of(api, "FedXgbBagging", **({"initial_parameters": Parameters([], "")} if api == "legacy" else {}))


def private(api: str, base: Any, kind: str = "ServerSideFixed", clients: int = 3, **options: Any) -> Any:
    """A base in one of Flower's wrappers for differential privacy, without noise."""
    own: dict[str, Any] = {} if "Adaptive" in kind else {"clipping_norm": 1.0}
    own |= {"clipped_count_stddev": 0.0} if "Adaptive" in kind else {}
    wrapper = getattr(BASES[api], f"DifferentialPrivacy{kind}Clipping")
    return wrapper(base, noise_multiplier=0.0, num_sampled_clients=clients, **{**own, **options})


def selection(api: str, selector: Any = 3, base: Any = None, **options: Any) -> Any:
    """A selection strategy; a number stands for a random choice of so many, and waits are short."""
    chosen = Random(clients_per_round=selector, seed=0) if isinstance(selector, int) else selector
    return make(api, chosen, base or base_of(api), **{"wait_timeout": 0.4, **options})


class Server:
    """Flower's own server over fake clients, which may come and go between rounds.

    Args:
        api: "legacy" or "message".
        strategy: The strategy.
        proxies: The clients.
        timeout: Seconds that a round may take; None: no limit in the legacy API, 5 in the Message API.
        start: The initial model; None: that of the base in the legacy API, zeros in the Message API.
        kind: The class of the nodes of the Message API.
        node: Keyword arguments of the nodes of the Message API.
    """

    def __init__(
        self, api: str, strategy: Any, proxies: Iterable[FakeProxy] = (), timeout: float | None = None,
        start: Arrays | None = None, kind: type[FakeNode] = FakeNode, **node: Any,
    ) -> None:  # fmt: skip
        self.api, self.strategy, self.timeout = api, strategy, timeout
        self._kind, self._node = kind, {"extra": {}, **node}
        self._start = start or model()
        if start is not None and api == "legacy":
            getattr(strategy.base, "strategy", strategy.base).initial_parameters = ndarrays_to_parameters(start)
        self.proxies: list[FakeProxy] = []
        self.federation, self.grid = Federation(strategy, timeout=timeout), FakeGrid()
        self.models: list[Arrays] = []
        self.result: Any = None
        for proxy in proxies:
            self.connect(proxy)

    def connect(self, proxy: FakeProxy, **node: Any) -> None:
        """A client registers, under a node id that it never had."""
        self.proxies.append(proxy)
        if self.api == "legacy":
            assert self.federation.manager.register(proxy)
        else:
            self.grid.nodes = {**self.grid.nodes, node_id(len(self.proxies)): self._kind(proxy, **self._node, **node)}

    def disconnect(self, proxy: FakeProxy) -> None:
        """A client leaves."""
        self.federation.manager.unregister(proxy)
        self.grid.nodes = {key: node for key, node in self.grid.nodes.items() if node.proxy is not proxy}

    def play(self, rounds: int = 1, **configs: Any) -> Server:
        """Play rounds from the model of the last one; in the Message API with the configs of ``start``."""
        if self.api == "legacy":
            for _ in range(rounds):
                self.models.append(self.federation.play(1).arrays())
            return self

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
            if number:
                self.models.append(arrays.to_numpy_ndarrays())
            return MetricRecord({"loss": 1.0})

        arrays = self.models[-1] if self.models else self._start
        start = named(arrays, NAMES[: len(arrays)])
        seconds = 5.0 if self.timeout is None else self.timeout
        self.result = self.strategy.start(self.grid, start, rounds, seconds, evaluate_fn=evaluated, **configs)
        return self

    def dispatched(self) -> list[list[str]]:
        """The ids of the clients that trained in each round, in the order of the ids."""
        ids: dict[int, list[str]] = {}
        for proxy in self.proxies:
            for number in proxy.fit_rounds:
                ids.setdefault(number, []).append(str(proxy.client_id))
        return [sorted(ids[number], key=lambda one: (len(one), one)) for number in sorted(ids)]

    def given(self) -> list[tuple[list[tuple[str, dict[str, Any]]], int]]:
        """What a recording base was given in each round: client ids with metrics, and the number of failures."""
        recorded = getattr(self.strategy.base, "strategy", self.strategy.base).given
        if self.api == "legacy":
            assert all(isinstance(client, FakeProxy) for results, _ in recorded for client, _ in results)
            assert all(_is_failure(one) for _, failures in recorded for one in failures)
            return [
                ([(str(client.client_id), res.metrics) for client, res in results], len(failures))
                for results, failures in recorded
            ]

        def client_of(message: Any) -> str:
            return str(self.grid.nodes[message.metadata.src_node_id].proxy.client_id)

        return [
            ([(client_of(m), _metrics(m)) for m in messages if m.has_content()], sum(m.has_error() for m in messages))
            for messages in recorded
        ]

    def received(self) -> tuple[list[dict[str, Any]], list[str]]:
        """What a recording base was given in the last round: metrics with the number of examples, words of failures."""
        last = self.strategy.base.given[-1]
        if self.api == "legacy":
            return [dict(res.metrics) | {"num-examples": res.num_examples} for _, res in last[0]], [*map(str, last[1])]
        return [_metrics(one) for one in last if one.has_content()], [m.error.reason for m in last if m.has_error()]


def _is_failure(one: Any) -> bool:
    if isinstance(one, tuple):
        return isinstance(one[0], FakeProxy) and isinstance(one[1], FitRes)
    return isinstance(one, BaseException)


def _metrics(message: Any) -> dict[str, Any]:
    (arrays,) = message.content.array_records.values()
    (metrics,) = message.content.metric_records.values()
    assert tuple(arrays.keys()) == NAMES
    return dict(metrics.items())


def mean_of(numbers: Iterable[int], current: Arrays, server_round: int, weights: Sequence[float] = ()) -> Arrays:
    """FedAvg's model of honest clients' updates, by hand; they weigh by their numbers of examples, if not given."""
    clients = list(numbers)
    updates = [update(k, current, server_round) for k in clients]
    weights = weights or [10 + 3 * k for k in clients]
    return [np.average(own, axis=0, weights=weights).astype(np.float32) for own in zip(*updates, strict=True)]


def close(models: Iterable[Any], expected: Iterable[Any]) -> None:
    """Models are equal but for the rounding of float32."""
    for array, own in zip(models, expected, strict=True):
        np.testing.assert_allclose(array, own, rtol=1e-5, atol=1e-6)


def make(api: str, selector: Any, base: Any = None, **options: Any) -> Any:
    """A strategy of a selector, or a paper's strategy by its name; a base that is not given records what it gets."""
    base = base or RECORDING[api]()
    if isinstance(selector, str):
        return getattr(PACKAGES[api], selector)(base=base, **options)
    return PACKAGES[api].SelectionStrategy(selector, base, **{"max_latency": 9.0, **options})


def play(
    api: str, selector: Any, proxies: Iterable[FakeProxy], rounds: int = 1, *, base: Any = None,
    timeout: float | None = None, ready: Mapping[int, float] | None = None, node: type[FakeNode] = FakeNode,
    **options: Any,
) -> Server:  # fmt: skip
    """Play fake clients to a new strategy; ``ready`` says how long a client's reply takes, by its number."""
    server = Server(api, make(api, selector, base, **options), timeout=timeout, kind=node)
    for proxy in proxies:
        server.connect(proxy, ready=(ready or {}).get(proxy.number, 0.0))
    return server.play(rounds)
