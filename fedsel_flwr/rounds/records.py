"""The history's rows: a round, and a client in a round.

A round as a line of JSON, and back; and where a file's lines stand.

How often each client was selected and each kind of problem met, kept as rounds go by.

The history's records as columns, and back: how a state holds them.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import state_dicts


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


LINE_START = '{"round": '
"""How a line begins; the round's own record follows."""
DECODE_ERRORS = (ValueError, KeyError, TypeError, RecursionError)
"""What a line that is no round raises."""
_decoder = json.JSONDecoder()


class RoundEntry(NamedTuple):
    """A round and its clients."""

    round: RoundRecord
    clients: Sequence[ClientRecord]


def encode_entry(entry: RoundEntry) -> bytes:
    """A round as one line; NaN and infinities are written as JavaScript has them, floats in full.

    >>> from fedsel_flwr.rounds.records import RoundRecord
    >>> record = RoundRecord(round=1, num_available=2, num_selected=0, num_completed=0, round_s=0.1, simulated_s=0.1,
    ...                      energy_j=0.0, total_energy_j=0.0)
    >>> decode_entry(encode_entry(RoundEntry(record, []))).round.round_s
    0.1
    """
    said = {"round": vars(entry.round), "clients": [vars(row) for row in entry.clients]}
    return json.dumps(said, default=_plain).encode() + b"\n"


def decode_entry(line: bytes) -> RoundEntry:
    """Read a line; raises one of :data:`DECODE_ERRORS` if it is no round."""
    said = json.loads(line)
    return RoundEntry(RoundRecord(**said["round"]), [ClientRecord(**row) for row in said["clients"]])


def decode_round(line: bytes) -> RoundRecord:
    """Read the round of a line, of which the beginning is enough; clients are passed over."""
    text = line.decode("ascii")
    if not text.startswith(LINE_START):
        return decode_entry(line).round
    said, _ = _decoder.raw_decode(text, len(LINE_START))
    return RoundRecord(**said)


class LineIndex:
    """Where each line ends, how many clients there are up to it, and the checksum (CRC-32) of everything up to it.

    24 bytes a line, whatever it holds.
    """

    def __init__(self) -> None:
        self._ends, self._clients, self._sums = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        """How many lines there are."""
        return len(self._ends)

    def add(self, line: bytes, num_clients: int) -> None:
        """A line was added."""
        count = len(self)
        checksum = zlib.crc32(line, self.checksum(count))
        self._ends.append(self.start(count) + len(line))
        self._clients.append(self.num_clients(count) + num_clients)
        self._sums.append(checksum)

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` lines."""
        for column in (self._ends, self._clients, self._sums):
            del column[count:]

    def start(self, line: int) -> int:
        """Where a line begins, bytes; lines count from 0. That after the last one begins at the end."""
        return self._ends[line - 1] if line else 0

    def num_clients(self, count: int) -> int:
        """Clients in the first ``count`` lines."""
        return self._clients[count - 1] if count else 0

    def checksum(self, count: int) -> int:
        """CRC-32 of the first ``count`` lines."""
        return self._sums[count - 1] if count else 0

    def with_client(self, index: int) -> int:
        """The line that holds a client's record; both count from 0."""
        return bisect_left(self._clients, index + 1)

    def ending_at(self, offset: int) -> int | None:
        """How many lines end at a byte; None where that is in the middle of one."""
        count = bisect_left(self._ends, offset) + 1 if offset else 0
        return count if count <= len(self) and self.start(count) == offset else None


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's own."""
    return value.item()


class ParticipationCounts:
    """Counts over clients' records.

    Attributes:
        rounds: How many rounds are in it, as its owner counts them.
        problems: Kind -> how often it was met.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.problems: Counter[str] = Counter()
        self._selections = np.zeros(0, dtype=np.int64)  # by row

    def add(self, clients: Sequence[ClientRecord]) -> None:
        """Count some records."""
        self.problems.update(problem.split(":")[0] for row in clients for problem in row.problem.split("; ") if problem)
        more = np.bincount([row.client for row in clients], minlength=self._selections.size).astype(np.int64)
        more[: self._selections.size] += self._selections
        self._selections = more

    def selections(self, num_clients: int) -> IntArray:
        """How often each client was selected, by row, shape (num_clients,) or longer where there are more rows."""
        counts = np.zeros(max(num_clients, self._selections.size), dtype=np.int64)
        counts[: self._selections.size] = self._selections
        return counts


Record = TypeVar("Record", ClientRecord, RoundRecord)
TYPES: dict[str, type[np.generic]] = {"int": np.int64, "float": np.float64, "bool": np.bool_}


def to_columns(rounds: Sequence[RoundRecord], clients: Sequence[ClientRecord]) -> state_dicts.State:
    """Rounds and clients, a column a field."""
    return {"rounds": _columns(RoundRecord, rounds), "clients": _columns(ClientRecord, clients)}


def from_columns(state: Any) -> tuple[list[RoundRecord], list[ClientRecord]]:
    """The records in a state of :func:`to_columns`; raises :class:`StateError` if it is none."""
    state_dicts.expect_keys(state, ("rounds", "clients"))
    rounds = _records("rounds", RoundRecord, state["rounds"])
    return rounds, _records("clients", ClientRecord, state["clients"])


def _columns(kind: type[Record], records: Sequence[Record]) -> state_dicts.State:
    columns: state_dicts.State = {}
    for one in fields(kind):
        values = [getattr(record, one.name) for record in records]
        columns[one.name] = values if one.type == "str" else np.array(values, dtype=TYPES[str(one.type)])
    return columns


def _records(name: str, kind: type[Record], columns: Any) -> list[Record]:
    newer = {one.name for one in fields(kind) if one.default is not MISSING}  # an older version's records lack some
    if isinstance(columns, Mapping):
        newer -= set(columns)
    known = [one for one in fields(kind) if one.name not in newer]
    state_dicts.expect_keys(columns, [one.name for one in known])
    loaded: dict[str, list[Any]] = {}
    for one in known:
        value, where = columns[one.name], f"{name}.{one.name}"
        if one.type == "str":
            loaded[one.name] = state_dicts.texts(where, value)
        else:
            loaded[one.name] = state_dicts.array(where, value, TYPES[str(one.type)]).tolist()
    lengths = {len(values) for values in loaded.values()}
    if len(lengths) > 1:
        raise StateError(f"the columns of {name} must be of one length, got {sorted(lengths)}")
    return [kind(**dict(zip(loaded, row, strict=True))) for row in zip(*loaded.values(), strict=True)]
