"""The record of a run: the clients asked, the updates that the base received, and the model's changes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsel_flwr.selectors.round_report import RoundReport
from fedsel_flwr.testing.fleet import Fault, Fleet, Model, Reply


@dataclass
class ReceivedUpdate:
    """An update as the base strategy received it."""

    node: str
    arrays: Model
    num_examples: float


@dataclass
class ObservedRound:
    """The record of a round.

    Attributes:
        number: The absolute round.
        connected: Node id -> number of the client.
        expected: Number of available clients -> number that the selector will choose; None if only it knows.
        ended: Whether the strategy had ended the run before this round.
        asked: Node ids that were asked to train; an id that was asked twice stands here twice.
        keeps_model: Whether the selector only measures in this round and the model stays.
        broken: Node id -> its fault.
        sent: Node id -> its reply.
        configs: Node id -> the train config it received.
        before: The global model before the round.
        after: The global model after the round.
        base_config: The base's train config; None if the base was not asked.
        given: The updates that the base received; None if the base was not called.
        failures: Number of failures that the base received.
        base_model: The model that the base returned; None if it returned none.
        evaluated: Node id -> the evaluation config it received.
        base_evaluated: Node id -> the evaluation config that the base sent.
        reports: The reports that the selector observed.
    """

    number: int
    connected: dict[str, int]
    expected: dict[int, int | None]
    ended: bool
    before: Model
    asked: list[str] = field(default_factory=list)
    keeps_model: bool = False
    broken: Mapping[str, Fault] = field(default_factory=dict)
    sent: dict[str, Reply] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    after: Model = field(default_factory=list)
    base_config: dict[str, Any] | None = None
    given: list[ReceivedUpdate] | None = None
    failures: int = 0
    base_model: Model | None = None
    evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    base_evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: list[RoundReport] = field(default_factory=list)


@dataclass
class ObservedRun:
    """The record of a run.

    Attributes:
        strategy: The strategy under test.
        fleet: The clients.
        rounds: The rounds so far.
        model: The global model.
        error: The exception that ended the run early; None if the run was completed.
        global_seed: Seed of Python's and NumPy's global generators, from which bases may draw.
    """

    strategy: Any
    fleet: Fleet
    model: Model
    rounds: list[ObservedRound] = field(default_factory=list)
    error: Exception | None = None
    global_seed: int = 0

    @property
    def now(self) -> ObservedRound:
        """The current round."""
        return self.rounds[-1]

    def begin_round(self) -> ObservedRound:
        """Let clients connect and disconnect, and begin the record of the next round."""
        self.fleet.begin_round()
        # A resumed run must find the generators where the interrupted one had them: seeds follow from the round.
        random.seed(1000 * self.global_seed + self.fleet.round)
        np.random.seed(1000 * self.global_seed + self.fleet.round)  # noqa: NPY002
        selector = self.strategy.selector
        self.rounds.append(
            ObservedRound(
                number=self.fleet.round,
                connected=dict(self.fleet.connected),
                expected={n: selector.expected_count(n) for n in range(len(self.fleet.connected) + 1)},
                ended=bool(self.strategy.core.ended),
                before=self.model,
            )
        )
        return self.now

    def record_asked(self, nodes: list[str]) -> None:
        """Record the nodes that the strategy asks to train, and assign the round's faults."""
        selector = self.strategy.selector
        self.now.asked, self.now.keeps_model = list(nodes), bool(selector.keeps_model and not selector.warming_up)
        self.fleet.assign_faults(nodes)
        self.now.broken = self.fleet.broken

    def end_round(self, model: Model | None) -> None:
        """Record the new global model; None if it stayed."""
        if model is not None:
            self.model = model
        self.now.after = self.model

    def choices(self) -> list[list[str]]:
        """Return the ids of the clients that were asked, round by round, ascending."""
        return [sorted((self.fleet.id_of(node) for node in seen.asked), key=int) for seen in self.rounds]

    def rows(self, number: int) -> list[Any]:
        """Return the history's rows of a round."""
        return [row for row in self.strategy.history.clients if row.round == number]

    def record_reports(self) -> None:
        """Record the reports that the selector observes."""
        selector = self.strategy.selector
        observe = selector.observe

        def recorded(report: RoundReport) -> None:
            self.now.reports.append(report)
            observe(report)

        vars(selector)["observe"] = recorded
