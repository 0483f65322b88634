"""Who is new, and what the selector is told about the clients before it chooses among them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.client_values import ClientValues
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.replies import Arrays
from fedsel_flwr.rounds.roster import Roster, canonical_id
from fedsel_flwr.rounds.settings import Introduction
from fedsel_flwr.rounds.untrusted import fraction, usable_count
from fedsel_flwr.selectors import Selector

logger = logging.getLogger("fedsel_flwr")


class Enrolment:
    """Enters clients into the roster and informs the selector about them.

    Args:
        selector: The selector.
        roster: Who is who.
        measurer: Measures the first global model, for selectors that read ``accuracy``.
        client_values: Selector parameters given by client id; clients they do not cover are refused.
    """

    def __init__(
        self, selector: Selector, roster: Roster, measurer: Measurer, client_values: tuple[ClientValues, ...]
    ) -> None:
        self._selector, self._roster, self._measurer, self._client_values = selector, roster, measurer, client_values
        self._sizes: dict[int, int] = {}
        self._initial_accuracy: float | None = None
        self._uninformed: list[int] = []  # rows that do not have the first model's accuracy yet

    def enroll(self, introductions: Mapping[str, Introduction], round: int) -> list[int]:
        """Bind connections to rows and tell the selector about new clients.

        Args:
            introductions: Connection -> what it said. Without a usable id the connection's own name is the id.
            round: The round about to be chosen.

        Returns:
            The rows taken from clients that were evicted.

        Raises:
            ParameterError: In the first roll call, parameters given by client do not cover a client.
        """
        named = set(self._roster.refused)
        self._refuse_uncovered(introductions, first_call=not self._roster.ids)
        claims = {
            node: canonical_id(said.client_id) or node
            for node, said in introductions.items()
            if node not in self._roster.refused
        }
        new, evicted = self._roster.enroll(claims, round)
        for node in self._roster.refused.keys() - named:
            logger.warning("%s", self._roster.refused[node])
        for row in evicted:
            self._sizes.pop(row, None)
        if evicted:
            self._selector.forget(np.array(evicted))
        if new:
            nodes = self._roster.present(claims, round - 1)
            self._inform({row: introductions[node] for row, node in nodes.items() if row in new})
        return evicted

    def received(self, model: Arrays | None) -> None:
        """Inform about the accuracy of the first global model, which counts for clients that have not trained yet.

        Args:
            model: The global model that the round starts from; None if it cannot be decoded.
        """
        if "accuracy" not in self._selector.needs or model is None or not self._uninformed:
            return
        if self._initial_accuracy is None:
            self._initial_accuracy = self._measurer.initial_accuracy(model)
        accuracy = np.full(len(self._uninformed), self._initial_accuracy)
        self._selector.inform(np.array(self._uninformed), accuracy=accuracy)
        self._uninformed = []

    def reported(self, sizes: Mapping[int, int]) -> None:
        """Note row -> number of examples, 0 where unknown."""
        self._sizes |= {row: size for row, size in sizes.items() if size}

    def total_examples(self) -> float:
        """Examples of all clients together; a client of unknown size counts as an average one."""
        known = list(self._sizes.values())
        return sum(known) * self._selector.num_clients / len(known)  # of all of S, for p_k

    def _inform(self, said: Mapping[int, Introduction]) -> None:
        rows = np.array(list(said))
        self._selector.inform(rows)
        columns: dict[str, list[float | None]] = {
            "num_examples": [usable_count(one.num_examples) or None for one in said.values()],
            "energy_score": [fraction(one.energy_score) for one in said.values()],
        }
        for name, column in columns.items():
            known = np.array([value is not None for value in column])
            if known.any():
                self._selector.inform(rows[known], **{name: np.array(column)[known].astype(float)})
        self.reported({row: usable_count(one.num_examples) for row, one in said.items()})
        self._uninformed.extend(said)

    def _refuse_uncovered(self, introductions: Mapping[str, Introduction], *, first_call: bool) -> None:
        """Refuse clients without an entry in a parameter given by client; at the start that is the user's mistake."""
        for node, said in introductions.items():
            claim = canonical_id(said.client_id)
            for values in self._client_values:
                if values.covers(claim or node):
                    continue
                if first_call and claim is not None:
                    raise ParameterError(
                        f"{values.name} has {len(values)} entries but none for client {claim!r}: give a mapping "
                        "{client_id: value} that covers every client (an array is for the ids 0..K-1)"
                    )
                self._roster.refused[node] = f"client {claim or node!r} refused: no entry in {values.name}"
