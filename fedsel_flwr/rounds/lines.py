"""A round as a line of JSON, and back; and where a file's lines stand."""

from __future__ import annotations

import json
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

HEAD = '{"round": '
"""How a line begins; the round's own record follows."""
DAMAGED = (ValueError, KeyError, TypeError, RecursionError)
"""What a line that is no round raises."""
_decoder = json.JSONDecoder()


class Entry(NamedTuple):
    """A round and its clients."""

    round: RoundRecord
    clients: Sequence[ClientRecord]


def line_of(entry: Entry) -> bytes:
    """A round as one line; NaN and infinities are written as JavaScript has them, floats in full.

    >>> from fedsel_flwr.rounds.records import RoundRecord
    >>> record = RoundRecord(round=1, num_available=2, num_selected=0, num_completed=0, round_s=0.1, simulated_s=0.1,
    ...                      energy_j=0.0, total_energy_j=0.0)
    >>> entry_of(line_of(Entry(record, []))).round.round_s
    0.1
    """
    said = {"round": vars(entry.round), "clients": [vars(row) for row in entry.clients]}
    return json.dumps(said, default=_plain).encode() + b"\n"


def entry_of(line: bytes) -> Entry:
    """Read a line; raises one of :data:`DAMAGED` if it is no round."""
    said = json.loads(line)
    return Entry(RoundRecord(**said["round"]), [ClientRecord(**row) for row in said["clients"]])


def round_of(line: bytes) -> RoundRecord:
    """Read the round of a line, of which the beginning is enough; clients are passed over."""
    text = line.decode("ascii")
    if not text.startswith(HEAD):
        return entry_of(line).round
    said, _ = _decoder.raw_decode(text, len(HEAD))
    return RoundRecord(**said)


class Lines:
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
