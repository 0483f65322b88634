"""The history's rows: a round, and a client in a round."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """One selected client in one round; NaN where a value is unknown.

    Attributes:
        round: 1-based absolute round.
        client_id: The client's own identity.
        client: The client's row in the selector.
        completed: Whether the update could be used and arrived in time.
        kept: Whether the update was averaged: completed, and not dropped by FedCA's filter.
        problem: Empty, or what was wrong: a kind, a colon and details; several are joined by "; ".
        latency_s: Seconds the selector was told.
        latency_source: Where they come from: "reported", "observed", "clipped", "first" or "max_latency". "first": the
            server measured this client for the first time, and the selector was given what is known of other times.
        first_s: The first time itself, seconds; NaN unless ``latency_source`` is "first".
        energy_j: Joules the client reported.
        energy_score: PCZFL's score in [0, 1] that the client reported.
        download_s: Reported seconds to receive the model.
        compute_s: Reported seconds of local training.
        upload_s: Reported seconds to send the update.
        train_loss: Reported training loss.
        num_examples: Examples behind the update; 0 where unknown.
        timed_out: Whether no answer came for as long as the server waited: the timeout, or the round's deadline.
    """

    round: int
    client_id: str
    client: int
    completed: bool
    problem: str
    latency_s: float
    energy_j: float
    download_s: float
    compute_s: float
    upload_s: float
    train_loss: float
    num_examples: int
    kept: bool = True
    latency_source: str = "reported"
    energy_score: float = float("nan")
    timed_out: bool = False
    first_s: float = math.nan

    @property
    def transfer_s(self) -> float:
        """Seconds of the round trip that were not computing: sending, waiting, starting the client's process.

        NaN unless the server timed the client (``latency_source`` "observed" or "first") and the client reported
        ``compute_s``. Of a latency that was cut at max_latency it is the least that it can have been.
        """
        took = {"observed": self.latency_s, "first": self.first_s}.get(self.latency_source, math.nan)
        return max(took - self.compute_s, 0.0) if not math.isnan(took - self.compute_s) else math.nan


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round; accuracy and loss are those of the central evaluation, NaN without one.

    Attributes:
        round: 1-based absolute round.
        num_available: Clients that could have been chosen.
        num_selected: Clients that were chosen.
        num_completed: Clients whose update arrived in time and could be used.
        num_kept: Clients whose update was averaged; fewer where FedCA's filter dropped some.
        round_s: Seconds the round took on the strategy's clock.
        simulated_s: Seconds since the start, cumulative.
        energy_j: Joules reported in this round; NaN where clients took part and nobody reported any.
        total_energy_j: Joules since the start, cumulative; NaN as long as nobody reported any.
        accuracy: Accuracy of the new global model.
        loss: Loss of the new global model.
        probe_s: Seconds that questions before the choice took, part of ``round_s``.
        probe_j: Joules they took, part of ``energy_j``.
        num_timeouts: Clients of whom no answer came for as long as the server waited.
    """

    round: int
    num_available: int
    num_selected: int
    num_completed: int
    round_s: float
    simulated_s: float
    energy_j: float
    total_energy_j: float
    accuracy: float = float("nan")
    loss: float = float("nan")
    probe_s: float = 0.0
    probe_j: float = 0.0
    num_kept: int = 0
    num_timeouts: int = 0
