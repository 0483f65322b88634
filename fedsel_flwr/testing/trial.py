"""A strategy under test: what is played of it, in which of Flower's APIs.

What :func:`fedsel_flwr.testing.check_strategy` is given, looked at before anything is played.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.testing.course import Course
from fedsel_flwr.testing.fleet import Fleet, Model, Plan

StrategyFactory = Callable[[], Any]
"""Builds the strategy under test, a new one at each call."""
PARTS = ("selector", "base", "history", "roster", "core", "state_dict", "load_state_dict")
"""What a strategy must have to be looked at."""


def made_strategy(make: StrategyFactory) -> Any:
    """Return ``make()``; raise :class:`ParameterError` if it cannot be called so, or returns something else."""
    try:
        strategy = make()
    except TypeError as error:
        raise ParameterError(f"make_strategy() must build a strategy without arguments, but: {error}") from error
    is_legacy(strategy)
    if missing := [name for name in PARTS if not hasattr(strategy, name)]:
        raise ParameterError(
            f"make_strategy must return a SelectionStrategy, one of the papers' or a class on them; "
            f"{type(strategy).__name__} has no {', '.join(missing)}: wrap it, SelectionStrategy(selector, base)"
        )
    return strategy


def is_legacy(strategy: Any) -> bool:
    """Whether a strategy is one of Flower's legacy API; raises :class:`ParameterError` if it is of neither API."""
    from flwr.server.strategy import Strategy as Legacy
    from flwr.serverapp.strategy import Strategy

    if not isinstance(strategy, Legacy | Strategy):
        raise ParameterError(
            "make_strategy must return a strategy of flwr.server.strategy or flwr.serverapp.strategy, got "
            f"{type(strategy).__name__}"
        )
    return isinstance(strategy, Legacy)


def checked(arrays: Sequence[Any]) -> Model:
    """The initial model as a list of arrays; raises :class:`ParameterError` if it is none."""
    model = [np.asarray(array) for array in arrays]
    if not model or not all(array.dtype.kind in "fiu" and np.isfinite(array).all() for array in model):
        raise ParameterError(
            "arrays must be the initial model, a list of NumPy arrays of finite numbers, got "
            f"{[f'{a.dtype}{list(a.shape)}' for a in model]}"
        )
    return model


def layers(base: Any) -> Iterator[Any]:
    """A base strategy and those it wraps."""
    while base is not None:
        yield base
        base = getattr(base, "strategy", None)


SPARE = 4
"""Clients more than the strategy waits for, so that some may be away."""
NEEDED = (
    "min_available_clients", "min_available_nodes", "min_fit_clients", "min_train_nodes", "min_evaluate_clients",
    "min_evaluate_nodes",
)  # fmt: skip
"""Attributes of bases that say how many clients they wait for."""


class Trial:
    """Plays of one strategy.

    Args:
        make: Builds the strategy.
        arrays: The initial model.
        num_clients: Clients of the fleet; None takes 12, or what the strategy waits for and four more.
        metrics: What every client reports beside.

    Attributes:
        plan: What every play has in common.
        legacy: Whether the strategy is one of Flower's legacy API.

    Raises:
        ParameterError: ``make`` or ``arrays`` cannot be used, or the clients are too few.
    """

    def __init__(
        self,
        make: StrategyFactory,
        arrays: Sequence[Any],
        num_clients: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self._make = make
        first = self.made()
        if self.made() is first:
            raise ParameterError("make_strategy must return a new strategy at each call, got the same one twice")
        self.legacy = is_legacy(first)
        settings = first.core.settings
        if not settings.compare_models:
            raise ParameterError(
                f"check_strategy plays models of NumPy arrays; {type(first.base).__name__} has trees, whose size grows"
            )
        if settings.identity in ("node", "key"):
            raise ParameterError(
                "check_strategy plays clients that reconnect under new node ids and are known again by their name or "
                f"their client_id: make the strategy with identity None, 'name' or 'claim', got {settings.identity!r}"
            )
        wanted = max(8, *(int(getattr(one, name, 0)) for one in layers(first.base) for name in NEEDED))
        least = max(wanted, int(first.min_available), first.selector.clients_per_round or 1) + SPARE
        if num_clients is not None and num_clients < least:
            raise ParameterError(
                f"num_clients must be at least {least}: what the strategy and its base wait for, and {SPARE} that may "
                f"be away, got {num_clients}"
            )
        self.plan = Plan(
            arrays=checked(arrays),
            num_clients=num_clients or least,
            keys=settings.keys,
            max_latency=float(settings.max_latency),
            metrics=dict(metrics or {}),
        )

    def made(self) -> Any:
        """A new strategy."""
        with _undisturbed():
            return made_strategy(self._make)

    @cached_property
    def course(self) -> Course:
        """A whole play, with everything that can be seen of it."""
        strategy = self.made()
        course = Course(strategy, Fleet(self.plan), self.plan.arrays)
        course.watch_selector()
        if self.legacy:
            from fedsel_flwr.testing.legacy_fleet import watch_legacy as watch
        else:
            from fedsel_flwr.testing.message_fleet import watch_messages as watch
        watch(course)
        return self._played(course, self.plan.num_rounds)

    @property
    def clock_is_virtual(self) -> bool:
        """Whether latencies are those that clients report, so that nothing depends on the machine's speed."""
        return bool(self.course.strategy.core.settings.clock == "virtual")

    def other_course(self) -> Course:
        """A play of a second strategy, over connections with other names and in another order.

        Python's and NumPy's own generators are in another state as well, unless the base draws its noise from them.
        """
        strategy = self.made()
        noisy = any(type(one).__name__.startswith(("DifferentialPrivacy", "DPFedAvg")) for one in layers(strategy.base))
        course = Course(strategy, Fleet(self.plan, seed=1), self.plan.arrays, global_seed=0 if noisy else 1)
        return self._played(course, self.plan.num_rounds)

    def cut(self, rounds: int) -> Course:
        """A play that ends early."""
        return self._played(Course(self.made(), Fleet(self.plan), self.plan.arrays), rounds)

    def continued(self, cut: Course, state: Mapping[str, Any]) -> Course:
        """The rest of a play by a new strategy with the state, and with a copy of the base as it was left."""
        strategy = self.made()
        strategy.load_state_dict(state)
        strategy.base = copy.deepcopy(cut.strategy.base)
        return self._played(Course(strategy, cut.fleet, cut.model), self.plan.num_rounds - cut.fleet.round)

    def _played(self, course: Course, rounds: int) -> Course:
        if self.legacy:
            from fedsel_flwr.testing.legacy_fleet import play_legacy as play
        else:
            from fedsel_flwr.testing.message_fleet import play_messages as play
        with _undisturbed():
            try:
                play(course, rounds)
            except Exception as error:  # whatever the strategy raises is a broken promise, but for its own parameters
                if isinstance(error, ParameterError) and course.fleet.round <= 1:
                    raise
                course.error = error
        return course


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the logs quiet, and give Python's and NumPy's own generators back as they were."""
    loggers = [logging.getLogger(name) for name in ("flwr", "fedsel_flwr")]
    levels = [logger.level for logger in loggers]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - Flower draws from it
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
