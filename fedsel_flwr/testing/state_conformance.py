"""What the state of any selector must do: be saved, loaded, refused, forgotten.

What any selector must do in a warm-up that all selectors share, and after it.

The check in another process: the same seed gives the same choices there, whatever the order of sets is.
"""

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
from fedsel_flwr.testing.worlds import (
    SelectorFactory,
    fleet,
    not_finite,
    play,
    promise,
    promise_finite,
    report_for,
    unlike,
    values_for,
)


def check_save_and_load(make: SelectorFactory) -> None:
    """Save, load into a fresh selector and continue equals never stopping."""
    straight = make(seed=6)
    play(straight, range(17))
    promise_finite(straight, "when clients fail")
    resumed = make(seed=99)
    try:
        resumed.load_state_dict(straight.state_dict())
    except StateError as error:
        raise AssertionError(
            f"broken promise: a selector takes its own state: {error}; arrays keep the declared type, numbers that of "
            "__init__"
        ) from error
    key = unlike(resumed.state_dict(), straight.state_dict())
    promise(not key, f"state {key!r} comes back with its numbers, shape and type")
    promise(
        play(resumed, range(17, 60)) == play(straight, range(17, 60)),
        "save, load, continue equals never stopping: "
        "what is kept for each client belongs into client_state, other numbers into scalar_state",
    )
    for key, value in straight.state_dict().items():
        promise(np.asarray(value).dtype.kind in "biuf", f"state {key!r} is a number or an array of numbers")


def check_state_is_a_copy(make: SelectorFactory) -> None:
    """A saved state does not change as the selector goes on."""
    selector = make(seed=6)
    play(selector, range(5))
    state = selector.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    play(selector, range(5, 10))
    promise(all(np.array_equal(before[k], state[k], equal_nan=True) for k in state), "a saved state does not change")


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
        promise(False, f"a state with keys {sorted(foreign)} is refused with StateError")
    promise(play(selector, range(5, 15)) == play(twin, range(5, 15)), "a refused state changes nothing")


def check_forget(make: SelectorFactory) -> None:
    """A row given to a newcomer carries nothing over from the client that had it."""
    selector, gone = make(seed=7), np.array([1, 4])
    num_clients = fleet(selector, 6)
    play(selector, range(25), num_clients=num_clients)
    clients = selector.num_clients
    selector.forget(np.array([4, 1, num_clients + 93]))
    promise(selector.num_clients == clients - 2, "a forgotten client is not registered, an unknown one is ignored")
    state = selector.state_dict()
    for attribute, value in selector.client_state.items():
        rows = state[attribute.lstrip("_")][gone]
        new = np.broadcast_to(np.asarray(value), rows.shape)
        promise(np.array_equal(rows, new, equal_nan=new.dtype.kind == "f"), f"forget resets {attribute!r} of a client")
    stranger = make(seed=8)  # it knows what is declared, so nothing of the clients that are gone
    stranger.load_state_dict(state)
    again, fresh = make(seed=8), make(seed=8)
    again.load_state_dict(state)
    fresh.load_state_dict(state)
    again.inform(gone)
    newcomers = np.array([num_clients, num_clients + 1])
    fresh.inform(newcomers)
    if not any(getattr(selector, name, None) is not None for name in selector.by_client):  # else rows differ by index
        for attribute in selector.client_state:
            old, new = (each.state_dict()[attribute.lstrip("_")] for each in (again, fresh))
            promise(
                np.array_equal(old[gone], new[newcomers], equal_nan=old.dtype.kind == "f"), "a row is given out as new"
            )
    promise(
        play(selector, range(25, 60), num_clients=num_clients)
        == play(stranger, range(25, 60), num_clients=num_clients),
        "a forgotten client is a stranger: what is kept for each client belongs into client_state",
    )


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


SEED, SPAWNED_ROUNDS = 4, 30
CHILD = "FEDSEL_TESTING_CHILD"
"""Set in the child's environment, so that a script that is read again there does not start another one."""
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)
"""Statements that may be run again to get at a script's classes."""


def check_spawned_process(make: SelectorFactory) -> None:
    """Same seed, same choices in a fresh process.

    The process gets the factory pickled. It cannot if the factory is a lambda, or lives in a notebook, in a session or
    in a script that does more than define things outside ``if __name__ == "__main__"``: then a warning says so.
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
            "the selector is defined in a session, or in a script that would run again there; put it into a module, or "
            'what the script does under if __name__ == "__main__"'
        )
    done = subprocess.run(
        [sys.executable, "-c", "from fedsel_flwr.testing.state_conformance import answer; answer()"],
        input=pickle.dumps({"path": sys.path, "main": main, "factory": factory}),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "4242", CHILD: "1"},
        timeout=300,
        check=False,
    )
    said = done.stdout.decode(errors="replace").strip().splitlines()
    promise(
        done.returncode == 0 and bool(said),
        f"the selector plays in another process, but it ended with {done.returncode}: "
        f"{done.stderr.decode(errors='replace')[-2000:]}",
    )
    other = json.loads(said[-1])
    if "left_out" in other:
        return _left_out(f"the other process cannot import the factory ({other['left_out']})")
    here = play(make(seed=SEED), range(SPAWNED_ROUNDS))
    promise(other["choices"] == here, "the same seed gives the same choices in another process")


def answer() -> None:
    """Play in the child and print the choices; what it gets comes by standard input."""
    given: dict[str, Any] = pickle.load(sys.stdin.buffer)
    sys.path[:] = given["path"]
    try:
        _restore_main(**given["main"])
        make: SelectorFactory = pickle.loads(given["factory"])
    except (ImportError, AttributeError) as error:
        print(json.dumps({"left_out": str(error)}))
        return
    print("\n" + json.dumps({"choices": play(make(seed=SEED), range(SPAWNED_ROUNDS))}))


def _left_out(why: str) -> None:
    warnings.warn(f"check_spawned_process was left out: {why}", stacklevel=3)


def _main_module() -> dict[str, str] | None:
    """How another process finds this one's main module without doing what the script does; None if it cannot."""
    module = sys.modules["__main__"]
    path, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if path is None or not Path(path).is_file():
        return None
    body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    if not all(isinstance(one, DEFINITIONS) or _is_text(one) or _is_guard(one) for one in body):
        return None
    return {"name": spec.name} if spec is not None else {"path": str(Path(path).resolve())}


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)


def _restore_main(name: str = "", path: str = "") -> None:
    """Make the parent's main module this process's, under a name with which its guarded part does not run."""
    if name:
        sys.modules["__main__"] = importlib.import_module(name)
    elif path:
        module = types.ModuleType("__mp_main__")
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        vars(module).update(runpy.run_path(path, run_name="__mp_main__"))
