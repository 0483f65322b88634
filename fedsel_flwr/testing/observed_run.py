"""The record of a run: the clients asked, the updates that the base received, and the changes of the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
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
    num_examples: Any


@dataclass
class ObservedRound:
    """The record of a round.

    Attributes:
        number: The absolute round.
        connected: Node id -> number of the client.
        expected: Number of available clients -> number that the selector will choose, None if not known before.
        ended: Whether the strategy had ended the run before this round.
        asked: Node ids that were asked to train, an id twice if it was asked twice.
        keeps_model: Whether the selector only measures in this round and the model stays.
        broken: Node id -> its fault.
        sent: Node id -> its reply.
        configs: Node id -> the train config it received.
        before: The global model before the round.
        after: The global model after the round.
        base_configs: Node -> the base's train config for it, None if the base was not asked.
        given: The updates that the base received, None if the base was not called.
        failures: Number of failures that the base received.
        base_model: The model that the base returned, None if it returned none.
        evaluated: Node id -> the evaluation config it received.
        base_evaluated: Node id -> the evaluation config that the base sent.
        reports: The reports that the selector observed.
    """

    number: int
    connected: dict[str, int]
    expected: dict[int, int | None]
    ended: bool
    before: Model
    after: Model
    sent: dict[str, Reply]
    configs: dict[str, dict[str, Any]]
    evaluated: dict[str, dict[str, Any]]
    asked: list[str] = field(default_factory=list)
    keeps_model: bool = False
    broken: Mapping[str, Fault] = field(default_factory=dict)
    base_configs: dict[str, dict[str, Any]] | None = None
    given: list[ReceivedUpdate] | None = None
    failures: int = 0
    base_model: Model | None = None
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
        error: The exception that ended the run early, None if the run was completed.
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

    def begin_round(self) -> None:
        """Let clients connect and disconnect, and start the record of the next round."""
        fleet, selector = self.fleet, self.strategy.selector
        fleet.begin_round()
        # Seeds follow from the round, so a resumed run finds the generators in the state of the interrupted run.
        random.seed(1000 * self.global_seed + fleet.round)
        np.random.seed(1000 * self.global_seed + fleet.round)  # noqa: NPY002
        self.rounds.append(
            ObservedRound(
                number=fleet.round,
                connected=dict(fleet.connected),
                expected={n: selector.expected_count(n) for n in range(len(fleet.connected) + 1)},
                ended=bool(self.strategy.core.ended),
                before=self.model,
                after=self.model,
                sent=fleet.sent,
                configs=fleet.configs,
                evaluated=fleet.evaluated,
            )
        )

    def watch_strategy(self, api: Any) -> None:
        """Record the clients that the strategy asks, and the models that it returns.

        Args:
            api: The strategy's API, a :class:`~fedsel_flwr.testing.flower_rounds.FlowerRounds`.
        """

        def asked(instructions: Any) -> None:
            now, selector = self.now, self.strategy.selector
            now.asked = [node for node, _ in api.configs(instructions)]
            now.keeps_model = bool(selector.keeps_model and not selector.warming_up)
            now.broken = self.fleet.assign_faults(now.asked)

        def aggregated(result: Any) -> None:
            if result[0] is not None:
                self.now.after = self.model = api.model(result[0])

        watch(self.strategy, api.configure, after=asked)
        watch(self.strategy, api.aggregate, after=aggregated)

    def watch_parts(self, api: Any) -> None:
        """Record what the base sends, receives and returns, and the reports that the selector observes.

        Args:
            api: The strategy's API.
        """

        def configured(instructions: Any) -> None:
            self.now.base_configs = dict(api.configs(instructions))

        # Read before the base aggregates, because it may aggregate in place.
        def given(server_round: int, *replies: Any) -> None:
            self.now.given, self.now.failures = api.updates(*replies)

        def aggregated(result: Any) -> None:
            self.now.base_model = None if result[0] is None else api.model(result[0])

        def evaluated(instructions: Any) -> None:
            self.now.base_evaluated = dict(api.configs(instructions))

        base, selector = self.strategy.base, self.strategy.selector
        watch(base, api.configure, after=configured)
        watch(base, api.aggregate, before=given, after=aggregated)
        watch(base, "configure_evaluate", after=evaluated)
        watch(selector, "observe", before=lambda report: self.now.reports.append(report))

    def choices(self) -> list[list[str]]:
        """Return the ids of the clients that were asked, round by round, ascending."""
        return [sorted((self.fleet.id_of(node) for node in seen.asked), key=int) for seen in self.rounds]

    def rows(self, number: int) -> list[Any]:
        """Return the history's rows of a round."""
        return [row for row in self.strategy.history.clients if row.round == number]


def watch(
    owner: Any, method: str, *, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    """Call ``before`` with the arguments of each call of a method, and ``after`` with its result."""
    original = getattr(owner, method)

    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if isinstance(result, Iterator):
            # A generator of messages can be read only once.
            result = list(result)
        if after is not None:
            after(result)
        return result

    vars(owner)[method] = watched
