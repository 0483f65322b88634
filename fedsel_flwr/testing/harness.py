"""A test harness for strategies: runs of one strategy with a fleet of simulated clients, in either of Flower's APIs.

:class:`ObservedRun` records the clients asked, the updates that the base received, and the changes of the model. This
module also checks the arguments of :func:`fedsel_flwr.testing.check_strategy`, before the first round.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.testing.fleet import Fleet, FleetPlan, Model, ObservedRound

if TYPE_CHECKING:
    from fedsel_flwr.testing.in_process import FlowerRounds

StrategyFactory = Callable[[], Any]
"""Builds the strategy under test. Each call returns a new strategy."""
REQUIRED_ATTRIBUTES = ("selector", "base", "history", "roster", "core", "state_dict", "load_state_dict")
"""Attributes of a strategy that the checks read."""
SPARE_CLIENTS = 4
"""Number of clients beyond those that the strategy waits for. This many may be offline."""


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
        self.rounds.append(fleet.now)
        self.now.expected = {n: selector.expected_count(n) for n in range(len(fleet.connected) + 1)}
        self.now.ended = bool(self.strategy.core.ended)
        self.now.before = self.now.after = self.model

    def begin_with(self, method: str) -> None:
        """Begin a round at each call of a method of the strategy."""
        watch(self.strategy, method, before=lambda *_: self.begin_round())

    def watch_strategy(self, api: Any) -> None:
        """Record the clients that the strategy asks, and the models that it returns.

        Args:
            api: The strategy's API, a :class:`~fedsel_flwr.testing.in_process.FlowerRounds`.
        """

        def asked(instructions: Any) -> None:
            selector, self.now.asked = self.strategy.selector, [node for node, _ in api.configs(instructions)]
            self.now.keeps_model = bool(selector.keeps_model and not selector.warming_up)
            self.fleet.assign_faults(self.now.asked)

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


class StrategyHarness:
    """Runs one strategy with a fleet: a full run, a second run, and a run that is interrupted and resumed.

    Args:
        make: Builds the strategy.
        arrays: The initial model.
        num_clients: Clients of the fleet. None takes 12, or four more than the strategy waits for.
        metrics: Further metrics that every client reports.
        reported: The names of all metrics that the clients report; None for everything that is asked.

    Attributes:
        plan: The model, the clients and the metrics of every run.
        legacy: Whether the strategy belongs to Flower's legacy API.

    Raises:
        ParameterError: ``make`` or ``arrays`` is unusable, or there are too few clients.
    """

    def __init__(
        self,
        make: StrategyFactory,
        arrays: Sequence[Any],
        num_clients: int | None = None,
        metrics: Mapping[str, float] | None = None,
        reported: Collection[str] | None = None,
    ) -> None:
        self._make = make
        first = self.build()
        if self.build() is first:
            raise ParameterError("make_strategy returned the same strategy twice. Build a new one at each call")
        self.legacy = hasattr(first, "configure_fit")
        # Whether clients of earlier rounds may be at work.
        self.buffered = first.core.parts.flights is not None
        settings = first.core.settings
        if settings.payload == "trees":
            raise ParameterError(
                f"make_strategy wraps {type(first.base).__name__}, whose model grows from round to round. Give the "
                "strategy a base whose model is a list of NumPy arrays of fixed shapes"
            )
        if settings.identity in ("node", "key"):
            raise ParameterError(
                f"make_strategy sets identity={settings.identity!r}, under which a client that reconnects gets another "
                "row, and the fleet's clients do reconnect. Set identity to None, 'name' or 'claim'"
            )
        # Flower's strategies keep the numbers of clients that they wait for in min_available_nodes and similar names.
        base = [vars(one).items() for one in wrapped_strategies(first.base)]
        waited_for = [int(value) for items in base for name, value in items if name.startswith("min_")]
        wanted = (8, *waited_for, int(first.min_available), first.selector.clients_per_round or 1)
        least = max(wanted) + SPARE_CLIENTS
        if num_clients is not None and num_clients < least:
            raise ParameterError(
                f"num_clients must be at least {least}, got {num_clients}: the strategy and its base wait for "
                f"{least - SPARE_CLIENTS} clients, and {SPARE_CLIENTS} may be offline. Raise num_clients"
            )
        model = [np.asarray(array) for array in arrays]
        if not model or not all(array.dtype.kind in "fiu" and np.isfinite(array).all() for array in model):
            raise ParameterError(
                "arrays must be the initial model, a list of NumPy arrays of finite numbers, got "
                f"{[f'{a.dtype}{list(a.shape)}' for a in model]}"
            )
        known = None if reported is None else frozenset(reported) - {"num-examples"}
        self.plan = FleetPlan(
            arrays=model, num_clients=num_clients or least, keys=settings.keys, metrics=dict(metrics or {}),
            max_latency=float(settings.max_latency), reported=known,
        )  # fmt: skip

    def build(self) -> Any:
        """Return a new strategy; raise :class:`ParameterError` if the call fails or returns no strategy of ours."""
        try:
            with _isolated():
                strategy = self._make()
        except TypeError as error:
            raise ParameterError(
                f"make_strategy() must build a strategy without arguments, but raised: {error}. Bind its arguments "
                "with functools.partial"
            ) from error
        if missing := [name for name in REQUIRED_ATTRIBUTES if not hasattr(strategy, name)]:
            raise ParameterError(
                f"make_strategy must return a SelectionStrategy or a paper's strategy, but {type(strategy).__name__} "
                f"has no {', '.join(missing)}. Wrap it: SelectionStrategy(selector, base)"
            )
        return strategy

    @cached_property
    def _api(self) -> FlowerRounds:
        # Flower is imported here, because `import fedsel_flwr.testing` must work without Flower.
        from fedsel_flwr.testing.in_process import LegacyRounds, MessageRounds

        return LegacyRounds() if self.legacy else MessageRounds()

    @cached_property
    def full_run(self) -> ObservedRun:
        """The run of the first strategy, from the first to the last round."""
        run = ObservedRun(self.build(), Fleet(self.plan), self.plan.arrays)
        run.watch_parts(self._api)
        return self._play(run, self.plan.num_rounds)

    @property
    def clock_is_virtual(self) -> bool:
        """Whether clients report latencies. Then no choice depends on the machine's speed."""
        return bool(self.full_run.strategy.core.settings.clock == "virtual")

    def second_run(self) -> ObservedRun:
        """Return the run of a second strategy, with other node ids and another order of replies.

        Python's and NumPy's global generators have another state too, unless the base draws its noise from them.
        """
        strategy = self.build()
        # Flower's differential privacy draws from NumPy's global generator. Other noise would mean another model.
        names = [type(one).__name__ for one in wrapped_strategies(strategy.base)]
        noisy = any(name.startswith(("DifferentialPrivacy", "DPFedAvg")) for name in names)
        run = ObservedRun(strategy, Fleet(self.plan, seed=1), self.plan.arrays, global_seed=0 if noisy else 1)
        return self._play(run, self.plan.num_rounds)

    def interrupted_run(self, rounds: int) -> ObservedRun:
        """Return a run that ends after ``rounds`` rounds."""
        return self._play(ObservedRun(self.build(), Fleet(self.plan), self.plan.arrays), rounds)

    def resumed_run(self, interrupted: ObservedRun, state: Mapping[str, Any]) -> ObservedRun:
        """Return the rest of a run, played by a new strategy with the state and a copy of the base."""
        strategy = self.build()
        strategy.load_state_dict(state)
        # The copy contains the base's state, such as the moments of FedAdam.
        strategy.base = copy.deepcopy(interrupted.strategy.base)
        run = ObservedRun(strategy, interrupted.fleet, interrupted.model)
        return self._play(run, self.plan.num_rounds - run.fleet.round)

    def _play(self, run: ObservedRun, rounds: int) -> ObservedRun:
        run.watch_strategy(self._api)
        with _isolated():
            try:
                self._api.play(run, rounds)
            except Exception as error:
                # Any exception from the strategy is a broken promise, which the first check reports. Wrong parameters
                # are the caller's mistake and show in round 1.
                if isinstance(error, ParameterError) and run.fleet.round <= 1:
                    raise
                run.error = error
        return run


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Silence the logs, and restore Python's and NumPy's global generators afterwards."""
    with contextlib.ExitStack() as afterwards:
        # Flower's client managers and noise draw from the global generators. Their states belong to the caller.
        afterwards.callback(random.setstate, random.getstate())
        afterwards.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        for logger in map(logging.getLogger, ("flwr", "fedsel_flwr")):
            afterwards.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        yield


def wrapped_strategies(base: Any) -> Iterator[Any]:
    """Yield a base strategy, and every strategy that it wraps."""
    while base is not None:
        yield base
        base = getattr(base, "strategy", None)
