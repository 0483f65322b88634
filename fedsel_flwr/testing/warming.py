"""What any selector must do in a warm-up that all selectors share, and after it."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.testing.worlds import SelectorFactory, fleet, not_finite, play, promise, report_for, unlike, values_for

ROUNDS = 4
"""Rounds of the warm-up."""


def check_warm_up(make: SelectorFactory) -> None:
    """In a common warm-up everybody is asked, without probes; the selector learns, can be saved, and goes on."""
    selector, blind = warm(make, seed=6), warm(make, seed=6)
    num_clients = fleet(selector, 9)
    for number in range(ROUNDS):
        world = np.random.default_rng([13, number])
        available = world.permutation(np.flatnonzero(world.uniform(size=num_clients) < 0.8))
        chosen = _joined(selector, available)
        blind.select(available)
        completed = world.uniform(size=chosen.size) < 0.8
        selector.observe(report_for(selector, chosen, completed, world, missing=0.2))
        resumed = warm(make, seed=99)
        resumed.load_state_dict(selector.state_dict())
        same = not unlike(resumed.state_dict(), selector.state_dict())
        promise(same, "a state saved in the warm-up comes back with its numbers, shape and type")
        if number == 1:
            selector = resumed
    learned = bool(unlike(selector.state_dict(), blind.state_dict()))
    promise(
        learned or not selector.needs,
        "a selector learns from the reports of the warm-up: _select is not called there, so what _observe wants of the "
        "choice belongs into _join(available)",
    )
    key = not_finite(selector)
    promise(not key, f"state {key!r} is finite after the warm-up")
    _goes_on(make, selector)


def warm(make: SelectorFactory, *, seed: int, rounds: int = ROUNDS) -> Selector:
    """A selector before a common warm-up."""
    selector = make(seed=seed)
    selector.common_warmup = rounds
    return selector


def _joined(selector: Selector, available: IntArray) -> IntArray:
    """The choice of a round of the warm-up."""
    request = selector.probe(available)
    promise(request is None, "nobody is probed in the warm-up: there is nothing to choose")
    expected = selector.expected_count(available.size)
    chosen = selector.select(available)
    everybody = np.array_equal(chosen, np.sort(available))
    promise(everybody, f"in the warm-up everybody available is chosen, {np.sort(available)}, not {chosen}")
    promise(expected in (None, chosen.size), f"{expected} clients are chosen, as expected_count says")
    promise(np.array_equal(selector.draws(chosen), np.ones(chosen.size)), "in the warm-up each client is drawn once")
    return chosen


def _goes_on(make: SelectorFactory, selector: Selector) -> None:
    """After the warm-up the selector chooses again, and newcomers can be chosen; with saving as without."""
    other = warm(make, seed=11)
    other.load_state_dict(selector.state_dict())
    available = np.arange(fleet(selector, 12))
    for number in range(ROUNDS, 30):
        world = np.random.default_rng([13, number])
        request, twin = selector.probe(available), other.probe(available)
        promise((request is None) == (twin is None), "a loaded selector probes as one that never stopped")
        if request is not None:
            told = {name: values_for(name, request.clients.size, world) for name in request.columns}
            selector.inform(request.clients, **told)
            other.inform(request.clients, **told)
        expected = selector.expected_count(available.size)
        chosen = selector.select(available)
        promise(expected in (None, chosen.size), f"after the warm-up {expected} clients are chosen, as expected")
        promise(np.array_equal(chosen, other.select(available)), "a loaded selector chooses as one that never stopped")
        report = report_for(selector, chosen, world.uniform(size=chosen.size) < 0.85, world)
        selector.observe(report)
        other.observe(report)
    key = not_finite(selector)
    promise(not key, f"state {key!r} is finite long after the warm-up")
    long = warm(make, seed=4, rounds=30)
    choices = play(long, range(60))
    promise(all(len(choice) >= 1 for choice in choices[30:]), "somebody is chosen after a long warm-up")
