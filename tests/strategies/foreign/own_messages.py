"""Strategies of the Message API that configure each node in their own way, or whose replies are no usual models.

First: a config or a sub-model for each node, budgets that count the messages, rounds without training, and an end by
the strategy's own criterion. Then: control variates, personal layers, packed updates, renamed arrays, and other records
than one of arrays and one of metrics; each brings its own aggregation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords, aggregate_metricrecords

from tests.strategies.foreign.world import CLIENTS, LOG, Case, MessageClient, asked, honest, node_id, reply, trained
from tests.strategies.message.helpers import named

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]
KNOWN = [node_id(k) for k in range(2 * CLIENTS)]
"""The nodes that the strategies' tables know. An invented node is a KeyError."""


def _contents(replies: Iterable[Message]) -> list[RecordDict]:
    return [message.content for message in replies if message.has_content()]


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
    pairs = zip(arrays.to_numpy_ndarrays(), trained(number, content), strict=True)
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
        sent = {m.metadata.dst_node_id: sum(a.numpy().nbytes for a in asked(m.content)[0].values()) for m in messages}
        self.sent.append(dict(sorted(sent.items())))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        if not (contents := _contents(replies)):
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

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        config["server-round"] = server_round
        return self._messages(MessageType.TRAIN, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        contents = _contents(replies)
        return aggregate_arrayrecords(contents, "num-examples"), aggregate_metricrecords(contents, "num-examples")

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return self._messages(MessageType.EVALUATE, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        contents = _contents(replies)
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


# ---- replies that are not shaped like the global model ---------------------------------------------------------------


def _mean(records: list[ArrayRecord], prefix: str = "") -> ArrayRecord:
    """The plain mean of the arrays whose names have a prefix, without the prefix."""
    names = [name for name in records[0] if name.startswith(prefix)]
    means = {name: np.mean([one[name].numpy() for one in records], axis=0, dtype=np.float32) for name in names}
    return ArrayRecord({name.removeprefix(prefix): Array(mean) for name, mean in means.items()})


def _sum(one: ArrayRecord, other: ArrayRecord, factor: float = 1.0) -> ArrayRecord:
    pairs = {name: (array.numpy(), other[name].numpy()) for name, array in one.items()}
    return ArrayRecord({name: Array((a + factor * b).astype(a.dtype)) for name, (a, b) in pairs.items()})


def _zeros(arrays: ArrayRecord) -> ArrayRecord:
    return ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in arrays.items()})


class Scaffold(FedAvg):
    """Keeps the server's control variate, and steps by the mean of the clients' changes."""

    variate: ArrayRecord | None = None

    def _step(self, arrays: ArrayRecord, change: ArrayRecord) -> ArrayRecord:
        assert self.variate is not None
        self.variate = _sum(self.variate, change, 0.5)
        return arrays


class ScaffoldInOneRecord(Scaffold):
    """The control variates stand behind the weights, in the same record, in both directions."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.variate = self.variate or _zeros(arrays)
        both = ArrayRecord({**arrays, **{f"c.{name}": array for name, array in self.variate.items()}})
        return super().configure_train(server_round, both, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        if not (contents := _contents(replies)):
            return None, None
        records = [content["arrays"] for content in contents]
        weights = ArrayRecord({name: array for name, array in _mean(records).items() if not name.startswith("c.")})
        return self._step(weights, _mean(records, "c.")), aggregate_metricrecords(contents, self.weighted_by_key)


class ScaffoldBehindTheWeights(ScaffoldInOneRecord):
    """Only the weights are sent. The replies have the changes of the control variates behind the weights."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.variate = self.variate or _zeros(arrays)
        return FedAvg.configure_train(self, server_round, arrays, config, grid)


class ScaffoldInTwoRecords(Scaffold):
    """The control variates have a record of their own."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.variate = self.variate or _zeros(arrays)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["control"] = self.variate
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        if not (contents := _contents(replies)):
            return None, None
        change = _mean([content["control"] for content in contents])
        weights = _mean([content["arrays"] for content in contents])
        return self._step(weights, change), aggregate_metricrecords(contents, self.weighted_by_key)


def scaffold_client(layout: str) -> MessageClient:
    """A client of SCAFFOLD, whose control variate stays with it from round to round."""
    own: dict[int, list[np.ndarray]] = {}

    def train(number: int, content: RecordDict) -> RecordDict:
        first, _ = asked(content)
        names = [name for name in first if not name.startswith("c.")]
        weights = ArrayRecord({name: first[name] for name in names})
        sent = content["control"] if layout == "two" else {name: first.get(f"c.{name}") for name in names}
        server = [np.zeros(2, np.float32) if sent[name] is None else sent[name].numpy() for name in names]
        before = own.get(number, [np.float32(0.0) for _ in names])
        new = trained(number, RecordDict({"a": weights, "b": asked(content)[1]}))
        pairs = zip(new, weights.to_numpy_ndarrays(), before, server, strict=True)
        own[number] = [(a - b - np.float32(0.1) * (c - d)).astype(np.float32) for a, b, c, d in pairs]
        changes = [np.asarray(a - b, np.float32) for a, b in zip(own[number], before, strict=True)]
        if layout == "two":
            return RecordDict({**reply(number, named(new, names)), "control": named(changes, names)})
        return reply(number, ArrayRecord({**named(new, names), **named(changes, [f"c.{name}" for name in names])}))

    return train


class PersonalHead(FedAvg):
    """The clients keep the last layer at home; the server's stays as it is."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.current = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return None if arrays is None else ArrayRecord({**self.current, **arrays}), metrics


def personal() -> MessageClient:
    heads: dict[int, np.ndarray] = {}

    def train(number: int, content: RecordDict) -> RecordDict:
        names = tuple(asked(content)[0])
        *body, heads[number] = trained(number, content)
        return reply(number, named(body, names[:-1]), head=float(np.abs(heads[number]).sum()))

    return train


class PackedUpdates(FedAvg):
    """The clients send their change as one vector of bytes, with its range."""

    bytes_received = 0

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.current = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        if not (contents := _contents(replies)):
            return None, None
        change: Any = 0.0
        for content in contents:
            packed, low, high = (content["update"][name].numpy() for name in ("packed", "low", "high"))
            assert packed.dtype == np.uint8
            self.bytes_received += packed.nbytes
            change = change + (low + packed.astype(np.float32) * (high - low) / 255) / len(contents)
        merged, at = {}, 0
        for name, array in self.current.items():
            old = array.numpy()
            merged[name] = Array((old + change[at : at + old.size].reshape(old.shape)).astype(old.dtype))
            at += old.size
        return ArrayRecord(merged), aggregate_metricrecords(contents, self.weighted_by_key)


def packing(number: int, content: RecordDict) -> RecordDict:
    old = np.concatenate([array.ravel() for array in asked(content)[0].to_numpy_ndarrays()])
    change = np.concatenate([array.ravel() for array in trained(number, content)]) - old
    low, high = np.float32(change.min()), np.float32(change.max())
    packed = np.round((change - low) / (high - low) * 255).astype(np.uint8)
    update = ArrayRecord({"packed": Array(packed), "low": Array(np.array([low])), "high": Array(np.array([high]))})
    return RecordDict({**reply(number, None), "update": update})


class Renamed(FedAvg):
    """The clients' framework puts a prefix before each name."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            arrays = ArrayRecord({name.removeprefix("module."): array for name, array in arrays.items()})
        return arrays, metrics


def prefixed(number: int, content: RecordDict) -> RecordDict:
    return reply(number, named(trained(number, content), [f"module.{name}" for name in asked(content)[0]]))


class ExtraRecords(FedAvg):
    """The clients send a hash of their model and their environment; Flower aggregates."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.versions: dict[int, Any] = {}

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        messages = list(replies)
        for message in messages:
            if message.has_content():
                told = message.content["environment"]
                assert told["sha"] == _sha(message.content["arrays"])
                self.versions[message.metadata.src_node_id] = [told["version"], told["gpus"], told["salt"]]
        LOG.info("round %d: %d replies verified", server_round, len(messages))
        return super().aggregate_train(server_round, messages)


def _sha(arrays: ArrayRecord) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays.to_numpy_ndarrays())).hexdigest()


def describing(number: int, content: RecordDict) -> RecordDict:
    answer = honest(number, content)
    environment = {"sha": _sha(answer["arrays"]), "version": f"1.{number}", "gpus": [number, 0], "salt": b"\x00\xff"}
    return RecordDict({**answer, "environment": ConfigRecord(environment)})


class TwoMetricRecords(FedAvg):
    """The clients' measurements come in a record of their own."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        if not (contents := _contents(replies)):
            return None, None
        weights = [content["metrics"]["num-examples"] for content in contents]
        self.watts = [content["system"]["watts"] for content in contents]
        arrays = {}
        for name in contents[0]["arrays"]:
            stack = [content["arrays"][name].numpy() for content in contents]
            arrays[name] = Array(np.average(stack, axis=0, weights=weights).astype(np.float32))
        losses = [content["metrics"]["train_loss"] for content in contents]
        return ArrayRecord(arrays), MetricRecord({"loss": float(np.mean(losses)), "watts": float(np.sum(self.watts))})


def measuring(number: int, content: RecordDict) -> RecordDict:
    system = MetricRecord({"watts": 5.0 + number, "cores": [1, number]})
    return RecordDict({**honest(number, content), "system": system})


class NoMetrics(FedAvg):
    """The clients send their model and nothing else."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        contents = _contents(replies)
        return (_mean([content["arrays"] for content in contents]), None) if contents else (None, None)


def silent(number: int, content: RecordDict) -> RecordDict:
    return RecordDict({"arrays": honest(number, content)["arrays"]})


class UnweightedEvaluation(FedAvg):
    """The clients report how many examples were right, and not how many they have."""

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        contents = _contents(replies)
        return MetricRecord({"right": sum(content["metrics"]["right"] for content in contents)}) if contents else None


def counting(number: int, content: RecordDict) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({"right": 3 + number})})


class LastModelFile(FedAvg):
    """Overrides its aggregation only to write a file."""

    def __init__(self, folder: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder = folder

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            data = b"".join(array.tobytes() for array in arrays.to_numpy_ndarrays())
            (self.folder / f"round-{server_round}.bin").write_bytes(data)
        return arrays, metrics


PAYLOADS: dict[str, Case] = {
    "scaffold-in-one-record": Case(lambda folder: ScaffoldInOneRecord(), lambda: scaffold_client("one")),
    "scaffold-behind-the-weights": Case(lambda folder: ScaffoldBehindTheWeights(), lambda: scaffold_client("behind")),
    "scaffold-in-two-records": Case(lambda folder: ScaffoldInTwoRecords(), lambda: scaffold_client("two")),
    "personal-head": Case(lambda folder: PersonalHead(), personal),
    "packed-updates": Case(lambda folder: PackedUpdates(), lambda: packing),
    "renamed": Case(lambda folder: Renamed(), lambda: prefixed),
    "extra-records": Case(lambda folder: ExtraRecords(), lambda: describing),
    "two-metric-records": Case(lambda folder: TwoMetricRecords(), lambda: measuring),
    "no-metrics": Case(lambda folder: NoMetrics(), lambda: silent, problems=("latency",)),
    "unweighted-evaluation": Case(lambda folder: UnweightedEvaluation(), evaluation=counting),
    "last-model-file": Case(LastModelFile),
}
