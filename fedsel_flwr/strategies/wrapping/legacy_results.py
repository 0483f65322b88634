"""Results and parameters of the legacy API: read into plain types, cleaned for a base strategy, and in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flwr.common import EvaluateRes, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.untrusted import usable_count
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.client_manager import TimedProxy
from fedsel_flwr.strategies.wrapping.failure_reasons import no_answer, reason_in

FitResult = tuple[ClientProxy, FitRes]
EvaluateResult = tuple[ClientProxy, EvaluateRes]
NUMPY = "numpy.ndarray"
"""Flower's type of parameters that are NumPy arrays."""


class Arrived(NamedTuple):
    """The results and failures of a round or an evaluation.

    Attributes:
        results: Connection -> result.
        failures: Flower's failures.
    """

    results: dict[str, Any]
    failures: list[Any]

    @classmethod
    def of(cls, results: Sequence[FitResult | EvaluateResult], failures: Sequence[object]) -> Arrived:
        """Sort results by connection."""
        return cls({client.cid: (client, res) for client, res in results}, list(failures))

    def failures_with(self, faults: Iterable[str]) -> list[Any]:
        """Return the failures with Flower's own proxies, and an error for each fault of an unusable result."""
        failures = [(unwrapped(one[0]), one[1]) if isinstance(one, tuple) else one for one in self.failures]
        return [*failures, *map(RunError, faults)]


def reply_of(
    base: object, proxy: TimedProxy, arrived: FitResult | None, refused: FitRes | None, model: Parameters | None = None
) -> Reply:
    """Read a client's result into plain types; no content of a result raises an error.

    Args:
        base: The strategy that will aggregate the replies.
        proxy: The proxy of the client.
        arrived: The client's result; None if it did not succeed.
        refused: Its result with a status other than OK; None if there is none.
        model: The global model.
    """
    if refused is not None:
        return Reply(error=f"status: {refused.status.code.name}: {refused.status.message}", observed_s=proxy.elapsed_s)
    if arrived is None:
        reason = reason_in(proxy.error, proxy.timeout_s, proxy.elapsed_s)
        # Without a timeout, a missing answer means a broken connection, not a straggler.
        timed_out = proxy.timeout_s is not None and reason == no_answer(proxy.timeout_s)
        return Reply(error=reason, observed_s=proxy.elapsed_s, timed_out=timed_out)
    res = arrived[1]
    fault = bases.fault_in_metrics(base, res.metrics or {})
    if not fault and bases.payload(base) == "trees" and isinstance(res.parameters, Parameters):
        tensors = res.parameters.tensors
        fault = bases.fault_in_model(base, tensors) if tensors else "arrays: none in the reply"
    if fault:
        return Reply(error=fault, observed_s=proxy.elapsed_s)
    # A client whose whole update is in its metrics sends no arrays.
    nothing = isinstance(res.parameters, Parameters) and not res.parameters.tensors
    return Reply(
        arrays=[] if nothing else decode(res.parameters),
        num_examples=res.num_examples,
        metrics=res.metrics or {},
        observed_s=proxy.elapsed_s,
        sent=None if proxy.sent is None or proxy.sent is model else decode(proxy.sent),
    )


def decode(parameters: Parameters) -> Arrays | None:
    """Return the arrays of ``parameters``; None if they are not NumPy arrays (trees, garbage) or there are none."""
    try:
        arrays = parameters_to_ndarrays(parameters)
    # A client may send any content, so any error may be raised.
    except Exception:
        return None
    return arrays if arrays and all(isinstance(array, np.ndarray) for array in arrays) else None


def unwrapped(client: ClientProxy) -> ClientProxy:
    """Return Flower's own proxy."""
    return client.proxy if isinstance(client, TimedProxy) else client


def cleaned(result: FitResult, read: ClientResult, ours: Collection[str], dropped: Collection[str]) -> FitResult:
    """Return a result for a base strategy: with Flower's own proxy, in the model's types, at most max_examples.

    Args:
        result: The client's result, which is not changed.
        read: The result after reading.
        ours: Keys that only this package reads. Keys whose value cannot be used are left out.
        dropped: Keys of metrics that are left out: vectors that the selector asked for, and metrics with NaN.
    """
    client, res = result
    if without := (read.faulty_keys & {*ours}) | ({*dropped} & {*(res.metrics or {})}):
        res = replace(res, metrics={key: value for key, value in res.metrics.items() if key not in without})
    # A claim above max_examples would have too large a weight in the base's average.
    if usable_count(res.num_examples) > read.num_examples:
        res = replace(res, num_examples=read.num_examples)
    if read.converted is not None:
        res = replace(res, parameters=ndarrays_to_parameters(list(read.converted)))
    return unwrapped(client), res


def to_checkpoint(parameters: Parameters) -> tuple[list[str], Arrays]:
    """Return the names and arrays of a model in a checkpoint.

    The names of NumPy arrays are their numbers. Any other model, such as trees, is saved as bytes, one array for each
    tensor. The name of such an array is the tensors' type, a colon and its number.

    Raises:
        RunError: The model has a type that Flower does not have.

    >>> to_checkpoint(ndarrays_to_parameters([np.zeros(2)]))
    (['0'], [array([0., 0.])])
    >>> to_checkpoint(Parameters(tensors=[b"{}"], tensor_type="json"))
    (['json:0'], [array([123, 125], dtype=uint8)])
    """
    if not isinstance(parameters, Parameters):
        raise RunError(
            f"checkpoints cannot save a model of {type(parameters).__name__}, expected flwr.common.Parameters. "
            "Return these from the base, or leave checkpoint_dir out"
        )
    arrays = decode(parameters) if parameters.tensor_type == NUMPY else None
    if arrays is not None:
        return [str(i) for i in range(len(arrays))], arrays
    tensors = [np.frombuffer(tensor, np.uint8) for tensor in parameters.tensors]
    return [f"{parameters.tensor_type}:{i}" for i in range(len(tensors))], tensors


def from_checkpoint(checkpoint: Checkpoint) -> Parameters:
    """Return the model of a checkpoint as Flower's parameters."""
    kind, colon, _ = checkpoint.names[0].rpartition(":") if checkpoint.names else ("", "", "")
    if not colon:
        return ndarrays_to_parameters(checkpoint.model)
    return Parameters(tensors=[array.tobytes() for array in checkpoint.model], tensor_type=kind)


def named_arrays(parameters: object) -> Mapping[str, object] | None:
    """Return name -> array of the initial model, for comparison with a checkpoint; None if it cannot be compared."""
    if not isinstance(parameters, Parameters) or parameters.tensor_type != NUMPY:
        return None
    names, arrays = to_checkpoint(parameters)
    return dict(zip(names, arrays, strict=True)) if ":" not in "".join(names) else None
