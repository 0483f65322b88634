"""What nodes alone may answer in place of an honest reply; the faults of ``tests.strategies.helpers`` work here too."""

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
