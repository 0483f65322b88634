"""A file that only grows, opened when it is needed; every fault is an OSError.

A history's records as sequences that are read where they stand.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from fedsel_flwr.rounds.records import ClientRecord, LineIndex, RoundEntry, RoundRecord

MAX_IN_MEMORY = 2**24
"""Bytes up to which :meth:`AppendFile.remove` keeps the content in memory."""


class FileTruncatedError(OSError):
    """The file is shorter than what was written to it."""


class AppendFile:
    """Bytes on disk at places that the owner knows.

    Args:
        path: The file; nothing happens there before something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: bytes | None = None
        self._nameless = False
        self._descriptor, self._writes, self._named = -1, False, False
        self._closing: weakref.finalize[[int], AppendFile] | None = None

    def cut(self, size: int) -> None:
        """Make the file, and cut off what stands behind the first ``size`` bytes."""
        descriptor = self._open(write=True)
        found = os.fstat(descriptor).st_size
        if found < size:
            raise FileTruncatedError(0, f"another program has cut it from {size} to {found} bytes")
        if found > size:
            os.ftruncate(descriptor, size)

    def write(self, data: bytes, start: int) -> None:
        """Write everything from a place on, in place of what stands there and behind; all of it or nothing."""
        self.cut(start)
        view, place = memoryview(data), start
        try:
            while view:
                written = os.pwrite(self._descriptor, view, place)
                view, place = view[written:], place + written
        except OSError:
            with contextlib.suppress(OSError):
                self.cut(start)
            raise

    def sync(self) -> None:
        """Have everything written reach the disk, the file's name in its folder included."""
        if not self._writes:
            return
        os.fsync(self._descriptor)
        if not self._named:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            self._named = True

    def read(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``."""
        return self._held[start:end] if self._held is not None else os.pread(self._open(), end - start, start)

    def lines(self) -> Iterator[bytes]:
        """The lines of the whole file, whoever wrote them; the last one may lack its end."""
        with self.path.open("rb") as file:
            yield from file

    def close(self) -> None:
        """Close it; it is opened again when that is needed. One that was removed but is still read stays open."""
        if self._nameless:
            return
        if self._closing is not None:
            with contextlib.suppress(OSError):  # what could not be written has been told
                self._closing()
        self._descriptor, self._writes, self._closing = -1, False, None

    def remove(self, size: int) -> None:
        """Delete the file, of which the first ``size`` bytes can still be read.

        Few are kept in memory. Many stay on disk without a name as long as this object lives.
        """
        if self._nameless or self._held is not None:
            return
        if 0 < size <= MAX_IN_MEMORY:
            self._held = self.read(0, size)
        if size > MAX_IN_MEMORY:
            self._open()
        else:
            self.close()
        self._nameless = size > MAX_IN_MEMORY
        self.path.unlink(missing_ok=True)

    def _open(self, *, write: bool = False) -> int:
        if self._descriptor < 0 or (write and not self._writes):
            self.close()
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY, 0o666)
            self._writes, self._closing = write, weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


Record = TypeVar("Record", RoundRecord, ClientRecord)


class Source(Protocol):
    """Rounds by their places, which count from 0."""

    @property
    def lines(self) -> LineIndex:
        """Of all rounds, but perhaps the last."""

    @property
    def num_clients(self) -> int:
        """How many records of clients there are."""

    def __len__(self) -> int:
        """How many rounds there are."""

    def entry(self, place: int, /) -> RoundEntry:
        """A round and its clients."""

    def round(self, place: int, /) -> RoundRecord:
        """A round."""


class _View(Sequence[Record]):
    """Records in order, read where they are."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @abstractmethod
    def _read(self, start: int, stop: int) -> Iterator[Record]:
        """The records from ``start`` to ``stop``."""

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
        low, high = min(places[0], places[-1]), max(places[0], places[-1])
        read = self._read(low, high + 1)
        if places.step > 0:
            return list(islice(read, 0, None, places.step))
        return list(read)[:: places.step]

    def __iter__(self) -> Iterator[Record]:
        return self._read(0, len(self))

    def __eq__(self, other: Any) -> bool:
        """Equal to another sequence of equal records; NaN counts as equal to NaN."""
        if not isinstance(other, list | tuple | _View):
            return NotImplemented
        return len(self) == len(other) and all(repr(a) == repr(b) for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class Rounds(_View[RoundRecord]):
    """The records of all rounds."""

    def __len__(self) -> int:
        return len(self._source)

    def _read(self, start: int, stop: int) -> Iterator[RoundRecord]:
        return (self._source.round(place) for place in range(start, stop))


class Clients(_View[ClientRecord]):
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
