"""Where a history keeps its records: all in memory, or the last ones there and the ones before in a ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import saving
from fedsel_flwr.rounds.columnar import in_columns, of_columns
from fedsel_flwr.rounds.ledger import Ledger
from fedsel_flwr.rounds.lines import Entry, Lines
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord
from fedsel_flwr.rounds.tally import Tally
from fedsel_flwr.rounds.views import Clients, Rounds

MOST = 10_000
"""Records in memory beside a ledger, of rounds and clients together; the last rounds stay, however large they are."""
LEAST = 3
"""How many rounds these are."""


class InMemory:
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

    def tally(self) -> Tally:
        """The counts over all clients."""
        tally = Tally()
        tally.add(self.clients)
        return tally

    def state_dict(self) -> saving.State:
        """Every record, a column a field."""
        return in_columns(self.rounds, self.clients)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        if isinstance(state, Mapping) and "offset" in state:
            raise StateError("the rounds before stand in a file: give the strategy the checkpoint_dir that it had")
        self.rounds[:], self.clients[:] = of_columns(state)


class OnDisk:
    """The last rounds in memory, the ones before them in a ledger.

    The last one is open until it is closed: it is in memory alone, and its record may be replaced.

    Args:
        ledger: Takes the closed ones.

    Attributes:
        ledger: Holds the closed ones.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._open = False  # whether the last round is not in the ledger
        self._ring: deque[Entry] = deque()
        self._held = 0  # records in the ring
        self._tally = Tally()

    def __len__(self) -> int:
        """How many rounds there are."""
        return len(self.ledger) + self._open

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """All rounds."""
        return Rounds(self)

    @property
    def clients(self) -> Sequence[ClientRecord]:
        """All clients of all rounds."""
        return Clients(self)

    @property
    def lines(self) -> Lines:
        """Of the closed rounds."""
        return self.ledger.lines

    @property
    def num_clients(self) -> int:
        """How many records of clients there are."""
        return self.lines.num_clients(len(self.lines)) + (len(self._ring[-1].clients) if self._open else 0)

    def add(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """A round was played; the one before is closed."""
        self.close()
        self._ring.append(Entry(record, clients))
        self._held += 1 + len(clients)
        self._open = True
        while self._held > MOST and len(self._ring) > LEAST:
            self._held -= 1 + len(self._ring.popleft().clients)

    def replace(self, record: RoundRecord) -> None:
        """Put another record in place of the last one, which is open again then."""
        if not self._open:
            self.ledger.truncate(self.lines.start(len(self) - 1))
            self._open = True
        self._ring[-1] = Entry(record, self._ring[-1].clients)

    def close(self) -> None:
        """Write the last round, if it is open."""
        if self._open:
            self.ledger.append(*self._ring[-1])
            self._open = False

    def entry(self, place: int) -> Entry:
        """A round and its clients, by its place from 0."""
        in_ring = place - len(self) + len(self._ring)
        return self._ring[in_ring] if in_ring >= 0 else self.ledger.entry(place)

    def round(self, place: int) -> RoundRecord:
        """A round by its place from 0."""
        in_ring = place - len(self) + len(self._ring)
        return self._ring[in_ring].round if in_ring >= 0 else self.ledger.round(place)

    def tally(self) -> Tally:
        """The counts over all clients; only rounds that are new to it are looked at."""
        while self._tally.rounds < len(self):
            self._tally.add(self.entry(self._tally.rounds).clients)
            self._tally.rounds += 1
        return self._tally

    def state_dict(self) -> saving.State:
        """Where the ledger stands before the last round, and the last round; the ledger is synced to the disk."""
        before = max(0, len(self) - 1)
        last = [self._ring[-1]] if len(self) else []
        self.ledger.sync()
        return {
            "offset": self.lines.start(before),
            "rounds": before,
            "checksum": self.lines.checksum(before),
            "last": in_columns([one.round for one in last], [row for one in last for row in one.clients]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, the last round open again; nothing changes if it does not fit.

        What the ledger holds behind the state's offset is given up. A state of :class:`InMemory` is written to it.
        """
        if isinstance(state, Mapping) and "clients" in state:
            rounds, clients = of_columns(state)
            played: dict[int, list[ClientRecord]] = {record.round: [] for record in rounds}
            for row in clients:
                played.setdefault(row.round, []).append(row)
            self.ledger.truncate(0)
            self._begin_with(None)
            for record in rounds:
                self.add(record, played[record.round])
            return
        saving.expect_keys(state, ("offset", "rounds", "checksum", "last"))
        offset, count, checksum = (saving.whole_number(key, state[key]) for key in ("offset", "rounds", "checksum"))
        records, clients = of_columns(state["last"])
        if len(records) > 1 or (not records and (clients or count)):
            raise StateError(f"the last round must be one, got {len(records)} records")
        self.ledger.load(offset, rounds=count, checksum=checksum)
        self._begin_with(Entry(records[0], clients) if records else None)

    def _begin_with(self, last: Entry | None) -> None:
        self._ring, self._held = (deque([last]), 1 + len(last.clients)) if last else (deque(), 0)
        self._open, self._tally = last is not None, Tally()
