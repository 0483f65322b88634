"""An in-memory grid over programmable nodes, played with Flower's own ``Strategy.start``.

A node trains with the legacy tests' fake proxy, so that the same clients can be run through both APIs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common import Code, EvaluateIns, FitIns, GetPropertiesIns, Parameters, ndarrays_to_parameters
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedsel_flwr.strategies.message import SelectionStrategy
from tests.strategies.helpers import FakeProxy, model, parameters_to_ndarrays

try:
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # the oldest Flower, which knows neither
    NodeInfo = SimpleNamespace  # type: ignore[assignment,misc]
    TaskIdentity = type("TaskIdentity", (), {})  # type: ignore[assignment,misc]

SERVER_NODE = 1
NAMES = ("layer.weight", "layer.bias")


def arrays_of(value: float = 0.0, names: Sequence[str] = NAMES) -> ArrayRecord:
    """The tests' model as a record."""
    return named(model(value), names)


def named(arrays: Iterable[Any], names: Sequence[str] = NAMES) -> ArrayRecord:
    """Arrays under their names."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in zip(names, arrays, strict=True)})


Fault = Callable[["FakeNode", Message, RecordDict], "RecordDict | Error | None"]
"""From a node, the message and its honest content to what it answers instead; None is silence."""


def _arrays(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    def fault(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        old = {name: array.numpy() for name, array in content["arrays"].items()}
        content["arrays"] = ArrayRecord({k: Array(np.asarray(v)) for k, v in change(old).items()})
        return content

    return fault


def reports(changes: dict[str, Any], *without: str) -> Fault:
    """A reply whose metrics are changed."""

    def fault(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        told = {**dict(content["metrics"]), **changes}
        content["metrics"] = MetricRecord({key: value for key, value in told.items() if key not in without})
        return content

    return fault


def _records(changes: Callable[[], dict[str, Any]], *without: str) -> Fault:
    """A reply with further records, and without some."""

    def fault(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        for name in without:
            del content[name]
        for name, record in changes().items():
            content[name] = record
        return content

    return fault


def _error(code: int, reason: str | None = None) -> Fault:
    return lambda node, message, content: Error(code, reason)


def _other_names(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
    text = ConfigRecord({"note": "hello"})
    return RecordDict({"my model": content["arrays"], "my numbers": content["metrics"], "my text": text})


def _float_weight(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
    content["metrics"]["num-examples"] = float(content["metrics"]["num-examples"])
    return content


BY_KIND: dict[str, dict[str, Fault]] = {
    "arrays": {
        "names": _arrays(lambda a: {f"x.{k}": v for k, v in a.items()}),
        "two-arrays": _records(lambda: {"more": arrays_of(1.0)}),
        "no-arrays": _records(dict, "arrays"),
    },
    "metrics": {
        "two-metrics": _records(lambda: {"more": MetricRecord({"num-examples": 5})}),
        "no-metrics": _records(dict, "metrics"),
        "nothing": _records(dict, "arrays", "metrics"),
    },
    "num_examples": {
        "weight-nan": reports({"num-examples": float("nan")}),
        "weight-infinite": reports({"num-examples": float("inf")}),
        "weight-list": reports({"num-examples": [3, 4]}),
        "weight-missing": reports({}, "num-examples"),
    },
    "latency": {"latency-empty": reports({"latency_s": []})},
    "exception": {
        "error": _error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the battery;\n is: empty"),
        "error-silent": _error(ErrorCode.UNKNOWN),
    },
    "node unavailable": {"error-unavailable": _error(ErrorCode.NODE_UNAVAILABLE, "node unavailable")},
}
"""Problem in the history -> the faults that are one."""
ODD_BUT_GOOD: dict[str, Fault] = {
    "metrics-missing": reports({}, "acc"),
    "metrics-list": reports({"acc": [0.5, 0.5]}),
    "metrics-extra": reports({"aaa": 1.0, "zzz": [1, 2]}),
    "other-names": _other_names,
    "reordered": _arrays(lambda a: dict(reversed(list(a.items())))),
    "float-weight": _float_weight,
    "double": _arrays(lambda a: {k: v.astype(np.float64) for k, v in a.items()}),
}
FAULTS: dict[str, Fault] = {name: fault for faults in BY_KIND.values() for name, fault in faults.items()}


class ProbeProxy(FakeProxy):
    """A client that answers probes: with ``accuracy`` of the round and a loss, at a time and an energy of its own."""

    def __init__(
        self, cid: str, client_id: Any, *, answer: Callable[[ProbeProxy, dict[str, Any]], dict[str, Any]] | None = None,
        probe_s: float = 0.25, probe_j: float = 0.125, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(cid, client_id, **kwargs)
        self.answer, self.probe_s, self.probe_j = answer, probe_s, probe_j
        self.probed: list[dict[str, Any]] = []
        self.models: list[list[np.ndarray]] = []

    def accuracy(self, server_round: int) -> float:
        return float(np.random.default_rng([77, self.number, server_round]).random())

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> Any:
        result = super().evaluate(ins, timeout, group_id)
        config = dict(ins.config)
        if "probe" not in config:
            return result
        self.probed.append(config)
        self.models.append(parameters_to_ndarrays(ins.parameters))
        accuracy = self.accuracy(int(config["round"]))  # type: ignore[arg-type]
        result.metrics = {
            "local_accuracy": accuracy, "loss": 2.0 - accuracy, "batch_loss": 2.5 - accuracy,
            "latency_s": self.probe_s, "energy_j": self.probe_j,
        }  # fmt: skip
        if self.answer is not None:
            result.metrics = self.answer(self, result.metrics)
        return result


class FakeNode:
    """A node around a fake client.

    Args:
        proxy: The client, with its own ``fault``.
        fault: Name of one of FAULTS or ODD_BUT_GOOD, which this API alone knows, or a fault of its own.
        extra: Further metrics of a TRAIN reply, those of another strategy.
        ready: Seconds until its TRAIN reply can be pulled.
        query_fault: What it does to its QUERY reply.
        evaluate_fault: What it does to its EVALUATE reply.
    """

    def __init__(
        self, proxy: FakeProxy, *, fault: str | Fault | None = None, extra: dict[str, Any] | None = None,
        ready: float = 0.0, query_fault: Fault | None = None, evaluate_fault: Fault | None = None,
    ) -> None:  # fmt: skip
        self.proxy, self.fault, self.ready = proxy, fault, ready
        self.extra = {"acc": 0.5} if extra is None else extra
        self.query_fault, self.evaluate_fault = query_fault, evaluate_fault
        self.received: list[Message] = []

    def messages(self, kind: str) -> list[Message]:
        return [message for message in self.received if message.metadata.message_type == kind]

    def handle(self, message: Message) -> RecordDict | Error | None:
        """What it answers to a message."""
        kind, fault = message.metadata.message_type, None
        try:
            if kind == MessageType.QUERY:
                content, fault = self._query(), self.query_fault
            elif kind == MessageType.EVALUATE:
                content, fault = self._evaluate(message), self.evaluate_fault
            elif self.proxy.fault == "straggler":
                return None
            else:
                content = self._train(message)
                fault = {**FAULTS, **ODD_BUT_GOOD}[self.fault] if isinstance(self.fault, str) else self.fault
            return fault(self, message, content) if fault else content
        except Exception as error:  # as Flower's ClientApp does
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")

    def _query(self) -> RecordDict:
        properties = self.proxy.get_properties(GetPropertiesIns({}), None, None).properties
        return RecordDict({"facts": ConfigRecord(dict(properties))})

    def _train(self, message: Message) -> RecordDict:
        (arrays,), (configs,) = message.content.array_records.values(), message.content.config_records.values()
        config = dict(configs)
        result = self.proxy.fit(FitIns(_parameters(arrays), config), None, int(config["server-round"]))
        if result.status.code != Code.OK:
            raise RuntimeError(result.status.message)
        metrics = {k: v for k, v in result.metrics.items() if not isinstance(v, str | bytes)}
        records: dict[str, Any] = _vectors(result.metrics)
        if self.proxy.fault == "impostor":
            metrics["client_id"] = 999
        elif self.proxy.fault is not None:  # no metric can hold a text: a list is as wrong
            texts = [k for k, v in result.metrics.items() if isinstance(v, str | bool) and k != "client_id"]
            metrics |= {key: [1.0, 2.0] for key in texts}
        records["arrays"] = _record(result.parameters.tensors, list(arrays.keys()))
        records["metrics"] = MetricRecord({"num-examples": result.num_examples, **metrics, **self.extra})
        return RecordDict(records)

    def _evaluate(self, message: Message) -> RecordDict:
        (arrays,), (configs,) = message.content.array_records.values(), message.content.config_records.values()
        config: dict[str, Any] = dict(configs)
        result = self.proxy.evaluate(EvaluateIns(_parameters(arrays), config), None, int(config.get("server-round", 0)))
        metrics = {k: v for k, v in result.metrics.items() if not isinstance(v, bytes)}
        told = MetricRecord({"num-examples": result.num_examples, "loss": result.loss, **metrics})
        return RecordDict({**_vectors(result.metrics), "metrics": told})


def _vectors(metrics: dict[str, Any]) -> dict[str, ArrayRecord]:
    """What the legacy API sends as float32 bytes: a record of the same name with one array; garbage stays garbage."""
    vectors = {}
    for name, value in metrics.items():
        if isinstance(value, bytes):
            garbage = Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=value)
            array = garbage if len(value) % 4 else Array(np.frombuffer(value, np.float32))
            vectors[name] = ArrayRecord({"0": array})
    return vectors


def _record(tensors: list[bytes], names: list[str]) -> ArrayRecord:
    """Encoded arrays under their names; what is no array stays garbage."""
    arrays = [
        Array(parameters_to_ndarrays(Parameters([one], ""))[0])
        if one.startswith(b"\x93NUMPY")
        else Array(dtype="float32", shape=(3, 2), stype="numpy.ndarray", data=one)
        for one in tensors
    ]
    return ArrayRecord(dict(zip([*names, "more"], arrays, strict=False)))


def _parameters(arrays: ArrayRecord) -> Any:
    return ndarrays_to_parameters(arrays.to_numpy_ndarrays())


class FakeGrid(Grid):
    """A grid over fake nodes. It sets Flower's ``TaskIdentity``, without which no message can be made.

    Args:
        nodes: Node id -> node; more may be added later.
        seed: Shuffles node lists and replies, as node sets and completion order do; None keeps the order.
    """

    def __init__(self, nodes: dict[int, FakeNode] | None = None, seed: int | None = 0) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 7, 1, SERVER_NODE
        self.nodes = dict(nodes or {})
        self._generator = None if seed is None else np.random.default_rng(seed)
        self._replies: dict[str, tuple[float, Message]] = {}
        self._number = 0
        self.sent: list[list[Message]] = []
        self.looked_up = 0

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=7)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("deprecated")

    def get_node_ids(self) -> Iterable[int]:
        return self._shuffled(list(self.nodes))

    def get_nodes(self) -> Iterable[Any]:
        self.looked_up += 1
        told = [(node_id, getattr(self.nodes[node_id], "registered", {})) for node_id in self.nodes]
        return self._shuffled([NodeInfo(node_id=node_id, **facts) for node_id, facts in told])

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids, messages = [], list(messages)
        self.sent.append(messages)
        for message in messages:
            self._number += 1
            message.metadata.__dict__["_message_id"] = f"message-{self._number}"
            assert message.metadata.reply_to_message_id == ""
            ids.append(message.metadata.message_id)
            self._deliver(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now = time.monotonic()
        here = [i for i in message_ids if i in self._replies and self._replies[i][0] <= now]
        return self._shuffled([self._replies.pop(i)[1] for i in sorted(here)])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        assert isinstance(messages, list), "the HTTP grid iterates twice: a generator fails only in deployment"
        ids = set(self.push_messages(messages))
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        replies: list[Message] = []
        while ids & self._replies.keys() and time.monotonic() < deadline:  # nobody waits for those that never answer
            arrived = list(self.pull_messages(ids))
            ids -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies.extend(arrived)
            if not arrived:
                time.sleep(0.005)
        return replies

    def _deliver(self, message: Message) -> None:
        """Over the wire: what arrives is a copy, and so is the answer."""
        there = copy.deepcopy(message)
        node = self.nodes.get(message.metadata.dst_node_id)
        answer: RecordDict | Error | None = Error(ErrorCode.NODE_UNAVAILABLE, "no such node")
        ready = 0.0
        if node is not None:
            node.received.append(there)
            answer = node.handle(there)
            ready = node.ready if message.metadata.message_type == MessageType.TRAIN else 0.0
        if answer is None:
            return
        reply: Message = Message(copy.deepcopy(answer), reply_to=there)  # type: ignore[call-overload]
        if isinstance(answer, Error) and answer.code == ErrorCode.NODE_UNAVAILABLE:
            reply.metadata.__dict__["_src_node_id"] = SERVER_NODE
        self._replies[message.metadata.message_id] = (time.monotonic() + ready, reply)

    def _shuffled(self, items: list[Any]) -> list[Any]:
        return items if self._generator is None else [items[i] for i in self._generator.permutation(len(items))]


def node_id(k: int) -> int:
    """Random-looking node ids, whose order is not that of the clients."""
    return (7919 * (k + 11) % 104729) * 10**6 + 13


def train_message(node: int) -> Message:
    """The message of a round that asks a node to train."""
    content = RecordDict({"arrays": arrays_of(), "config": ConfigRecord({"server-round": 1})})
    return Message(content, dst_node_id=node, message_type=MessageType.TRAIN)


def crowd(count: int) -> dict[int, FakeNode]:
    """Honest nodes with the client ids 0..count-1."""
    return {node_id(k): FakeNode(FakeProxy(str(node_id(k)), k, number=k)) for k in range(count)}


def play(strategy: SelectionStrategy, grid: FakeGrid, rounds: int, **kwargs: Any) -> tuple[Result, list[list[bytes]]]:
    """Run Flower's own loop; returns its result and the global model after each round."""
    models: list[list[bytes]] = []

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round:
            models.append([array.tobytes() for array in arrays.to_numpy_ndarrays()])
        return MetricRecord({"loss": 1.0 / (server_round + 1), "accuracy": 0.1 * server_round})

    start = {"grid": grid, "initial_arrays": arrays_of(), "num_rounds": rounds, "timeout": 5.0, **kwargs}
    return strategy.start(evaluate_fn=evaluate_fn, **start), models


def fedavg(**kwargs: Any) -> FedAvg:
    """FedAvg without federated evaluation."""
    return FedAvg(**{"fraction_evaluate": 0.0, **kwargs})


class RecordingBase(FedAvg):
    """FedAvg that keeps the messages it was given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"fraction_evaluate": 0.0, **kwargs})
        self.given: list[list[Message]] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        messages = list(replies)
        self.given.append([copy.deepcopy(message) for message in messages])
        return super().aggregate_train(server_round, messages)
