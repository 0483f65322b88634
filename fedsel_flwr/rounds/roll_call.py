"""The roll call: new connections are asked who they are, through a transport that each adapter has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.probing import Answers
from fedsel_flwr.rounds.untrusted import first_lines

logger = logging.getLogger("fedsel_flwr")
MAX_REMEMBERED = 10_000
"""Connections whose missing answers are remembered; beyond that, those due soonest are forgotten first."""
MAX_ASKED_ALONE = 2
"""Connections that are asked one by one, at most, before all others are asked at once."""
Properties = Mapping[str, object]
"""What a client says of itself: its id, number of examples, energy score."""
NO_PROPERTIES: Final[Properties] = MappingProxyType({})
"""The properties of a client that was not asked, or whose app cannot answer the question who it is."""
Introduce = Callable[[list[str]], tuple[Mapping[str, Properties | None], list[str]]]
"""The signature of :meth:`Transport.introduce`."""


class Transport(Protocol):
    """How an adapter reaches connections before a round."""

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Properties | None], list[str]]:
        """Ask connections who they are.

        Returns:
            Connection -> its properties; None for an error, :data:`NO_PROPERTIES` (itself) if the client's app has no
            answer to that question. And the connections that did not answer in time.
        """

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Have connections measure the current global model: connection -> metrics, of those that answered."""


@dataclass(frozen=True)
class Registration:
    """What the server knows of a connection, whatever the client says.

    Args:
        name: The name that an operator registered it under; empty without one.
        public_key: The key with which it signs; empty if unknown.
    """

    name: str = ""
    public_key: bytes = b""


@runtime_checkable
class Registry(Protocol):
    """A transport whose server knows more of connections than their ids."""

    @property
    def simulated(self) -> bool:
        """Return whether the connections are clients of a simulation, which the server itself started."""

    @property
    def one_first(self) -> bool:
        """Return whether one client should be asked before the others, because an app that cannot answer is slow."""

    def registrations(self) -> Mapping[str, Registration] | None:
        """Return what is known of every connection, in one call; None if the server knows only ids."""


class RollCall(state_dicts.NotByClient):
    """Asks new connections who they are.

    Those that did not answer are asked last, and each time after twice as many rounds, so that one of them cannot hold
    up every round.

    Args:
        timeout: Seconds that the transport waits for an answer, for messages.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        # connection -> how often it did not answer
        self._unanswered: dict[str, int] = {}
        # connection -> round in which it is asked again
        self._not_before: dict[str, int] = {}
        # None until known; not saved, since the next run may have another app
        self._app_answers: bool | None = None

    def call(
        self, strangers: Iterable[str], round: int, introduce: Introduce, *, one_first: bool = False
    ) -> dict[str, Properties]:
        """Ask the connections that are due; those that answer with an error are asked once more.

        Args:
            strangers: Connections that are not in the roster.
            round: The round about to be chosen.
            introduce: Asks them.
            one_first: Ask one before the others, and a second one if that was inconclusive. All of them run the same
                app: if it cannot say who it is, the others are not asked.

        Returns:
            Connection -> its properties, none if it twice answered with an error or was not asked; without those that
            did not answer.
        """
        due = self._due(strangers, round)
        if not due:
            return {}
        said: dict[str, Properties | None] = {}
        missed: list[str] = []
        asked = 0
        while asked < len(due) and self._app_answers is not False:
            alone = one_first and self._app_answers is None and asked < MAX_ASKED_ALONE
            batch = due[asked : asked + 1] if alone else due[asked:]
            asked += len(batch)
            answers, hanging = introduce(batch)
            said, missed = {**said, **answers}, [*missed, *hanging]
            self._learn(answers.values(), one_first)
        said |= dict.fromkeys(due[asked:], NO_PROPERTIES)
        if failed := [node for node, properties in said.items() if properties is None]:
            again, hanging = introduce(failed)
            said |= again
            missed = [*missed, *hanging]
        # one that failed first and hung then stands in both
        for node in missed:
            said.pop(node, None)
        failed = [node for node, properties in said.items() if properties is None]
        for line in first_lines(
            [f"client {node} answered with an error, so its connection serves as its client id" for node in failed]
        ):
            logger.warning("roll call: %s", line)
        self._note_missed(missed, round)
        return {node: properties or {} for node, properties in said.items()}

    def state_dict(self) -> state_dicts.State:
        """Return how often connections did not answer, and when each is asked again."""
        return {"in_vain": dict(self._unanswered), "not_before": dict(self._not_before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        loaded = [state_dicts.whole_numbers(key, state[key]) for key in ("in_vain", "not_before")]
        self._unanswered, self._not_before = loaded

    def _learn(self, answers: Collection[Properties | None], one_first: bool) -> None:
        """Learn from answers whether the app can say who it is."""
        # by identity: a client with an empty answer did answer
        if any(properties is not None and properties is not NO_PROPERTIES for properties in answers):
            self._app_answers = True
        elif self._app_answers is None and any(properties is NO_PROPERTIES for properties in answers):
            message = "the ClientApp has no query function. Flower reports this as an error, but it is harmless"
            if one_first:
                self._app_answers, message = False, f"{message}. The other clients are not asked"
            logger.warning("roll call: %s", message)

    def _due(self, connections: Iterable[str], round: int) -> list[str]:
        """Return the connections to ask before ``round``, those that missed most calls last."""
        due = [name for name in connections if self._not_before.get(name, 0) <= round]
        return sorted(due, key=lambda name: self._unanswered.get(name, 0)) if self._unanswered else due

    def _note_missed(self, connections: list[str], round: int) -> None:
        """Note the connections that were asked before ``round`` and did not answer."""
        for name in connections:
            self._unanswered[name] = self._unanswered.get(name, 0) + 1
            # 2^30 rounds are for ever, and the number stays small in a checkpoint
            self._not_before[name] = round + 2 ** min(self._unanswered[name] - 1, 30)
        words = f"did not answer within {self.timeout:g} s and takes no part in this round"
        for line in first_lines([f"client {name} {words}" for name in connections]):
            logger.warning("roll call: %s", line)
        # node ids can be invented without end, and each of them would be saved for ever
        if (surplus := len(self._not_before) - MAX_REMEMBERED) > 0:
            for name in sorted(self._not_before, key=self._not_before.__getitem__)[:surplus]:
                del self._not_before[name], self._unanswered[name]
