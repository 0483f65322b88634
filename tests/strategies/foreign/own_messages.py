"""Strategies of the Message API that configure each node, or each round, in their own way.

A config or a sub-model for each node, budgets that count the messages, rounds without training, and an end by the
strategy's own criterion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords, aggregate_metricrecords

from tests.strategies.foreign.world import CLIENTS, LOG, Case, asked, node_id, reply, trained
from tests.strategies.message.helpers import named

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]
KNOWN = [node_id(k) for k in range(2 * CLIENTS)]
"""The nodes that the strategies' tables know. An invented node is a KeyError."""


class PerNodeProximal(FedProx):
    """Sends each node the proximal term of the node's row in a table, and records what was intended."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(proximal_mu=0.0, **kwargs)
        self.table = {node: round(0.1 * (i + 1), 1) for i, node in enumerate(KNOWN)}
        self.intended: list[dict[int, float]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        messages, sent = [], {}
        for message in super().configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            own = ConfigRecord({**config, "proximal-mu": self.table[node] / server_round, "for-node": node})
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            messages.append(Message(content, dst_node_id=node, message_type=MessageType.TRAIN))
            sent[node] = self.table[node] / server_round
        self.intended.append(dict(sorted(sent.items())))
        return messages


def proximal(number: int, content: RecordDict) -> RecordDict:
    """Moves less, the larger the proximal term is, and reports the term."""
    (arrays, config) = asked(content)
    mu = float(config["proximal-mu"])
    before = arrays.to_numpy_ndarrays()
    pairs = zip(before, trained(number, content), strict=True)
    return reply(number, named([(a + (b - a) / np.float32(1 + mu)) for a, b in pairs], tuple(arrays)), mu=mu)


class SubModels(FedAvg):
    """HeteroFL: weak nodes get the first rows of each array, and an entry is averaged over the nodes that have it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = {node: 1 + i % 2 for i, node in enumerate(KNOWN)}
        self.sent: list[dict[int, int]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.current = arrays
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            rows = self.rows[message.metadata.dst_node_id]
            own = ArrayRecord({name: Array(array.numpy()[:rows]) for name, array in arrays.items()})
            message.content = RecordDict({"arrays": own, "config": ConfigRecord({**config, "rows": rows})})
        sent = {
            one.metadata.dst_node_id: sum(a.numpy().nbytes for a in asked(one.content)[0].values()) for one in messages
        }
        self.sent.append(dict(sorted(sent.items())))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        contents = [message.content for message in replies if message.has_content()]
        if not contents:
            return None, None
        merged = {}
        for name, array in self.current.items():
            total, counts = np.zeros(array.shape), np.zeros(array.shape)
            for content in contents:
                own = content["arrays"][name].numpy()
                total[: len(own)] += own
                counts[: len(own)] += 1
            mean = np.where(counts > 0, total / np.maximum(counts, 1), array.numpy())
            merged[name] = Array(mean.astype(np.float32))
        return ArrayRecord(merged), aggregate_metricrecords(contents, self.weighted_by_key)


class MegabyteBudget(FedAvg):
    """Counts the bytes of its messages, and trains nobody when the budget is spent."""

    def __init__(self, budget: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.budget, self.spent, self.per_round = budget, 0, list[int]()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        if self.spent >= self.budget:
            LOG.info("round %d: budget of %d bytes is spent", server_round, self.budget)
            return []
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.per_round.append(len(messages))
        for message in messages:
            self.spent += sum(array.numpy().nbytes for array in asked(message.content)[0].values())
        return messages


class EveryOtherRound(FedAvg):
    """Trains in odd rounds only; in even rounds the clients evaluate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trained_in, self.aggregated_in = list[int](), list[int]()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        if server_round % 2 == 0:
            return []
        self.trained_in.append(server_round)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        self.aggregated_in.append(server_round)
        return super().aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return super().configure_evaluate(server_round, arrays, config, grid) if server_round % 2 == 0 else []


class TargetReached(FedAvg):
    """Configures nobody once the model has moved far enough."""

    def __init__(self, target: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target, self.reached_in = target, 0

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return [] if self.reached_in else super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None and np.linalg.norm(arrays.to_numpy_ndarrays()[0]) > self.target and not self.reached_in:
            self.reached_in = server_round
            LOG.info("target reached in round %d", server_round)
        return arrays, metrics


class HalfAndHalf(Strategy):
    """From scratch, as in Flower's tutorial: the second half of the nodes gets a higher learning rate."""

    def __init__(self) -> None:
        self.rates: list[dict[int, float]] = []

    def _messages(self, kind: str, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        messages, nodes, rates = [], sorted(grid.get_node_ids()), {}
        for i, node in enumerate(nodes):
            rates[node] = 0.001 if i < len(nodes) // 2 else 0.003
            content = RecordDict({"model": arrays, "settings": ConfigRecord({**config, "lr": rates[node]})})
            messages.append(Message(content=content, message_type=kind, dst_node_id=node))
        if kind == MessageType.TRAIN:
            self.rates.append(rates)
        return messages

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        config["server-round"] = server_round
        return self._messages(MessageType.TRAIN, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        contents = [message.content for message in replies if message.has_content()]
        metrics = aggregate_metricrecords(contents, "num-examples")
        return aggregate_arrayrecords(contents, "num-examples"), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        return self._messages(MessageType.EVALUATE, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        contents = [message.content for message in replies if message.has_content()]
        return aggregate_metricrecords(contents, "num-examples") if contents else None

    def summary(self) -> None:
        LOG.info("half and half")


class KnownNodes(FedAvg):
    """Chooses names for the records, and looks at every node before it configures the round."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(arrayrecord_key="weights", configrecord_key="hyper", **kwargs)
        self.seen: list[list[int]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.seen.append(sorted(grid.get_node_ids()))
        config["shares"] = [1.0 / (1 + KNOWN.index(node)) for node in self.seen[-1]]
        return super().configure_train(server_round, arrays, config, grid)


OWN: dict[str, Case] = {
    "flower's-own": Case(lambda folder: FedAvg()),
    "per-node-proximal": Case(lambda folder: PerNodeProximal(), lambda: proximal),
    "sub-models": Case(lambda folder: SubModels()),
    "megabyte-budget": Case(lambda folder: MegabyteBudget(3 * CLIENTS * 32), skips=True),
    "every-other-round": Case(lambda folder: EveryOtherRound(), skips=True),
    "target-reached": Case(lambda folder: TargetReached(2.0), skips=True),
    "half-and-half": Case(lambda folder: HalfAndHalf()),
    "known-nodes": Case(lambda folder: KnownNodes()),
}
