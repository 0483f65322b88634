"""What any selector must do, whatever its paper: one function per promise.

Each check takes a factory, ``make(seed=...) -> Selector`` with ``clients_per_round=3``; a factory that can be
pickled (a class, a ``functools.partial``) is needed for the check in a spawned process. A broken promise raises
:class:`AssertionError` that says what was promised.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol

import numpy as np

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.columns import FLAGS, SCALARS, VECTORS
from fedsel_flwr.selectors.report import RoundReport


class SelectorFactory(Protocol):
    """Builds the selector under test with ``clients_per_round=3``."""

    def __call__(self, *, seed: int | None = None) -> Selector:
        """Return a new selector that draws from ``seed``."""


MAX_LATENCY = 5.0
"""Seconds reported for failed clients in every check."""


def report_for(selector: Selector, chosen: IntArray, completed: BoolArray, world: np.random.Generator) -> RoundReport:
    """Return a plausible report with every column that ``selector`` needs."""
    latency = np.where(completed, world.uniform(0.1, 1.0, chosen.size) * (1 + chosen % 7), MAX_LATENCY)
    columns: dict[str, Any] = {}
    for name in sorted(selector.needs - {"latency"}):
        if name in SCALARS:
            columns[name] = float(world.uniform())
        elif name in FLAGS:
            columns[name] = completed & (world.uniform(size=chosen.size) < 0.7)
        else:
            value = world.uniform(size=_shape(name, chosen.size))
            value[~completed] = np.nan
            columns[name] = value
    return RoundReport(clients=chosen, completed=completed, latency=latency, **columns)


def play(
    selector: Selector,
    rounds: Iterable[int],
    *,
    num_clients: int = 10,
    availability: float = 0.8,
    dead: tuple[int, ...] = (),
) -> list[list[int]]:
    """Run rounds in a small random world and return the choices; each round's world depends on its number alone."""
    choices = []
    for number in rounds:
        world = np.random.default_rng([7, number])
        available = np.flatnonzero(world.uniform(size=num_clients) < availability)
        request = selector.probe(available)
        if request is not None:
            answers = {name: world.uniform(size=_shape(name, request.clients.size)) for name in request.columns}
            selector.inform(request.clients, **answers)
        chosen = selector.select(available)
        completed = (world.uniform(size=chosen.size) < 0.85) & ~np.isin(chosen, dead)
        selector.observe(report_for(selector, chosen, completed, world))
        choices.append(chosen.tolist())
    return choices


def check_choice(make: SelectorFactory) -> None:
    """Chosen clients are available, unique and as many as asked for; the input stays as it was."""
    selector = make(seed=1)
    for number in range(40):
        world = np.random.default_rng([3, number])
        available = world.permutation(np.flatnonzero(world.uniform(size=9) < 0.6))
        before, expected = available.copy(), selector.expected_count(available.size)
        try:
            chosen = selector.select(available)
        except RunError as error:  # Selector.select looks
            raise AssertionError(
                f"broken promise: every chosen client is available, and chosen once: {error}"
            ) from None
        _promise(np.array_equal(available, before), "select leaves `available` as it was")
        _promise(np.isin(chosen, available).all(), "every chosen client is available")
        _promise(np.unique(chosen).size == chosen.size, "no client is chosen twice")
        _promise(expected in (None, chosen.size), f"{expected} clients are chosen, as expected_count says")
        _promise(chosen.size > 0 or not available.size, "somebody is chosen where somebody is available")
        selector.observe(report_for(selector, chosen, world.uniform(size=chosen.size) < 0.8, world))


def check_input_order(make: SelectorFactory) -> None:
    """The order of ``available`` does not matter."""
    first, second = make(seed=2), make(seed=2)
    for number in range(15):
        available = np.random.default_rng([5, number]).permutation(8)
        chosen = first.select(available)
        _promise(np.array_equal(chosen, second.select(np.sort(available))), "the order of `available` does not matter")
        for selector in (first, second):
            completed = np.ones(chosen.size, dtype=np.bool_)
            selector.observe(report_for(selector, chosen, completed, np.random.default_rng(number)))


def check_determinism(make: SelectorFactory) -> None:
    """Same seed, same choices; the global generator plays no part."""
    np.random.seed(0)  # noqa: NPY002 - to show that the global state is not used
    first = play(make(seed=4), range(40))
    np.random.seed(1)  # noqa: NPY002
    _promise(first == play(make(seed=4), range(40)), "the same seed gives the same choices")


def check_spawned_process(make: SelectorFactory) -> None:
    """Same seed, same choices in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        other = pool.submit(_play_from_seed, make, 4).result()
    _promise(other == play(make(seed=4), range(30)), "the same seed gives the same choices in another process")


def check_save_and_load(make: SelectorFactory) -> None:
    """Save, load into a fresh selector and continue equals never stopping."""
    straight = make(seed=6)
    play(straight, range(17))
    resumed = make(seed=99)
    resumed.load_state_dict(straight.state_dict())
    _promise(
        play(resumed, range(17, 60)) == play(straight, range(17, 60)),
        "save, load, continue equals never stopping: "
        "what is kept for each client belongs into client_state, other numbers into scalar_state",
    )
    for key, value in straight.state_dict().items():
        _promise(np.ndim(value) <= 2 and np.asarray(value).dtype.kind in "biuf", f"state {key!r} is a number or array")


def check_state_is_a_copy(make: SelectorFactory) -> None:
    """A saved state does not change as the selector goes on."""
    selector = make(seed=6)
    play(selector, range(5))
    state = selector.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    play(selector, range(5, 10))
    _promise(all(np.array_equal(before[k], state[k], equal_nan=True) for k in state), "a saved state does not change")


def check_foreign_state(make: SelectorFactory) -> None:
    """A state that does not fit is refused, and the selector goes on as it was."""
    selector, twin = make(seed=8), make(seed=8)
    play(selector, range(5))
    play(twin, range(5))
    state = selector.state_dict()
    for foreign in ({}, state | {"surprise": 1}, state | {"registered": np.ones((2, 2), dtype=np.bool_)}):
        try:
            selector.load_state_dict(foreign)
        except StateError:
            continue
        _promise(False, f"a state with keys {sorted(foreign)} is refused with StateError")
    _promise(play(selector, range(5, 15)) == play(twin, range(5, 15)), "a refused state changes nothing")


def check_growth(make: SelectorFactory) -> None:
    """Clients may appear at any time, by ``available`` or by ``inform``."""
    selector = make(seed=3)
    play(selector, range(10), num_clients=4)
    selector.inform(np.array([11]))
    seen = {k for choice in play(selector, range(10, 200), num_clients=12) for k in choice}
    _promise(selector.num_clients == 12, "newcomers are registered")
    _promise(len(seen & set(range(4, 12))) > 0, "newcomers get chosen")


def check_empty_and_short(make: SelectorFactory) -> None:
    """With nobody available the choice is empty and the round counts; with few, all go that expected_count promises."""
    selector = make(seed=5)
    _promise(selector.select(np.arange(0)).size == 0, "no available client gives an empty choice")
    _promise(selector.round == 1, "a round without clients counts")
    selector.observe(RoundReport(clients=[], completed=[], latency=[], **_empty_columns(selector)))  # type: ignore[arg-type]
    expected, chosen = selector.expected_count(2), selector.select(np.array([4, 2])).tolist()
    _promise(chosen == [2, 4] or (expected is None and set(chosen) < {2, 4}), "with two available, both are chosen")


def check_all_failed(make: SelectorFactory) -> None:
    """Rounds in which everyone fails leave the state finite and the selector working."""
    selector = make(seed=5)
    for number in range(30):
        world = np.random.default_rng(number)
        chosen = selector.select(np.arange(8))
        selector.observe(report_for(selector, chosen, np.zeros(chosen.size, dtype=np.bool_), world))
    for key, value in selector.state_dict().items():
        _promise(bool(np.isfinite(value).all()), f"state {key!r} stays finite when everyone fails")
    _promise(selector.select(np.arange(8)).size > 0, "the selector still chooses")


def check_dead_client(make: SelectorFactory) -> None:
    """A client that never answers is not asked for ever, unless the class says so."""
    if make(seed=5).asks_failed_for_ever:
        return
    choices = play(make(seed=5), range(300), num_clients=8, availability=1.0, dead=(0,))
    last = sum(0 in choice for choice in choices[-100:])
    _promise(last < 100, f"a dead client is not asked for ever (asked in {last} of the last 100 rounds)")


def check_select_without_observe(make: SelectorFactory) -> None:
    """``select`` may be called again without an ``observe`` between."""
    selector = make(seed=5)
    for number in range(5):
        expected = selector.expected_count(8)
        _promise(expected in (None, selector.select(np.arange(8)).size), "select works without an observe between")
        _promise(selector.round == number + 1, "each select is a round")


def check_bad_input(make: SelectorFactory) -> None:
    """Impossible availability is refused with :class:`ParameterError` and changes nothing."""
    selector, twin = make(seed=5), make(seed=5)
    for bad in (np.array([1, 1]), np.array([-1, 2]), np.array([0.5]), np.array([[1, 2]]), np.array([True, False])):
        try:
            selector.select(bad)
        except ParameterError:
            continue
        _promise(False, f"available = {bad.tolist()} is refused with ParameterError")
    _promise(play(selector, range(10)) == play(twin, range(10)), "refused input changes nothing")


def check_many_clients(make: SelectorFactory) -> None:
    """A hundred thousand clients fit."""
    selector = make(seed=5)
    for number in range(3):
        chosen = selector.select(np.arange(100_000))
        completed = np.ones(chosen.size, dtype=np.bool_)
        selector.observe(report_for(selector, chosen, completed, np.random.default_rng(number)))
    _promise(selector.num_clients == 100_000, "a hundred thousand clients are registered")


CHECKS: tuple[Callable[[SelectorFactory], None], ...] = (
    check_choice,
    check_input_order,
    check_determinism,
    check_spawned_process,
    check_save_and_load,
    check_state_is_a_copy,
    check_foreign_state,
    check_growth,
    check_empty_and_short,
    check_all_failed,
    check_dead_client,
    check_select_without_observe,
    check_bad_input,
    check_many_clients,
)
"""Every check, for ``pytest.mark.parametrize``."""


def check_selector(make: SelectorFactory) -> None:
    """Run every check.

    Args:
        make: Called as ``make(seed=...)``; returns a selector with ``clients_per_round=3``.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ParameterError: ``make`` cannot be called so.

    >>> from functools import partial
    >>> from fedsel_flwr.selectors import RoundRobin
    >>> check_selector(partial(RoundRobin, clients_per_round=3))
    """
    try:
        make(seed=1)
    except TypeError as error:
        raise ParameterError(
            f"make(seed=1) must build a selector of three clients, but: {error}; "
            "use functools.partial(MySelector, clients_per_round=3)"
        ) from error
    for check in CHECKS:
        check(make)


def _promise(kept: bool | np.bool_, promise: str) -> None:
    if not kept:
        raise AssertionError(f"broken promise: {promise}")


def _play_from_seed(make: SelectorFactory, seed: int) -> list[list[int]]:
    return play(make(seed=seed), range(30))


def _shape(name: str, num_rows: int) -> tuple[int, ...]:
    return (num_rows, 4) if name in VECTORS else (num_rows,)


def _empty_columns(selector: Selector) -> dict[str, object]:
    world = np.random.default_rng(0)
    report = report_for(selector, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_), world)
    return {name: getattr(report, name) for name in selector.needs - {"latency"}}
