"""What happened in a run, round by round and client by client.

The log's one line for each round, with the same fields in every round.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.history_storage import Journal, JournalStorage, MemoryStorage
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord
from fedsel_flwr.rounds.replies import NUMBERS
from fedsel_flwr.selectors.columns import COLUMNS

logger = logging.getLogger("fedsel_flwr")
LATE = "late"
MINOR = frozenset({*NUMBERS, *COLUMNS, "identity", "max_examples"} - {"num_examples"})
"""Kinds of problems that do not cost an update."""
MOST_REASONS = 8
"""Reasons in a line; further ones count as "other"."""
Value = int | float | str


def log_round(rounds: Sequence[RoundRecord], clients: Sequence[ClientRecord]) -> None:
    """Log the last round of a history; ``fedsel`` of the log record has the fields."""
    if not rounds or not logger.isEnabledFor(logging.INFO):
        return
    last = rounds[-1]
    rows = clients[-last.num_selected :] if last.num_selected else []
    fields = round_fields(last, [row for row in rows if row.round == last.round])
    logger.info(round_line(fields), extra={"fedsel": fields})


def round_fields(record: RoundRecord, clients: Sequence[ClientRecord]) -> dict[str, Value]:
    """What the line says of a round.

    Args:
        record: The round.
        clients: Its clients.

    Returns:
        ``round``, ``available``, ``selected``, ``completed``, ``kept``, ``late`` (answers that came after the end of
        the round), ``timeouts`` (no answer came while the server waited), ``round_s``, ``simulated_s``, ``joules``,
        ``loss``, ``accuracy`` (NaN where they are unknown), and ``failures``: why the other updates could not be used,
        each reason with its count, the most frequent first.
    """
    reasons = Counter(reason(row) for row in clients if not row.completed and not row.timed_out)
    late = reasons.pop(LATE, 0)
    named = reasons.most_common(MOST_REASONS)
    if rest := reasons.total() - sum(count for _, count in named):
        named.append(("other", rest))
    return {
        "round": record.round,
        "available": record.num_available,
        "selected": record.num_selected,
        "completed": record.num_completed,
        "kept": record.num_kept,
        "late": late,
        "timeouts": record.num_timeouts,
        "round_s": record.round_s,
        "simulated_s": record.simulated_s,
        "joules": record.energy_j,
        "loss": record.loss,
        "accuracy": record.accuracy,
        "failures": ",".join(f"{name}:{count}" for name, count in named),
    }


def round_line(fields: dict[str, Value]) -> str:
    """The fields in logfmt.

    >>> round_line({"round": 3, "round_s": 1.25, "loss": float("nan"), "failures": "exception:2"})
    'round=3 round_s=1.25 loss=nan failures="exception:2"'
    """
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def reason(row: ClientRecord) -> str:
    """Why a client's update could not be used: the kind of the problem that cost it.

    >>> from fedsel_flwr.rounds.records import ClientRecord
    >>> nothing = dict.fromkeys(["latency_s", "energy_j", "download_s", "compute_s", "upload_s", "train_loss"], 0.0)
    >>> reason(ClientRecord(round=1, client_id="a", client=0, completed=False, num_examples=0, **nothing,
    ...                     problem="energy: -1 cannot be used; late: done after 3 s"))
    'late'
    """
    kinds = [problem.split(":")[0].replace(",", " ")[:40] for problem in row.problem.split("; ")]
    return next((kind for kind in kinds if kind not in MINOR), kinds[0])


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


__all__ = ["ClientRecord", "History", "RoundRecord"]

USELESS = 3
"""Rounds in a row without a usable update after which the log says so."""


class History:
    """The record of a run.

    Without a journal everything is in memory, in lists. With one the last rounds are, and the ones before are read from
    it where they are asked for; ``rounds`` and ``clients`` are complete sequences in both cases.

    The last round's evaluation can still be entered (:meth:`record_evaluation`); it goes to the journal with
    :meth:`close_round`, at the latest when the next one is appended.

    Args:
        journal: Takes the finished rounds; what its file holds is replaced, unless a state is loaded. None: memory.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._kept: MemoryStorage | JournalStorage = MemoryStorage() if journal is None else JournalStorage(journal)
        self._told = True  # whether the log has the last round

    @classmethod
    def from_records(cls, rounds: Iterable[RoundRecord], clients: Iterable[ClientRecord]) -> History:
        """A history in memory."""
        history = cls()
        history._kept = MemoryStorage(list(rounds), list(clients))
        return history

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """One record a round."""
        return self._kept.rounds

    @property
    def clients(self) -> Sequence[ClientRecord]:
        """One record for each selected client of each round."""
        return self._kept.clients

    @property
    def journal(self) -> Journal | None:
        """Where finished rounds go; None: nowhere."""
        return self._kept.journal if isinstance(self._kept, JournalStorage) else None

    def write_to(self, journal: Journal) -> None:
        """Have the rounds to come written to a journal.

        Raises:
            RunError: There are rounds already.
        """
        if self.rounds:
            raise RunError(
                f"a journal takes a history from its first round on, but there are {len(self.rounds)} rounds"
            )
        self._kept = JournalStorage(journal)

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
        """Add a round and its clients; times and joules are accumulated here, probes are added to the round's.

        Raises:
            RunError: The round before cannot be written.
        """
        self.close_round()
        joules = np.array([row.energy_j for row in clients])
        probed = probe_j if probe_s or probe_j else math.nan
        measured = not math.isnan(probed) or bool(np.isfinite(joules).any())
        energy = float(np.nansum([float(np.nansum(joules)), probed])) if measured or not clients else math.nan
        round_s += probe_s
        last = self.last
        total = last.total_energy_j if last else math.nan
        if measured:
            total = energy + (0.0 if math.isnan(total) else total)
        record = RoundRecord(
            round=round,
            num_available=num_available,
            num_selected=len(clients),
            num_completed=sum(row.completed for row in clients),
            num_kept=sum(row.kept for row in clients),
            num_timeouts=sum(row.timed_out for row in clients),
            round_s=round_s,
            simulated_s=round_s + (last.simulated_s if last else 0.0),
            energy_j=energy,
            total_energy_j=total,
            probe_s=probe_s,
            probe_j=probe_j,
        )
        self._kept.add(record, clients)
        self._told = False
        return record

    @property
    def last(self) -> RoundRecord | None:
        """The last round; None before the first."""
        return self.rounds[-1] if self.rounds else None

    def record_evaluation(self, round: int, *, loss: float, accuracy: float) -> None:
        """Enter the central evaluation of ``round``, if that round is the last one recorded."""
        last = self.last
        if last is not None and last.round == round:
            self._kept.replace(replace(last, loss=loss, accuracy=accuracy))

    def close_round(self) -> None:
        """The last round has ended: it is told in the log and written to the journal, once.

        Raises:
            RunError: It cannot be written.
        """
        if not self._told:
            self._told = True
            log_round(self.rounds, self.clients)
        self._kept.close()

    def selection_counts(self, num_clients: int) -> IntArray:
        """How often each client was selected, by row, shape (num_clients,)."""
        return self._kept.tally().selections(num_clients)

    def problem_counts(self) -> Counter[str]:
        """How often each kind of problem was met."""
        return Counter(self._kept.tally().problems)

    def log_unusable_rounds(self) -> None:
        """Say loudly that several rounds in a row had no usable update."""
        last = self.rounds[-USELESS:]
        if len(last) < USELESS or any(one.num_completed or not one.num_selected for one in last):
            return
        problems = Counter(row.problem for row in self.clients[-sum(one.num_selected for one in last) :])
        logger.error(
            "no update could be used in rounds %d to %d, and the model does not change; most often: %s",
            last[0].round, last[-1].round, problems.most_common(1)[0][0],
        )  # fmt: skip

    def state_dict(self) -> state_dicts.State:
        """Every record, a column a field; with a journal where it stands, and the records of the last round.

        The journal is synced to the disk before.

        Raises:
            RunError: It cannot be.
        """
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit.

        With a journal its lines after the state's offset are dropped, and the last round is open again. The state of a
        history in memory fits as well: it is written to the journal.
        """
        self._kept.load_state_dict(state)
        self._told = not (isinstance(self._kept, JournalStorage) and "offset" in state)

    def forget(self, rows: IntArray) -> None:
        """What happened stays."""

    def __eq__(self, other: object) -> bool:
        """Equal to a history of the same records."""
        if not isinstance(other, History):
            return NotImplemented
        return self.rounds == other.rounds and self.clients == other.clients

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Every record."""
        return f"History(rounds={self.rounds!r}, clients={self.clients!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what goes to another process, is in memory."""
        return History.from_records, (list(self.rounds), list(self.clients))
