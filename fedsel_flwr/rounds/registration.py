"""Registration: enters new clients into the roster, and informs the selector before it chooses among them.

The identity of a client is its own claim, or what the server knows of its connection: node id, name or public key.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.aggregation import READS_TOTAL_EXAMPLES
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.roll_call import Properties, Registration, Registry
from fedsel_flwr.rounds.roster import ClientValues, Roster, canonical_id
from fedsel_flwr.rounds.settings import Identity, Settings
from fedsel_flwr.rounds.untrusted import column_value, usable_count, warn_of
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import COLUMNS

logger = logging.getLogger("fedsel_flwr")
KEY_DIGITS = 16
"""Number of hexadecimal digits of a public key's SHA-256 in a client id."""
MEDIAN_MULTIPLE = 4
"""Largest claim as a multiple of the median claim, if ``max_examples`` is "auto"."""
IDENTITY_PHRASES: Mapping[Identity, str] = {
    "node": "its node id",
    "key": "the public key of its SuperNode",
    "name": "the name its SuperNode is registered with",
    "claim": "the client_id that it reports",
}
NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class ConnectionIdentity:
    """The identity of a connection, as far as the server can tell.

    Args:
        client_id: Its client id; None if the client's own claim decides.
        holder: The owner of the row, for messages; empty if only the client's claim supports the id.
        known_by: The kind of identity: the node id if the connection lacks the kind that the rule requires.
    """

    client_id: str | None = None
    holder: str = ""
    known_by: Identity = "claim"


STRANGER = ConnectionIdentity()
"""A connection of which the server knows nothing."""


class Registrar(state_dicts.SavedFields):
    """Enters clients into the roster and informs the selector about them.

    Args:
        selector: The selector.
        settings: The limit on claimed examples, the averaging scheme, which may read :meth:`total_examples`, and the
            names of the properties.
        roster: Connections, client ids and rows.
        measurer: Measures the first global model, for selectors that read ``accuracy``.
        client_values: Selector parameters by client id. Clients without an entry are refused.
    """

    saved: ClassVar = {
        "_sizes": partial(state_dicts.array, dtype=np.int64),
        "_initial_accuracy": state_dicts.optional(state_dicts.plain_number),
        "_uninformed": partial(state_dicts.array, dtype=np.int64),
    }

    def __init__(
        self,
        selector: Selector,
        settings: Settings,
        roster: Roster,
        measurer: Measurer,
        client_values: tuple[ClientValues, ...],
    ) -> None:
        self._selector, self._roster, self._measurer, self._client_values = selector, roster, measurer, client_values
        self._max_examples, self._averaging, self._keys = settings.max_examples, settings.averaging, settings.keys
        # By row: the number of examples that a client claims, 0 if unknown.
        self._sizes: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        # The first model's accuracy; None before it is measured.
        self._initial_accuracy: float | None = None
        # Rows for which the selector lacks the first model's accuracy.
        self._uninformed: IntArray = np.zeros(0, dtype=np.int64)

    @property
    def reads_properties(self) -> bool:
        """Return whether the selector or the averaging scheme reads more properties of a client than its id."""
        return self._selector.takes_information or self._averaging in READS_TOTAL_EXAMPLES

    def register(
        self, properties: Mapping[str, Properties], round: int, known: Mapping[str, ConnectionIdentity]
    ) -> tuple[dict[int, str], IntArray]:
        """Bind connections to rows.

        Args:
            properties: Connection -> its own properties, from the roll call.
            round: The round about to be chosen.
            known: Connection -> its identity, as far as the server can tell. If it has no id, the client's claim is the
                id. Without a usable claim the connection's own name is the id.

        Returns:
            Row -> connection of the new clients, and those of their rows that belonged to evicted clients.

        Raises:
            ParameterError: A parameter by client does not cover a client of the first roll call.
        """
        refused_before = set(self._roster.refused)
        ids = {node: canonical_id(one.get(self._keys.client_id)) for node, one in properties.items()}
        # In a simulation both are the partition id. One text for both takes half the memory.
        ids = {node: node if node == client_id else client_id for node, client_id in ids.items()}
        who = {node: one for node, one in known.items() if one is not STRANGER and node in ids}
        ids |= {node: one.client_id for node, one in who.items() if one.client_id}
        self._refuse_uncovered(ids, who, first_call=not self._roster.ids)
        claims = {node: one or node for node, one in ids.items() if node not in self._roster.refused}
        holders = {node: one.holder for node, one in who.items() if one.holder}
        new, evicted = self._roster.register(claims, round, holders)
        warn_of("", [reason for node, reason in self._roster.refused.items() if node not in refused_before])
        return new, evicted

    def inform_selector(self, rows: IntArray, properties: Sequence[Properties]) -> None:
        """Inform the selector about new clients.

        Args:
            rows: Their rows, ascending, shape (n,).
            properties: Their own properties, in the same order. Flower's own "num-examples" is accepted too.
        """
        examples = self._keys.num_examples
        claims = [one[examples] if examples in one else one.get("num-examples") for one in properties]
        sizes = np.array([usable_count(claim) for claim in claims], dtype=np.int64)
        if (limit := self.max_examples(rows, sizes)) is not None and (above := sizes > limit).any():
            cut = zip(rows[above].tolist(), sizes[above].tolist(), strict=True)
            lines = [f"client {self._roster.ids[k]}: {n} claimed, counted as {limit}" for k, n in cut]
            warn_of("max_examples: ", lines)
        counted = sizes if limit is None else np.minimum(sizes, limit)
        told = [one.get(self._keys.energy_score) for one in properties]
        # NumPy turns None into NaN.
        scores = np.array([column_value(COLUMNS["energy_score"], score) for score in told], dtype=np.float64)
        # First all clients without columns, because a client without any properties must be registered too.
        self._selector.inform(rows)
        if (known := sizes > 0).any():
            self._selector.inform(rows[known], num_examples=counted[known].astype(np.float64))
        if (known := np.isfinite(scores)).any():
            self._selector.inform(rows[known], energy_score=scores[known])
        self.note_sizes(rows, sizes)
        self._uninformed = np.append(self._uninformed, rows)

    def inform_initial_accuracy(self, model: Arrays | None) -> None:
        """Inform the selector of the first global model's accuracy, which counts for clients that have not trained.

        Args:
            model: The global model at the start of the round; None if it cannot be decoded.
        """
        if "accuracy" not in self._selector.needs or model is None or not self._uninformed.size:
            return
        # Measured once, on the first global model: a client that joins later starts from the same accuracy.
        if self._initial_accuracy is None:
            self._initial_accuracy = self._measurer.initial_accuracy(model)
        self._selector.inform(self._uninformed, accuracy=np.full(self._uninformed.size, self._initial_accuracy))
        self._uninformed = self._uninformed[:0]

    def max_examples(self, rows: IntArray = NO_ROWS, sizes: IntArray = NO_ROWS) -> int | None:
        """Return the largest number of examples that a client may claim now; None without a limit, or without claims.

        Args:
            rows: Clients with new claims, shape (n,).
            sizes: Their claims, shape (n,), 0 if unknown. These count in the median, but are not stored.
        """
        if self._max_examples != "auto":
            return self._max_examples
        claims = state_dicts.extended(self._sizes.copy(), int(rows.max(initial=-1)) + 1, 0)
        claims[rows[sizes > 0]] = sizes[sizes > 0]
        known = np.sort(claims[claims > 0])
        # The lower median: with an average of two claims, one liar among two clients would set the limit.
        return MEDIAN_MULTIPLE * int(known[(known.size - 1) // 2]) if known.size else None

    def note_sizes(self, rows: IntArray, sizes: IntArray) -> None:
        """Store the numbers of examples that clients claim, 0 if unknown."""
        self._sizes = state_dicts.extended(self._sizes, len(self._roster.ids), 0)
        # An unknown number does not erase an earlier claim.
        claimed = sizes > 0
        self._sizes[rows[claimed]] = sizes[claimed]

    def total_examples(self) -> float:
        """Return the number of examples of all clients; a client of unknown size counts as the mean size."""
        known = self._sizes[self._sizes > 0]
        if (limit := self.max_examples()) is not None:
            known = np.minimum(known, limit)
        return float(known.sum()) * self._selector.num_clients / len(known)  # sum over all of S, for p_k

    def forget(self, rows: IntArray) -> None:
        """Drop the sizes of clients, and the note that they lack the first model's accuracy."""
        self._sizes[rows[rows < len(self._sizes)]] = 0
        self._uninformed = self._uninformed[~np.isin(self._uninformed, rows)]

    def _refuse_uncovered(
        self, ids: Mapping[str, str | None], who: Mapping[str, ConnectionIdentity], *, first_call: bool
    ) -> None:
        """Refuse clients without an entry in a parameter by client.

        Raises:
            ParameterError: In the first roll call, a client with a known id lacks an entry, or all clients do. This is
                an error of the user. Later, a new client without an entry is only refused.
        """
        for values in self._client_values:
            # The usual case without a loop over a large fleet.
            if values.given.keys() >= set(ids.values()):
                continue
            lacking = [node for node, one in ids.items() if not values.covers(one or node)]
            for node in lacking:
                named, known_by = ids[node] is not None, who.get(node, STRANGER).known_by
                if first_call and ((named and known_by != "node") or len(lacking) == len(ids)):
                    raise ParameterError(
                        f"{values.name} has {len(values.given)} entries but none for client {ids[node] or node!r}, "
                        f"known by {IDENTITY_PHRASES[known_by if named else 'node']}. "
                        "Give a mapping {client_id: value} that covers every client (or an array, if the ids are "
                        '0..K-1), or change identity="...".'
                    )
                self._roster.refuse(node, f"client {ids[node] or node!r} refused: no entry in {values.name}")


class IdentityResolver:
    """Finds the client ids of connections.

    Args:
        settings: ``identity``, and the clock, which decides if ``identity`` is None.

    Attributes:
        rule: The identity of clients in this run; decided before each round.
    """

    def __init__(self, settings: Settings) -> None:
        self._given, self._clock = settings.identity, settings.clock
        self.rule: Identity = self._given or "claim"
        self._logged = False

    @property
    def by_claim(self) -> bool:
        """Return whether clients are identified by their own claims."""
        return self.rule == "claim"

    def settle(self, transport: object) -> None:
        """Decide the identity rule; if none is set, clients' claims count in a simulation only."""
        if self._given is None:
            simulation = self._clock == "virtual" or (isinstance(transport, Registry) and transport.simulated)
            self.rule = "claim" if simulation else "name"

    def one_first(self, transport: object) -> bool:
        """Return whether one client is asked before the others; never with ``identity="claim"``."""
        return self._given != "claim" and isinstance(transport, Registry) and transport.one_first

    def resolve(self, strangers: Sequence[str], transport: object) -> dict[str, ConnectionIdentity]:
        """Look up the identities of connections, with at most one call to the server.

        Args:
            strangers: Connections that have no row yet.
            transport: Reaches the connections.

        Returns:
            Connection -> its identity, without connections that the server does not know yet.
        """
        if not strangers:
            return {}
        registered: Mapping[str, Registration] | None = None
        if isinstance(transport, Registry) and self.rule != "node" and not (self.by_claim and transport.simulated):
            registered = transport.registrations()
        # A connection that the server does not know yet is left out: its name and key may come a moment later.
        if registered is None and self.by_claim:
            known = dict.fromkeys(strangers, STRANGER)
        elif registered is None:
            known = {node: self._identity(node, Registration()) for node in strangers}
        else:
            known = {node: self._identity(node, registered[node]) for node in strangers if node in registered}
        if known and not self._logged:
            self._log(known, asked=registered is not None)
            self._logged = True
        return known

    def _identity(self, node: str, said: Registration) -> ConnectionIdentity:
        """Apply the rule to a connection; the node id is the identity if it lacks a name or a key."""
        name = f"the SuperNode registered as {said.name!r}" if canonical_id(said.name) else ""
        if self.by_claim:
            return ConnectionIdentity(holder=name)
        if self.rule == "name" and name:
            return ConnectionIdentity(canonical_id(said.name), name, "name")
        if self.rule == "key" and said.public_key:
            digest = hashlib.sha256(said.public_key).hexdigest()
            return ConnectionIdentity(digest[:KEY_DIGITS], f"the SuperNode with the public key {digest}", "key")
        return ConnectionIdentity(node, f"node {node}", "node")

    def _log(self, known: Mapping[str, ConnectionIdentity], *, asked: bool) -> None:
        """Log the kinds of identity of the clients."""
        lacking = 0 if self.by_claim else sum(one.known_by != self.rule for one in known.values())
        rest = f"; {lacking} of {len(known)} lack it and are known by their node ids" if lacking else ""
        # A warning only if the user asked for what the server cannot provide.
        level = logging.WARNING if lacking and not asked and self._given else logging.INFO
        logger.log(level, 'identity "%s": a client is known by %s%s', self.rule, IDENTITY_PHRASES[self.rule], rest)
