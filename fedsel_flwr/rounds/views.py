"""A history's records as sequences that are read where they stand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, overload

from fedsel_flwr.rounds.lines import Entry, Lines
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

Record = TypeVar("Record", RoundRecord, ClientRecord)


class Source(Protocol):
    """Rounds by their places, which count from 0."""

    @property
    def lines(self) -> Lines:
        """Of all rounds, but perhaps the last."""

    @property
    def num_clients(self) -> int:
        """How many records of clients there are."""

    def __len__(self) -> int:
        """How many rounds there are."""

    def entry(self, place: int, /) -> Entry:
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
