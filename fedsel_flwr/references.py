"""References to the user's code in scenarios and commands: "package.module:name" or "./file.py:name"."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsel_flwr.errors import ParameterError, described

OWN_FILES = "fedsel_own_"
"""Prefix for the names of modules that are loaded from files."""
WORKING_DIR = "FEDSEL_WORKING_DIR"
"""Environment variable on a node of a Ray cluster: the working directory of the process that started the runs."""


def is_reference(text: str) -> bool:
    """Return whether a text is a reference to an object, not a plain name.

    >>> is_reference("bsfl"), is_reference("./mine.py:Fastest")
    (False, True)
    """
    return ":" in text


def absolute_reference(text: str, folder: Path) -> str:
    """Return a reference with an absolute path, which was relative to a folder; other texts are returned unchanged.

    >>> absolute_reference("mine.py:Fastest", Path("/projects"))
    '/projects/mine.py:Fastest'
    """
    place, _, name = text.rpartition(":")
    if not place.endswith(".py"):
        return text
    return f"{(folder / Path(place).expanduser()).resolve()}:{name}"


def load_reference(text: str, what: str) -> Any:
    """Load the object that a text refers to; each file is read once per process.

    Args:
        text: "package.module:name", or "FILE.py:name" with a path relative to the working directory. The name may
            contain dots.
        what: Kind of the object, for errors.

    Returns:
        The object.

    Raises:
        ParameterError: The module or file cannot be imported, has no such name, or belongs to the standard library.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ParameterError(f"{what} {text!r} must have the form package.module:name or ./file.py:name")
    # Checked before the import, because an import alone can have effects: importing antigravity opens a browser.
    if not place.endswith(".py") and _is_of_python(place):
        raise _of_python(text, what)
    try:
        module = _load_file(_absolute(place)) if place.endswith(".py") else _import(place)
    except ParameterError as error:
        raise ParameterError(f"{what} {text!r}: {error}") from error
    # The user's code may raise any error on import, and a script without a main guard exits.
    except (Exception, SystemExit) as error:
        raise ParameterError(f"{what} {text!r}: importing {place} failed: {described(error)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ParameterError(f"{what} {text!r}: {place} has no {name!r}. It has {_own_names(module) or 'nothing'}")
        found = getattr(found, part)
    if callable(found) and _is_of_python(_home(found)):
        raise _of_python(text, what)
    return found


def _is_of_python(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _of_python(text: str, what: str) -> ParameterError:
    return ParameterError(
        f"{what} {text!r} is in Python's standard library, and the package refuses such code. Give your "
        "own class or function, in a package or as ./file.py:name"
    )


def _home(found: Any) -> str:
    """Return the module that defines a class or function; for a partial, the module of its function."""
    while isinstance(found, functools.partial):
        found = found.func
    # Any other object belongs to the user, whatever its class.
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return ""
    return str(getattr(found, "__module__", None) or type(getattr(found, "__self__", None)).__module__)


def _own_names(module: ModuleType) -> str:
    """Return the public names that a module defines, without its imports."""
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return ", ".join(
        sorted(
            key
            for key, value in public.items()
            if not isinstance(value, ModuleType) and getattr(value, "__module__", module.__name__) == module.__name__
        )
    )


def _import(place: str) -> ModuleType:
    # Unlike ``python -m``, an installed command does not search the working directory.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(place)


def _absolute(place: str) -> Path:
    # An absolute path stays as it is, whatever the folder before it.
    return Path(os.environ.get(WORKING_DIR, ""), Path(place).expanduser()).resolve()


def _load_file(path: Path) -> ModuleType:
    stem = re.sub(r"\W", "_", path.stem)
    name = f"{OWN_FILES}{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    # Under this name, the file travels to the nodes of a Ray cluster.
    if name not in sys.modules and importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    if not path.is_file():
        raise ParameterError(f"there is no file {str(path)!r}")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ParameterError(f"{str(path)!r} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        # Registered before the code runs, as import does, because pickle and dataclasses look there.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
