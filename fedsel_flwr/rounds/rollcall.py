"""Who is asked who it is, when, and what it said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedsel_flwr.checks import IntArray
from fedsel_flwr.rounds import saving
from fedsel_flwr.rounds.untrusted import few

logger = logging.getLogger("fedsel_flwr")
MOST_REMEMBERED = 10_000
"""Connections whose silence is remembered; of more, those are forgotten first that would be asked again first."""
Facts = Mapping[str, object]
Introduce = Callable[[list[str]], tuple[Mapping[str, Facts | None], list[str]]]
"""Asks connections who they are; returns connection -> facts, None for an error, and those that hang."""


class RollCall:
    """Asks new connections who they are.

    Those that did not answer are asked last, and ever more rarely, so that one cannot hold up every round.

    Args:
        timeout: How long an answer is waited for, seconds; for messages.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._in_vain: dict[str, int] = {}  # connection -> how often it did not answer
        self._not_before: dict[str, int] = {}  # connection -> round in which it is asked again

    def call(self, strangers: Iterable[str], round: int, introduce: Introduce) -> dict[str, Facts]:
        """Ask the connections that are due, those that answered with an error once more.

        Args:
            strangers: Connections that nobody knows yet.
            round: The round about to be chosen.
            introduce: Asks them.

        Returns:
            Connection -> what it said of itself, nothing where it twice answered with an error; without those that
            did not answer.
        """
        due = self.due(strangers, round)
        if not due:
            return {}
        answers, missed = introduce(due)
        said = dict(answers)
        if unclear := [node for node, facts in said.items() if facts is None]:
            again, hanging = introduce(unclear)
            said |= again
            missed = [*missed, *hanging]
        for node in missed:
            said.pop(node, None)
        erring = [node for node, facts in said.items() if facts is None]
        for line in few([f"client {node} answers with errors; its connection serves as its id" for node in erring]):
            logger.warning("roll call: %s", line)
        self.missed(missed, round)
        return {node: facts or {} for node, facts in said.items()}

    def due(self, connections: Iterable[str], round: int) -> list[str]:
        """The connections to ask before ``round``, those that hung before last."""
        due = [name for name in connections if self._not_before.get(name, 0) <= round]
        return sorted(due, key=lambda name: self._in_vain.get(name, 0)) if self._in_vain else due

    def missed(self, connections: Iterable[str], round: int) -> None:
        """Note who was asked before ``round`` and did not answer."""
        silent = list(connections)
        for name in silent:
            self._in_vain[name] = self._in_vain.get(name, 0) + 1
            self._not_before[name] = round + 2 ** min(self._in_vain[name] - 1, 30)
        words = f"did not answer within {self.timeout:g} s and is left out of this round"
        for line in few([f"client {name} {words}" for name in silent]):
            logger.warning("roll call: %s", line)
        if (surplus := len(self._not_before) - MOST_REMEMBERED) > 0:
            for name in sorted(self._not_before, key=self._not_before.__getitem__)[:surplus]:
                del self._not_before[name], self._in_vain[name]

    def state_dict(self) -> saving.State:
        """Who did not answer how often, and when each is asked again."""
        return {"in_vain": dict(self._in_vain), "not_before": dict(self._not_before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, self.state_dict())
        loaded = [saving.whole_numbers(key, state[key]) for key in ("in_vain", "not_before")]
        self._in_vain, self._not_before = loaded

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""
