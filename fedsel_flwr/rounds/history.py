"""History: the record of a run, round by round and client by client.

Each round is one line in the log, always with the same fields (:func:`round_fields`).
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
from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord, from_state, to_state
from fedsel_flwr.rounds.untrusted import one_line
from fedsel_flwr.selectors.columns import COLUMNS

__all__ = ["ClientRecord", "History", "RoundRecord"]

logger = logging.getLogger("fedsel_flwr")
LATE = "late"
MINOR_PROBLEMS = frozenset({*COLUMNS, "identity", "max_examples", "probe"} - {"num_examples"})
"""Kinds of problems that leave the update usable."""
MAX_REASONS = 8
"""Largest number of reasons in a line; further reasons count as "other"."""
MOST_TOLD = 6
"""Largest number of clients in a note."""
UNUSABLE_ROUNDS = 3
"""Number of consecutive rounds without a usable update after which the log reports an error."""
Value = int | float | str


class History(state_dicts.NotByClient):
    """The record of a run; past rounds of evicted clients stay in it.

    Without a journal all records are in memory. With a journal only the last rounds are in memory, and older rounds are
    read from the file on demand. ``rounds`` and ``clients`` are complete sequences in both cases.

    The last round stays open for its evaluation (:meth:`record_evaluation`). :meth:`close_round` writes it to the
    journal, at the latest when the next round is appended.

    Args:
        journal: Stores the finished rounds. Its file is overwritten unless a state is loaded. None keeps all records in
            memory.

    Attributes:
        journal: The journal of finished rounds; None if the history is in memory.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal
        # The records of a history in memory.
        self._rounds, self._clients = list[RoundRecord](), list[ClientRecord]()
        # Whether the last round's line is in the log.
        self._logged = True

    @classmethod
    def from_records(cls, rounds: Iterable[RoundRecord], clients: Iterable[ClientRecord]) -> History:
        """Create a history in memory."""
        history = cls()
        history._rounds, history._clients = list(rounds), list(clients)
        return history

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """One record per round."""
        return self._rounds if self.journal is None else self.journal.rounds

    @property
    def clients(self) -> Sequence[ClientRecord]:
        """One record per selected client of each round."""
        return self._clients if self.journal is None else self.journal.clients

    def write_to(self, journal: Journal) -> None:
        """Write all future rounds to a journal.

        Raises:
            RunError: The history already has rounds.
        """
        if self.rounds:
            raise RunError(f"the history has {len(self.rounds)} rounds already. Give it a journal before round 1")
        self.journal = journal

    def append(
        self,
        *,
        round: int,
        round_s: float,
        clients: list[ClientRecord],
        probe_s: float = 0.0,
        probe_j: float = 0.0,
        remark: str = "",
        note: str = "",
        **fields: Any,
    ) -> RoundRecord:
        """Add a round and its clients, and accumulate times and joules, including those of probes.

        Further arguments are other fields of the record, such as ``num_available`` and ``deadline_s``.

        Raises:
            RunError: The previous round cannot be written.
        """
        self.close_round()
        # NaN unless a client or a probe reported joules; 0 in a round without clients.
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
            num_selected=len(clients),
            num_completed=sum(row.completed for row in clients),
            num_kept=sum(row.kept for row in clients),
            num_timeouts=sum(row.timed_out for row in clients),
            num_spares=sum(row.spare and not row.completed for row in clients),
            round_s=round_s,
            simulated_s=round_s + self.simulated_s,
            energy_j=energy,
            total_energy_j=total,
            probe_s=probe_s,
            probe_j=probe_j,
            # So short that the journal finds the record at the start of its line.
            remark=one_line(remark),
            note=one_line(note),
            **fields,
        )
        if self.journal is None:
            self._rounds.append(record)
            self._clients.extend(clients)
        else:
            self.journal.add(record, clients)
        self._logged = False
        return record

    @property
    def last(self) -> RoundRecord | None:
        """The last round; None before the first."""
        return self.rounds[-1] if self.rounds else None

    @property
    def simulated_s(self) -> float:
        """The seconds of all rounds."""
        return self.rounds[-1].simulated_s if self.rounds else 0.0

    def record_evaluation(self, round: int, *, loss: float, accuracy: float) -> None:
        """Record the central evaluation of ``round``, if that is the last recorded round."""
        last = self.last
        if last is None or last.round != round:
            return
        evaluated = replace(last, loss=loss, accuracy=accuracy)
        if self.journal is None:
            self._rounds[-1] = evaluated
        else:
            self.journal.replace_last(evaluated)

    def close_round(self) -> None:
        """Close the last round: log it and write it to the journal, once.

        The log record's attribute ``fedsel`` holds the fields.

        Raises:
            RunError: The round cannot be written.
        """
        last, logged = self.last, self._logged
        # Set before logging, so that a log handler that raises does not repeat the line.
        self._logged = True
        if not logged and last is not None and logger.isEnabledFor(logging.INFO):
            rows = self.clients[-last.num_selected :] if last.num_selected else []
            fields = round_fields(last, [row for row in rows if row.round == last.round])
            logger.info(format_line(fields), extra={"fedsel": fields})
        if self.journal is not None:
            self.journal.close_round()

    def selection_counts(self, num_clients: int) -> IntArray:
        """Return each client's number of selections, by row, shape (num_clients,), or longer if there are more rows."""
        return np.bincount(np.fromiter((row.client for row in self.clients), dtype=np.int64), minlength=num_clients)

    def problem_counts(self) -> Counter[str]:
        """Return the number of problems of each kind: of clients' replies, and of whole rounds (their remarks)."""
        counts = Counter(kind for row in self.clients if row.problem for kind in row.problem_kinds)
        for remark, rounds in self.remarks().items():
            counts[remark.split(":")[0]] += rounds
        return counts

    def remarks(self) -> Counter[str]:
        """Return the remarks of rounds, with their numbers of rounds."""
        return Counter(one.remark for one in self.rounds if one.remark)

    def log_unusable_rounds(self) -> None:
        """Log an error if the last :data:`UNUSABLE_ROUNDS` rounds had no usable update."""
        last = self.rounds[-UNUSABLE_ROUNDS:]
        if len(last) < UNUSABLE_ROUNDS or any(one.num_completed or not one.num_selected for one in last):
            return
        problems = Counter(row.problem for row in self.clients[-sum(one.num_selected for one in last) :])
        logger.error(
            "no update was usable in rounds %d to %d, so the model did not change. Most frequent reason: %s",
            last[0].round, last[-1].round, problems.most_common(1)[0][0],
        )  # fmt: skip

    def state_dict(self) -> state_dicts.State:
        """Return all records, one dict per record; with a journal its position and the last round's records.

        The journal is synced to the disk first.

        Raises:
            RunError: The journal cannot be synced.
        """
        return to_state(self._rounds, self._clients) if self.journal is None else self.journal.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit.

        With a journal, its lines after the state's offset are dropped, and the last round is open again.

        Raises:
            StateError: The state does not fit. Or it was saved with a journal and this history has none, or the
                reverse.
        """
        if self.journal is not None:
            self.journal.load_state_dict(state)
            # The state was saved before its last round was closed, and so before that round was logged.
            self._logged = False
            return
        if isinstance(state, Mapping) and "offset" in state:
            raise StateError("this state keeps its earlier rounds in a file. Give the strategy its checkpoint_dir")
        self._rounds[:], self._clients[:] = from_state(state)
        self._logged = True

    def __eq__(self, other: object) -> bool:
        """Return whether two histories have the same records; NaN counts as equal to NaN."""
        # By repr, because a record that holds a NaN differs from its own copy, and from Python 3.13 on from itself.
        return repr(self) == repr(other) if isinstance(other, History) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return all records as text."""
        return f"History(rounds={self.rounds!r}, clients={self.clients!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a history in memory, because a copy or another process must not write to the same file."""
        return History.from_records, (list(self.rounds), list(self.clients))


def round_fields(record: RoundRecord, clients: Sequence[ClientRecord]) -> dict[str, Value]:
    """Return the fields of a round's line.

    Args:
        record: The round.
        clients: Its clients.

    Returns:
        The fields ``round``, ``available``, ``selected``, ``completed``, ``kept``, ``late``, ``timeouts``, ``round_s``,
        ``simulated_s``, ``joules``, ``loss``, ``accuracy`` and ``failures``. ``late`` counts answers after the end of
        the round. ``timeouts`` counts clients without an answer while the server waited. Loss and accuracy are NaN if
        unknown. ``failures`` has the reasons for unusable updates with their counts, the most frequent first.
    """
    reasons = Counter(failure_reason(row) for row in clients if not row.completed and not row.timed_out)
    late = reasons.pop(LATE, 0)
    named = reasons.most_common(MAX_REASONS)
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


def round_note(
    seconds: float,
    deadline_s: float,
    asked: int,
    missing: Sequence[tuple[str, str]],
    late: Sequence[tuple[str, float, float]],
) -> str:
    """Return what happened in a round, in one line.

    Args:
        seconds: Duration of the round.
        deadline_s: Its deadline in seconds; infinity without one.
        asked: Number of clients that were asked.
        missing: Id of each client without an update in time, and the reason.
        late: Id of each client whose late update counts, the seconds by which it was late, and its weight.

    >>> round_note(720.0, 720.0, 5, [("oslo", "out for 4 rounds")], [("lyon", 180.0, 0.4)])
    '4 of 5 clients in 12 min (deadline 12 min); oslo: out for 4 rounds; lyon: late by 3 min, used with weight 0.4'
    """
    limit = f" (deadline {_duration(deadline_s)})" if math.isfinite(deadline_s) else ""
    parts = [f"{asked - len(missing)} of {asked} clients in {_duration(seconds)}{limit}"]
    told = [f"{name}: {reason}" for name, reason in missing]
    told += [f"{name}: late by {_duration(late_s)}, used with weight {weight:.2g}" for name, late_s, weight in late]
    more = [f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
    return "; ".join(parts + told[:MOST_TOLD] + more)


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_line(fields: dict[str, Value]) -> str:
    """Format the fields as logfmt.

    >>> format_line({"round": 3, "round_s": 1.25, "loss": float("nan"), "failures": "exception:2"})
    'round=3 round_s=1.25 loss=nan failures="exception:2"'
    """
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def failure_reason(row: ClientRecord) -> str:
    """Return the kind of the problem that made a client's update unusable.

    >>> from fedsel_flwr.rounds.records import ClientRecord
    >>> nothing = dict.fromkeys(["latency_s", "energy_j", "download_s", "compute_s", "upload_s", "train_loss"], 0.0)
    >>> failure_reason(ClientRecord(round=1, client_id="a", client=0, completed=False, num_examples=0, **nothing,
    ...                     problem="energy: -1 cannot be used; late: done after 3 s"))
    'late'
    """
    # A base strategy's exception may be long and hold commas, but commas separate the reasons in the field.
    kinds = [kind.replace(",", " ")[:40] for kind in row.problem_kinds]
    return next((kind for kind in kinds if kind not in MINOR_PROBLEMS), kinds[0])


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
