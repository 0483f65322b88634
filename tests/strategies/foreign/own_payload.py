"""Strategies of the Message API whose replies are not shaped like the global model.

Control variates, personal layers, packed updates, renamed arrays, and other records than one of arrays and one of
metrics. Each brings its own aggregation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from tests.strategies.foreign.world import LOG, Case, MessageClient, asked, honest, reply, trained
from tests.strategies.message.helpers import named

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]


def _contents(replies: Iterable[Message]) -> list[RecordDict]:
    return [message.content for message in replies if message.has_content()]


def _mean(records: list[ArrayRecord], prefix: str = "") -> ArrayRecord:
    """The plain mean of the arrays whose names have a prefix, without the prefix."""
    names = [name for name in records[0] if name.startswith(prefix)]
    return ArrayRecord(
        {
            name.removeprefix(prefix): Array(np.mean([one[name].numpy() for one in records], axis=0, dtype=np.float32))
            for name in names
        }
    )


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

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bytes_received = 0

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
    return RecordDict(
        {**honest(number, content), "system": MetricRecord({"watts": 5.0 + number, "cores": [1, number]})}
    )


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
