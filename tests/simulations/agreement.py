"""Two engines beside each other, round by round: who was chosen, and the model after each round.

A :class:`Course` is what one engine did. The vectorized engine can be made to follow a course: with its clients in
every round, or with its clients and its model at the beginning of every round. What it would have chosen itself is
recorded either way.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.vectorized import run_vectorized
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations import inprocess

CUT = 1e-6
"""Scores that lie closer may change places by rounding."""


@dataclass
class Course:
    """What an engine did, an entry a round.

    Attributes:
        chosen: Whom its selector chose, by index; whether or not they were taken.
        scores: What its selector compared, a number for each client; None where it does not take the largest numbers.
        received: The global model at the beginning of the round.
        ended: The global model after the round, as this engine made it; empty where its core does not see it.
    """

    chosen: list[IntArray] = field(default_factory=list)
    scores: list[FloatArray | None] = field(default_factory=list)
    received: list[Arrays] = field(default_factory=list)
    ended: list[Arrays] = field(default_factory=list)


def recorded(strategy: Any, follow: Course | None = None, *, models: bool = False) -> Course:
    """Have a strategy record its course.

    Args:
        strategy: A selection strategy that has not begun; it is changed.
        follow: A course that has ended, whose clients are taken in place of its own.
        models: Whether its models are, too: each round begins with the model that it has there.

    Returns:
        Its course, which grows as it runs.
    """
    course, core, selector = Course(), strategy.core, strategy.selector
    choose, finish, select, largest = core.choose, core.finish, selector.select, selector._largest

    def choosing(connected: Any, reference: Any, *rest: Any) -> Any:
        course.received.append([array.copy() for array in reference])
        return choose(connected, reference, *rest)

    def selecting(available: IntArray) -> IntArray:
        course.scores.append(None)
        course.chosen.append(np.sort(select(available)))
        return course.chosen[-1] if follow is None else follow.chosen[len(course.chosen) - 1]

    def comparing(score: FloatArray, available: IntArray) -> IntArray:
        course.scores[-1] = np.array(score)
        return largest(score, available)  # type: ignore[no-any-return]

    def finishing(after: Arrays | None = None) -> Arrays | None:
        after = finish(after)
        course.ended.append(course.received[-1] if after is None else after)
        number = len(course.ended)
        if follow is None or not models or number == len(follow.received):
            return after
        return follow.received[number]

    core.choose, core.finish, selector.select, selector._largest = choosing, finishing, selecting, comparing
    return course


def one_by_one(world: World) -> Course:
    """The course of clients that train one by one, as on Ray, with Flower's server."""
    strategy = make_strategy(world)
    course = recorded(strategy)
    result = inprocess.play(world.scenario, world, strategy=strategy)
    course.ended = [*course.received[1:], result.arrays]  # of its core not every selector asks to see them
    return course


def together(world: World, follow: Course | None = None, *, models: bool = False) -> Course:
    """The course of the vectorized engine; ``follow`` and ``models`` as in :func:`recorded`."""
    strategy = make_strategy(world)
    course = recorded(strategy, follow, models=models)
    run_vectorized(world, strategy)
    return course


def in_double(scenario: Scenario) -> World:
    """A scenario's world whose examples and model are in double precision."""

    def doubled(split: Split) -> Split:
        split = copy.copy(split)  # a split refuses other types than single precision
        object.__setattr__(split, "inputs", split.inputs.astype(np.float64))
        return split

    world = World(scenario)
    held = world.dataset
    world.dataset = replace(
        held, train=doubled(held.train), validation=doubled(held.validation), test=doubled(held.test)
    )
    world.model.double()
    world._initial = [array.astype(np.float64) for array in world._initial]
    return world


def differences(one: Course, other: Course) -> list[float]:
    """The largest difference of the models after each round."""
    return [
        max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))
        for first, second in zip(one.ended, other.ended, strict=True)
    ]


def partings(expected: Course, found: Course) -> list[tuple[int, float]]:
    """The rounds, from 1, in which others were chosen, each with the gap of the scores at the cut.

    The gap is the most by which a client that ``found`` took is ahead of one that it left to ``expected``. A selector
    that does not take the largest scores (bsfl, whose bounds are latencies; pczfl, whose contexts are fractions of
    examples) compares nothing that rounding moves: its gap is infinite.
    """
    parted = []
    for number, (ours, theirs, scores) in enumerate(zip(found.chosen, expected.chosen, found.scores, strict=True), 1):
        only, missing = np.setdiff1d(ours, theirs), np.setdiff1d(theirs, ours)
        if len(only) + len(missing):
            known = scores is not None and len(only) and len(missing)
            gap = float(scores[only].max() - scores[missing].min()) if known and scores is not None else np.inf
            parted.append((number, gap))
    return parted
