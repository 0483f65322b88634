"""Fingerprints of code: of a selector, a model, an objective of the user's, of the package's own.

What counts is the source text of the modules of a class and of its bases, and the values that a function or object
holds. Code without a file counts by what the compiler made of it, which depends on the version of Python. Python's own
library, NumPy, torch and Flower do not count: the record of a run has their versions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

LENGTH = 32
"""Characters of a fingerprint."""
DEEPEST = 12
"""Levels of values within values that are looked at."""
LIBRARIES = frozenset({"builtins", "flwr", "numpy", "torch"})
"""Packages that do not count, besides Python's own."""


def fingerprint(*values: Any) -> str:
    """The fingerprint of classes, functions and what they hold.

    >>> fingerprint(int) == fingerprint(int), fingerprint({"a": 1}) == fingerprint({"a": 2})
    (True, False)
    """
    found = _Sum()
    for value in values:
        found.add(value, 0)
    return found.found.hexdigest()[:LENGTH]


class _Sum:
    """Adds values up; what was added before is named only, as a class and its methods lead to each other."""

    def __init__(self) -> None:
        self.found, self.seen = hashlib.sha256(), dict[int, Any]()

    def add(self, value: Any, depth: int) -> None:
        """Add a value, with its kind."""
        self.found.update(f"{type(value).__qualname__}:".encode())
        if depth > DEEPEST or isinstance(value, np.random.Generator | np.random.BitGenerator | torch.Generator):
            return  # the seed of a run stands in its scenario
        if isinstance(value, type | FunctionType | dict | list) or hasattr(value, "__dict__"):
            if id(value) in self.seen:
                self.found.update(b"again")
                return
            self.seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.found.update(repr(value).encode())
        elif isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            self.found.update(f"{array.dtype}{array.shape}".encode())
            self.found.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.add(part, depth + 1)
        elif isinstance(value, MethodType):
            self.add(value.__func__, depth + 1)
            self.add(value.__self__, depth + 1)
        elif isinstance(value, FunctionType):
            self.add_function(value, depth)
        elif isinstance(value, CodeType):
            self.add_code(value, depth)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                self.add(key, depth + 1)
                self.add(value[key], depth + 1)
        elif isinstance(value, set | frozenset):
            self.found.update("".join(sorted(fingerprint(one) for one in value)).encode())
        elif isinstance(value, list | tuple | range):
            self.found.update(f"{len(value)};".encode())
            for one in value:
                self.add(one, depth + 1)
        else:
            self.add_class(type(value))
            self.add(getattr(value, "__dict__", None), depth + 1)

    def add_class(self, cls: type) -> None:
        """Add the modules of a class and of its bases."""
        self.found.update(cls.__qualname__.encode())
        modules: list[str] = []
        for one in cls.__mro__:
            if _counts(one.__module__) and one.__module__ not in modules:
                text = module_source(one.__module__)
                if text is None:
                    self.add_body(one)
                else:
                    modules.append(one.__module__)
                    self.found.update(text.encode())

    def add_body(self, cls: type) -> None:
        """Add a class of no file by what it is made of."""
        held: dict[str, Any] = dict(vars(cls))
        for name, value in sorted(held.items()):
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, property):
                value = (value.fget, value.fset, value.fdel)
            elif isinstance(value, functools.cached_property):
                value = value.func
            if name.startswith("_abc_") or name in (
                "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__",
                "__abstractmethods__", "__annotations__", "__annotate_func__", "__annotations_cache__",
            ):  # fmt: skip
                continue
            if isinstance(value, FunctionType | tuple | int | float | str | frozenset | list | dict | None):
                self.found.update(name.encode())
                self.add(value, 1)

    def add_function(self, function: FunctionType, depth: int) -> None:
        """Add a function: its module's source, or its code, and what it holds."""
        text = module_source(function.__module__) if _counts(function.__module__) else ""
        self.found.update(function.__qualname__.encode())
        if text is None:
            self.add_code(function.__code__, depth)
            self.add_used(function, depth)
        else:
            self.found.update(text.encode())
            if function.__name__ == "<lambda>":  # a module may have several
                self.add_code(function.__code__, depth)
        cells = [_content(cell) for cell in function.__closure__ or ()]
        for part in (function.__defaults__, function.__kwdefaults__, cells):
            self.add(part, depth + 1)

    def add_used(self, function: FunctionType, depth: int) -> None:
        """Add the functions and classes of the same module that a function of no file uses."""
        if depth > DEEPEST // 2:
            return
        for name in sorted(set(function.__code__.co_names)):
            used = function.__globals__.get(name)
            if isinstance(used, FunctionType | type) and used.__module__ == function.__module__:
                self.found.update(name.encode())
                self.add(used, depth + 2)

    def add_code(self, code: CodeType, depth: int) -> None:
        """Add compiled code without its file and lines."""
        self.found.update(code.co_code)
        self.add((code.co_names, code.co_varnames, code.co_freevars), depth + 1)
        for constant in code.co_consts:
            self.add(constant, depth + 1)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _counts(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in LIBRARIES and (top not in sys.stdlib_module_names or top == "__main__")


def module_source(name: str) -> str | None:
    """The source text of a module; None of the program itself, of a notebook's cells, and if there is none.

    A program's text holds what it runs, too, and changes with the number of seeds.
    """
    if name == "__main__" or (module := sys.modules.get(name)) is None:
        return None
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return None
