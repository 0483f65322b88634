"""Who is who: connections, client ids and the selector's rows.

A connection (Flower's node id) is bound to a row once. The id a client reports names that row, but a claim never
moves an observation: a second connection that claims the id of a connected client is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np

MAX_ID_LENGTH = 256
MAX_ID_DIGITS = 40


def canonical_id(claim: object) -> str | None:
    """Return a reported identity as a string; None if it cannot serve as one.

    >>> canonical_id(7), canonical_id(" phone-7 "), canonical_id(None), canonical_id(float("nan"))
    ('7', 'phone-7', None, None)
    """
    if isinstance(claim, bool | np.bool_):
        return None
    if isinstance(claim, Integral) or (isinstance(claim, float | np.floating) and float(claim).is_integer()):
        return str(int(claim)) if abs(int(claim)) < 10**MAX_ID_DIGITS else None
    if isinstance(claim, str) and 0 < len(claim.strip()) <= MAX_ID_LENGTH and claim.strip().isprintable():
        return claim.strip()
    return None


def id_order(client_id: str) -> tuple[int, int, str]:
    """Sort key of ids: all-digit ids first, as integers, then the others as text.

    >>> sorted(["b", "10", "9"], key=id_order)
    ['9', '10', 'b']
    """
    digits = client_id.isascii() and client_id.isdigit()
    return (0, int(client_id), client_id) if digits else (1, 0, client_id)


@dataclass
class Roster:
    """Binds connections to rows and rows to client ids.

    Args:
        max_clients: Refuse newcomers beyond this many clients; None for no limit.
        max_new_per_round: Admit at most this many newcomers a round after the first roll call; None for no limit.
        evict_after: With ``max_clients`` reached, give the row of the client that has been away longest, and for
            more than this many rounds, to a newcomer; None never evicts.
    """

    max_clients: int | None = None
    max_new_per_round: int | None = None
    evict_after: int | None = None
    ids: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    _row_of_id: dict[str, int] = field(default_factory=dict)
    _row_of_node: dict[str, int] = field(default_factory=dict)
    _last_seen: dict[int, int] = field(default_factory=dict)
    _waits_for: dict[str, int | None] = field(default_factory=dict)  # refused connection -> row; None for any

    def name(self, node: str) -> str:
        """The client id behind a connection; the connection's own name before it is enrolled."""
        row = self._row_of_node.get(node)
        return node if row is None else self.ids[row]

    def strangers(self, connected: Collection[str]) -> list[str]:
        """Connections that are neither bound nor refused, in id order."""
        return sorted(
            (node for node in connected if node not in self._row_of_node and node not in self.refused), key=id_order
        )

    def release(self, connected: Collection[str], round: int = 0) -> None:
        """Forget the bindings and refusals of connections that are gone; ids and rows stay.

        Connections refused because their id was connected, or the roster full, are lifted when that has passed.
        """
        here = set(connected)
        for gone in [node for node in self._row_of_node if node not in here]:
            del self._row_of_node[gone]
        taken = set(self._row_of_node.values())
        room = self._free_row(round, taken) is not None
        for node in list(self.refused):
            waits = node in self._waits_for
            row = self._waits_for.get(node)
            if node not in here or (waits and (room if row is None else row not in taken)):
                del self.refused[node]
                self._waits_for.pop(node, None)

    def enroll(self, claims: Mapping[str, str], round: int) -> tuple[list[int], list[int]]:
        """Bind connections to the ids they claim, in id order.

        Args:
            claims: Connection -> canonical client id.
            round: The round about to be chosen.

        Returns:
            The rows of clients seen for the first time, and the rows taken from evicted clients (a subset).
        """
        taken = set(self._row_of_node.values())
        first_call = not self.ids
        new: list[int] = []
        evicted: list[int] = []
        for node, client_id in sorted(claims.items(), key=lambda claim: (id_order(claim[1]), id_order(claim[0]))):
            row = self._row_of_id.get(client_id)
            if row is None:
                if self.max_new_per_round is not None and not first_call and len(new) >= self.max_new_per_round:
                    continue  # asked again next round
                row = self._free_row(round, taken)
                if row is None:
                    self.refused[node] = f"client {client_id!r} refused: max_clients = {self.max_clients} reached"
                    self._waits_for[node] = None
                    continue
                if row < len(self.ids):
                    evicted.append(row)
                    del self._row_of_id[self.ids[row]]
                    self.ids[row] = client_id
                else:
                    self.ids.append(client_id)
                self._row_of_id[client_id] = row
                new.append(row)
            elif row in taken:
                self.refused[node] = f"connection {node} refused: client id {client_id!r} is already connected"
                self._waits_for[node] = row
                continue
            self._row_of_node[node] = row
            taken.add(row)
        return new, evicted

    def present(self, connected: Iterable[str], round: int) -> dict[int, str]:
        """Row -> connection of the connected clients, by ascending row; remembers that they were seen."""
        rows = {self._row_of_node[node]: node for node in connected if node in self._row_of_node}
        self._last_seen.update(dict.fromkeys(rows, round))
        return dict(sorted(rows.items()))

    def _free_row(self, round: int, taken: set[int]) -> int | None:
        if self.max_clients is None or len(self.ids) < self.max_clients:
            return len(self.ids)
        absent = [(self._last_seen.get(row, 0), row) for row in range(len(self.ids)) if row not in taken]
        if self.evict_after is None or not absent or round - min(absent)[0] <= self.evict_after:
            return None
        return min(absent)[1]
