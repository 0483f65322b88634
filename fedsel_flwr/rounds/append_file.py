"""Append-only files: one that is opened when it is needed, and a history's records read from it as sequences.

:class:`AppendFile` knows bytes alone; every fault of the disk is an :class:`OSError`. :class:`RoundSequence` and
:class:`ClientSequence` are the ``rounds`` and ``clients`` of a history whose older rounds are in such a file. They read
a record when it is asked for, so that memory does not grow with the run.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, overload

from fedsel_flwr.rounds.records import ClientRecord, LineIndex, Record, RoundEntry, RoundRecord

MAX_IN_MEMORY = 2**24
"""Bytes up to which :meth:`AppendFile.remove` keeps the content in memory."""


class FileTruncatedError(OSError):
    """The file is shorter than what was written to it."""


class AppendFile:
    """Bytes on disk, at places that the owner knows.

    Args:
        path: The file; nothing happens on disk before the first write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # After remove: the content, if it is small, or that the open descriptor is all that is left of the file.
        self._content: bytes | None = None
        self._unlinked = False
        self._descriptor, self._writable = -1, False
        # Whether the file's name in its folder has been synced.
        self._name_synced = False
        # Closes the descriptor when this object goes: a history is dropped without a call of close.
        self._closing: weakref.finalize[[int], AppendFile] | None = None

    def cut(self, size: int) -> None:
        """Make the file if needed, and truncate it to its first ``size`` bytes."""
        descriptor = self._open(write=True)
        found = os.fstat(descriptor).st_size
        if found < size:
            raise FileTruncatedError(0, f"another program has cut it from {size} to {found} bytes")
        if found > size:
            os.ftruncate(descriptor, size)

    def write(self, data: bytes, start: int) -> None:
        """Write data at a place, replacing what follows; all of it or nothing."""
        # Also cuts off the rest of a line that was being written when the process died.
        self.cut(start)
        view, place = memoryview(data), start
        try:
            # A system call may write less than it was given.
            while view:
                written = os.pwrite(self._descriptor, view, place)
                view, place = view[written:], place + written
        except OSError:
            with contextlib.suppress(OSError):
                self.cut(start)
            raise

    def sync(self) -> None:
        """Sync everything written to the disk, the file's name in its folder included."""
        if not self._writable:
            return
        os.fsync(self._descriptor)
        if not self._name_synced:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            self._name_synced = True

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``."""
        return self._content[start:end] if self._content is not None else os.pread(self._open(), end - start, start)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the whole file, those of other writers included; the last one may lack its end."""
        with self.path.open("rb") as file:
            yield from file

    def close(self) -> None:
        """Close the file; it is opened again when needed. A removed file that is still read stays open."""
        # Without a name it could not be opened again.
        if self._unlinked:
            return
        if self._closing is not None:
            # A write that failed has raised already; closing would raise the same error again.
            with contextlib.suppress(OSError):
                self._closing()
        self._descriptor, self._writable, self._closing = -1, False, None

    def remove(self, size: int) -> None:
        """Delete the file; its first ``size`` bytes can still be read.

        Up to :data:`MAX_IN_MEMORY` bytes are kept in memory. More stay on disk without a name as long as this object
        lives.
        """
        if self._unlinked or self._content is not None:
            return
        if 0 < size <= MAX_IN_MEMORY:
            self._content = self.read(0, size)
        # An open descriptor keeps the bytes of a file without a name.
        if size > MAX_IN_MEMORY:
            self._open()
        else:
            self.close()
        self._unlinked = size > MAX_IN_MEMORY
        self.path.unlink(missing_ok=True)

    def _open(self, *, write: bool = False) -> int:
        # Opened for reading until something is written: a folder of results may be read-only.
        if self._descriptor < 0 or (write and not self._writable):
            self.close()
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY, 0o666)
            self._writable, self._closing = write, weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


class RecordSource(Protocol):
    """Rounds by their places, which count from 0."""

    @property
    def lines(self) -> LineIndex:
        """The index of all rounds, perhaps without the last one."""

    @property
    def num_clients(self) -> int:
        """How many client records there are."""

    def __len__(self) -> int:
        """Return how many rounds there are."""

    def entry(self, place: int, /) -> RoundEntry:
        """Return a round and its clients."""

    def round(self, place: int, /) -> RoundRecord:
        """Return a round."""


class _RecordSequence(Sequence[Record]):
    """Records in order, read from their source when they are asked for."""

    def __init__(self, source: RecordSource) -> None:
        self._source = source

    @abstractmethod
    def _read(self, start: int, stop: int) -> Iterator[Record]:
        """Yield the records from ``start`` to ``stop``."""

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
        # One pass over the file, forwards: a step or a reversed slice picks from the records between its ends.
        low, high = min(places[0], places[-1]), max(places[0], places[-1])
        read = self._read(low, high + 1)
        if places.step > 0:
            return list(islice(read, 0, None, places.step))
        return list(read)[:: places.step]

    def __iter__(self) -> Iterator[Record]:
        return self._read(0, len(self))

    def __eq__(self, other: Any) -> bool:
        """Return whether another sequence has equal records; NaN counts as equal to NaN."""
        if not isinstance(other, list | tuple | _RecordSequence):
            return NotImplemented
        # By repr, which is exact for floats: with == a record that holds a NaN differs from its own copy.
        return len(self) == len(other) and all(repr(a) == repr(b) for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class RoundSequence(_RecordSequence[RoundRecord]):
    """The records of all rounds."""

    def __len__(self) -> int:
        return len(self._source)

    def _read(self, start: int, stop: int) -> Iterator[RoundRecord]:
        return (self._source.round(place) for place in range(start, stop))


class ClientSequence(_RecordSequence[ClientRecord]):
    """The records of all clients of all rounds."""

    def __len__(self) -> int:
        return self._source.num_clients

    def _read(self, start: int, stop: int) -> Iterator[ClientRecord]:
        lines = self._source.lines
        place = lines.with_client(start)
        before = lines.num_clients(place)
        while start < stop:
            rows = self._source.entry(place).clients[start - before : stop - before]
            yield from rows
            start, before, place = start + len(rows), before + len(self._source.entry(place).clients), place + 1
