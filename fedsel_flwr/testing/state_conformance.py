"""Checks of every selector's state: saving, loading, forgetting, a common warm-up, and another process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from functools import partial

import numpy as np

from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.selector_state import state_key
from fedsel_flwr.testing.random_rounds import (
    SelectorFactory,
    choose,
    differing_key,
    fleet_size,
    loaded,
    play,
    promise,
    promise_as_new,
    promise_finite,
    promise_refused,
    report_for,
)


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
    selector.forget(np.array([4, 1, num_clients + 93]))
    promise(selector.num_clients == clients - 2, "a forgotten client is not registered, an unknown one is ignored")
    state = selector.state_dict()
    for attribute, value in selector.client_state.items():
        promise_as_new(state[state_key(attribute)][gone], value, f"forget resets {attribute!r} of a client")
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
        [sys.executable, "-c", "from fedsel_flwr.testing.state_conformance import play_in_child; play_in_child()"],
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
