"""The promises of every selector's state: saving, loading, forgetting, a common warm-up, and another process."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.testing.random_rounds import (
    SelectorFactory,
    differing_key,
    fleet_size,
    nonfinite_key,
    play,
    promise,
    promise_finite,
    report_for,
    values_for,
)


def check_save_and_load(make: SelectorFactory) -> None:
    """A selector that is saved, loaded and continued makes the choices of one that never stopped."""
    straight = make(seed=6)
    play(straight, range(17))
    promise_finite(straight, "when clients fail")
    resumed = make(seed=99)
    try:
        resumed.load_state_dict(straight.state_dict())
    except StateError as error:
        raise AssertionError(
            f"broken promise: a selector takes its own state: {error}. Keep the declared type of arrays, and of "
            "numbers the type that __init__ gives them"
        ) from error
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
    """A saved state does not change in later rounds."""
    selector = make(seed=6)
    play(selector, range(5))
    state = selector.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    play(selector, range(5, 10))
    promise(all(np.array_equal(before[k], state[k], equal_nan=True) for k in state), "a saved state does not change")


def check_foreign_state(make: SelectorFactory) -> None:
    """A state that does not fit raises :class:`StateError` and changes nothing."""
    selector, twin = make(seed=8), make(seed=8)
    play(selector, range(5))
    play(twin, range(5))
    state = selector.state_dict()
    for foreign in ({}, state | {"surprise": 1}, state | {"registered": np.ones((2, 2), dtype=np.bool_)}):
        try:
            selector.load_state_dict(foreign)
        except StateError:
            continue
        promise(False, f"a state with keys {sorted(foreign)} is refused with StateError")
    promise(play(selector, range(5, 15)) == play(twin, range(5, 15)), "a refused state changes nothing")


def check_forget(make: SelectorFactory) -> None:
    """A row given to a newcomer holds nothing of the client that had it."""
    selector, gone = make(seed=7), np.array([1, 4])
    num_clients = fleet_size(selector, 6)
    play(selector, range(25), num_clients=num_clients)
    clients = selector.num_clients
    selector.forget(np.array([4, 1, num_clients + 93]))
    promise(selector.num_clients == clients - 2, "a forgotten client is not registered, an unknown one is ignored")
    state = selector.state_dict()
    for attribute, value in selector.client_state.items():
        rows = state[attribute.lstrip("_")][gone]
        new = np.broadcast_to(np.asarray(value), rows.shape)
        promise(np.array_equal(rows, new, equal_nan=new.dtype.kind == "f"), f"forget resets {attribute!r} of a client")
    # The new selector loads the declared state only, so it knows nothing else of the forgotten clients.
    reloaded = make(seed=8)
    reloaded.load_state_dict(state)
    again, fresh = make(seed=8), make(seed=8)
    again.load_state_dict(state)
    fresh.load_state_dict(state)
    again.inform(gone)
    newcomers = np.array([num_clients, num_clients + 1])
    fresh.inform(newcomers)
    # Parameters by client make the rows of two newcomers differ by index.
    if not any(getattr(selector, name, None) is not None for name in selector.by_client):
        for attribute in selector.client_state:
            old, new = (each.state_dict()[attribute.lstrip("_")] for each in (again, fresh))
            promise(
                np.array_equal(old[gone], new[newcomers], equal_nan=old.dtype.kind == "f"), "a reused row is as new"
            )
    promise(
        play(selector, range(25, 60), num_clients=num_clients)
        == play(reloaded, range(25, 60), num_clients=num_clients),
        "a forgotten client is a newcomer. Declare what is kept for each client in client_state",
    )


WARMUP_ROUNDS = 4
"""Rounds of the common warm-up."""


def check_warm_up(make: SelectorFactory) -> None:
    """In a common warm-up every available client is chosen, without probes, and the selector learns."""
    selector, blind = before_warmup(make, seed=6), before_warmup(make, seed=6)
    num_clients = fleet_size(selector, 9)
    for number in range(WARMUP_ROUNDS):
        rng = np.random.default_rng([13, number])
        available = rng.permutation(np.flatnonzero(rng.uniform(size=num_clients) < 0.8))
        chosen = _play_warmup_round(selector, available)
        blind.select(available)
        completed = rng.uniform(size=chosen.size) < 0.8
        selector.observe(report_for(selector, chosen, completed, rng, missing=0.2))
        resumed = before_warmup(make, seed=99)
        resumed.load_state_dict(selector.state_dict())
        same = not differing_key(resumed.state_dict(), selector.state_dict())
        promise(same, "a state saved in the warm-up comes back with its numbers, shape and type")
        if number == 1:
            selector = resumed
    learned = bool(differing_key(selector.state_dict(), blind.state_dict()))
    promise(
        learned or not selector.needs,
        "a selector learns from the reports of the warm-up. _select is not called there: note in _join(available) what "
        "_observe reads of a choice",
    )
    key = nonfinite_key(selector)
    promise(not key, f"state {key!r} is finite after the warm-up")
    _check_after_warmup(make, selector)


def before_warmup(make: SelectorFactory, *, seed: int, rounds: int = WARMUP_ROUNDS) -> Selector:
    """Return a selector with a common warm-up ahead."""
    selector = make(seed=seed)
    selector.plan_rounds(warmup_rounds=rounds)
    return selector


def _play_warmup_round(selector: Selector, available: IntArray) -> IntArray:
    """Select in a round of the warm-up, check the choice and return it."""
    request = selector.probe(available)
    promise(request is None, "no client is probed in the warm-up: there is nothing to choose")
    expected = selector.expected_count(available.size)
    chosen = selector.select(available)
    complete = np.array_equal(chosen, np.sort(available))
    promise(complete, f"in the warm-up every available client is chosen, {np.sort(available)}, not {chosen}")
    promise(expected in (None, chosen.size), f"{expected} clients are chosen, as expected_count says")
    promise(np.array_equal(selector.draws(chosen), np.ones(chosen.size)), "in the warm-up each client is drawn once")
    return chosen


def _check_after_warmup(make: SelectorFactory, selector: Selector) -> None:
    """Check that the selector chooses after the warm-up, newcomers included, and that a loaded one chooses the same."""
    other = before_warmup(make, seed=11)
    other.load_state_dict(selector.state_dict())
    available = np.arange(fleet_size(selector, 12))
    for number in range(WARMUP_ROUNDS, 30):
        rng = np.random.default_rng([13, number])
        request, twin = selector.probe(available), other.probe(available)
        promise((request is None) == (twin is None), "a loaded selector probes as one that never stopped")
        if request is not None:
            informed = {name: values_for(name, request.clients.size, rng) for name in request.columns}
            selector.inform(request.clients, **informed)
            other.inform(request.clients, **informed)
        expected = selector.expected_count(available.size)
        chosen = selector.select(available)
        promise(expected in (None, chosen.size), f"after the warm-up {expected} clients are chosen, as expected")
        promise(np.array_equal(chosen, other.select(available)), "a loaded selector chooses as one that never stopped")
        report = report_for(selector, chosen, rng.uniform(size=chosen.size) < 0.85, rng)
        selector.observe(report)
        other.observe(report)
    key = nonfinite_key(selector)
    promise(not key, f"state {key!r} is finite long after the warm-up")
    long = before_warmup(make, seed=4, rounds=30)
    choices = play(long, range(60))
    promise(all(len(choice) >= 1 for choice in choices[30:]), "clients are chosen after a long warm-up")


SEED, SPAWNED_ROUNDS = 4, 30
CHILD = "FEDSEL_TESTING_CHILD"
"""Set in the child's environment: a script that is imported there again must not start another child."""
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
"""Statements of a script that the child may run again to define the script's classes."""


def check_spawned_process(make: SelectorFactory) -> None:
    """The same seed gives the same choices in a fresh process, in which sets have another order.

    The factory is pickled. The check is left out with a warning if the factory is a lambda, or is defined in a
    notebook, in a session, or in a script that does more than define things outside ``if __name__ == "__main__"``.
    """
    if CHILD in os.environ:
        return
    try:
        factory = pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return _left_out(f"the factory cannot be pickled ({error}); give a class or a functools.partial of one")
    main = _main_module() if b"__main__" in factory else {}
    if main is None:
        return _left_out(
            "the selector is defined in a session, or in a script that would run again there. Move it into a module, "
            'or the script\'s work under if __name__ == "__main__"'
        )
    # Another PYTHONHASHSEED, so that sets have another order there.
    # Not multiprocessing: its start methods import the caller's main module, with everything that a script does.
    done = subprocess.run(
        [sys.executable, "-c", "from fedsel_flwr.testing.state_conformance import play_in_child; play_in_child()"],
        input=pickle.dumps({"path": sys.path, "main": main, "factory": factory}),
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
    other = json.loads(said[-1])
    if "left_out" in other:
        return _left_out(f"the other process cannot import the factory ({other['left_out']})")
    here = play(make(seed=SEED), range(SPAWNED_ROUNDS))
    promise(other["choices"] == here, "the same seed gives the same choices in another process")


def play_in_child() -> None:
    """Play the factory pickled on standard input, and print the choices as JSON; runs in the child."""
    given: dict[str, Any] = pickle.load(sys.stdin.buffer)
    sys.path[:] = given["path"]
    try:
        _restore_main(**given["main"])
        make: SelectorFactory = pickle.loads(given["factory"])
    except (ImportError, AttributeError) as error:
        print(json.dumps({"left_out": str(error)}))
        return
    # On the last line: the author's code may print too.
    print("\n" + json.dumps({"choices": play(make(seed=SEED), range(SPAWNED_ROUNDS))}))


def _left_out(why: str) -> None:
    warnings.warn(f"check_spawned_process was left out: {why}", stacklevel=3)


def _main_module() -> dict[str, str] | None:
    """Return how the child can import this process's main module; None if that would run a script again."""
    module = sys.modules["__main__"]
    path, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if path is None or not Path(path).is_file():
        return None
    body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    if not all(isinstance(one, DEFINITIONS) or _is_docstring(one) or _is_main_guard(one) for one in body):
        return None
    return {"name": spec.name} if spec is not None else {"path": str(Path(path).resolve())}


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)


def _restore_main(name: str = "", path: str = "") -> None:
    """Import the parent's main module as this process's, under a name that leaves its guarded part out."""
    if name:
        sys.modules["__main__"] = importlib.import_module(name)
    elif path:
        module = types.ModuleType("__mp_main__")
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        vars(module).update(runpy.run_path(path, run_name="__mp_main__"))
