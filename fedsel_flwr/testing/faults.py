"""What clients of the fleet may answer in place of an honest reply, in plain types."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Model = list[np.ndarray[Any, Any]]


class Silence(Exception):
    """Nothing comes of this client."""


@dataclass
class Answer:
    """What a client is about to send after training; faults change it.

    Attributes:
        arrays: Its model; bytes that are no arrays at all, where a fault says so.
        num_examples: Examples behind it.
        metrics: What it reports; arrays are vectors. A list stands for a text in an API without texts.
        refused: Empty, or why the client says that it has not trained.
    """

    arrays: Model | bytes
    num_examples: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class Fault:
    """One way to be broken.

    Attributes:
        name: In words, for messages.
        change: Changes the answer, or raises.
        loses: Whether the update is lost: always, never, or on the clock that believes what clients report.
        named: Whether the history must say what was wrong, although the update is not lost.
    """

    name: str
    change: Callable[[Answer], None]
    loses: Literal["always", "on the virtual clock", "never"] = "always"
    named: bool = False


def all_faults(latency: str, energy: str, train_loss: str, client_id: str, max_latency: float) -> tuple[Fault, ...]:
    """Every fault, given the names under which clients report and the longest wait for them, seconds."""
    return (
        Fault("raises an exception", _raises),
        Fault("never answers", _silent),
        Fault("refuses to train", _refuses),
        Fault("sends NaN", _arrays(lambda model: [_full(model[0], math.nan), *model[1:]])),
        Fault("sends infinite numbers", _arrays(lambda model: [*model[:-1], _full(model[-1], math.inf)])),
        Fault("sends arrays of other shapes", _arrays(lambda model: [array[None] for array in model])),
        Fault("sends an array too few", _arrays(lambda model: model[:-1])),
        Fault("sends an array too many", _arrays(lambda model: [*model, model[0]])),
        Fault("sends texts for numbers", _arrays(lambda model: [np.full(array.shape, "x") for array in model])),
        Fault("sends complex numbers", _arrays(lambda model: [array.astype(np.complex64) for array in model])),
        Fault("sends bytes that are no arrays", _garbage),
        Fault("claims to have no examples", _examples(0)),
        Fault("claims a negative number of examples", _examples(-5)),
        Fault("claims 2^62 examples", _examples(2**62)),
        Fault("reports twice the longest latency", _metric(latency, 2.0 * max_latency), "on the virtual clock"),
        Fault("reports an infinite latency", _metric(latency, math.inf), "on the virtual clock"),
        Fault("reports a negative latency", _metric(latency, -1.0), "never", True),
        Fault("reports NaN for its latency", _metric(latency, math.nan), "never", True),
        Fault("reports a text for its latency", _metric(latency, "fast"), "never", True),
        Fault("reports negative joules", _metric(energy, -3.0), "never", True),
        Fault("reports huge metrics", _huge(energy, train_loss), "never", True),
        Fault("reports metrics that nobody else reports", _metric("fleet-own", 0.5), "never"),
        Fault("claims another client's id", _metric(client_id, 10**6), "never", True),
    )


def _full(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    return np.full(array.shape, value, dtype=array.dtype if array.dtype.kind == "f" else np.float64)


def _arrays(change: Callable[[Model], Model]) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        assert not isinstance(answer.arrays, bytes)
        answer.arrays = change(answer.arrays)

    return fault


def _metric(key: str, value: Any) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        answer.metrics[key] = value

    return fault


def _examples(value: int) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        answer.num_examples = value

    return fault


def _huge(*keys: str) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        answer.metrics.update(dict.fromkeys(keys, 1e300))

    return fault


def _raises(answer: Answer) -> None:
    raise OSError("the battery; is: empty")


def _silent(answer: Answer) -> None:
    raise Silence


def _refuses(answer: Answer) -> None:
    answer.refused = "no training here"


def _garbage(answer: Answer) -> None:
    answer.arrays = b"\x00 no arrays"
