"""Fingerprints of a run's code and data: equal in every process and on every machine for the same code and data.

No id, address or path goes into one, so that runs of two machines can be compared.

The fingerprint of code covers the source text of the modules of a class and of its bases, and the values that a
function or object holds. Code without a file counts by its bytecode, which depends on the version of Python. Python's
own library, NumPy, torch and Flower do not count: the record of a run has their versions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.scenario import Scenario, course_settings
from fedsel_flwr.simulations.worlds.data import Dataset, Split
from fedsel_flwr.simulations.worlds.given_partitions import SampledPartition
from fedsel_flwr.simulations.worlds.ingredients import OwnParts, own_data_of
from fedsel_flwr.simulations.worlds.own_data import OwnData, SeededData
from fedsel_flwr.simulations.worlds.world import World

Fingerprints = Mapping[str, str]
"""Part of a run, one of :data:`PARTS` -> its fingerprint."""
PARTS = ("selector", "model", "objective", "scenario", "data", "partition")
"""Parts of a run that have a fingerprint."""
PATH_KEYS = ("model.name", "data.dataset")
"""Keys of a scenario that may name a file of the user's by its path."""
OF_SEED, DRAWN = "of seed", "drawn for seed"
"""Marks in a fingerprint: a function of the user's made this for the seed; the scenario drew it for the seed."""
LENGTH = 32
"""Characters of a fingerprint."""
MAX_DEPTH = 12
"""Levels of values within values that count."""
LIBRARIES = frozenset({"builtins", "flwr", "numpy", "torch"})
"""Packages that do not count, in addition to Python's own."""


def code_fingerprints(scenario: Scenario, selector: Selector | None, own: OwnParts) -> dict[str, str]:
    """Return the fingerprints of a run's code.

    Args:
        scenario: Of the run.
        selector: The caller's, before its first round; None: the scenario's.
        own: Model, data and objective of the caller's.

    Returns:
        ``selector`` with its parameters; ``model`` and ``objective`` if they are the user's.
    """
    if selector is None:
        params: Mapping[str, Any] = scenario.selectors.get(label_of(scenario.selector), {})
        found = {"selector": fingerprint(selector_class(scenario.selector), params)}
    else:
        # Seed and rounds stand in the scenario; a resumed run may have more rounds.
        names = inspect.signature(type(selector)).parameters.keys() - {"seed", "total_rounds"}
        held = {name: getattr(selector, name) for name in names if hasattr(selector, name)}
        found = {"selector": fingerprint(type(selector), held)}
    name = scenario.model.name
    make = load_reference(name, "model") if own.model is None and is_reference(name) else own.model
    if make is not None:
        found["model"] = fingerprint(make)
    if own.objective is not None:
        found["objective"] = fingerprint(own.objective)
    return found


def scenario_fingerprint(scenario: Scenario) -> str:
    """Return the fingerprint of a scenario with its defaults, without selector, seed, engine and folders."""
    kept = {key: text for key, text in course_settings(scenario).items() if key not in ("selector", "seed", "engine")}
    # The name of a file without its folder: the same file lies elsewhere on another machine.
    kept |= {key: text.rpartition("/")[2] for key, text in kept.items() if key in PATH_KEYS}
    return fingerprint({key: text for key, text in kept.items() if not key.startswith("selectors.")})


def fingerprints(world: World, own: OwnParts, code: Fingerprints) -> dict[str, str]:
    """Return the fingerprints of a run.

    Args:
        world: Of the run.
        own: Model, data and objective of the caller's.
        code: Those of :func:`code_fingerprints`.

    Returns:
        ``code``, and ``scenario``, ``data`` and ``partition``; the parts of a user's model count too.
    """
    scenario, given = world.scenario, own_data_of(world.scenario, own)
    data, partition = (
        data_fingerprint(world.dataset, content=given is not None),
        partition_fingerprint(world.partitions),
    )
    # The marks tell a difference between seeds, which is meant, from one between runs of a seed.
    fixed = isinstance(given, OwnData) and given.partition is not None and not callable(given.partition)
    if isinstance(given, SeededData):
        data += f" {OF_SEED} {scenario.seed}"
    elif not fixed and (given is None or given.validation is None):
        data += f" {DRAWN} {scenario.seed}"
    if not fixed:
        partition += f" {DRAWN} {scenario.seed}"
    found = {**code, "scenario": scenario_fingerprint(scenario), "data": data, "partition": partition}
    if "model" in code:
        # A function that builds a model says nothing of the classes of its layers, which may lie in other files.
        parts = sorted({type(part) for part in world.model.modules()}, key=lambda cls: cls.__qualname__)
        found["model"] = fingerprint(code["model"], parts)
    return found


def plan_fingerprints(codes: Mapping[str, Fingerprints], world: World, own: OwnParts) -> dict[str, Any]:
    """Return the fingerprints of a comparison.

    Args:
        codes: Label of each selector -> its :func:`code_fingerprints`.
        world: Of the first seed.
        own: Model, data and objective of the caller's.

    Returns:
        ``selectors``: label -> fingerprint; ``seed``, and the other fingerprints of the first run.
    """
    first = fingerprints(world, own, next(iter(codes.values())))
    selectors = {label: code["selector"] for label, code in codes.items()}
    return {"selectors": selectors, "seed": world.scenario.seed} | {
        key: first[key] for key in PARTS if key in first and key != "selector"
    }


def changed_plan_parts(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs between the fingerprints of two plans.

    Selectors may be added, and another seed may be the first.
    """
    before, now = there.get("selectors"), here["selectors"]
    known = before if isinstance(before, Mapping) else {}
    changed = [f"selector {label!r}" for label in now if label in known and known[label] != now[label]]
    # Not the scenario: when a run is resumed, its error names the key that differs. Other seeds have other data.
    left_out = ("scenario",) if there.get("seed") == here["seed"] else ("scenario", "data", "partition")
    return changed + [key for key in PARTS[1:] if key not in left_out and there.get(key) != here.get(key)]


def changed_parts(there: Fingerprints, here: Fingerprints) -> list[str]:
    """Return the parts in which two runs differ."""
    return [key for key in PARTS if there.get(key) != here.get(key)]


def check_poolable(runs: Sequence[tuple[str, int, Fingerprints, str]]) -> None:
    """Refuse to pool runs of different code or data.

    Args:
        runs: Label, seed, fingerprints and folder of each.

    Raises:
        ParameterError: Names the first part that differs, and two folders.
    """
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    for label, seed, prints, place in runs:
        # A run of an older version has no fingerprints; its reader has been warned.
        for key in PARTS if prints else ():
            own = prints.get(key, "none")
            of_one_seed = f" {DRAWN} " in own or f" {OF_SEED} " in own
            what: tuple[Any, ...] = (key, label) if key == "selector" else (key, seed if of_one_seed else None)
            other, where = seen.setdefault(what, (own, place))
            if own != other:
                part = f"selector {label!r}" if key == "selector" else key
                on = f" on seed {seed}" if of_one_seed else ""
                raise ParameterError(
                    f"the runs in {where!r} and {place!r} cannot be compared: {part} is not the same in both{on}. "
                    "Leave one out, or play it again with --resume and --replay"
                )


def describe_shared(by_seed: Mapping[int, Fingerprints]) -> str:
    """Return what runs on the same seeds share, as the end of a sentence.

    Args:
        by_seed: Seed -> the fingerprints of one of its runs.
    """
    own = any(f" {OF_SEED} " in one.get("data", "") for one in by_seed.values())
    partitions = {one["partition"].partition(" ")[0] if "partition" in one else None for one in by_seed.values()}
    if len(by_seed) > 1 and len(partitions) == 1 and None not in partitions:
        return " and data sets, with one partition for all of them" if own else " and one partition for all of them"
    return ", data sets and partitions" if own else " and partitions"


def partition_fingerprint(partitions: Sequence[npt.NDArray[np.int64]]) -> str:
    """Return the fingerprint of a partition: which client holds which rows.

    >>> one, other = [np.array([0, 2]), np.array([1])], [np.array([0]), np.array([1, 2])]
    >>> partition_fingerprint(one) == partition_fingerprint(other)
    False
    """
    found = hashlib.sha256()
    # A sampled partition draws rows when they are asked for: its parameters determine them.
    if isinstance(partitions, SampledPartition):
        found.update(repr(sorted(vars(partitions).items())).encode())
        return found.hexdigest()[:LENGTH]
    for rows in partitions:
        found.update(f"{len(rows)};".encode())
        found.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
    return found.hexdigest()[:LENGTH]


@lru_cache(maxsize=2)
def data_fingerprint(dataset: Dataset, *, content: bool) -> str:
    """Return the fingerprint of the examples.

    Args:
        dataset: The examples, which are never changed.
        content: Whether the inputs count, as for data of the user's. The labels identify data sets that have a name.
    """
    found = hashlib.sha256()
    for split in (dataset.train, dataset.validation, dataset.test):
        for array in _arrays(split, content=content):
            found.update(f"{array.dtype.str}{array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:LENGTH]


def _arrays(split: Split, *, content: bool) -> list[npt.NDArray[Any]]:
    return [split.inputs, split.labels] if content else [split.labels]


def fingerprint(*values: Any) -> str:
    """Return the fingerprint of classes, functions and the values that they hold.

    >>> fingerprint(int) == fingerprint(int), fingerprint({"a": 1}) == fingerprint({"a": 2})
    (True, False)
    """
    digest = _Digest()
    for value in values:
        digest.add(value, 0)
    return digest.found.hexdigest()[:LENGTH]


class _Digest:
    """Digest of values of any kind, each added once: a class and its methods lead to each other."""

    def __init__(self) -> None:
        # By id, with the value itself: without a reference its id could be given to another object.
        self.found, self.seen = hashlib.sha256(), dict[int, Any]()

    def add(self, value: Any, depth: int) -> None:
        """Add a value, with its kind."""
        self.found.update(f"{type(value).__qualname__}:".encode())
        # The state of a generator does not count: the seed of a run stands in its scenario.
        if depth > MAX_DEPTH or isinstance(value, np.random.Generator | np.random.BitGenerator | torch.Generator):
            return
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
            # The bytes of an array of objects are addresses.
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
            # Sorted: the order of keys depends on how the mapping was made, that of a set also on the process.
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
        """Add a class without a file by its attributes."""
        held: dict[str, Any] = dict(vars(cls))
        for name, value in sorted(held.items()):
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, property):
                value = (value.fget, value.fset, value.fdel)
            elif isinstance(value, functools.cached_property):
                value = value.func
            # These hold addresses, lines or caches, or differ between versions of Python.
            if name.startswith("_abc_") or name in (
                "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__",
                "__abstractmethods__", "__annotations__", "__annotate_func__", "__annotations_cache__",
            ):  # fmt: skip
                continue
            if isinstance(value, FunctionType | tuple | int | float | str | frozenset | list | dict | None):
                self.found.update(name.encode())
                self.add(value, 1)

    def add_function(self, function: FunctionType, depth: int) -> None:
        """Add a function: its module's source or its own code, its defaults and the variables that it encloses."""
        text = module_source(function.__module__) if _counts(function.__module__) else ""
        self.found.update(function.__qualname__.encode())
        if text is None:
            self.add_code(function.__code__, depth)
            self.add_used(function, depth)
        else:
            self.found.update(text.encode())
            # A module may have several lambdas, which share this name.
            if function.__name__ == "<lambda>":
                self.add_code(function.__code__, depth)
        cells = [_cell_content(cell) for cell in function.__closure__ or ()]
        for part in (function.__defaults__, function.__kwdefaults__, cells):
            self.add(part, depth + 1)

    def add_used(self, function: FunctionType, depth: int) -> None:
        """Add the functions and classes of the same module that a function without a file uses."""
        # Half of the depth, as a notebook's functions may call each other in long chains.
        if depth > MAX_DEPTH // 2:
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


def _cell_content(cell: Any) -> Any:
    # A cell is empty until its variable is assigned.
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _counts(module: str) -> bool:
    """Tell whether the source of a module counts; that of the program itself always does."""
    top = module.partition(".")[0]
    return top not in LIBRARIES and (top not in sys.stdlib_module_names or top == "__main__")


def module_source(name: str) -> str | None:
    """Return the source text of a module; None for the program itself, a notebook's cells, and modules without one."""
    # A program's text also says how many seeds it runs, and changes with them.
    if name == "__main__" or (module := sys.modules.get(name)) is None:
        return None
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return None
