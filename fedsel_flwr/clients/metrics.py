"""Metrics that a simulated client sends with its update: identity, times, energy, training loss.

The system model is the only source of the energy. A meter would count all processes on the machine, and so all clients
together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flwr.common import Scalar

from fedsel_flwr.clients.answering import SKETCH_BITS, Shares, forward_passes
from fedsel_flwr.clients.device import PROBE_BITS, RoundDelays, System, probe_delays
from fedsel_flwr.rounds.replies import SIMULATED_FAILURE


def fit_metrics(
    system: System,
    partition_id: int,
    delays: RoundDelays,
    *,
    train_loss: float,
    compute_s: float | None = None,
    energy_score: float | None = None,
) -> dict[str, Scalar]:
    """Return the metrics of an update.

    Args:
        system: Delays and energy.
        partition_id: The client's partition.
        delays: The client's delays in the round.
        train_loss: Mean loss over the local steps.
        compute_s: Measured seconds of computing; None takes the system model's.
        energy_score: The client's energy score (PCZFL), reported if it is set.

    Returns:
        ``latency_s`` = ``download_s`` + ``compute_s`` + ``upload_s`` (Xia et al., equation (4), not yet capped),
        ``energy_j`` (always modelled, hence ``energy_modelled`` = 1), ``train_loss``, ``client_id``.
    """
    compute = delays.compute_s if compute_s is None else compute_s
    metrics: dict[str, Scalar] = {
        "latency_s": delays.download_s + compute + delays.upload_s,  # (4) before the cap
        "energy_j": system.energy_j(delays, compute),
        "energy_modelled": 1,
        "download_s": delays.download_s,
        "compute_s": compute,
        "upload_s": delays.upload_s,
        "train_loss": train_loss,
        "client_id": partition_id,
    }
    return metrics if energy_score is None else metrics | {"energy_score": energy_score}


def dropout_metrics(partition_id: int, outcome: int, spent: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
    """Return the metrics of a simulated client that drops out.

    Args:
        partition_id: The client's partition.
        outcome: :data:`~fedsel_flwr.rounds.replies.FAILED` or :data:`~fedsel_flwr.rounds.replies.CRASHED`.
        spent: The metrics that the reply would have had; None if the client has not trained.

    Returns:
        The client's costs, for the history, without the training loss, which a server could not know.
    """
    known = {key: value for key, value in (spent or {}).items() if key != "train_loss"}
    return known | {"client_id": partition_id, SIMULATED_FAILURE: outcome}


def probe_costs(
    system: System,
    delays: RoundDelays,
    asked: Collection[str],
    shares: Shares,
    compute_s: float | None = None,
) -> dict[str, Scalar]:
    """Return the cost of answering a probe.

    Args:
        system: Delays and energy.
        delays: The client's delays in the round.
        asked: The columns that it answers. Without any, the client still makes one pass over its test examples.
        shares: The client's examples.
        compute_s: Measured seconds of computing; None takes the system model's.

    Returns:
        ``latency_s`` and ``energy_j``.
    """
    # All numbers together are one answer, and so is a reply without any number.
    vectors = {"gradient", "sketch"} & set(asked)
    bits = system.payload_up_bits if "gradient" in asked else PROBE_BITS * (vectors != set(asked))
    bits = max(bits + SKETCH_BITS * ("sketch" in asked), PROBE_BITS)
    passes = forward_passes(asked, shares) or shares.test
    answering = probe_delays(system, delays, forward_passes=passes, bits=bits)
    compute = answering.compute_s if compute_s is None else compute_s
    return {
        "latency_s": answering.download_s + compute + answering.upload_s,
        "energy_j": system.energy_j(answering, compute),
    }
