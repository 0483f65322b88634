"""What happened in a run, round by round and client by client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from fedsel_flwr.checks import IntArray


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """One selected client in one round; NaN where a value is unknown.

    Attributes:
        round: 1-based round.
        client_id: The client's own identity.
        client: The client's row in the selector.
        completed: Whether the update could be used and arrived in time.
        problem: Empty, or what was wrong: a kind, a colon and details; several are joined by "; ".
        latency_s: Seconds the selector was told.
        energy_j: Joules the client reported.
        download_s: Reported seconds to receive the model.
        compute_s: Reported seconds of local training.
        upload_s: Reported seconds to send the update.
        train_loss: Reported training loss.
        num_examples: Examples behind the update; 0 where unknown.
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


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round; accuracy and loss are those of the central evaluation, NaN without one.

    Attributes:
        round: 1-based round.
        num_available: Clients that could have been chosen.
        num_selected: Clients that were chosen.
        num_completed: Clients whose update was used.
        round_s: Seconds the round took on the strategy's clock.
        simulated_s: Seconds since the start, cumulative.
        energy_j: Joules reported in this round.
        total_energy_j: Joules since the start, cumulative.
        accuracy: Accuracy of the new global model.
        loss: Loss of the new global model.
        probe_s: Seconds that questions before the choice took, part of ``round_s``.
        probe_j: Joules they took, part of ``energy_j``.
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


@dataclass
class History:
    """The record of a run.

    Attributes:
        rounds: One record a round.
        clients: One record for each selected client of each round.
    """

    rounds: list[RoundRecord] = field(default_factory=list)
    clients: list[ClientRecord] = field(default_factory=list)

    def append(
        self,
        *,
        round: int,
        num_available: int,
        round_s: float,
        clients: list[ClientRecord],
        probe_s: float = 0.0,
        probe_j: float = 0.0,
    ) -> RoundRecord:
        """Add a round and its clients; times and joules are accumulated here, probes are added to the round's."""
        energy = probe_j + (float(np.nansum([row.energy_j for row in clients])) if clients else 0.0)
        round_s += probe_s
        last = self.rounds[-1] if self.rounds else None
        record = RoundRecord(
            round=round,
            num_available=num_available,
            num_selected=len(clients),
            num_completed=sum(row.completed for row in clients),
            round_s=round_s,
            simulated_s=round_s + (last.simulated_s if last else 0.0),
            energy_j=energy,
            total_energy_j=energy + (last.total_energy_j if last else 0.0),
            probe_s=probe_s,
            probe_j=probe_j,
        )
        self.rounds.append(record)
        self.clients.extend(clients)
        return record

    def evaluated(self, round: int, *, loss: float, accuracy: float) -> None:
        """Enter the central evaluation of ``round``, if that round is the last one recorded."""
        if self.rounds and self.rounds[-1].round == round:
            self.rounds[-1] = replace(self.rounds[-1], loss=loss, accuracy=accuracy)

    def selection_counts(self, num_clients: int) -> IntArray:
        """How often each client was selected, by row, shape (num_clients,)."""
        return np.bincount([row.client for row in self.clients], minlength=num_clients).astype(np.int64)

    def problem_counts(self) -> Counter[str]:
        """How often each kind of problem was met."""
        return Counter(problem.split(":")[0] for row in self.clients for problem in row.problem.split("; ") if problem)
