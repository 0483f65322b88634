"""By what clients are known: by their own word, or by what the server says of their connections."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsel_flwr.rounds.identity import canonical_id
from fedsel_flwr.rounds.settings import Identity, Settings
from fedsel_flwr.rounds.transport import Registration, Registry

logger = logging.getLogger("fedsel_flwr")
KEY_DIGITS = 16
"""Hexadecimal digits of a public key's SHA-256 that serve as an id."""
WORDS: Mapping[Identity, str] = {
    "node": "its node id",
    "key": "the public key of its SuperNode",
    "name": "the name its SuperNode is registered with",
    "claim": "what it says itself",
}


@dataclass(frozen=True)
class Known:
    """Who a connection is, as far as the server can tell.

    Args:
        client_id: Its client id; None where the client itself says that.
        holder: Whose row it takes, in words; empty where nobody but the client vouches for it.
        by: What it is known by: the node id where it lacks what the rule asks for.
    """

    client_id: str | None = None
    holder: str = ""
    by: Identity = "claim"


class Identifying:
    """Finds the client ids of connections.

    Args:
        settings: ``identity``, and the clock by which None is settled.

    Attributes:
        rule: By what clients are known; settled before each round.
    """

    def __init__(self, settings: Settings) -> None:
        self._given, self._clock = settings.identity, settings.clock
        self.rule: Identity = self._given or "claim"
        self._told = False

    @property
    def by_claim(self) -> bool:
        """Whether clients are known by what they say themselves."""
        return self.rule == "claim"

    def settle(self, transport: object) -> None:
        """Settle the rule: where none is given, a simulation's clients are believed, and no others."""
        if self._given is None:
            simulation = self._clock == "virtual" or (isinstance(transport, Registry) and transport.simulated)
            self.rule = "claim" if simulation else "name"

    def one_first(self, transport: object) -> bool:
        """Whether one client is asked before the others; not where the user says that clients must be asked."""
        return self._given != "claim" and isinstance(transport, Registry) and transport.one_first

    def known(self, strangers: Sequence[str], transport: object) -> dict[str, Known]:
        """Look connections up; the server is asked at most once.

        Args:
            strangers: Connections that have no row yet.
            transport: Reaches them.

        Returns:
            Connection -> who it is; without those of which the server does not know yet.
        """
        if not strangers:
            return {}
        registered: Mapping[str, Registration] | None = None
        if isinstance(transport, Registry) and self.rule != "node" and not (self.by_claim and transport.simulated):
            registered = transport.registrations()
        if registered is None:
            known = {node: self._identified(node, Registration()) for node in strangers}
        else:
            known = {node: self._identified(node, registered[node]) for node in strangers if node in registered}
        if known and not self._told:
            self._tell(known, asked=registered is not None)
            self._told = True
        return known

    def _identified(self, node: str, said: Registration) -> Known:
        name = f"the SuperNode registered as {said.name!r}" if canonical_id(said.name) else ""
        if self.by_claim:
            return Known(holder=name)
        if self.rule == "name" and name:
            return Known(canonical_id(said.name), name, "name")
        if self.rule == "key" and said.public_key:
            digest = hashlib.sha256(said.public_key).hexdigest()
            return Known(digest[:KEY_DIGITS], f"the SuperNode with the public key {digest}", "key")
        return Known(node, f"node {node}", "node")

    def _tell(self, known: Mapping[str, Known], *, asked: bool) -> None:
        """Say once what is in force."""
        lacking = sum(one.by != self.rule for one in known.values())
        rest, level = "", logging.INFO
        if lacking and asked:
            rest = f"; {lacking} of {len(known)} have none, and their node ids serve"
        elif lacking:
            rest = "; that cannot be had here, and node ids serve"
            level = logging.INFO if self._given is None else logging.WARNING
        logger.log(level, 'identity "%s": a client is known by %s%s', self.rule, WORDS[self.rule], rest)
