"""How connections are reached before a round, and who the server says they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedsel_flwr.rounds.probing import Answers
from fedsel_flwr.rounds.rollcall import Facts


class Transport(Protocol):
    """How an adapter reaches connections before a round."""

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Facts | None], list[str]]:
        """Ask connections who they are: connection -> facts, None for an error; and those that did not answer.

        :data:`~fedsel_flwr.rounds.rollcall.CANNOT_SAY` stands for a client whose app has no answer to that question.
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
