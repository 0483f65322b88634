"""The record of a play: what the strategy asked, what its base was given, and what became of the model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsel_flwr.selectors.report import RoundReport
from fedsel_flwr.testing.fleet import Answer, Fault, Fleet, Model


@dataclass
class Given:
    """An update as the base strategy was given it."""

    node: str
    arrays: Model
    num_examples: float


@dataclass
class Seen:
    """One round, seen from outside.

    Attributes:
        number: The absolute round.
        connected: Connection -> number of the client.
        expected: How many the selector will choose, by the number of those available; None if only it knows.
        ended: Whether the strategy's run was over before the round.
        asked: The connections that were asked to train, as often as they were.
        keeps_model: Whether the selector only measures in this round, so that the model stays.
        broken: Connection -> how it was broken.
        sent: Connection -> what it sent.
        configs: Connection -> the config it received with the model.
        before: The model at the start.
        after: The model at the end.
        base_config: What the base configured for the round; None if it was not asked.
        given: What the base aggregated; None if it was not called.
        failures: Failures that the base was given.
        base_model: What the base made of it; None if nothing.
        evaluated: Connection -> the config of its evaluation.
        base_evaluated: What the base configured for the evaluation.
        reports: What the selector observed.
    """

    number: int
    connected: dict[str, int]
    expected: dict[int, int | None]
    ended: bool
    before: Model
    asked: list[str] = field(default_factory=list)
    keeps_model: bool = False
    broken: Mapping[str, Fault] = field(default_factory=dict)
    sent: dict[str, Answer] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    after: Model = field(default_factory=list)
    base_config: dict[str, Any] | None = None
    given: list[Given] | None = None
    failures: int = 0
    base_model: Model | None = None
    evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    base_evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: list[RoundReport] = field(default_factory=list)


@dataclass
class Course:
    """A play.

    Attributes:
        strategy: The strategy that was played.
        fleet: The clients.
        rounds: What was seen, a record a round.
        model: The global model.
        error: What broke the play; None if it went to its end.
        global_seed: Seed, with the round, of Python's and NumPy's own generators, from which bases may draw.
    """

    strategy: Any
    fleet: Fleet
    model: Model
    rounds: list[Seen] = field(default_factory=list)
    error: Exception | None = None
    global_seed: int = 0

    @property
    def now(self) -> Seen:
        """The round that is played."""
        return self.rounds[-1]

    def begin_round(self) -> Seen:
        """Let the clients come and go, and open the record of the next round."""
        self.fleet.begin_round()
        random.seed(1000 * self.global_seed + self.fleet.round)
        np.random.seed(1000 * self.global_seed + self.fleet.round)  # noqa: NPY002 - Flower's noise comes from it
        selector = self.strategy.selector
        self.rounds.append(
            Seen(
                number=self.fleet.round,
                connected=dict(self.fleet.connected),
                expected={n: selector.expected_count(n) for n in range(len(self.fleet.connected) + 1)},
                ended=bool(self.strategy.core.ended),
                before=self.model,
            )
        )
        return self.now

    def asks(self, nodes: list[str]) -> None:
        """Note whom the strategy asks to train; decides who is broken."""
        selector = self.strategy.selector
        self.now.asked, self.now.keeps_model = list(nodes), bool(selector.keeps_model and not selector.warming_up)
        self.fleet.ask(nodes)
        self.now.broken = self.fleet.broken

    def end_round(self, model: Model | None) -> None:
        """Note the model that came of the round, None if it stayed."""
        if model is not None:
            self.model = model
        self.now.after = self.model

    def choices(self) -> list[list[str]]:
        """The client ids that were asked, round by round."""
        return [sorted((self.fleet.id_of(node) for node in seen.asked), key=int) for seen in self.rounds]

    def rows(self, number: int) -> list[Any]:
        """The history's rows of a round."""
        return [row for row in self.strategy.history.clients if row.round == number]

    def watch_selector(self) -> None:
        """Keep what the selector observes."""
        selector = self.strategy.selector
        observe = selector.observe

        def watched(report: RoundReport) -> None:
            self.now.reports.append(report)
            observe(report)

        vars(selector)["observe"] = watched
