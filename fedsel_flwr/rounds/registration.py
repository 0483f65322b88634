"""Who is new, and what the selector is told about the clients before it chooses among them.

By what clients are known: by their own word, or by what the server says of their connections.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.roll_call import Registration, Registry
from fedsel_flwr.rounds.roster import ClientValues, Roster, canonical_id
from fedsel_flwr.rounds.settings import Identity, MaxExamples, MetricKeys, Settings
from fedsel_flwr.rounds.untrusted import first_lines, fraction, usable_count
from fedsel_flwr.selectors import Selector

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


NOBODY: IntArray = np.zeros(0, dtype=np.int64)
MULTIPLE = 4
"""How many times the median claim a claim may be where ``max_examples`` is "auto"."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a connection says of itself in the roll call; None where it says nothing."""

    client_id: object = None
    num_examples: object = None
    energy_score: object = None

    @classmethod
    def of(cls, facts: Mapping[str, object], keys: MetricKeys) -> Introduction:
        """Pick out of an answer's facts what counts; Flower's own "num-examples" will do too."""
        return cls(
            client_id=facts.get(keys.client_id),
            num_examples=facts.get(keys.num_examples, facts.get("num-examples")),
            energy_score=facts.get(keys.energy_score),
        )


class Enrolment:
    """Enters clients into the roster and informs the selector about them.

    Args:
        selector: The selector.
        roster: Who is who.
        measurer: Measures the first global model, for selectors that read ``accuracy``.
        client_values: Selector parameters given by client id; clients they do not cover are refused.
        counts_everybody: Whether the averaging scheme reads :meth:`total_examples`.
        max_examples: Most examples that a client may claim; a larger claim counts as so many. "auto" takes four times
            the median claim. None for no limit.
    """

    def __init__(
        self,
        selector: Selector,
        roster: Roster,
        measurer: Measurer,
        client_values: tuple[ClientValues, ...] = (),
        max_examples: MaxExamples | None = None,
        *,
        counts_everybody: bool = False,
    ) -> None:
        self._selector, self._roster, self._measurer, self._client_values = selector, roster, measurer, client_values
        self._max_examples, self._counts_everybody = max_examples, counts_everybody
        self._sizes: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # claimed by row; 0 where unknown
        self._initial_accuracy: float | None = None
        self._uninformed: IntArray = np.zeros(0, dtype=np.int64)  # rows that lack the first model's accuracy

    @property
    def reads_facts(self) -> bool:
        """Whether the selector, or the averaging scheme, reads what a client says of itself beside its id."""
        return self._selector.takes_information or self._counts_everybody

    def enter(
        self,
        introductions: Mapping[str, Introduction],
        round: int,
        known: Mapping[str, Known] = MappingProxyType({}),
    ) -> tuple[dict[int, str], IntArray]:
        """Bind connections to rows.

        Args:
            introductions: Connection -> what it said.
            round: The round about to be chosen.
            known: Connection -> who it is, as far as the server can tell. Where it gives no id, what the client said is
                the id, and without a usable one the connection's own name.

        Returns:
            Row -> connection of the new clients, and the rows of these that were taken from clients evicted.

        Raises:
            ParameterError: In the first roll call, parameters given by client do not cover a client.
        """
        named = set(self._roster.refused)
        who = {node: known.get(node, Known()) for node in introductions}
        ids = {node: who[node].client_id or canonical_id(said.client_id) for node, said in introductions.items()}
        self._refuse_uncovered(ids, who, first_call=not self._roster.ids)
        claims = {node: one or node for node, one in ids.items() if node not in self._roster.refused}
        new, evicted = self._roster.register(claims, round, {node: one.holder for node, one in who.items()})
        refused = [reason for node, reason in self._roster.refused.items() if node not in named]
        for line in first_lines(refused):
            logger.warning("%s", line)
        return new, evicted

    def welcome(self, said: Mapping[int, Introduction]) -> None:
        """Tell the selector about new clients, row -> what the client said of itself."""
        rows = np.array(sorted(said), dtype=np.int64)
        facts = [said[row] for row in rows.tolist()]
        sizes = np.array([usable_count(one.num_examples) for one in facts], dtype=np.int64)
        if (limit := self.max_examples(rows, sizes)) is not None and (above := sizes > limit).any():
            claims = zip(rows[above].tolist(), sizes[above].tolist(), strict=True)
            for line in first_lines(
                [f"client {self._roster.ids[k]}: {n} claimed, counts as {limit}" for k, n in claims]
            ):
                logger.warning("max_examples: %s", line)
        told = sizes if limit is None else np.minimum(sizes, limit)
        scores = np.array([fraction(one.energy_score) for one in facts], dtype=np.float64)  # None becomes NaN
        self._selector.inform(rows)
        if (known := sizes > 0).any():
            self._selector.inform(rows[known], num_examples=told[known].astype(np.float64))
        if (known := np.isfinite(scores)).any():
            self._selector.inform(rows[known], energy_score=scores[known])
        self.reported(rows, sizes)
        self._uninformed = np.append(self._uninformed, rows)

    def received(self, model: Arrays | None) -> None:
        """Inform about the accuracy of the first global model, which counts for clients that have not trained yet.

        Args:
            model: The global model that the round starts from; None if it cannot be decoded.
        """
        if "accuracy" not in self._selector.needs or model is None or not self._uninformed.size:
            return
        if self._initial_accuracy is None:
            self._initial_accuracy = self._measurer.initial_accuracy(model)
        accuracy = np.full(self._uninformed.size, self._initial_accuracy)
        self._selector.inform(self._uninformed, accuracy=accuracy)
        self._uninformed = self._uninformed[:0]

    def max_examples(self, rows: IntArray = NOBODY, sizes: IntArray = NOBODY) -> int | None:
        """Most examples that a client may claim now; None for no limit, or where nobody has claimed any yet.

        Args:
            rows: Clients that have just made claims, shape (n,).
            sizes: What they claim, shape (n,), 0 where unknown; it counts in the median, and is not noted.
        """
        if self._max_examples != "auto":
            return self._max_examples
        claims = state_dicts.extended(self._sizes.copy(), int(rows.max(initial=-1)) + 1, 0)
        claims[rows[sizes > 0]] = sizes[sizes > 0]
        known = np.sort(claims[claims > 0])
        return MULTIPLE * int(known[(known.size - 1) // 2]) if known.size else None  # of two the lower one

    def reported(self, rows: IntArray, sizes: IntArray) -> None:
        """Note the numbers of examples that clients claim, 0 where unknown."""
        self._sizes = state_dicts.extended(self._sizes, len(self._roster.ids), 0)
        told = sizes > 0
        self._sizes[rows[told]] = sizes[told]

    def total_examples(self) -> float:
        """Examples of all clients together; a client of unknown size counts as an average one."""
        known = self._sizes[self._sizes > 0]
        if (limit := self.max_examples()) is not None:
            known = np.minimum(known, limit)
        return float(known.sum()) * self._selector.num_clients / len(known)  # of all of S, for p_k

    def state_dict(self) -> state_dicts.State:
        """Sizes by row, the first model's accuracy, and who lacks it."""
        return {
            "sizes": self._sizes.copy(),
            "initial_accuracy": self._initial_accuracy,
            "uninformed": self._uninformed.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        sizes = state_dicts.array("sizes", state["sizes"], np.int64)
        accuracy = state_dicts.plain_number("initial_accuracy", state["initial_accuracy"], or_none=True)
        uninformed = state_dicts.array("uninformed", state["uninformed"], np.int64)
        self._sizes, self._initial_accuracy, self._uninformed = sizes, accuracy, uninformed

    def forget(self, rows: IntArray) -> None:
        """Drop sizes, and who lacked the first model's accuracy."""
        self._sizes[rows[rows < len(self._sizes)]] = 0
        self._uninformed = self._uninformed[~np.isin(self._uninformed, rows)]

    def _refuse_uncovered(self, ids: Mapping[str, str | None], who: Mapping[str, Known], *, first_call: bool) -> None:
        """Refuse clients without an entry in a parameter given by client; at the start that is the user's mistake."""
        for values in self._client_values:
            lacking = [node for node, one in ids.items() if not values.covers(one or node)]
            for node in lacking:
                named, by = ids[node] is not None, who[node].by
                if first_call and ((named and by != "node") or len(lacking) == len(ids)):
                    raise ParameterError(
                        f"{values.name} has {len(values.given)} entries but none for client {ids[node] or node!r}: "
                        "give a mapping {client_id: value} that covers every client (an array is for the ids 0..K-1); "
                        f'a client is known by {WORDS[by if named else "node"]} here, which identity="..." changes'
                    )
                self._roster.refuse(node, f"client {ids[node] or node!r} refused: no entry in {values.name}")
