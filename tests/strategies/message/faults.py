"""What nodes may answer in place of an honest reply (Message API)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from tests.strategies.message.models import arrays_of

if TYPE_CHECKING:
    from tests.strategies.message.helpers import FakeNode

Fault = Callable[["FakeNode", Message, RecordDict], "RecordDict | Error | None"]
"""From a node, the message and its honest content to what it answers instead; None is silence."""


def _arrays(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    def fault(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        old = {name: array.numpy() for name, array in content["arrays"].items()}
        content["arrays"] = ArrayRecord({k: Array(np.asarray(v)) for k, v in change(old).items()})
        return content

    return fault


def _metrics(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    def fault(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        content["metrics"] = MetricRecord(change(dict(content["metrics"])))
        return content

    return fault


def _set(key: str, value: Any) -> Fault:
    return _metrics(lambda metrics: {**metrics, key: value})


def _without(key: str) -> Fault:
    return _metrics(lambda metrics: {k: v for k, v in metrics.items() if k != key})


def _content(change: Callable[[RecordDict], None]) -> Fault:
    def fault(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        change(content)
        return content

    return fault


def _second_arrays(content: RecordDict) -> None:
    content["more"] = arrays_of(1.0)


def _second_metrics(content: RecordDict) -> None:
    content["more"] = MetricRecord({"num-examples": 5})


def _no_arrays(content: RecordDict) -> None:
    del content["arrays"]


def _no_metrics(content: RecordDict) -> None:
    del content["metrics"]


def _nothing(content: RecordDict) -> None:
    content.clear()


def _garbage(content: RecordDict) -> None:
    record = content["arrays"]
    content["arrays"] = ArrayRecord(
        {n: Array(dtype="float32", shape=(3, 2), stype="numpy.ndarray", data=b"garbage") for n in record}
    )


def _other_names(content: RecordDict) -> None:
    arrays, metrics = content["arrays"], content["metrics"]
    content.clear()
    content["my model"], content["my numbers"] = arrays, metrics
    content["my text"] = ConfigRecord({"note": "hello"})


UPDATE_FAULTS: dict[str, Fault] = {
    "nan": _arrays(lambda a: {k: v * np.nan for k, v in a.items()}),
    "infinite": _arrays(lambda a: {k: np.full_like(v, np.inf) for k, v in a.items()}),
    "shape": _arrays(lambda a: {k: v.T[..., None] for k, v in a.items()}),
    "names": _arrays(lambda a: {f"x.{k}": v for k, v in a.items()}),
    "fewer": _arrays(lambda a: dict(list(a.items())[:-1])),
    "more": _arrays(lambda a: {**a, "extra": np.zeros(2, dtype=np.float32)}),
    "text": _arrays(lambda a: {k: np.full(v.shape, "x") for k, v in a.items()}),
    "complex": _arrays(lambda a: {k: v.astype(np.complex64) for k, v in a.items()}),
    "too-large": _arrays(lambda a: {k: np.full(v.shape, 1e300) for k, v in a.items()}),
    "two-arrays": _content(_second_arrays),
    "no-arrays": _content(_no_arrays),
    "garbage": _content(_garbage),
}
METRIC_FAULTS: dict[str, Fault] = {
    "two-metrics": _content(_second_metrics),
    "no-metrics": _content(_no_metrics),
    "nothing": _content(_nothing),
}
WEIGHT_FAULTS: dict[str, Fault] = {
    "weight-zero": _set("num-examples", 0),
    "weight-negative": _set("num-examples", -5),
    "weight-nan": _set("num-examples", float("nan")),
    "weight-infinite": _set("num-examples", float("inf")),
    "weight-huge": _set("num-examples", 2**62),
    "weight-list": _set("num-examples", [3, 4]),
}
LATENCY_FAULTS: dict[str, Fault] = {
    "latency-negative": _set("latency_s", -1),
    "latency-list": _set("latency_s", [1.0, 2.0]),
    "latency-empty": _set("latency_s", []),
    "latency-nan": _set("latency_s", float("nan")),
    "latency-missing": _without("latency_s"),
}
ERROR_FAULTS: dict[str, Fault] = {
    "error": lambda node, message, content: Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the battery;\n is: empty"),
    "error-unavailable": lambda node, message, content: Error(ErrorCode.NODE_UNAVAILABLE, "node unavailable"),
    "error-silent": lambda node, message, content: Error(ErrorCode.UNKNOWN),
}
OTHER_FAULTS: dict[str, Fault] = {
    "energy-negative": _set("energy_j", -3.0),
    "energy-list": _set("energy_j", [1.0]),
    "impostor": _set("client_id", 999),
}
ODD_BUT_GOOD: dict[str, Fault] = {
    "metrics-missing": _without("acc"),
    "metrics-list": _set("acc", [0.5, 0.5]),
    "metrics-extra": _metrics(lambda m: {"aaa": 1.0, **m, "zzz": [1, 2]}),
    "other-names": _content(_other_names),
    "reordered": _arrays(lambda a: dict(reversed(list(a.items())))),
    "float-weight": _metrics(lambda m: {**m, "num-examples": float(m["num-examples"])}),
    "double": _arrays(lambda a: {k: v.astype(np.float64) for k, v in a.items()}),
}
SILENT: dict[str, Fault] = {"silent": lambda node, message, content: None}
FAULTS: dict[str, Fault] = {
    **UPDATE_FAULTS, **METRIC_FAULTS, **WEIGHT_FAULTS, "weight-missing": _without("num-examples"), **LATENCY_FAULTS,
    "latency-infinite": _set("latency_s", float("inf")), **ERROR_FAULTS, **OTHER_FAULTS, **SILENT,
}  # fmt: skip
