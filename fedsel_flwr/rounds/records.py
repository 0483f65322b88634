"""Records: the rows of a run's history, and the forms in which they are stored.

A :class:`RoundRecord` is a round. A :class:`ClientRecord` is a selected client in a round. The journal stores a round
and its clients as a line of JSON (:func:`encode_entry`).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.selectors.columns import COLUMNS, RECORDED, with_fields

LINE_START = '{"round": '
"""The first bytes of a line. The record of the round follows."""
ROUND_BYTES = 2**13
"""Number of bytes at the start of a line that always include the record of the round.

The record has 19 numbers with their names, a remark and a note of at most 300 characters each.
"""
DECODE_ERRORS = (ValueError, KeyError, TypeError, RecursionError)
"""Errors from decoding a damaged line."""
MOST, MOST_COUNT, MOST_CHARACTERS = 1e100, 2**53, 2**14
"""Largest float, largest integer and longest text of a record. Sums of squares of such floats are finite."""
UNBOUNDED = frozenset({"loss", "accuracy", "train_loss"})
"""Numbers of a record that may have any value, because a model can diverge."""
_decoder = json.JSONDecoder()
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}


@with_fields("float", dict.fromkeys(sorted(COLUMNS[name].key for name in RECORDED), math.nan))
@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """One selected client in one round; NaN if a value is unknown.

    Values that clients report have the keys of the recorded columns in :mod:`fedsel_flwr.selectors.columns`. Recorded
    columns that you add to that table are included.

    Attributes:
        round: Absolute round, from 1.
        client_id: The client's own identity.
        client: The client's row in the selector.
        completed: Whether the update was usable and arrived in time.
        kept: Whether the update was averaged: completed, and not dropped by FedCA's filter.
        problem: Empty, or the problem: its kind, a colon and details. Several problems are separated by semicolons.
        latency_s: Latency in seconds, as the selector got it.
        latency_source: Source of the latency: "reported", "observed", "clipped", "first" or "max_latency". "first"
            means that the server measured this client for the first time. The latency is then an estimate from other
            times.
        first_s: The first measured time itself, seconds; NaN unless ``latency_source`` is "first".
        energy_j: Reported joules.
        energy_score: Reported energy score (PCZFL), in [0, 1].
        download_s: Reported seconds to receive the model.
        compute_s: Reported seconds of local training.
        upload_s: Reported seconds to send the update.
        train_loss: Reported training loss.
        num_examples: Number of examples behind the update; 0 if unknown.
        timed_out: Whether no answer came before the timeout or the round's deadline.
        spare: Whether the round ended without this client because enough others were earlier (over-selection).
        staleness: Steps of the server since the client got its model, 0 in synchronous rounds. The client got the model
            after round - 1 - staleness.
        arrived_s: Simulated seconds since the start at which the client's update or failure arrived; NaN in synchronous
            rounds.
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
    spare: bool = False
    staleness: int = 0
    arrived_s: float = math.nan

    @property
    def buffered(self) -> bool:
        """Whether the client arrived in a buffered round, which waits for no client."""
        return math.isfinite(self.arrived_s)

    @property
    def problem_kinds(self) -> list[str]:
        """The kind of each problem, in order; one empty text if there is no problem."""
        return [problem.split(":")[0] for problem in self.problem.split("; ")]

    @property
    def transfer_s(self) -> float:
        """Seconds of the round trip without training: transfer, waiting, and the start of the client's process.

        NaN unless the server timed the client (``latency_source`` "observed" or "first") and the client reported
        ``compute_s``. If the latency was capped at max_latency, this is a lower bound.
        """
        # A clipped or reported latency is not the server's own measurement of the round trip.
        took = {"observed": self.latency_s, "first": self.first_s}.get(self.latency_source, math.nan)
        return max(took - self.compute_s, 0.0) if not math.isnan(took - self.compute_s) else math.nan


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round; accuracy and loss come from the central evaluation, and are NaN without one.

    Attributes:
        round: Absolute round, from 1.
        num_available: Number of available clients.
        num_selected: Number of chosen clients.
        num_completed: Number of clients with a usable update that arrived in time.
        num_kept: Number of clients with an averaged update; smaller than num_completed if FedCA's filter dropped some.
        round_s: Duration of the round on the strategy's clock, seconds.
        simulated_s: Seconds since the start, cumulative.
        energy_j: Joules reported in this round; NaN if clients took part but reported none.
        total_energy_j: Joules since the start, cumulative; NaN until a client reports some.
        accuracy: Accuracy of the new global model.
        loss: Loss of the new global model.
        probe_s: Seconds of the probes before the choice, part of ``round_s``.
        probe_j: Joules of the probes, part of ``energy_j``.
        num_timeouts: Number of clients without an answer before the timeout or the round's deadline.
        num_probed: Number of clients probed before the choice, counted once per probe.
        num_spares: Number of clients that the round did not wait for, because enough others were earlier.
        remark: Empty, or a problem of the round itself: its kind, a colon and details.
        deadline_s: Seconds after which the round had to end; NaN without a deadline.
        num_late: Number of late updates of earlier rounds that counted in this one.
        late_j: Joules of their trainings, which are part of ``energy_j`` in those rounds.
        note: What happened, for an operator; empty if rounds do not end early.
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
    num_probed: int = 0
    num_spares: int = 0
    remark: str = ""
    deadline_s: float = math.nan
    num_late: int = 0
    late_j: float = 0.0
    note: str = ""

    @property
    def num_failed(self) -> int:
        """Number of chosen clients without a usable update in time; a spare has not failed."""
        return self.num_selected - self.num_completed - self.num_spares


Record = TypeVar("Record", ClientRecord, RoundRecord)
Form = TypeVar("Form")


class RoundEntry(NamedTuple):
    """A round and its clients, the content of one line of the journal."""

    round: RoundRecord
    clients: Sequence[ClientRecord]


def encode_entry(entry: RoundEntry) -> bytes:
    """Encode a round as one line of JSON; floats are exact, NaN and infinities as in JavaScript.

    >>> from fedsel_flwr.rounds.records import RoundRecord
    >>> record = RoundRecord(round=1, num_available=2, num_selected=0, num_completed=0, round_s=0.1, simulated_s=0.1,
    ...                      energy_j=0.0, total_energy_j=0.0)
    >>> decode_entry(encode_entry(RoundEntry(record, []))).round.round_s
    0.1
    """
    content = {"round": vars(entry.round), "clients": [vars(row) for row in entry.clients]}
    return json.dumps(content, default=_plain).encode() + b"\n"


def decode_entry(line: bytes) -> RoundEntry:
    """Decode a line; raises one of :data:`DECODE_ERRORS` if the line is not a round."""
    content = json.loads(line)
    return RoundEntry(
        checked(RoundRecord, content["round"]), [checked(ClientRecord, row) for row in content["clients"]]
    )


def decode_round(line: bytes) -> RoundRecord:
    """Decode a line's round without its clients; the first :data:`ROUND_BYTES` bytes of the line are enough."""
    content, _ = _decoder.raw_decode(line.decode("ascii"), len(LINE_START))
    return checked(RoundRecord, content)


def checked(kind: Callable[..., Form], content: object) -> Form:
    """Return a dataclass made from names and values that another person may have written.

    Args:
        kind: Dataclass whose fields are numbers, texts, booleans or None. An int is at least 0.
        content: Names and values.

    Raises:
        ValueError: A value has another type or is out of range; the message has its name.
        TypeError: A name is missing or unknown.
    """
    if not isinstance(content, dict):
        raise ValueError(f"expected names and values, got {shown(content)}")
    values = {**content}
    for name, types in _types(kind):
        if name not in values:
            continue
        value, own = values[name], type(values[name])
        size = len(value) if own is str else value if own is int else 0
        if own not in types or not 0 <= size <= (MOST_CHARACTERS if own is str else MOST_COUNT):
            raise ValueError(f"{name} = {shown(value)}, expected {' or '.join(one.__name__ for one in types)}")
        if own is int and float in types:
            values[name] = float(value)
    return kind(**values)


@functools.cache
def _types(kind: Any) -> list[tuple[str, tuple[type, ...]]]:
    """Return the types of each field of a dataclass; JSON may write a whole float as an int."""
    found = [(one.name, tuple(_TYPES[word] for word in str(one.type).split(" | "))) for one in fields(kind)]
    return [(name, (*types, int) if float in types else types) for name, types in found]


def in_order(records: Iterable[Record], rounds: Collection[int] | None = None) -> Iterator[Record]:
    """Yield records for a report, which adds up their numbers; a journal stores any number.

    Args:
        records: Rounds, or clients of rounds.
        rounds: Rounds that clients may have; None for any.

    Raises:
        ValueError: The rounds are not in ascending order, a client has another round, or a number is out of range.
    """
    last = 0
    for record in records:
        if record.round < last or (rounds is not None and record.round not in rounds):
            raise ValueError(f"round {record.round} is not expected after round {last}")
        for name, value in vars(record).items():
            if type(value) is float and not (0 <= value <= MOST or value != value or name in UNBOUNDED):
                raise ValueError(f"round {record.round}: {name} = {value:g}, expected a number from 0 to {MOST:g}")
        last = record.round
        yield record


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number."""
    return value.item()


def to_state(rounds: Sequence[RoundRecord], clients: Sequence[ClientRecord]) -> state_dicts.State:
    """Return the names and values of rounds and clients, as they are in the journal."""
    content = {"rounds": [vars(one) for one in rounds], "clients": [vars(row) for row in clients]}
    state: state_dicts.State = json.loads(json.dumps(content, default=_plain))
    return state


def from_state(state: Any) -> tuple[list[RoundRecord], list[ClientRecord]]:
    """Return the records in a state of :func:`to_state`; raises :class:`StateError` for any other state."""
    state_dicts.expect_keys(state, ("rounds", "clients"))
    try:
        rounds = [checked(RoundRecord, one) for one in state["rounds"]]
        return rounds, [checked(ClientRecord, row) for row in state["clients"]]
    except DECODE_ERRORS as error:
        raise StateError(f"the history does not fit: {one_line(str(error))}") from error
