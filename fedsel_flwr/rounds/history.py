"""What happened in a run, round by round and client by client."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import saving
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

__all__ = ["ClientRecord", "History", "RoundRecord"]

logger = logging.getLogger("fedsel_flwr")
USELESS = 3
"""Rounds in a row without a usable update after which the log says so."""
Record = TypeVar("Record", ClientRecord, RoundRecord)


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

    def complain_of_useless_rounds(self) -> None:
        """Say loudly that several rounds in a row had no usable update."""
        last = self.rounds[-USELESS:]
        if len(last) < USELESS or any(one.num_completed or not one.num_selected for one in last):
            return
        problems = Counter(row.problem for row in self.clients[-sum(one.num_selected for one in last) :])
        logger.error(
            "no update could be used in rounds %d to %d, and the model does not change; most often: %s",
            last[0].round, last[-1].round, problems.most_common(1)[0][0],
        )  # fmt: skip

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
