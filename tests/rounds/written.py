"""A transport whose answers are written down, and a core on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Selector


class Written:
    """Connection -> what it says of itself, and what it answers to probes; who is in neither does not answer."""

    def __init__(self, facts: Mapping[str, Any] | None = None, answers: Mapping[str, Any] | None = None) -> None:
        self.facts, self.answers = facts or {}, answers or {}
        self.introduced: list[list[str]] = []
        self.probed: list[tuple[list[str], dict[str, str | int]]] = []

    def introduce(self, nodes: list[str]) -> tuple[dict[str, Any], list[str]]:
        self.introduced.append(nodes)
        return {n: self.facts[n] for n in nodes if n in self.facts}, [n for n in nodes if n not in self.facts]

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, Any]:
        self.probed.append((nodes, dict(config)))
        return {node: self.answers[node] for node in nodes if node in self.answers}


def facts(*nodes: str, **more: Any) -> dict[str, Any]:
    """Connections that call themselves by their own names."""
    return {node: {"client_id": node, **more} for node in nodes}


def core_of(selector: Selector, *, roster: Any = None, **options: Any) -> SelectionCore:
    return SelectionCore(selector, resolve_settings(selector, **options), roster=roster)
