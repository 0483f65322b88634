"""Checks of the promises of every selector, one check per promise.

A check takes a factory, ``make(seed=...) -> Selector``. It raises :class:`AssertionError` with the broken promise. The
number of clients grows with ``clients_per_round``, so that every round leaves some clients out.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.columns import INFORMED, REPORTED
from fedsel_flwr.selectors.round_report import RoundReport
from fedsel_flwr.selectors.selector_state import state_key
from fedsel_flwr.testing.random_rounds import (
    SelectorFactory,
    build_selector,
    choose,
    differing_key,
    fleet_size,
    loaded,
    optional_columns,
    play,
    promise,
    promise_as_new,
    promise_finite,
    promise_forgotten,
    promise_refused,
    report_for,
    side_information,
)

MANY = 100_000
"""Number of clients that a selector must accept, unless its ``max_clients`` is smaller."""


def check_choice(make: SelectorFactory) -> None:
    """Check that chosen clients are available, unique and of the right number, and that the input is unchanged."""
    selector = make(seed=1)
    play(selector, range(40), num_clients=fleet_size(selector, 9), availability=0.6, shuffled=True)


def check_input_order(make: SelectorFactory) -> None:
    """Check that the choice does not depend on the order of ``available``."""
    shuffled = play(make(seed=2), range(15), shuffled=True)
    promise(shuffled == play(make(seed=2), range(15)), "the order of `available` does not matter")


def check_determinism(make: SelectorFactory) -> None:
    """Check that the same seed gives the same selections, for any state of NumPy's global generator."""
    # The two plays start from different global states, so a selector that draws from them is detected.
    np.random.seed(0)  # noqa: NPY002
    first = play(make(seed=4), range(40))
    np.random.seed(1)  # noqa: NPY002
    promise(first == play(make(seed=4), range(40)), "the same seed gives the same selections")


SEED, SPAWNED_ROUNDS = 4, 30
CHILD = "FEDSEL_TESTING_CHILD"
"""Variable of the child's environment. If an imported module calls the suite there, no further child starts."""


def check_spawned_process(make: SelectorFactory) -> None:
    """Check that the same seed gives the same selections in a new process, where sets have another order.

    The factory is pickled. The check is left out with a warning if the other process cannot import the factory. This
    holds for a lambda, and for a factory defined in a notebook, in a session or in the script that is run.
    """
    if CHILD in os.environ:
        return
    try:
        factory = pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return _left_out(f"the factory cannot be pickled ({error}); give a class or a functools.partial of one")
    if b"__main__" in factory:
        return _left_out("the selector is defined in a session or in the script that is run. Move it into a module")
    # With another PYTHONHASHSEED sets have another order. multiprocessing cannot set it.
    done = subprocess.run(
        [sys.executable, "-c", "from fedsel_flwr.testing.conformance import play_in_child; play_in_child()"],
        input=pickle.dumps((sys.path, factory)),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "4242", CHILD: "1"},
        timeout=300,
        check=False,
    )
    said = done.stdout.decode(errors="replace").strip().splitlines()
    promise(
        done.returncode == 0 and bool(said),
        f"the selector can be played in another process, but that one ended with {done.returncode}: "
        f"{done.stderr.decode(errors='replace')[-2000:]}",
    )
    choices, cause = json.loads(said[-1])
    if cause:
        return _left_out(f"the other process cannot import the factory ({cause})")
    here = play(make(seed=SEED), range(SPAWNED_ROUNDS))
    promise(choices == here, "the same seed gives the same selections in another process")


def play_in_child() -> None:
    """Play the factory pickled on standard input in the child, and print the choices and an error as JSON."""
    sys.path[:], factory = pickle.load(sys.stdin.buffer)
    choices, cause = list[list[int]](), ""
    try:
        make: SelectorFactory = pickle.loads(factory)
    except (ImportError, AttributeError) as error:
        cause = str(error) or type(error).__name__
    else:
        choices = play(make(seed=SEED), range(SPAWNED_ROUNDS))
    # On the last line, because the author's code may print too.
    print("\n" + json.dumps([choices, cause]))


def _left_out(why: str) -> None:
    warnings.warn(f"check_spawned_process was left out: {why}", stacklevel=3)


def check_save_and_load(make: SelectorFactory) -> None:
    """Check that a selector, saved, loaded and continued, makes the choices of one that never stopped."""
    straight = make(seed=6)
    play(straight, range(17))
    promise_finite(straight, "when clients fail")
    resumed = loaded(make, straight.state_dict(), seed=99)
    key = differing_key(resumed.state_dict(), straight.state_dict())
    promise(not key, f"state {key!r} comes back with its numbers, shape and type")
    promise(
        play(resumed, range(17, 60)) == play(straight, range(17, 60)),
        "save, load, continue equals never stopping. Declare what is kept for each client in client_state, other "
        "numbers in scalar_state",
    )
    for key, value in straight.state_dict().items():
        promise(np.asarray(value).dtype.kind in "biuf", f"state {key!r} is a number or an array of numbers")


def check_state_is_a_copy(make: SelectorFactory) -> None:
    """Check that a saved state does not change in later rounds."""
    selector = make(seed=6)
    play(selector, range(5))
    state = selector.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    play(selector, range(5, 10))
    promise(all(np.array_equal(before[k], state[k], equal_nan=True) for k in state), "a saved state does not change")


def check_foreign_state(make: SelectorFactory) -> None:
    """Check that an unsuitable state raises :class:`StateError` and changes nothing."""
    selector, twin = make(seed=8), make(seed=8)
    play(selector, range(5))
    play(twin, range(5))
    state = selector.state_dict()
    for foreign in ({}, state | {"surprise": 1}, state | {"registered": np.ones((2, 2), dtype=np.bool_)}):
        words = f"a state with keys {sorted(foreign)} is"
        promise_refused(StateError, partial(selector.load_state_dict, foreign), words)
    promise(play(selector, range(5, 15)) == play(twin, range(5, 15)), "a refused state changes nothing")


def check_forget(make: SelectorFactory) -> None:
    """Check that a row reused for a new client contains nothing of the former client."""
    selector, gone = make(seed=7), np.array([1, 4])
    num_clients = fleet_size(selector, 6)
    play(selector, range(25), num_clients=num_clients)
    clients = selector.num_clients
    before = selector.state_dict()
    selector.forget(np.array([4, 1, num_clients + 93]))
    promise(selector.num_clients == clients - 2, "a forgotten client is not registered, an unknown one is ignored")
    state = selector.state_dict()
    for attribute, value in selector.client_state.items():
        promise_forgotten(attribute, before[state_key(attribute)], state[state_key(attribute)], gone, value)
    # These load only the declared state, so they know nothing else about the forgotten clients.
    reloaded, again, fresh = (loaded(make, state, seed=8) for _ in range(3))
    newcomers = np.array([num_clients, num_clients + 1])
    again.inform(gone)
    fresh.inform(newcomers)
    # With parameters by client, the rows of two new clients differ by index.
    if not any(getattr(selector, name, None) is not None for name in selector.by_client):
        for key in map(state_key, selector.client_state):
            old, new = again.state_dict()[key], fresh.state_dict()[key]
            promise_as_new(old[gone], new[newcomers], "a reused row is as new")
    promise(
        play(selector, range(25, 60), num_clients=num_clients)
        == play(reloaded, range(25, 60), num_clients=num_clients),
        "a forgotten client counts as a new client. Declare what is kept for each client in client_state",
    )


UNDECLARED_COLUMNS = frozenset({"clients", "completed", "latency"})
"""Columns of every report. ``needs`` does not have to name them."""


class RecordingReport(RoundReport):
    """A report that records in its attribute ``reads``, if set, which columns are read."""

    def __getattribute__(self, name: str) -> Any:
        reads = object.__getattribute__(self, "__dict__").get("reads")
        if reads is not None and not name.startswith("_"):
            reads.add(name)
        return object.__getattribute__(self, name)


def check_needs(make: SelectorFactory) -> None:
    """Check that a selector reads exactly the columns in ``needs``."""
    selector, read = make(seed=5), set[str]()
    observe: Callable[[RoundReport], None] = selector._observe

    # Replaces _observe, not observe, because the checks in Selector.observe read columns too.
    def recorded(given: RoundReport) -> None:
        report = RecordingReport(**{field.name: getattr(given, field.name) for field in fields(given)})
        object.__setattr__(report, "reads", read)
        observe(report)

    vars(selector)["_observe"] = recorded
    play(selector, range(60), num_clients=fleet_size(selector, 8), availability=1.0, columns=REPORTED)
    undeclared = sorted((read & REPORTED) - selector.needs - UNDECLARED_COLUMNS)
    promise(not undeclared, f"columns that are read are in needs: add {', '.join(undeclared)}")
    unread = sorted(selector.needs - read)
    lost = [name for name in unread if name in selector.remembers]
    promise(
        not lost,
        f"columns in needs are read: remembers keeps {', '.join(lost)} of the roll call and of probes only. Read "
        f"report.{'/'.join(lost)} in _observe, or leave it out of needs",
    )
    promise(not unread, f"columns in needs are read in some of 60 rounds: leave out {', '.join(unread)}")


def check_missing_values(make: SelectorFactory) -> None:
    """Check that missing values in reports and side information leave the state finite."""
    selector = make(seed=5)
    num_clients = fleet_size(selector, 8)
    for number in range(40):
        rng = np.random.default_rng([11, number])
        clients = rng.permutation(num_clients)[: fleet_size(selector, 3)]
        selector.inform(clients, **side_information(sorted(INFORMED), clients.size, rng, missing=0.5))
        play(selector, [number], num_clients=num_clients, missing=0.5, spares=0.2)
        lacking = f"columns that a client may lack ({', '.join(sorted(optional_columns(selector))) or 'none here'})"
        promise_finite(selector, f"when {lacking} or side information are NaN")


def check_growth(make: SelectorFactory) -> None:
    """Check that clients may appear at any time, by ``available`` or by ``inform``."""
    selector = make(seed=3)
    few, many = fleet_size(selector, 4), fleet_size(selector, 12)
    play(selector, range(10), num_clients=few)
    selector.inform(np.array([many - 1]))
    seen = {k for choice in play(selector, range(10, 200), num_clients=many) for k in choice}
    promise(selector.num_clients == many, "new clients are registered")
    promise(len(seen & set(range(few, many))) > 0, "new clients are chosen")


def check_empty_and_short(make: SelectorFactory) -> None:
    """Check the choice without available clients, and ``expected_count`` with two."""
    selector = make(seed=5)
    promise(play(selector, [0], availability=0.0) == [[]], "no available client gives an empty choice")
    promise(selector.round == 1, "a round without clients counts")
    due, known = min(2, selector.clients_per_round or 2), selector.expected_count(2) is not None
    chosen = choose(selector, np.array([4, 2]))
    promise(chosen.size == due or not known, f"with two available, {due} chosen, not {chosen.size}")


def check_all_failed(make: SelectorFactory) -> None:
    """Check that the state stays finite and the selector works after rounds in which every client fails."""
    selector = make(seed=5)
    num_clients = fleet_size(selector, 8)
    play(selector, range(30), num_clients=num_clients, availability=1.0, completing=0.0)
    promise_finite(selector, "when every client fails")
    choose(selector, np.arange(num_clients))


def check_dead_client(make: SelectorFactory) -> None:
    """Check that a dead client is not chosen in every round, unless ``asks_failed_for_ever`` is set."""
    selector = make(seed=5)
    if selector.asks_failed_for_ever:
        return
    choices = play(selector, range(300), num_clients=fleet_size(selector, 8), availability=1.0, dead=(0,))
    last = sum(0 in choice for choice in choices[-100:])
    promise(last < 100, f"a client that never answers is not chosen for ever (chosen in {last} of the last 100 rounds)")


def check_select_without_observe(make: SelectorFactory) -> None:
    """Check that ``select`` can be called again without an ``observe`` in between."""
    selector = make(seed=5)
    for number in range(5):
        choose(selector, np.arange(fleet_size(selector, 8)))
        promise(selector.round == number + 1, "each select is a round")


def check_bad_input(make: SelectorFactory) -> None:
    """Check that an ``available`` without unique indices raises :class:`ParameterError` and changes nothing."""
    selector = make(seed=5)
    for bad in (np.array([1, 1]), np.array([-1, 2]), np.array([0.5]), np.array([[1, 2]]), np.array([True, False])):
        promise_refused(ParameterError, partial(selector.select, bad), f"available = {bad.tolist()} is")
    promise(play(selector, range(10)) == play(make(seed=5), range(10)), "refused input changes nothing")


def check_many_clients(make: SelectorFactory) -> None:
    """Check that 100,000 clients are accepted, or ``max_clients`` and not one more."""
    selector = make(seed=5)
    most = MANY if selector.max_clients is None else selector.max_clients
    if most < MANY:
        select = partial(make(seed=5).select, np.arange(most + 1))
        said = promise_refused(ParameterError, select, f"more than max_clients = {most} clients are")
        promise("max_clients" in said, f"the refusal names max_clients, got {said}")
    count = min(most, MANY)
    play(selector, range(3), num_clients=count, availability=1.0)
    promise(selector.num_clients == count, f"{count} clients are registered")


WARMUP_ROUNDS = 4
"""Rounds of the common warm-up."""


def check_warm_up(make: SelectorFactory) -> None:
    """Check that a common warm-up chooses every available client without probes, and that the selector learns."""
    selector, blind = before_warmup(make, seed=6), before_warmup(make, seed=6)
    everyone = np.arange(fleet_size(selector, 9))
    for number in range(WARMUP_ROUNDS):
        available = everyone[number:]
        promise(selector.probe(available) is None, "no client is probed in the warm-up: there is nothing to choose")
        chosen = choose(selector, available)
        promise(np.array_equal(chosen, available), f"in the warm-up every available client is chosen, not {chosen}")
        once = np.ones(chosen.size)
        promise(np.array_equal(selector.draws(chosen), once), "in the warm-up each client is drawn once")
        blind.select(available)
        rng = np.random.default_rng([13, number])
        selector.observe(report_for(selector, chosen, rng.uniform(size=chosen.size) < 0.8, rng, missing=0.2))
        resumed = loaded(partial(before_warmup, make), selector.state_dict(), seed=99)
        same = not differing_key(resumed.state_dict(), selector.state_dict())
        promise(same, "a state saved in the warm-up comes back with its numbers, shape and type")
        if number == 1:
            selector = resumed
    promise(
        not selector.needs or bool(differing_key(selector.state_dict(), blind.state_dict())),
        "a selector learns from the reports of the warm-up. _select is not called there, so note in "
        "_join(available) what _observe reads of a choice",
    )
    promise_finite(selector, "after the warm-up")
    # With new clients, which were not in the warm-up.
    rounds, num_clients = range(WARMUP_ROUNDS, 30), fleet_size(selector, 12)
    promise(
        play(selector, rounds, num_clients=num_clients) == play(resumed, rounds, num_clients=num_clients),
        "a loaded selector chooses as one that never stopped",
    )
    promise_finite(selector, "long after the warm-up")
    play(before_warmup(make, seed=4, rounds=30), range(60))


def before_warmup(make: SelectorFactory, *, seed: int | None = None, rounds: int = WARMUP_ROUNDS) -> Selector:
    """Return a selector before a common warm-up."""
    selector = make(seed=seed)
    selector.plan_rounds(warmup_rounds=rounds)
    return selector


CHECKS: tuple[Callable[[SelectorFactory], None], ...] = tuple(
    check for name, check in dict(globals()).items() if name.startswith("check_")
)
"""All checks above, in the order of running, for ``pytest.mark.parametrize``."""


def check_selector(make: SelectorFactory) -> None:
    """Run all checks on a selector.

    You can call it from a module, a script, a session or a notebook. If the factory cannot be sent to another process,
    the check there is left out with a warning. :func:`fedsel_flwr.testing.check_stateful` tests further sequences of
    calls.

    Args:
        make: Called as ``make(seed=...)``. Returns a selector with ``clients_per_round`` from 1 to 100, or None.

    Raises:
        AssertionError: A promise is broken. The message names it.
        ParameterError: ``make`` does not accept this call, or returns another ``clients_per_round``.

    >>> from functools import partial
    >>> from fedsel_flwr.selectors import RoundRobin
    >>> check_selector(partial(RoundRobin, clients_per_round=3))
    """
    build_selector(make)
    for check in CHECKS:
        check(make)


def check_stateful(make: SelectorFactory, *, sequences: int = 100, steps: int = 20) -> None:
    """Call a selector in random order: inform, probe, select, observe, forget, save, load, with a growing fleet.

    A second selector gets the same calls, and is saved and loaded in between. Both must agree. A sequence that breaks a
    promise is shortened as far as possible and printed. The sequences are the same in every run.

    Args:
        make: Called as ``make(seed=...)``. Returns a selector with ``clients_per_round`` from 1 to 100, or None.
        sequences: Number of sequences.
        steps: Largest number of calls in a sequence.

    Raises:
        AssertionError: A promise is broken. The message names it.
        ParameterError: ``make`` does not accept this call, or returns another ``clients_per_round``.
        RunError: Hypothesis is not installed.

    >>> from functools import partial
    >>> from fedsel_flwr.selectors import Random
    >>> check_stateful(partial(Random, clients_per_round=3), sequences=5)
    """
    # Imported here, so that the other suites work without Hypothesis.
    try:
        from fedsel_flwr.testing.stateful import run_sequences
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise RunError("check_stateful needs Hypothesis: pip install hypothesis") from error
    build_selector(make)
    run_sequences(make, sequences=sequences, steps=steps)
