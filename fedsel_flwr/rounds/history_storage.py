"""Where a history keeps its records: all in memory, or the last ones there and the ones before in a journal.

The file of finished rounds: a line of JSON for each, only ever added to.

A line is whole or does not count: one that was being written when the process died is passed over, and cut off by the
next one that is written.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.append_file import AppendFile, Clients, FileTruncatedError, Rounds
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

PART = 2**11
"""Bytes of a line in which the round's own record ends."""


class Journal:
    """Writes rounds to a file and reads them back.

    A new journal holds nothing, whatever the file holds: :meth:`load` takes the file's lines in, and without that the
    first line that is written replaces them. Nothing happens on disk before the first line or :meth:`begin`.

    Args:
        path: The file; its folder is made if needed.

    Attributes:
        path: The file.
        lines: Where the lines stand in it.
        failure: The error of the last write, if that failed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lines = LineIndex()
        self.failure: RunError | None = None
        self._file = AppendFile(self.path)
        self._last_read: tuple[int, RoundEntry] | None = None

    def __len__(self) -> int:
        """How many rounds there are."""
        return len(self.lines)

    @property
    def offset(self) -> int:
        """Bytes of all lines."""
        return self.lines.start(len(self))

    def load(self, offset: int | None = None, *, rounds: int | None = None, checksum: int | None = None) -> None:
        """Take in the lines of the file; what stands behind them is cut off when the next one is written.

        Args:
            offset: Bytes to read; None: all whole lines.
            rounds: How many rounds these are; None: any number.
            checksum: Their CRC-32; None: not compared.

        Raises:
            StateError: The file cannot be read, is shorter, or holds something else; nothing has changed then.
        """
        found = LineIndex()
        try:
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
        """Make the file, and cut off what is not this journal's.

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
        """Give up the lines behind an offset; they are cut off when the next one is written.

        Raises:
            StateError: No line ends there.
        """
        count = self.lines.ending_at(offset)
        if count is None:
            raise StateError(f"{str(self.path)!r} has no line that ends at byte {offset}")
        self.lines.cut(count)
        self._last_read = None

    def sync(self) -> None:
        """Have everything written reach the disk.

        Raises:
            RunError: It does not.
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
            return decode_round(self._file.read(start, min(start + PART, self.lines.start(line + 1))))
        except (OSError, *DECODE_ERRORS):  # its record is longer than that, or something is wrong
            return self.entry(line).round

    def close(self) -> None:
        """Close the file; it is opened again when that is needed."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file, whose content stands elsewhere now; what this journal holds can still be read."""
        self._file.remove(self.offset)

    def _failed(self, message: str) -> RunError:
        self.failure = RunError(message)
        return self.failure


MOST = 10_000
"""Records in memory beside a journal, of rounds and clients together; the last rounds stay, however large they are."""
LEAST = 3
"""How many rounds these are."""


class MemoryStorage:
    """Rounds and clients in lists, which their owner may change."""

    def __init__(self, rounds: Sequence[RoundRecord] = (), clients: Sequence[ClientRecord] = ()) -> None:
        self.rounds, self.clients = list(rounds), list(clients)

    def add(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """A round was played."""
        self.rounds.append(record)
        self.clients.extend(clients)

    def replace(self, record: RoundRecord) -> None:
        """Put another record in place of the last one."""
        self.rounds[-1] = record

    def close(self) -> None:
        """Nothing is to be written."""

    def tally(self) -> ParticipationCounts:
        """The counts over all clients."""
        tally = ParticipationCounts()
        tally.add(self.clients)
        return tally

    def state_dict(self) -> state_dicts.State:
        """Every record, a column a field."""
        return to_columns(self.rounds, self.clients)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        if isinstance(state, Mapping) and "offset" in state:
            raise StateError("the rounds before stand in a file: give the strategy the checkpoint_dir that it had")
        self.rounds[:], self.clients[:] = from_columns(state)


class JournalStorage:
    """The last rounds in memory, the ones before them in a journal.

    The last one is open until it is closed: it is in memory alone, and its record may be replaced.

    Args:
        journal: Takes the closed ones.

    Attributes:
        journal: Holds the closed ones.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._open = False  # whether the last round is not in the journal
        self._ring: deque[RoundEntry] = deque()
        self._held = 0  # records in the ring
        self._tally = ParticipationCounts()

    def __len__(self) -> int:
        """How many rounds there are."""
        return len(self.journal) + self._open

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """All rounds."""
        return Rounds(self)

    @property
    def clients(self) -> Sequence[ClientRecord]:
        """All clients of all rounds."""
        return Clients(self)

    @property
    def lines(self) -> LineIndex:
        """Of the closed rounds."""
        return self.journal.lines

    @property
    def num_clients(self) -> int:
        """How many records of clients there are."""
        return self.lines.num_clients(len(self.lines)) + (len(self._ring[-1].clients) if self._open else 0)

    def add(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """A round was played; the one before is closed."""
        self.close()
        self._ring.append(RoundEntry(record, clients))
        self._held += 1 + len(clients)
        self._open = True
        while self._held > MOST and len(self._ring) > LEAST:
            self._held -= 1 + len(self._ring.popleft().clients)

    def replace(self, record: RoundRecord) -> None:
        """Put another record in place of the last one, which is open again then."""
        if not self._open:
            self.journal.truncate(self.lines.start(len(self) - 1))
            self._open = True
        self._ring[-1] = RoundEntry(record, self._ring[-1].clients)

    def close(self) -> None:
        """Write the last round, if it is open."""
        if self._open:
            self.journal.append(*self._ring[-1])
            self._open = False

    def entry(self, place: int) -> RoundEntry:
        """A round and its clients, by its place from 0."""
        in_ring = place - len(self) + len(self._ring)
        return self._ring[in_ring] if in_ring >= 0 else self.journal.entry(place)

    def round(self, place: int) -> RoundRecord:
        """A round by its place from 0."""
        in_ring = place - len(self) + len(self._ring)
        return self._ring[in_ring].round if in_ring >= 0 else self.journal.round(place)

    def tally(self) -> ParticipationCounts:
        """The counts over all clients; only rounds that are new to it are looked at."""
        while self._tally.rounds < len(self):
            self._tally.add(self.entry(self._tally.rounds).clients)
            self._tally.rounds += 1
        return self._tally

    def state_dict(self) -> state_dicts.State:
        """Where the journal stands before the last round, and the last round; the journal is synced to the disk."""
        before = max(0, len(self) - 1)
        last = [self._ring[-1]] if len(self) else []
        self.journal.sync()
        return {
            "offset": self.lines.start(before),
            "rounds": before,
            "checksum": self.lines.checksum(before),
            "last": to_columns([one.round for one in last], [row for one in last for row in one.clients]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, the last round open again; nothing changes if it does not fit.

        The journal's lines after the state's offset are dropped. A state of :class:`MemoryStorage` is written to it.
        """
        if isinstance(state, Mapping) and "clients" in state:
            rounds, clients = from_columns(state)
            played: dict[int, list[ClientRecord]] = {record.round: [] for record in rounds}
            for row in clients:
                played.setdefault(row.round, []).append(row)
            self.journal.truncate(0)
            self._begin_with(None)
            for record in rounds:
                self.add(record, played[record.round])
            return
        state_dicts.expect_keys(state, ("offset", "rounds", "checksum", "last"))
        offset, count, checksum = (
            state_dicts.whole_number(key, state[key]) for key in ("offset", "rounds", "checksum")
        )
        records, clients = from_columns(state["last"])
        if len(records) > 1 or (not records and (clients or count)):
            raise StateError(f"the last round must be one, got {len(records)} records")
        self.journal.load(offset, rounds=count, checksum=checksum)
        self._begin_with(RoundEntry(records[0], clients) if records else None)

    def _begin_with(self, last: RoundEntry | None) -> None:
        self._ring, self._held = (deque([last]), 1 + len(last.clients)) if last else (deque(), 0)
        self._open, self._tally = last is not None, ParticipationCounts()
