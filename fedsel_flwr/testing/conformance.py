"""What any selector must do, whatever its paper: one function per promise.

Each check takes a factory, ``make(seed=...) -> Selector``; a broken promise raises :class:`AssertionError` that says
what was promised. The fleets grow with ``clients_per_round``, so that some clients are always left out.

What the choice of any selector must be, whoever is there and whoever fails.

What any selector must do with columns: declare what it reads, and bear what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.columns import INFORMED, REPORTED
from fedsel_flwr.selectors.report import RoundReport
from fedsel_flwr.testing.state_conformance import (
    check_foreign_state,
    check_forget,
    check_save_and_load,
    check_spawned_process,
    check_state_is_a_copy,
    check_warm_up,
)
from fedsel_flwr.testing.worlds import (
    SelectorFactory,
    fleet,
    made,
    may_lack,
    play,
    promise,
    promise_finite,
    report_for,
    values_for,
)

MANY = 100_000
"""Clients that any selector takes, unless it says that it takes fewer."""


def check_choice(make: SelectorFactory) -> None:
    """Chosen clients are available, unique and as many as asked for; the input stays as it was."""
    selector = make(seed=1)
    num_clients = fleet(selector, 9)
    for number in range(40):
        world = np.random.default_rng([3, number])
        available = world.permutation(np.flatnonzero(world.uniform(size=num_clients) < 0.6))
        before, expected = available.copy(), selector.expected_count(available.size)
        try:
            chosen = selector.select(available)
        except RunError as error:  # Selector.select looks
            what = "every chosen client is available, and chosen once"
            if "may_exceed_clients_per_round" in str(error):
                what = "no more clients are chosen than clients_per_round says"
            raise AssertionError(f"broken promise: {what}: {error}") from None
        promise(np.array_equal(available, before), "select leaves `available` as it was")
        promise(np.isin(chosen, available).all(), "every chosen client is available")
        promise(np.unique(chosen).size == chosen.size, "no client is chosen twice")
        promise(expected in (None, chosen.size), f"{expected} clients are chosen, as expected_count says")
        promise(chosen.size > 0 or not available.size, "somebody is chosen where somebody is available")
        selector.observe(report_for(selector, chosen, world.uniform(size=chosen.size) < 0.8, world))


def check_input_order(make: SelectorFactory) -> None:
    """The order of ``available`` does not matter."""
    first, second = make(seed=2), make(seed=2)
    for number in range(15):
        available = np.random.default_rng([5, number]).permutation(fleet(first, 8))
        chosen = first.select(available)
        promise(np.array_equal(chosen, second.select(np.sort(available))), "the order of `available` does not matter")
        for selector in (first, second):
            completed = np.ones(chosen.size, dtype=np.bool_)
            selector.observe(report_for(selector, chosen, completed, np.random.default_rng(number)))


def check_determinism(make: SelectorFactory) -> None:
    """Same seed, same choices; the global generator plays no part."""
    np.random.seed(0)  # noqa: NPY002 - to show that the global state is not used
    first = play(make(seed=4), range(40))
    np.random.seed(1)  # noqa: NPY002
    promise(first == play(make(seed=4), range(40)), "the same seed gives the same choices")


def check_growth(make: SelectorFactory) -> None:
    """Clients may appear at any time, by ``available`` or by ``inform``."""
    selector = make(seed=3)
    few, many = fleet(selector, 4), fleet(selector, 12)
    play(selector, range(10), num_clients=few)
    selector.inform(np.array([many - 1]))
    seen = {k for choice in play(selector, range(10, 200), num_clients=many) for k in choice}
    promise(selector.num_clients == many, "newcomers are registered")
    promise(len(seen & set(range(few, many))) > 0, "newcomers get chosen")


def check_empty_and_short(make: SelectorFactory) -> None:
    """With nobody available the choice is empty and the round counts; with few, all go that expected_count promises."""
    selector = make(seed=5)
    promise(selector.select(np.arange(0)).size == 0, "no available client gives an empty choice")
    promise(selector.round == 1, "a round without clients counts")
    nobody = np.empty(0, dtype=np.int64)
    selector.observe(report_for(selector, nobody, np.empty(0, dtype=np.bool_), np.random.default_rng(0)))
    expected = selector.expected_count(2)
    one = selector.clients_per_round == 1 and expected == 1
    try:
        chosen = selector.select(np.array([4, 2])).tolist()
    except RunError as error:  # Selector.select looks
        raise AssertionError(
            f"broken promise: with two available, {'one of them is' if one else 'both are'} chosen: {error}"
        ) from None
    if one:
        promise(chosen in ([2], [4]), "with two available, one of them is chosen")
    else:
        promise(chosen == [2, 4] or (expected is None and set(chosen) < {2, 4}), "with two available, both are chosen")


def check_all_failed(make: SelectorFactory) -> None:
    """Rounds in which everyone fails leave the state finite and the selector working."""
    selector = make(seed=5)
    available = np.arange(fleet(selector, 8))
    for number in range(30):
        world = np.random.default_rng(number)
        chosen = selector.select(available)
        selector.observe(report_for(selector, chosen, np.zeros(chosen.size, dtype=np.bool_), world))
    promise_finite(selector, "when everyone fails")
    promise(selector.select(available).size > 0, "the selector still chooses")


def check_dead_client(make: SelectorFactory) -> None:
    """A client that never answers is not asked for ever, unless the class says so."""
    selector = make(seed=5)
    if selector.asks_failed_for_ever:
        return
    choices = play(selector, range(300), num_clients=fleet(selector, 8), availability=1.0, dead=(0,))
    last = sum(0 in choice for choice in choices[-100:])
    promise(last < 100, f"a dead client is not asked for ever (asked in {last} of the last 100 rounds)")


def check_select_without_observe(make: SelectorFactory) -> None:
    """``select`` may be called again without an ``observe`` between."""
    selector = make(seed=5)
    num_clients = fleet(selector, 8)
    for number in range(5):
        expected, chosen = selector.expected_count(num_clients), selector.select(np.arange(num_clients))
        promise(expected in (None, chosen.size), "select works without an observe between")
        promise(selector.round == number + 1, "each select is a round")


def check_bad_input(make: SelectorFactory) -> None:
    """Impossible availability is refused with :class:`ParameterError` and changes nothing."""
    selector, twin = make(seed=5), make(seed=5)
    for bad in (np.array([1, 1]), np.array([-1, 2]), np.array([0.5]), np.array([[1, 2]]), np.array([True, False])):
        try:
            selector.select(bad)
        except ParameterError:
            continue
        promise(False, f"available = {bad.tolist()} is refused with ParameterError")
    promise(play(selector, range(10)) == play(twin, range(10)), "refused input changes nothing")


def check_many_clients(make: SelectorFactory) -> None:
    """A hundred thousand clients fit; where a selector has ``max_clients``, as many, and one more is refused."""
    selector = make(seed=5)
    most = int(getattr(selector, "max_clients", MANY))
    if most < MANY:
        try:
            make(seed=5).select(np.arange(most + 1))
            promise(False, f"more than max_clients = {most} clients are refused with ParameterError")
        except ParameterError as error:
            promise("max_clients" in str(error), f"the refusal names max_clients, got {error}")
    fleet = min(most, MANY)
    for number in range(3):
        chosen = selector.select(np.arange(fleet))
        completed = np.ones(chosen.size, dtype=np.bool_)
        selector.observe(report_for(selector, chosen, completed, np.random.default_rng(number)))
    promise(selector.num_clients == fleet, f"{fleet} clients are registered")


ALWAYS = frozenset({"clients", "completed", "latency"})
"""What every report has, whatever ``needs`` says."""


class WatchedReport(RoundReport):
    """A report that notes which of its columns are read."""

    def __getattribute__(self, name: str) -> Any:
        noted = object.__getattribute__(self, "__dict__").get("noted")
        if noted is not None and not name.startswith("_"):
            noted.add(name)
        return object.__getattribute__(self, name)


def columns_read(selector: Selector, report: RoundReport) -> set[str]:
    """Let the selector observe the report and return the columns that its ``_observe`` read."""
    watched = WatchedReport(**{field.name: getattr(report, field.name) for field in fields(report)})
    noted: set[str] = set()
    observe: Callable[[RoundReport], None] = selector._observe

    def watch(given: RoundReport) -> None:
        object.__setattr__(given, "noted", noted)  # from here on: what comes before is Selector.observe's own reading
        observe(given)

    vars(selector)["_observe"] = watch
    try:
        selector.observe(watched)
    finally:
        del vars(selector)["_observe"]
    return noted & REPORTED


def check_needs(make: SelectorFactory) -> None:
    """A column in ``needs`` is read, and a column that is read is in ``needs``."""
    selector, read = make(seed=5), set[str]()
    available = np.arange(fleet(selector, 8))
    for number in range(60):
        world = np.random.default_rng([9, number])
        chosen = selector.select(available)
        completed = world.uniform(size=chosen.size) < 0.85
        read |= columns_read(selector, report_for(selector, chosen, completed, world, columns=REPORTED))
        undeclared = sorted(read - selector.needs - ALWAYS)
        promise(not undeclared, f"what is read of a report is in needs: add {', '.join(undeclared)}")
    unread = sorted(selector.needs - read)
    promise(not unread, f"what is in needs is read in some of 60 rounds: leave out {', '.join(unread)}")


def check_missing_values(make: SelectorFactory) -> None:
    """Clients that lack a column which they may lack, and side information that is NaN, leave the state finite."""
    selector = make(seed=5)
    available = np.arange(fleet(selector, 8))
    for number in range(40):
        world = np.random.default_rng([11, number])
        clients = world.permutation(available)[: fleet(selector, 3)]
        told = {name: values_for(name, clients.size, world) for name in sorted(INFORMED)}
        for value in told.values():
            value[world.uniform(size=clients.size) < 0.5] = np.nan
        selector.inform(clients, **told)
        chosen = selector.select(available)
        completed = world.uniform(size=chosen.size) < 0.85
        selector.observe(report_for(selector, chosen, completed, world, missing=0.5, spares=0.2))
        lacking = f"columns that a client may lack ({', '.join(sorted(may_lack(selector))) or 'none here'})"
        promise_finite(selector, f"where {lacking} or side information are NaN")
    promise(selector.select(available).size > 0, "the selector still chooses where values are missing")


CHECKS: tuple[Callable[[SelectorFactory], None], ...] = (
    check_choice,
    check_input_order,
    check_determinism,
    check_spawned_process,
    check_save_and_load,
    check_state_is_a_copy,
    check_foreign_state,
    check_forget,
    check_needs,
    check_missing_values,
    check_growth,
    check_empty_and_short,
    check_all_failed,
    check_dead_client,
    check_select_without_observe,
    check_bad_input,
    check_many_clients,
    check_warm_up,
)
"""Every check, for ``pytest.mark.parametrize``."""


def check_selector(make: SelectorFactory) -> None:
    """Run every check.

    It may be called from a module, a script, a session or a notebook; the check in another process, where it cannot be
    made, is left out with a warning that says why. :func:`fedsel_flwr.testing.check_stateful` looks further.

    Args:
        make: Called as ``make(seed=...)``; returns a selector whose ``clients_per_round`` is 1 to 100 or None.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ParameterError: ``make`` cannot be called so, or builds a selector of another number of clients a round.

    >>> from functools import partial
    >>> from fedsel_flwr.selectors import RoundRobin
    >>> check_selector(partial(RoundRobin, clients_per_round=3))
    """
    made(make)
    for check in CHECKS:
        check(make)
