"""Storage of a history's records: all in memory, or the last rounds in memory and the others in a journal.

The :class:`Journal` is the file of finished rounds, a line of JSON for each, to which lines are only added. A line
counts if it is complete. One that was being written when the process died is skipped, and cut off by the next write.
:class:`MemoryStorage` and :class:`JournalStorage` have the same methods; :class:`~fedsel_flwr.rounds.history.History`
uses one of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.append_file import AppendFile, ClientSequence, FileTruncatedError, RoundSequence
from fedsel_flwr.rounds.records import (
    DECODE_ERRORS,
    ClientRecord,
    LineIndex,
    ParticipationCounts,
    RoundEntry,
    RoundRecord,
    decode_entry,
    decode_round,
    encode_entry,
    from_columns,
    to_columns,
)

MAX_RECORDS = 10_000
"""Most records in memory when there is a journal, those of rounds and of clients together."""
MIN_ROUNDS = 3
"""Last rounds that stay in memory, however large they are."""
RECORD_BYTES = 2**11
"""Bytes read of a line for the round alone: its record, without those of the clients, is shorter."""


class Journal:
    """Writes rounds to a file and reads them back.

    A new journal is empty, whatever the file holds. :meth:`load` takes the file's lines in; without it the first write
    replaces them. Nothing happens on disk before the first line or :meth:`begin`.

    Args:
        path: The file; its folder is made if needed.

    Attributes:
        path: The file.
        lines: The index of its lines.
        failure: The error of the last write, if that failed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lines = LineIndex()
        self.failure: RunError | None = None
        self._file = AppendFile(self.path)
        # The last line that was read: iterating over its clients asks for it again and again.
        self._last_read: tuple[int, RoundEntry] | None = None

    def __len__(self) -> int:
        """Return how many rounds there are."""
        return len(self.lines)

    @property
    def offset(self) -> int:
        """The bytes of all lines together."""
        return self.lines.start(len(self))

    def load(self, offset: int | None = None, *, rounds: int | None = None, checksum: int | None = None) -> None:
        """Take in the lines of the file; what follows them is cut off by the next write.

        Args:
            offset: Bytes to read; None: all whole lines.
            rounds: How many rounds these are; None: any number.
            checksum: Their CRC-32; None: not compared.

        Raises:
            StateError: The file cannot be read, is shorter, or holds something else; nothing has changed then.
        """
        found = LineIndex()
        try:
            # Every line is decoded once: damage is found here, and not rounds later.
            for number, line in enumerate(self._file.lines() if offset != 0 else (), start=1):
                if found.start(len(found)) == offset or not line.endswith(b"\n"):
                    break
                try:
                    found.add(line, len(decode_entry(line).clients))
                except DECODE_ERRORS as error:
                    raise StateError(f"line {number} of {str(self.path)!r} is no round: {error}") from error
        except OSError as error:
            raise StateError(f"{str(self.path)!r} cannot be read: {error.strerror}") from error
        count = len(found)
        pairs = {
            "bytes": (offset, found.start(count)),
            "rounds": (rounds, count),
            "checksum": (checksum, found.checksum(count)),
        }
        wrong = [
            f"{name} {want} expected, {got} found" for name, (want, got) in pairs.items() if want not in (None, got)
        ]
        if wrong:
            raise StateError(f"{str(self.path)!r} is not the history that belongs to the state: {', '.join(wrong)}")
        self.lines, self._last_read = found, None

    def begin(self) -> None:
        """Make the file, and cut off what does not belong to this journal.

        Raises:
            RunError: It cannot be made.
        """
        try:
            self._file.cut(self.offset)
        except OSError as error:
            raise self._failed(f"the journal {str(self.path)!r} cannot be begun: {error.strerror}") from error

    def append(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """Write a round.

        Args:
            record: The round.
            clients: Its clients.

        Raises:
            RunError: The disk is full, or otherwise refuses; the rounds before are as they were.
        """
        line = encode_entry(RoundEntry(record, clients))
        try:
            self._file.write(line, self.offset)
        except OSError as error:
            before = (
                "rounds before it are lost"
                if isinstance(error, FileTruncatedError)
                else "the rounds before it are there"
            )
            raise self._failed(
                f"round {record.round} cannot be written to {str(self.path)!r}: {error.strerror}; {before}"
            ) from error
        self.lines.add(line, len(clients))

    def truncate(self, offset: int) -> None:
        """Drop the lines after an offset; the next write cuts them off.

        Raises:
            StateError: No line ends there.
        """
        count = self.lines.ending_at(offset)
        if count is None:
            raise StateError(f"{str(self.path)!r} has no line that ends at byte {offset}")
        self.lines.cut(count)
        self._last_read = None

    def sync(self) -> None:
        """Sync everything written to the disk.

        Raises:
            RunError: The disk refuses.
        """
        try:
            self._file.sync()
        except OSError as error:
            raise self._failed(f"{str(self.path)!r} cannot be synced: {error.strerror}") from error

    def entry(self, line: int) -> RoundEntry:
        """Read a round with its clients; lines count from 0.

        Raises:
            RunError: The file was changed meanwhile.
        """
        found = self._last_read
        if found is None or found[0] != line:
            try:
                found = line, decode_entry(self._file.read(self.lines.start(line), self.lines.start(line + 1)))
            except (OSError, *DECODE_ERRORS) as error:
                where = f"round {line + 1} cannot be read from {str(self.path)!r}"
                raise RunError(f"{where}, which another program has changed: {error}") from error
            self._last_read = found
        return found[1]

    def round(self, line: int) -> RoundRecord:
        """Read a round without its clients; errors as in :meth:`entry`."""
        start = self.lines.start(line)
        try:
            return decode_round(self._file.read(start, min(start + RECORD_BYTES, self.lines.start(line + 1))))
        # The record is longer than expected, or damaged: reading the whole line tells which.
        except (OSError, *DECODE_ERRORS):
            return self.entry(line).round

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file once its content is stored elsewhere; this journal's rounds can still be read."""
        self._file.remove(self.offset)

    def _failed(self, message: str) -> RunError:
        self.failure = RunError(message)
        return self.failure


class MemoryStorage:
    """Rounds and clients in lists, which callers may change."""

    def __init__(self, rounds: Sequence[RoundRecord] = (), clients: Sequence[ClientRecord] = ()) -> None:
        self.rounds, self.clients = list(rounds), list(clients)

    def add(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """Add a round that was played."""
        self.rounds.append(record)
        self.clients.extend(clients)

    def replace(self, record: RoundRecord) -> None:
        """Replace the last round's record."""
        self.rounds[-1] = record

    def close(self) -> None:
        """Do nothing: there is no file."""

    def counts(self) -> ParticipationCounts:
        """Return the participation counts over all rounds."""
        counts = ParticipationCounts()
        counts.add(self.clients)
        return counts

    def state_dict(self) -> state_dicts.State:
        """Return every record, a column for each field."""
        return to_columns(self.rounds, self.clients)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        if isinstance(state, Mapping) and "offset" in state:
            raise StateError(
                "the earlier rounds of this state are in a file. Give the strategy its former checkpoint_dir"
            )
        self.rounds[:], self.clients[:] = from_columns(state)


class JournalStorage:
    """The last rounds in memory, and all closed rounds in a journal.

    The last round is open until it is closed: it is in memory alone, and its record may be replaced.

    Args:
        journal: Takes the closed rounds.

    Attributes:
        journal: Holds the closed rounds.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        # Whether the last round is still open, and so not in the journal.
        self._open = False
        self._recent: deque[RoundEntry] = deque()
        # Records in ``_recent``, of rounds and clients together.
        self._in_memory = 0
        self._counts = ParticipationCounts()

    def __len__(self) -> int:
        """Return how many rounds there are."""
        return len(self.journal) + self._open

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """All rounds."""
        return RoundSequence(self)

    @property
    def clients(self) -> Sequence[ClientRecord]:
        """All clients of all rounds."""
        return ClientSequence(self)

    @property
    def lines(self) -> LineIndex:
        """The index of the closed rounds."""
        return self.journal.lines

    @property
    def num_clients(self) -> int:
        """How many client records there are."""
        return self.lines.num_clients(len(self.lines)) + (len(self._recent[-1].clients) if self._open else 0)

    def add(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """Add a round that was played; the one before is closed."""
        self.close()
        self._recent.append(RoundEntry(record, clients))
        self._in_memory += 1 + len(clients)
        self._open = True
        while self._in_memory > MAX_RECORDS and len(self._recent) > MIN_ROUNDS:
            self._in_memory -= 1 + len(self._recent.popleft().clients)

    def replace(self, record: RoundRecord) -> None:
        """Replace the last round's record; a closed round is open again then."""
        # Its line is dropped from the journal, and written again when the round is closed.
        if not self._open:
            self.journal.truncate(self.lines.start(len(self) - 1))
            self._open = True
        self._recent[-1] = RoundEntry(record, self._recent[-1].clients)

    def close(self) -> None:
        """Write the last round, if it is open."""
        if self._open:
            self.journal.append(*self._recent[-1])
            self._open = False

    def entry(self, place: int) -> RoundEntry:
        """Return a round and its clients, by its place from 0."""
        in_recent = place - len(self) + len(self._recent)
        return self._recent[in_recent] if in_recent >= 0 else self.journal.entry(place)

    def round(self, place: int) -> RoundRecord:
        """Return a round by its place from 0."""
        in_recent = place - len(self) + len(self._recent)
        return self._recent[in_recent].round if in_recent >= 0 else self.journal.round(place)

    def counts(self) -> ParticipationCounts:
        """Return the participation counts over all rounds; only rounds not counted before are read."""
        # Not counted as rounds end: a resumed run reads the journal only if the counts are asked for.
        while self._counts.rounds < len(self):
            self._counts.add(self.entry(self._counts.rounds).clients)
            self._counts.rounds += 1
        return self._counts

    def state_dict(self) -> state_dicts.State:
        """Return the journal's position before the last round, and the last round; the journal is synced first."""
        # The last round goes into the state itself: its evaluation may still be entered after a resume.
        before = max(0, len(self) - 1)
        last = [self._recent[-1]] if len(self) else []
        self.journal.sync()
        return {
            "offset": self.lines.start(before),
            "rounds": before,
            "checksum": self.lines.checksum(before),
            "last": to_columns([one.round for one in last], [row for one in last for row in one.clients]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state and open its last round again; nothing changes if it does not fit.

        The journal's lines after the state's offset are dropped. A state of :class:`MemoryStorage` is written to it.
        """
        # Only a state of MemoryStorage has every client.
        if isinstance(state, Mapping) and "clients" in state:
            rounds, clients = from_columns(state)
            played: dict[int, list[ClientRecord]] = {record.round: [] for record in rounds}
            for row in clients:
                played.setdefault(row.round, []).append(row)
            self.journal.truncate(0)
            self._restart(None)
            for record in rounds:
                self.add(record, played[record.round])
            return
        state_dicts.expect_keys(state, ("offset", "rounds", "checksum", "last"))
        offset, count, checksum = (
            state_dicts.whole_number(key, state[key]) for key in ("offset", "rounds", "checksum")
        )
        records, clients = from_columns(state["last"])
        if len(records) > 1 or (not records and (clients or count)):
            raise StateError(f"last must hold one round, got {len(records)}")
        self.journal.load(offset, rounds=count, checksum=checksum)
        self._restart(RoundEntry(records[0], clients) if records else None)

    def _restart(self, last: RoundEntry | None) -> None:
        self._recent, self._in_memory = (deque([last]), 1 + len(last.clients)) if last else (deque(), 0)
        self._open, self._counts = last is not None, ParticipationCounts()
