"""The same selector and the same clients through either of Flower's APIs, and what came of it in one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fedsel_flwr.strategies as legacy
from fedsel_flwr.strategies import message
from tests.strategies import helpers
from tests.strategies.message import helpers as messages
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id

APIS = ("legacy", "message")
BOTH = pytest.mark.parametrize("api", APIS)


@dataclass
class Played:
    """What came of a run: the strategy, its base, and the global model after each round as bytes, and at the end."""

    strategy: Any
    base: Any
    models: list[list[bytes]]
    arrays: list[np.ndarray]

    def given(self) -> tuple[list[dict[str, Any]], list[str]]:
        """What the base got in the last round: metrics with the number of examples, and the words of failures."""
        last = self.base.given[-1]
        if isinstance(last, tuple):
            return [dict(res.metrics) | {"num-examples": res.num_examples} for _, res in last[0]], [*map(str, last[1])]
        whole = [one.content for one in last if one.has_content()]
        assert all(len(content.array_records) == 1 for content in whole)
        metrics = [dict(next(iter(content.metric_records.values()))) for content in whole]
        return metrics, [one.error.reason for one in last if one.has_error()]

    def rows(self, client: str) -> list[Any]:
        """The history's rows of a client."""
        return [row for row in self.strategy.history.clients if row.client_id == client]


def fedavg(api: str, **kwargs: Any) -> Any:
    """FedAvg without federated evaluation."""
    return (helpers if api == "legacy" else messages).fedavg(**kwargs)


def make(api: str, selector: Any, base: Any = None, **options: Any) -> Any:
    """A strategy.

    Args:
        api: One of :data:`APIS`.
        selector: A selector, or the name of a paper's strategy, which takes the options.
        base: The base; None is one that records what it is given.
        options: Of the strategy.
    """
    package: Any = legacy if api == "legacy" else message
    base = base or (helpers if api == "legacy" else messages).RecordingBase()
    if isinstance(selector, str):
        return getattr(package, selector)(base=base, **options)
    return package.SelectionStrategy(selector, base, **{"max_latency": 9.0, **options})


def nodes_of(
    proxies: Iterable[helpers.FakeProxy], ready: Mapping[int, float] | None = None, node: type[FakeNode] = FakeNode
) -> dict[int, FakeNode]:
    """Nodes around fake clients, by the number of each; ``ready`` says how long a client's reply takes."""
    return {node_id(p.number): node(p, extra={}, ready=(ready or {}).get(p.number, 0.0)) for p in proxies}


def play(
    api: str, selector: Any, proxies: list[Any], rounds: int = 1, *, base: Any = None, timeout: float | None = None,
    ready: Mapping[int, float] | None = None, node: type[FakeNode] = FakeNode, **options: Any,
) -> Played:  # fmt: skip
    """Play fake clients to a new strategy; ``timeout`` is that of a round."""
    strategy = make(api, selector, base, **options)
    if api == "legacy":
        federation = helpers.Federation(strategy, proxies, timeout=timeout).play(rounds)
        return Played(strategy, strategy.base, federation.models, federation.arrays())
    grid = FakeGrid(nodes_of(proxies, ready, node))
    limit = {} if timeout is None else {"timeout": timeout}
    result, models = messages.play(strategy, grid, rounds, **limit)
    return Played(strategy, strategy.base, models, result.arrays.to_numpy_ndarrays())
