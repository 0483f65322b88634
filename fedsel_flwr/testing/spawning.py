"""The check in another process: the same seed gives the same choices there, whatever the order of sets is."""

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

from fedsel_flwr.testing.worlds import SelectorFactory, play, promise

SEED, ROUNDS = 4, 30
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
        [sys.executable, "-c", "from fedsel_flwr.testing.spawning import answer; answer()"],
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
    here = play(make(seed=SEED), range(ROUNDS))
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
    print("\n" + json.dumps({"choices": play(make(seed=SEED), range(ROUNDS))}))


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
