"""Who is asked who it is, when, and what it said.

How connections are reached before a round, and who the server says they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

from fedsel_flwr.checks import IntArray
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.probing import Answers
from fedsel_flwr.rounds.untrusted import first_lines

logger = logging.getLogger("fedsel_flwr")
MOST_REMEMBERED = 10_000
"""Connections whose silence is remembered; of more, those are forgotten first that would be asked again first."""
ALONE = 2
"""Connections that are asked one by one, at most, before all others are asked together."""
Facts = Mapping[str, object]
CANNOT_SAY: Final[Facts] = MappingProxyType({})
"""Stands for the facts of a client whose app has no answer to the question who it is, or that was not asked."""
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
        self._app_answers: bool | None = None  # of the app that runs now: not saved

    def call(
        self, strangers: Iterable[str], round: int, introduce: Introduce, *, one_first: bool = False
    ) -> dict[str, Facts]:
        """Ask the connections that are due, those that answered with an error once more.

        Args:
            strangers: Connections that nobody knows yet.
            round: The round about to be chosen.
            introduce: Asks them.
            one_first: Ask one before the others, and a second one if that tells nothing, until somebody has answered:
                all of them run the same app, and if it cannot say who it is, nobody else is asked.

        Returns:
            Connection -> what it said of itself, nothing where it twice answered with an error or was not asked;
            without those that did not answer.
        """
        due = self.due(strangers, round)
        if not due:
            return {}
        said: dict[str, Facts | None] = {}
        missed: list[str] = []
        asked = 0
        while asked < len(due) and self._app_answers is not False:
            alone = one_first and self._app_answers is None and asked < ALONE
            batch = due[asked : asked + 1] if alone else due[asked:]
            asked += len(batch)
            answers, hanging = introduce(batch)
            said, missed = {**said, **answers}, [*missed, *hanging]
            self._learn(answers.values(), one_first)
        said |= dict.fromkeys(due[asked:], CANNOT_SAY)
        if unclear := [node for node, facts in said.items() if facts is None]:
            again, hanging = introduce(unclear)
            said |= again
            missed = [*missed, *hanging]
        for node in missed:
            said.pop(node, None)
        erring = [node for node, facts in said.items() if facts is None]
        for line in first_lines(
            [f"client {node} answers with errors; its connection serves as its id" for node in erring]
        ):
            logger.warning("roll call: %s", line)
        self.missed(missed, round)
        return {node: facts or {} for node, facts in said.items()}

    def _learn(self, answers: Collection[Facts | None], one_first: bool) -> None:
        """Learn from answers whether the app can say who it is."""
        if any(facts is not None and facts is not CANNOT_SAY for facts in answers):
            self._app_answers = True
        elif self._app_answers is None and any(facts is CANNOT_SAY for facts in answers):
            told = "the clients' app has no query function, which Flower reports as an error; that is no fault"
            if one_first:
                self._app_answers, told = False, f"{told}, and nobody else is asked"
            logger.warning("roll call: %s", told)

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
        for line in first_lines([f"client {name} {words}" for name in silent]):
            logger.warning("roll call: %s", line)
        if (surplus := len(self._not_before) - MOST_REMEMBERED) > 0:
            for name in sorted(self._not_before, key=self._not_before.__getitem__)[:surplus]:
                del self._not_before[name], self._in_vain[name]

    def state_dict(self) -> state_dicts.State:
        """Who did not answer how often, and when each is asked again."""
        return {"in_vain": dict(self._in_vain), "not_before": dict(self._not_before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        loaded = [state_dicts.whole_numbers(key, state[key]) for key in ("in_vain", "not_before")]
        self._in_vain, self._not_before = loaded

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""


class Transport(Protocol):
    """How an adapter reaches connections before a round."""

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Facts | None], list[str]]:
        """Ask connections who they are: connection -> facts, None for an error; and those that did not answer.

        :data:`~fedsel_flwr.rounds.roll_call.CANNOT_SAY` stands for a client whose app has no answer to that question.
        """

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Have connections measure the current global model: connection -> metrics, of those that answered."""


@dataclass(frozen=True)
class Registration:
    """What the server knows of a connection, whatever the client says.

    Args:
        name: The name that an operator registered it under; empty without one.
        public_key: The key with which it signs; empty where unknown.
    """

    name: str = ""
    public_key: bytes = b""


@runtime_checkable
class Registry(Protocol):
    """A transport that also knows what its server says of connections."""

    @property
    def simulated(self) -> bool:
        """Whether the connections are clients of a simulation, which are the server's own."""

    @property
    def one_first(self) -> bool:
        """Whether a question is better put to one client first: those that cannot answer do so at length."""

    def registrations(self) -> Mapping[str, Registration] | None:
        """Everybody connected, in one call; None where the server tells ids alone."""
