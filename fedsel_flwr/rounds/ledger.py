"""The file of finished rounds: a line of JSON for each, only ever added to.

A line is whole or does not count: one that was being written when the process died is passed over, and cut off by the
next one that is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds.growing_file import CutError, GrowingFile
from fedsel_flwr.rounds.lines import DAMAGED, Entry, Lines, entry_of, line_of, round_of
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

PART = 2**11
"""Bytes of a line in which the round's own record ends."""


class Ledger:
    """Writes rounds to a file and reads them back.

    A new ledger holds nothing, whatever the file holds: :meth:`load` takes the file's lines in, and without that the
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
        self.lines = Lines()
        self.failure: RunError | None = None
        self._file = GrowingFile(self.path)
        self._last_read: tuple[int, Entry] | None = None

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
        found = Lines()
        try:
            for number, line in enumerate(self._file.lines() if offset != 0 else (), start=1):
                if found.start(len(found)) == offset or not line.endswith(b"\n"):
                    break
                try:
                    found.add(line, len(entry_of(line).clients))
                except DAMAGED as error:
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
        """Make the file, and cut off what is not this ledger's.

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
        line = line_of(Entry(record, clients))
        try:
            self._file.write(line, self.offset)
        except OSError as error:
            before = "rounds before it are lost" if isinstance(error, CutError) else "the rounds before it are there"
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

    def entry(self, line: int) -> Entry:
        """Read a round with its clients; lines count from 0.

        Raises:
            RunError: The file was changed meanwhile.
        """
        found = self._last_read
        if found is None or found[0] != line:
            try:
                found = line, entry_of(self._file.read(self.lines.start(line), self.lines.start(line + 1)))
            except (OSError, *DAMAGED) as error:
                where = f"round {line + 1} cannot be read from {str(self.path)!r}"
                raise RunError(f"{where}, which another program has changed: {error}") from error
            self._last_read = found
        return found[1]

    def round(self, line: int) -> RoundRecord:
        """Read a round without its clients; errors as in :meth:`entry`."""
        start = self.lines.start(line)
        try:
            return round_of(self._file.read(start, min(start + PART, self.lines.start(line + 1))))
        except (OSError, *DAMAGED):  # its record is longer than that, or something is wrong
            return self.entry(line).round

    def close(self) -> None:
        """Close the file; it is opened again when that is needed."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file, whose content stands elsewhere now; what this ledger holds can still be read."""
        self._file.remove(self.offset)

    def _failed(self, message: str) -> RunError:
        self.failure = RunError(message)
        return self.failure
