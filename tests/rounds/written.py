"""A transport whose answers are written down, a core on it, and rounds of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Selector

MODEL = [np.zeros((2, 2))]


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


def reply(seconds: float = 1.0, arrays: Any = MODEL, num_examples: int = 1, **metrics: Any) -> Reply:
    """An update of a client that took so many seconds."""
    return Reply(arrays=arrays, num_examples=num_examples, metrics={"latency_s": seconds, **metrics})


def play_round(
    core: SelectionCore, nodes: list[str], replies: Any = None, *, model: Any = MODEL, transport: Any = None
) -> list[str]:
    """A round among these connections, after which the model is the same; returns who was asked.

    Replies are by connection, or there is one that all send; the others do not answer.
    """
    asked = core.choose(nodes, model, transport or Written(facts(*nodes)))
    if asked:
        said = dict.fromkeys(asked, replies) if isinstance(replies, Reply) else replies or {}
        core.collect({node: said[node] for node in asked if node in said})
        core.finish(model)
    return asked
