"""The roll call: ask new connections for their identity, through the transport of an adapter."""

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
"""Number of connections whose missing answers are stored; beyond that, the earliest due are dropped first."""
MAX_ASKED_ALONE = 2
"""Largest number of connections to ask one by one before all others are asked at once."""
Properties = Mapping[str, object]
"""The client's own properties: its id, number of examples, energy score."""
NO_PROPERTIES: Final[Properties] = MappingProxyType({})
"""The properties of a client that was not asked, or whose app has no function for the roll call."""
Introduce = Callable[[list[str]], tuple[Mapping[str, Properties | None], list[str]]]
"""The signature of :meth:`Transport.introduce`."""


class Transport(Protocol):
    """The adapter's access to connections before a round."""

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Properties | None], list[str]]:
        """Ask connections for their properties.

        Returns:
            Connection -> its properties; None for an error, :data:`NO_PROPERTIES` (the object itself) if the client's
            app has no function for this question. And the connections that did not answer in time.
        """

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Let connections measure the current global model: connection -> metrics, for those that answered."""


@dataclass(frozen=True)
class Registration:
    """The server's own data on a connection, independent of the client's claims.

    Args:
        name: The name under which an operator registered it; empty without one.
        public_key: The key with which it signs; empty if unknown.
    """

    name: str = ""
    public_key: bytes = b""


@runtime_checkable
class Registry(Protocol):
    """A transport whose server knows more about connections than their ids."""

    @property
    def simulated(self) -> bool:
        """Return whether the connections are clients of a simulation, which the server itself started."""

    @property
    def one_first(self) -> bool:
        """Return whether one client should be asked before the others, because an app without an answer is slow."""

    def registrations(self) -> Mapping[str, Registration] | None:
        """Return the registration of every connection, in one call; None if the server knows only ids."""


class RollCall(state_dicts.NotByClient):
    """Asks new connections for their identity.

    Connections that did not answer are asked last, and each time after twice as many rounds. So one silent connection
    cannot delay every round.

    Args:
        timeout: Seconds that the transport waits for an answer, for messages.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        # Connection -> how often it did not answer.
        self._unanswered: dict[str, int] = {}
        # Connection -> round in which it is asked again.
        self._not_before: dict[str, int] = {}
        # None until known. Not saved, because the next run may have another app.
        self._app_answers: bool | None = None

    def call(
        self, strangers: Iterable[str], round: int, introduce: Introduce, *, one_first: bool = False
    ) -> dict[str, Properties]:
        """Ask the due connections for their identity; repeat the question once after an error.

        Args:
            strangers: Connections that are not in the roster.
            round: The round about to be chosen.
            introduce: Asks the connections.
            one_first: Ask one connection before the others, and a second one if the first was inconclusive. All of them
                run the same app. If the app cannot state its identity, the others are not asked.

        Returns:
            Connection -> its properties, empty after two errors or without a question. Without the connections that did
            not answer.
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
        # A connection that first failed and then hung is in both.
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
        """Load a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        loaded = [state_dicts.whole_numbers(key, state[key]) for key in ("in_vain", "not_before")]
        self._unanswered, self._not_before = loaded

    def _learn(self, answers: Collection[Properties | None], one_first: bool) -> None:
        """Learn from answers whether the app can state its identity."""
        # By identity, because a client with an empty answer did answer.
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
        """Record the connections that were asked before ``round`` and did not answer."""
        for name in connections:
            self._unanswered[name] = self._unanswered.get(name, 0) + 1
            # 2^30 rounds never end, and the number stays small in a checkpoint.
            self._not_before[name] = round + 2 ** min(self._unanswered[name] - 1, 30)
        words = f"did not answer within {self.timeout:g} s and takes no part in this round"
        for line in first_lines([f"client {name} {words}" for name in connections]):
            logger.warning("roll call: %s", line)
        # A client can invent any number of node ids, and each would be saved permanently.
        if (surplus := len(self._not_before) - MAX_REMEMBERED) > 0:
            for name in sorted(self._not_before, key=self._not_before.__getitem__)[:surplus]:
                del self._not_before[name], self._unanswered[name]
