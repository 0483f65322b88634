"""Active FL against a round by hand and the chances of its sets by enumeration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors.active_fl import ActiveFL
from tests.selectors import rounds
from tests.selectors.oracle_draws import Chances, drawn_one_by_one, frequencies, p_value, then_uniformly

build = partial(ActiveFL, clients_per_round=2, seed=0)


def chances(value: Mapping[int, float], m: int, a1: float, a2: float, a3: float) -> Chances:
    """The definition: drop the lowest, draw by exp(a2 v), fill up uniformly; in exact fractions of the arguments."""
    ranked = sorted(value, key=lambda k: value[k])
    kept = ranked[math.floor(round(a1 * len(value), 6)) :]
    top = max(value[k] for k in kept) if kept else 0.0
    weights = {k: math.exp(a2 * (value[k] - top)) for k in kept}
    first = drawn_one_by_one(weights, min(len(kept), math.floor(round((1 - a3) * m, 6))))
    return then_uniformly(first, value, m)


def informed(losses: Mapping[int, float], sizes: Mapping[int, float], **parameters: Any) -> ActiveFL:
    selector, clients = build(**parameters), sorted(losses)
    selector.inform(np.array(clients), num_examples=np.array([sizes[k] for k in clients]))
    assert rounds.answer(selector, clients, losses) == clients
    return selector


def test_a_round_by_hand() -> None:
    """Four clients, m = 2, alpha = (.5, 1, .5): the lowest 2 are dropped, floor(.5 * 2) = 1 is drawn by value.

    n = (4, 9, 1, 16), loss = (1, .5, 2.5, .25): v = sqrt(n) loss = (2, 1.5, 2.5, 1). Left: 0 and 2.
    P(2 first) = e^2.5/(e^2 + e^2.5) = .6225; then one of the three others, each 1/3.
    {1, 3} has no chance; {0, 2} has .6225/3 + .3775/3 = 1/3; {1, 2} has .6225/3 = .2075.
    """
    selector = informed(
        {0: 1.0, 1: 0.5, 2: 2.5, 3: 0.25}, {0: 4, 1: 9, 2: 1, 3: 16}, dropped=0.5, temperature=1.0, uniform=0.5
    )
    counts = frequencies(lambda: selector.select(np.arange(4)).tolist(), 1000)
    by_hand = {(0, 2): 1 / 3, (1, 2): 0.2075, (2, 3): 0.2075, (0, 1): 0.1258, (0, 3): 0.1258}
    assert p_value(counts, {frozenset(members): chance for members, chance in by_hand.items()}) > 1e-3


@pytest.mark.parametrize(
    ("available", "m", "a1", "a2", "a3"),
    [
        (range(7), 2, 0.75, 0.01, 0.1), (range(7), 3, 0.5, 2.0, 0.4), (range(7), 4, 0.25, 0.5, 0.25),
        (range(7), 3, 0.0, 1.0, 0.0), (range(7), 2, 1.0, 1.0, 0.0), ([1, 2, 4, 6], 2, 0.5, 1.0, 0.5),
    ],
)  # fmt: skip
def test_the_draws_follow_the_formula(available: Sequence[int], m: int, a1: float, a2: float, a3: float) -> None:
    """Seven clients; every set as often as the definition says. The lowest are dropped of those that are there."""
    sizes = {k: float(5 + 3 * k) for k in range(7)}
    losses = {0: 0.9, 1: 0.2, 2: 1.4, 3: 0.6, 4: 0.45, 5: 0.1, 6: 0.3}
    value = {k: math.sqrt(sizes[k]) * losses[k] for k in available}
    selector = informed(losses, sizes, clients_per_round=m, dropped=a1, temperature=a2, uniform=a3)
    counts = frequencies(lambda: selector.select(np.array(available)).tolist(), 1000)
    assert p_value(counts, chances(value, m, a1, a2, a3)) > 1e-3


def test_a_round_with_the_utility_by_hand() -> None:
    """Four clients, m = 2, alpha = (.5, 10, .5), weight .5: the lowest 2 are dropped, 1 is drawn by utility.

    Initial accuracy .1, energy scores .9, .5, .7, .3: v = (.5, .3, .4, .2). Left: 0 and 2, and with the factor
    sqrt(n) = (2, 3, 1, 4) it would be 0 and 1. P(0 first) = e^5/(e^5 + e^4) = .7311; then one of three, each 1/3.
    {1, 3} has no chance; {0, 2} has .7311/3 + .2689/3 = 1/3; {0, 1} has .7311/3 = .2437; {1, 2} has .0896.
    """
    selector = build(dropped=0.5, temperature=10.0, uniform=0.5, accuracy_weight=0.5)
    everybody = np.arange(4)
    selector.inform(everybody, num_examples=np.array([4.0, 9.0, 1.0, 16.0]), loss=np.array([0.0, 9.0, 0.0, 9.0]))
    selector.inform(everybody, energy_score=np.array([0.9, 0.5, 0.7, 0.3]), accuracy=np.full(4, 0.1))
    assert selector.probe(everybody) is None
    counts = frequencies(lambda: selector.select(everybody).tolist(), 1000)
    by_hand = {(0, 2): 1 / 3, (0, 1): 0.2437, (0, 3): 0.2437, (1, 2): 0.0896, (2, 3): 0.0896}
    assert p_value(counts, {frozenset(members): chance for members, chance in by_hand.items()}) > 1e-3


def test_utilities_are_those_of_the_last_completed_round() -> None:
    """Weight .25, energy score .4 for all, initial accuracies .2, .4, .6: .35, .4, .45; m = 1, the largest wins.

    2 reports accuracy .1 and score .4: .325. 1 (.4) fails once and keeps it, so 1 again; it fails again and has no
    valuation; 0 (.35) reports .5 and score .1: .2. 2 (.325) reports .0 and .0: 0. Now 0 (.2), which reports 0, .2: .15.
    Now 0 again (.15 against 0 of 2 and nothing of 1). Alone in the round, 1 reports .2, .4: .35, and is back.
    """
    selector = build(clients_per_round=1, dropped=0.0, temperature=1e6, uniform=0.0, accuracy_weight=0.25)
    assert selector.needs == {"accuracy", "energy_score", "spare"}
    selector.inform(np.arange(3), energy_score=np.full(3, 0.4), accuracy=np.array([0.2, 0.4, 0.6]))
    story: list[tuple[int, tuple[float, float] | None]] = [
        (2, (0.1, 0.4)), (1, None), (1, None), (0, (0.5, 0.1)), (2, (0.0, 0.0)), (0, (0.0, 0.2)), (0, (0.0, 0.2)),
    ]  # fmt: skip
    for expected, said in story:
        told = {} if said is None else {"accuracy": {expected: said[0]}, "energy_score": {expected: said[1]}}
        absent = {"accuracy": np.full(1, np.nan), "energy_score": np.full(1, np.nan)} if said is None else {}
        assert rounds.play(selector, range(3), failed=() if said else (expected,), **told, **absent) == [expected]
    assert rounds.play(selector, [1], accuracy={1: 0.2}, energy_score={1: 0.4}) == [1]
    np.testing.assert_allclose(selector._valuations(), [0.15, 0.35, 0.0], atol=1e-12)
    assert selector.select(np.arange(3)).tolist() == [1]


def test_a_spare_keeps_its_utility() -> None:
    """The server measures no accuracy of a spare, which may report a score; one that answered has not failed."""
    selector = build(accuracy_weight=0.5)
    selector.inform(np.arange(2), energy_score=np.full(2, 0.6), accuracy=np.full(2, 0.2))
    selector.observe(
        rounds.report([0, 1], accuracy={0: 0.4}, energy_score={0: 0.6, 1: 0.9}, spare=np.array([False, True]))
    )  # fmt: skip
    np.testing.assert_allclose(selector._valuations(), [0.5, 0.4])


def test_everybody_is_asked_once_and_newcomers_when_they_come() -> None:
    selector = build()
    assert rounds.answer(selector, range(4), {0: 1.0, 2: 1.0, 3: 1.0}) == [0, 1, 2, 3]
    selector.select(np.arange(4))
    assert selector.probe(np.arange(4)) is None  # client 1 did not answer, and is not asked again
    second = selector.probe(np.arange(6))
    assert second is not None
    assert (second.clients.tolist(), second.columns) == ([4, 5], ("loss",))


def test_valuations_are_refreshed_with_the_loss_before_training() -> None:
    """Losses (1, 2, 3), all sizes 1, m = 1, greedy by temperature: the value told last is the one that counts.

    Client 2 is chosen (3) and reports .5; then 1 (2), which fails once and keeps its valuation, so 1 again; it fails
    again and loses it; then 0 (1); client 0 completes without a loss and keeps 1, so 0 again; 2 is next when 0 reports
    .1.
    """
    selector = informed(
        {0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 1.0), clients_per_round=1, dropped=0.0, temperature=500.0,
        uniform=0.0,
    )  # fmt: skip
    story = [
        (2, True, 0.5), (1, False, np.nan), (1, False, np.nan), (0, True, np.nan), (0, True, 0.1), (2, True, 0.3),
        (2, True, 0.0),
    ]  # fmt: skip
    for expected, completed, loss in story:
        failed = () if completed else (expected,)
        assert rounds.play(selector, range(3), failed=failed, loss={expected: loss}) == [expected]
    assert selector.select(np.arange(3)).tolist() == [0]
