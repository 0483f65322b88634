"""What any strategy that wraps a selector must do, in either of Flower's APIs: one function per promise.

A fleet is played to it through Flower's own types, in this process: clients that are healthy, slow, absent, that raise,
send NaN, other shapes or other types, lie about their latency, and reconnect under a new node id. Each check takes a
:class:`~fedsel_flwr.testing.trial.Trial`; a broken promise raises :class:`AssertionError` that says what was promised.

What any strategy must do in a round: whom it asks, what its base gets, what becomes of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsel_flwr.testing.course import Course, Seen
from fedsel_flwr.testing.fleet import IMPOSTOR, Model
from fedsel_flwr.testing.strategy_state_conformance import (
    check_failures_are_named,
    check_history,
    check_identity,
    check_same_seed,
    check_save_and_load,
    check_selector_observes,
    check_times,
)
from fedsel_flwr.testing.trial import StrategyFactory, Trial
from fedsel_flwr.testing.worlds import promise

PLAIN = (None, "fedpdp", "mean")
"""Averaging schemes in which the model is what the base makes of the updates."""


def check_no_client_breaks_a_round(trial: Trial) -> None:
    """Whatever a client sends, or does not send, no exception leaves the strategy."""
    course = trial.course
    if course.error is not None:
        seen = course.rounds[-1] if course.rounds else None
        who = {} if seen is None else {course.fleet.id_of(node): fault.name for node, fault in seen.broken.items()}
        what = f"{type(course.error).__name__}: {course.error}"
        number = 0 if seen is None else seen.number
        raise AssertionError(
            f"broken promise: no client breaks a round; in round {number} ({_told(who)}) came {what}"
        ) from course.error


def check_only_those_there_are_asked(trial: Trial) -> None:
    """Only clients that are connected are asked to train."""
    for seen in trial.course.rounds:
        absent = sorted(set(seen.asked) - seen.connected.keys())
        promise(not absent, f"only connected clients are asked; in round {seen.number} {absent} were not")


def check_asked_once(trial: Trial) -> None:
    """No client is asked to train twice in a round, however many connections it has."""
    for number, choice in enumerate(trial.course.choices(), 1):
        twice = sorted({one for one in choice if choice.count(one) > 1})
        promise(not twice, f"a client is asked once a round; in round {number} {twice} more often")


def check_impostor(trial: Trial) -> None:
    """A second connection that claims the id of a connected client is never asked."""
    for seen in trial.course.rounds:
        taken_in = any(seen.connected.get(node) == IMPOSTOR for node in seen.asked)
        promise(
            not taken_in,
            f"a second connection with a connected client's id is refused; in round {seen.number} it was asked",
        )


def check_right_number(trial: Trial) -> None:
    """As many clients are asked as the selector's ``expected_count`` says, of those that could be chosen."""
    course = trial.course
    for seen in course.rounds:
        for record in [one for one in course.strategy.history.rounds if one.round == seen.number]:
            available, here = record.num_available, len(set(seen.connected.values()) - {IMPOSTOR})
            promise(available <= here, f"no more clients are available than are connected, {here}, not {available}")
            warmup = seen.number <= course.strategy.core.settings.warmup_rounds
            expected = available if warmup else seen.expected[available]
            promise(
                expected in (None, len(seen.asked)),
                f"the right number is asked; in round {seen.number} {len(seen.asked)} of {available} available clients "
                f"were, expected {expected}",
            )
            promise(not available or bool(seen.asked) or expected in (None, 0), "somebody is asked where somebody is")


def check_configs(trial: Trial) -> None:
    """What the base configures for training reaches every client that is asked."""
    for seen in trial.course.rounds:
        promise(not seen.asked or seen.base_config is not None, "the base configures every round")
        for node in seen.asked:
            config, wanted = seen.configs.get(node, {}), seen.base_config or {}
            lost = {key: value for key, value in wanted.items() if config.get(key) != value}
            promise(not lost, f"the base's train config reaches every client; in round {seen.number} {lost} was lost")


def check_evaluation_configs(trial: Trial) -> None:
    """What the base configures for evaluation reaches exactly the clients it names, unchanged."""
    for seen in trial.course.rounds:
        promise(
            seen.evaluated == seen.base_evaluated,
            f"the base's evaluation configs pass through; in round {seen.number} it configured "
            f"{_told(seen.base_evaluated)}, clients received {_told(seen.evaluated)}",
        )


def check_model_is_sound(trial: Trial) -> None:
    """After every round the model has the initial model's shapes and holds finite numbers only."""
    shapes = [array.shape for array in trial.plan.arrays]
    for seen in trial.course.rounds:
        now = [array.shape for array in seen.after]
        promise(now == shapes, f"the model keeps its shapes {shapes}; after round {seen.number} it has {now}")
        finite = all(np.isfinite(array).all() for array in seen.after)
        promise(finite, f"the model holds finite numbers only; after round {seen.number} it does not")


def check_base_gets_survivors(trial: Trial) -> None:
    """The base aggregates the updates that the history calls kept, those only, as the clients sent them.

    Without FedCA's filter these are all that can be used.
    """
    course = trial.course
    settings = course.strategy.core.settings
    for seen in course.rounds:
        kept = {row.client_id for row in course.rows(seen.number) if row.kept}
        usable = {row.client_id for row in course.rows(seen.number) if row.completed}
        promise(
            kept <= usable if settings.filter is not None else kept == usable,
            f"without a filter every usable update is kept, and never another; in round {seen.number} clients "
            f"{sorted(usable, key=int)} had one, those of {sorted(kept, key=int)} were kept",
        )
        given = [] if seen.given is None else [course.fleet.id_of(one.node) for one in seen.given]
        promise(
            seen.given is None or sorted(given) == sorted(kept),
            f"the base is given the kept updates, each once; in round {seen.number} clients {sorted(kept, key=int)} "
            f"were kept, it was given those of {sorted(given, key=int)}",
        )
        for one in seen.given or ():
            sent = seen.sent[one.node]
            whole = not isinstance(sent.arrays, bytes) and _same(one.arrays, sent.arrays)
            if settings.averaging is None:
                whole = whole and one.num_examples == sent.num_examples
            promise(
                whole,
                f"the base is given updates as they were sent; in round {seen.number} client "
                f"{course.fleet.id_of(one.node)}'s was changed",
            )


def check_base_aggregates(trial: Trial) -> None:
    """Where enough updates can be used, the new model is what the base makes of them."""
    course = trial.course
    for seen in course.rounds:
        if not _enough(course, seen):
            continue
        called = seen.given is not None
        promise(called, f"the base aggregates every round with enough updates; in round {seen.number} it was not asked")
        if course.strategy.core.settings.averaging in PLAIN:
            made = seen.before if seen.base_model is None else seen.base_model
            promise(
                _same(seen.after, made), f"the new model is what the base made of it; in round {seen.number} it is not"
            )


def check_model_stays(trial: Trial) -> None:
    """With fewer usable updates than ``min_completed``, or a selector that only measures, the model stays as it is."""
    course = trial.course
    for seen in course.rounds:
        if not _enough(course, seen):
            same = _same(seen.before, seen.after)
            promise(same, f"with too few usable updates the model stays; in round {seen.number} it changed")


def check_base_hears_of_failures(trial: Trial) -> None:
    """A base that aggregates is given a failure for every client whose update is lost.

    In the Message API clients that never answer are none: Flower itself says nothing of them.
    """
    course = trial.course
    for seen in course.rounds:
        if seen.given is None:
            continue
        lost = {row.client_id for row in course.rows(seen.number) if not row.completed}
        if not trial.legacy:
            quiet = {course.fleet.id_of(n) for n, fault in seen.broken.items() if fault.name == "never answers"}
            lost -= quiet
        promise(
            seen.failures == len(lost),
            f"the base hears of every failure; in round {seen.number} of {seen.failures} in place of {len(lost)}",
        )


def _enough(course: Course, seen: Seen) -> bool:
    """Whether the round has updates for the base, by the history, and the selector does not only measure."""
    rows = course.rows(seen.number)
    least = int(course.strategy.core.settings.min_completed)
    return not seen.keeps_model and sum(row.completed for row in rows) >= least and any(row.kept for row in rows)


def _same(one: Model, other: Model) -> bool:
    """Whether two models are the same, bit for bit."""
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def _told(facts: object) -> str:
    text = str(facts or "nobody broken")
    return text if len(text) <= 200 else f"{text[:200]} ..."


STRATEGY_CHECKS: tuple[Callable[[Trial], None], ...] = (
    check_no_client_breaks_a_round,
    check_only_those_there_are_asked,
    check_impostor,
    check_asked_once,
    check_right_number,
    check_history,
    check_identity,
    check_configs,
    check_evaluation_configs,
    check_model_is_sound,
    check_failures_are_named,
    check_times,
    check_base_gets_survivors,
    check_base_aggregates,
    check_base_hears_of_failures,
    check_model_stays,
    check_selector_observes,
    check_same_seed,
    check_save_and_load,
)
"""Every check, in the order in which they are made: what the later ones rely on comes first."""


def check_strategy(
    make_strategy: StrategyFactory,
    arrays: Sequence[Any],
    *,
    num_clients: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Play a fleet to a strategy and run every check.

    It needs Flower, but neither Ray nor torch, and takes a second or two; five, with fifty clients a round: let it be
    few. Clients have the ids 0, 1, 2, ... and train by adding random numbers to the model that they receive. On the
    server's clock the two checks that compare choices are left out with a warning.

    Args:
        make_strategy: Returns a new strategy at each call, of Flower's legacy or of its Message API, with a seed: a
            :class:`~fedsel_flwr.strategies.SelectionStrategy` around your selector and base, or one of the papers'.
        arrays: The initial model, a list of NumPy arrays; small ones will do. A base that holds an initial model of its
            own (``initial_parameters``) must hold this one.
        num_clients: Clients of the fleet, for parameters that are given by client; None takes 12 or more.
        metrics: What every client reports beside, for a base that reads metrics of its own.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ParameterError: An argument cannot be used.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import CSUCB
    >>> check_strategy(lambda: CSUCB(clients_per_round=3, max_latency=5.0, seed=1), arrays=[np.zeros((3, 2))])
    """
    trial = Trial(make_strategy, arrays, num_clients, metrics)
    for check in STRATEGY_CHECKS:
        check(trial)
