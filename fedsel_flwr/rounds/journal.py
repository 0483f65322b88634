"""The journal: an append-only file with one line of JSON for each finished round.

Only complete lines count. If the process dies or the disk is full during a write, the last line is incomplete. Readers
skip that line, and the next write cuts it off. The last rounds are in memory too. Older rounds are read from the file
on demand, so that an old round takes only 24 bytes of memory.
"""

from __future__ import annotations

import os
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar, overload

from fedsel_flwr import operating_system
from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds import records, state_dicts
from fedsel_flwr.rounds.records import ClientRecord, RoundEntry, RoundRecord
from fedsel_flwr.rounds.storage import WRITING, open_file
from fedsel_flwr.rounds.untrusted import one_line

MOST_LINE = 2**26
"""Largest number of bytes of a line."""
LAST_ROUNDS = 100
"""Number of last rounds that stay in memory."""
Record = TypeVar("Record")


class Journal:
    """Writes rounds to a file, and gives access to all of them as two sequences, :attr:`rounds` and :attr:`clients`.

    The last round is open until it is closed. An open round is only in memory, and its record may be replaced.

    A new journal is empty, whatever the file holds. The file is not touched before :meth:`begin` or the first line,
    which replace its content. :meth:`load_state_dict` keeps the lines that belong to a state.

    Args:
        path: The file. Its folder is created if needed.

    Attributes:
        path: The file.
        failure: The error of the last write, if that write failed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.failure: RunError | None = None
        self._recent: deque[RoundEntry] = deque(maxlen=LAST_ROUNDS)
        # Whether the last round is still open, and therefore not in the file.
        self._open = False
        self._index = _LineIndex()
        self._descriptor: int | None = None

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self._index) + self._open

    @property
    def rounds(self) -> RecordSequence[RoundRecord]:
        """One record per round."""
        return RecordSequence(self.__len__, self._read_rounds)

    @property
    def clients(self) -> RecordSequence[ClientRecord]:
        """One record per selected client of each round."""
        return RecordSequence(self._num_clients, self._read_clients)

    def add(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """Add a round and close the previous one.

        Raises:
            RunError: The previous round cannot be written.
        """
        self.close_round()
        self._recent.append(RoundEntry(record, clients))
        self._open = True

    def replace_last(self, record: RoundRecord) -> None:
        """Replace the last round's record; a closed round becomes open again."""
        if not self._open:
            # The next write replaces the round's line.
            self._index.cut(len(self) - 1)
            self._open = True
        self._recent[-1] = RoundEntry(record, self._recent[-1].clients)

    def close_round(self) -> None:
        """Write the last round, if it is open.

        Raises:
            RunError: The disk is full, or the write fails for another reason. The round stays open.
        """
        if not self._open:
            return
        line = records.encode_entry(self._recent[-1])
        self._write(line, f"round {self._recent[-1].round.round}")
        self._index.add(line, len(self._recent[-1].clients))
        self._open = False

    def begin(self) -> None:
        """Create the file, and cut off lines that do not belong to this run.

        Raises:
            RunError: The file cannot be created.
        """
        self._write(b"", "the journal")

    def state_dict(self) -> state_dicts.State:
        """Return the length and checksum of the lines before the last round, and the last round itself.

        The state includes the last round because its evaluation may still be recorded after a resume. The file is
        synced to the disk first. Its name is synced together with the checkpoint that holds the state.

        Raises:
            RunError: The file cannot be synced.
        """
        last = [self._recent[-1]] if len(self) else []
        before = len(self) - len(last)
        if self._descriptor is not None:
            try:
                operating_system.sync(self._descriptor)
            except OSError as error:
                raise self._failed(f"{str(self.path)!r} cannot be synced: {error.strerror}") from error
        return {
            "offset": self._index.ends[before],
            "rounds": before,
            "checksum": self._index.checksums[before],
            "last": records.to_state([one.round for one in last], [row for one in last for row in one.clients]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the lines of a state, and open its last round again; the next write cuts off the lines after them.

        Raises:
            StateError: The file cannot be read, is shorter than the state's lines, or has other content. Nothing has
                changed.
        """
        state_dicts.expect_keys(state, ("offset", "rounds", "checksum", "last"))
        expected = {key: state_dicts.whole_number(key, state[key]) for key in ("offset", "rounds", "checksum")}
        rounds, clients = records.from_state(state["last"])
        if len(rounds) > 1 or (not rounds and (clients or expected["rounds"])):
            raise StateError(f"last must hold one round, got {len(rounds)}")
        index = _LineIndex()
        # The state of a new run has no lines, so it fits any file, and needs none.
        for line, entry in read_lines(self.path) if expected["offset"] else ():
            index.add(line, len(entry.clients))
            if index.ends[-1] >= expected["offset"]:
                break
        found = {"offset": index.ends[-1], "rounds": len(index), "checksum": index.checksums[-1]}
        wrong = [f"{key}: expected {want}, got {found[key]}" for key, want in expected.items() if want != found[key]]
        if wrong:
            raise StateError(f"{str(self.path)!r} is not the history of this state: {', '.join(wrong)}")
        self._index, self._open = index, bool(rounds)
        self._recent.clear()
        if rounds:
            self._recent.append(RoundEntry(rounds[0], clients))

    def _write(self, data: bytes, what: str) -> None:
        """Write data after the last line, and replace everything that follows."""
        start, written = self._index.ends[-1], 0
        refused = f"{what} cannot be written to {str(self.path)!r}"
        try:
            with WRITING:
                descriptor = self._opened()
                found = os.fstat(descriptor).st_size
                if found < start:
                    raise self._failed(
                        f"{refused}: another program has truncated it from {start} to {found} bytes. Earlier rounds "
                        "are lost"
                    )
                if found > start:
                    os.ftruncate(descriptor, start)
                # A system call may write less than the given data.
                while written < len(data):
                    written += operating_system.write_at(descriptor, data[written:], start + written)
        except OSError as error:
            raise self._failed(f"{refused}: {error.strerror}. The earlier rounds are safe") from error

    def _failed(self, message: str) -> RunError:
        self.failure = RunError(message)
        return self.failure

    def _opened(self) -> int:
        """Return the file's descriptor.

        The file stays open as long as this object lives, so its rounds can be read after the file was moved or removed.
        """
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = operating_system.open_descriptor(self.path, os.O_RDWR | os.O_CREAT, follow=False)
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor

    def _num_clients(self) -> int:
        return self._index.clients[-1] + (len(self._recent[-1].clients) if self._open else 0)

    def _read_rounds(self, start: int, stop: int) -> Iterator[RoundRecord]:
        for place in range(start, stop):
            recent = self._in_memory(place)
            yield self._decoded(place, records.decode_round, records.ROUND_BYTES) if recent is None else recent.round

    def _read_clients(self, start: int, stop: int) -> Iterator[ClientRecord]:
        # A round without clients begins at the same place as the next one; bisect_right skips it.
        place = bisect_right(self._index.clients, start) - 1
        start, stop = start - self._index.clients[place], stop - self._index.clients[place]
        while stop > 0:
            rows = (self._in_memory(place) or self._decoded(place, records.decode_entry)).clients
            yield from rows[start:stop]
            start, stop, place = max(0, start - len(rows)), stop - len(rows), place + 1

    def _in_memory(self, place: int) -> RoundEntry | None:
        """Return a round by its place from 0; None if it is only in the file."""
        place += len(self._recent) - len(self)
        return self._recent[place] if place >= 0 else None

    def _decoded(self, place: int, decode: Callable[[bytes], Any], most: int | None = None) -> Any:
        """Return the decoded content of a line, or of its first bytes."""
        start, end = self._index.ends[place : place + 2]
        try:
            return decode(operating_system.read_at(self._opened(), min(end - start, most or end), start))
        except (OSError, *records.DECODE_ERRORS) as error:
            where = f"round {place + 1} cannot be read from {str(self.path)!r}"
            raise RunError(f"{where}, which another program has changed: {error}") from error


class RecordSequence(Sequence[Record]):
    """Records in order, read on demand.

    Args:
        count: Returns the number of records.
        read: Yields the records from one place to another.
    """

    def __init__(self, count: Callable[[], int], read: Callable[[int, int], Iterator[Record]]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count()

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return next(self._read(places, places + 1))
        if not places:
            return []
        # One forward pass over the file: a step or a reversed slice picks from the records between its ends.
        read = self._read(min(places), max(places) + 1)
        return list(islice(read, 0, None, places.step)) if places.step > 0 else list(read)[:: places.step]

    def __iter__(self) -> Iterator[Record]:
        return self._read(0, len(self))

    def __eq__(self, other: Any) -> bool:
        """Return whether another sequence has equal records; NaN counts as equal to NaN."""
        if not isinstance(other, list | tuple | RecordSequence):
            return NotImplemented
        # By repr, which is exact for floats. With == a record that holds a NaN differs from its own copy.
        return len(self) == len(other) and all(repr(a) == repr(b) for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def read_lines(path: Path) -> Iterator[tuple[bytes, RoundEntry]]:
    """Yield the complete lines of a journal, each with its round.

    Every line is decoded, so that damage is found when the file is opened and not rounds later.

    Raises:
        StateError: The file cannot be read, or a line is not a round.
    """
    try:
        with open_file(path) as file:
            for number in count(1):
                line = file.readline(MOST_LINE)
                if len(line) < MOST_LINE and not line.endswith(b"\n"):
                    return
                try:
                    entry = records.decode_entry(line)
                except records.DECODE_ERRORS as error:
                    found = one_line(str(error))
                    raise StateError(f"line {number} of {str(path)!r} is not a round: {found}") from error
                yield line, entry
    except OSError as error:
        raise StateError(f"{str(path)!r} cannot be read: {error.strerror}") from error


class _LineIndex:
    """Index of the journal's lines, 24 bytes for each.

    Attributes:
        ends: Number of bytes in the first 0, 1, 2, … lines.
        clients: Number of clients in these lines.
        checksums: CRC-32 of these lines.
    """

    def __init__(self) -> None:
        # Arrays of 8-byte integers, not lists, because runs may have millions of rounds.
        self.ends, self.clients, self.checksums = array("q", [0]), array("q", [0]), array("q", [0])

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self.ends) - 1

    def add(self, line: bytes, num_clients: int) -> None:
        """Add a line at the end."""
        self.ends.append(self.ends[-1] + len(line))
        self.clients.append(self.clients[-1] + num_clients)
        self.checksums.append(zlib.crc32(line, self.checksums[-1]))

    def cut(self, count: int) -> None:
        """Drop all lines after the first ``count``."""
        for column in (self.ends, self.clients, self.checksums):
            del column[count + 1 :]
