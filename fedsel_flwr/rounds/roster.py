"""The roster: binds each connection to a client, and each client to a row of the selector.

A connection (Flower's node id) is bound to a row once. The reported client id names this row, but a claim never moves
an observation to another row. A second connection that claims the id of a connected client is refused. If the server
itself knows the owner of a connection, no other client ever gets the owner's row, connected or not.

Client ids are canonical texts with one order (:func:`canonical_id`, :func:`id_order`). The roster maps selector
parameters from client ids to rows (:class:`ClientValues`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.untrusted import shown

MAX_ID_LENGTH = 256
"""Largest number of characters of a client id."""
NOBODY = 2**62
"""Numbers of connections that reach nobody: up to this one."""
MAX_ID_DIGITS = 40
"""Largest number of digits of a client id that is an integer."""


@dataclass(frozen=True)
class ConnectedClients:
    """Registered clients that are connected.

    Args:
        rows: Rows of the selector, ascending, shape (n,).
        whole: The connections of a fleet.
        places: The place of each row's connection in ``whole``, shape (n,).
    """

    rows: IntArray
    whole: Sequence[str]
    places: IntArray

    @property
    def nodes(self) -> tuple[str, ...]:
        """The connection of each row. A large fleet takes milliseconds, so it is made only if it is read."""
        return tuple([self.whole[i] for i in self.places.tolist()])

    def only(self, mask: BoolArray) -> ConnectedClients:
        """Return the clients for which ``mask``, shape (n,), is True."""
        return self if mask.all() else ConnectedClients(self.rows[mask], self.whole, self.places[mask])

    def nodes_of(self, rows: IntArray) -> dict[int, str]:
        """Return row -> connection for some of the rows, in the same order."""
        # ``rows`` ascends, so a binary search finds each position.
        places = self.places[np.searchsorted(self.rows, rows)]
        return {row: self.whole[i] for row, i in zip(rows.tolist(), places.tolist(), strict=True)}


@dataclass
class Roster:
    """Binds connections to rows and rows to client ids.

    Args:
        max_clients: Refuse new clients beyond this number of clients; None for no limit.
        max_new_per_round: Admit at most this many new clients per round after the first roll call. This is also the
            largest number of clients chosen in a round that have delivered no usable update yet. None for no limit.
        evict_after: When ``max_clients`` is reached, give a new client the row of the client absent for longest. That
            client must have been absent for more than this many rounds. None never evicts.

    Attributes:
        ids: Row -> client id.
        holders: Row -> the server's identity of the row's client; empty if the server knows none.
        refused: Connection -> reason for the refusal.
    """

    max_clients: int | None = None
    max_new_per_round: int | None = None
    evict_after: int | None = None
    ids: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    _row_of_id: dict[str, int] = field(default_factory=dict)
    _row_of_node: dict[str, int] = field(default_factory=dict)
    _last_seen: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # Refused connection -> the row that must become free before it is asked again; -1 for any row.
    _waits_for: dict[str, int] = field(default_factory=dict)
    # The last connections and the bound clients among them, because sorting a large fleet in every round is slow.
    _cached: tuple[frozenset[str], ConnectedClients] | None = None

    def name(self, node: str) -> str:
        """Return the client id of a connection, or the connection's own name before it is registered."""
        row = self._row_of_node.get(node)
        return node if row is None else self.ids[row]

    def row_of(self, node: str) -> int:
        """Return the row of a registered connection."""
        return self._row_of_node[node]

    def unregistered(self, connected: Collection[str]) -> list[str]:
        """Return the connections that are neither bound nor refused, in id order."""
        # All connections are bound, as in most rounds.
        if self._cached is not None and len(self._cached[1].rows) == len(connected) and self._is_unchanged(connected):
            return []
        return in_id_order([node for node in connected if node not in self._row_of_node and node not in self.refused])

    def release(self, connected: Collection[str], round: int = 0) -> None:
        """Forget the bindings and refusals of connections that have ended; ids and rows stay.

        A refusal because the id was connected, or the roster full, ends as soon as the reason no longer holds.
        """
        if self._is_unchanged(connected) and not self.refused:
            return
        here = set(connected)
        if gone := [node for node in self._row_of_node if node not in here]:
            self._cached = None
            for node in gone:
                del self._row_of_node[node]
        taken = set(self._row_of_node.values())
        room = self.refused and next(self._free_rows(round, taken), None) is not None
        for node in list(self.refused):
            waits, row = node in self._waits_for, self._waits_for.get(node, -1)
            if node not in here or (waits and (room if row < 0 else row not in taken)):
                del self.refused[node]
                self._waits_for.pop(node, None)

    def refuse(self, node: str, reason: str, waits_for: int | None = None) -> None:
        """Refuse a connection, permanently or until the row ``waits_for`` is free (-1: any row)."""
        self.refused[node] = reason
        if waits_for is not None:
            self._waits_for[node] = waits_for

    def register(
        self, claims: Mapping[str, str], round: int, holders: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[dict[int, str], IntArray]:
        """Bind connections to the ids that they claim, in id order.

        If several connections claim one id, connections that the server knows come first.

        Args:
            claims: Connection -> canonical client id.
            round: The round about to be chosen.
            holders: Connection -> the server's identity of it; missing or empty if the server knows none.

        Returns:
            Row -> connection of clients registered for the first time, and those of these rows that evicted clients
            held.
        """
        self._cached = None
        room = self.max_clients is None or len(claims) <= self.max_clients
        if not self.ids and room and len(set(claims.values())) == len(claims):
            return self._enroll(claims, holders), np.zeros(0, dtype=np.int64)
        taken = set(self._row_of_node.values())
        first_call, free = not self.ids, self._free_rows(round, taken)
        new: dict[int, str] = {}
        evicted: list[int] = []

        def order(claim: tuple[str, str]) -> tuple[object, ...]:
            return id_order(claim[1]), not holders.get(claim[0]), id_order(claim[0])

        for node, client_id in sorted(claims.items(), key=order):
            row, holder = self._row_of_id.get(client_id), holders.get(node, "")
            if row is None:
                if self.max_new_per_round is not None and not first_call and len(new) >= self.max_new_per_round:
                    # Neither bound nor refused, so the next round asks it again.
                    continue
                row = next(free, None)
                if row is None:
                    self.refuse(node, f"client {client_id!r} refused: max_clients = {self.max_clients} reached", -1)
                    continue
                if row < len(self.ids):
                    evicted.append(row)
                    del self._row_of_id[self.ids[row]]
                    self.ids[row], self.holders[row] = client_id, ""
                else:
                    self.ids.append(client_id)
                    self.holders.append("")
                self._row_of_id[client_id] = row
                new[row] = node
            elif self.holders[row] not in ("", holder):
                who = holder or f"node {node}"
                self.refuse(node, f"{who} refused: client id {client_id!r} belongs to {self.holders[row]}")
                continue
            elif row in taken:
                self.refuse(node, f"connection {node} refused: client id {client_id!r} is already connected", row)
                continue
            self._row_of_node[node] = row
            self.holders[row] = holder or self.holders[row]
            taken.add(row)
        self._last_seen = state_dicts.extended(self._last_seen, len(self.ids), 0)
        return new, np.array(evicted, dtype=np.int64)

    def _enroll(self, claims: Mapping[str, str], holders: Mapping[str, str]) -> dict[int, str]:
        """Bind the connections of the first roll call, each with its own id, to rows in id order; return row -> node.

        The result is that of :meth:`register` one by one, which takes five times as long for a million clients.
        """
        node_of = dict(zip(claims.values(), claims, strict=True))
        self.ids.extend(in_id_order(node_of))
        new = dict(enumerate([node_of[client_id] for client_id in self.ids]))
        self.holders.extend([holders.get(node, "") for node in new.values()] if holders else [""] * len(new))
        self._row_of_id.update(zip(self.ids, new, strict=True))
        self._row_of_node.update(zip(new.values(), new, strict=True))
        self._last_seen = np.zeros(len(self.ids), dtype=np.int64)
        return new

    def present(self, connected: Collection[str]) -> ConnectedClients:
        """Return the registered clients that are connected; computed again only after a change of connections."""
        if self._cached is None or not self._is_unchanged(connected):
            here = frozenset(connected)
            # Not in the order of the set, in which a million look-ups take three times as long.
            nodes = [node for node in self._row_of_node if node in here]
            rows = np.array([self._row_of_node[node] for node in nodes], dtype=np.int64)
            order = np.argsort(rows)
            self._cached = here, ConnectedClients(rows[order], nodes, order)
        return self._cached[1]

    def among(self, client_ids: Sequence[str], connected: Collection[str]) -> ConnectedClients | None:
        """Return clients, whether they are connected or not; None if an id has no row.

        A client that is not connected gets a connection that reaches nobody.
        """
        if not all(client_id in self._row_of_id for client_id in client_ids):
            return None
        here, node_of = set(connected), {row: node for node, row in self._row_of_node.items()}
        rows = sorted(self._row_of_id[client_id] for client_id in client_ids)
        nodes = []
        for row in rows:
            if (node := node_of.get(row)) not in here:
                node = str(NOBODY - row)
                self._row_of_node[node] = row
            nodes.append(str(node))
        return ConnectedClients(np.array(rows, dtype=np.int64), nodes, np.arange(len(rows)))

    def seen(self, rows: IntArray, round: int) -> None:
        """Record that the clients in ``rows`` were connected before ``round``."""
        self._last_seen[rows] = round

    def state_dict(self) -> state_dicts.State:
        """Return a copy of the ids, the bindings and the refusals."""
        return {
            "ids": list(self.ids),
            "holders": list(self.holders),
            "last_seen": self._last_seen.copy(),
            "bound": dict(self._row_of_node),
            "refused": dict(self.refused),
            "waits_for": dict(self._waits_for),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        ids = state_dicts.texts("ids", state["ids"])
        holders = state_dicts.texts("holders", state["holders"])
        last_seen = state_dicts.array("last_seen", state["last_seen"], np.int64, rows=len(ids))
        bound, waits = (state_dicts.whole_numbers(key, state[key]) for key in ("bound", "waits_for"))
        # They stand in the log.
        wrong = [one for one in ids if canonical_id(one) != one] + [one for one in holders if not one.isprintable()]
        if wrong:
            raise StateError(f"ids must be printable texts of 1 to {MAX_ID_LENGTH} characters, got {shown(wrong[0])}")
        if not len(set(ids)) == len(ids) == len(holders) or not all(0 <= row < len(ids) for row in bound.values()):
            raise StateError(f"ids must differ, and connections be bound to one of {len(ids)} rows, got {ids!r:.80}")
        refused = state_dicts.mapping("refused", state["refused"])
        # In place, because callers may hold these lists.
        self.ids[:], self.holders[:] = ids, holders
        self._last_seen, self._cached = last_seen, None
        self._row_of_id = {client_id: row for row, client_id in enumerate(ids)}
        self._row_of_node, self._waits_for = bound, waits
        self.refused.clear()
        self.refused.update({node: str(reason) for node, reason in refused.items()})

    def forget(self, rows: IntArray) -> None:
        """Drop the rounds in which the clients in ``rows`` were connected; the rows already have new ids."""
        self._last_seen[rows] = 0

    def _is_unchanged(self, connected: Collection[str]) -> bool:
        """Return whether the connected set equals that of the cache."""
        if self._cached is None:
            return False
        before = self._cached[0]
        return connected is before or (len(connected) == len(before) and before.issuperset(connected))

    def _free_rows(self, round: int, taken: set[int]) -> Iterator[int]:
        """Yield rows for new clients, one after the other; ``taken`` may grow meanwhile."""
        while self.max_clients is None or len(self.ids) < self.max_clients:
            yield len(self.ids)
        if self.evict_after is None:
            return
        # A stable sort: the client absent for longest comes first, then the lower row.
        for row in np.argsort(self._last_seen, kind="stable").tolist():
            if round - int(self._last_seen[row]) <= self.evict_after:
                return
            if row not in taken:
                yield row


class ClientValues(Mapping[int, float]):
    """A number for each registered client, set by client id and read by row through the roster.

    As a mapping, it holds the rows of the registered clients that have a number. It grows with the roster.

    Args:
        name: The parameter's name, for messages.
        values: An array (accepted only if the client ids are 0..K-1) or a mapping from client id.
        roster: Maps rows to client ids.

    Attributes:
        given: All numbers by client id, including clients that are not registered yet.

    Raises:
        ParameterError: ``values`` is neither an array nor a mapping, or two keys mean the same client.

    >>> roster = Roster()
    >>> values = ClientValues("fairness", {"a": 0.1, "b": 0.2}, roster)
    >>> _ = roster.register({"node-1": "b"}, 1)
    >>> dict(values), values.given
    ({0: 0.2}, {'a': 0.1, 'b': 0.2})
    """

    def __init__(self, name: str, values: npt.ArrayLike | Mapping[object, float], roster: Roster) -> None:
        if isinstance(values, Mapping):
            items = [(canonical_id(key), value) for key, value in values.items()]
        else:
            array = np.asarray(values, dtype=np.float64)
            if array.ndim != 1:
                raise ParameterError(f"{name} must have one number per client, shape (clients,), got {array.shape}")
            items = [(str(k), float(value)) for k, value in enumerate(array)]
        self.name = name
        self.given: dict[str, float] = {key: value for key, value in items if key is not None}
        if len(self.given) != len(items):
            raise ParameterError(
                f"{name} names a client twice, or a key is no client id. Give integers or strings, once"
            )
        self._roster = roster

    def covers(self, client_id: str) -> bool:
        """Return whether there is a number for ``client_id``."""
        return client_id in self.given

    def __getitem__(self, row: int) -> float:
        """Return the number of the client in ``row``."""
        if not 0 <= row < len(self._roster.ids) or self._roster.ids[row] not in self.given:
            raise KeyError(row)
        return self.given[self._roster.ids[row]]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows that have a number."""
        return (row for row, client_id in enumerate(self._roster.ids) if client_id in self.given)

    def __len__(self) -> int:
        """Return the number of registered clients that have a number."""
        return sum(client_id in self.given for client_id in self._roster.ids)


def canonical_id(claim: object) -> str | None:
    """Return a reported identity as a string; None if it cannot be a client id.

    >>> canonical_id(7), canonical_id(" phone-7 "), canonical_id(None), canonical_id(float("nan"))
    ('7', 'phone-7', None, None)
    """
    # The common case skips the slower checks, because fleets are large.
    if type(claim) is not int:
        if isinstance(claim, bool | np.bool_):
            return None
        if isinstance(claim, Integral) or (isinstance(claim, float | np.floating) and float(claim).is_integer()):
            claim = int(claim)
    if isinstance(claim, int):
        return str(claim) if abs(claim) < 10**MAX_ID_DIGITS else None
    if isinstance(claim, str) and 0 < len(claim.strip()) <= MAX_ID_LENGTH and claim.strip().isprintable():
        return claim.strip()
    return None


def in_id_order(ids: Collection[str]) -> list[str]:
    """Return client ids, or connections, in the order of :func:`id_order`.

    >>> in_id_order(["10", "9", "8"]), in_id_order(["b", "10", "9"])
    (['8', '9', '10'], ['9', '10', 'b'])
    """
    texts, numbers = list(ids), whole_numbers(ids)
    if numbers is not None:
        order = np.argsort(numbers, kind="stable")
        # Equal numbers are different texts, such as "7" and "07", and then the texts decide.
        if (np.diff(numbers[order]) > 0).all():
            return [texts[i] for i in order.tolist()]
    return sorted(texts, key=id_order)


def whole_numbers(texts: Collection[str], digits: int = 18) -> IntArray | None:
    """Return the numbers of texts of ASCII digits, shape (n,); None if one text is empty, longer or something else.

    >>> whole_numbers(["10", "9"]).tolist(), whole_numbers(["10", "b"])
    ([10, 9], None)
    """
    joined = "".join(texts)
    if not (joined.isascii() and joined.isdigit() and all(texts) and max(map(len, texts)) <= digits):
        return None
    return np.fromiter(map(int, texts), dtype=np.int64, count=len(texts))


def id_order(client_id: str) -> tuple[int, int, str]:
    """Return the sort key of a client id: all-digit ids first, as integers, then the others as text.

    >>> sorted(["b", "10", "9"], key=id_order)
    ['9', '10', 'b']
    """
    return (0, int(client_id), client_id) if client_id.isascii() and client_id.isdigit() else (1, 0, client_id)
