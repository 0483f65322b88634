"""What happened in a run, round by round and client by client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import saving

Record = TypeVar("Record", "ClientRecord", "RoundRecord")


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
        latency_source: Where they come from: "reported", "observed", "clipped" or "max_latency".
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
    kept: bool = True
    latency_source: str = "reported"


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
        joules = np.array([row.energy_j for row in clients])
        probed = probe_j if probe_s or probe_j else math.nan
        measured = not math.isnan(probed) or bool(np.isfinite(joules).any())
        energy = float(np.nansum([float(np.nansum(joules)), probed])) if measured or not clients else math.nan
        round_s += probe_s
        last = self.rounds[-1] if self.rounds else None
        total = last.total_energy_j if last else math.nan
        if measured:
            total = energy + (0.0 if math.isnan(total) else total)
        record = RoundRecord(
            round=round,
            num_available=num_available,
            num_selected=len(clients),
            num_completed=sum(row.completed for row in clients),
            num_kept=sum(row.kept for row in clients),
            round_s=round_s,
            simulated_s=round_s + (last.simulated_s if last else 0.0),
            energy_j=energy,
            total_energy_j=total,
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

    def state_dict(self) -> saving.State:
        """Every record, a column a field."""
        return {"rounds": _columns(RoundRecord, self.rounds), "clients": _columns(ClientRecord, self.clients)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, ("rounds", "clients"))
        rounds = _records("rounds", RoundRecord, state["rounds"])
        clients = _records("clients", ClientRecord, state["clients"])
        self.rounds[:], self.clients[:] = rounds, clients

    def forget(self, rows: IntArray) -> None:
        """What happened stays."""


_TYPES: dict[str, type[np.generic]] = {"int": np.int64, "float": np.float64, "bool": np.bool_}


def _columns(kind: type[Record], records: Sequence[Record]) -> saving.State:
    columns: saving.State = {}
    for one in fields(kind):
        values = [getattr(record, one.name) for record in records]
        columns[one.name] = values if one.type == "str" else np.array(values, dtype=_TYPES[str(one.type)])
    return columns


def _records(name: str, kind: type[Record], columns: Any) -> list[Record]:
    saving.expect_keys(columns, [one.name for one in fields(kind)])
    loaded: dict[str, list[Any]] = {}
    for one in fields(kind):
        value, where = columns[one.name], f"{name}.{one.name}"
        if one.type == "str":
            loaded[one.name] = saving.texts(where, value)
        else:
            loaded[one.name] = saving.array(where, value, _TYPES[str(one.type)]).tolist()
    lengths = {len(values) for values in loaded.values()}
    if len(lengths) > 1:
        raise StateError(f"the columns of {name} must be of one length, got {sorted(lengths)}")
    return [kind(**dict(zip(loaded, row, strict=True))) for row in zip(*loaded.values(), strict=True)]
