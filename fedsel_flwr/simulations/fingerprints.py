"""Fingerprints of what a run is made of: equal in every process and on every machine for the same code and data.

No id, address or path goes into one, so that runs of two machines can be compared.

Fingerprints of code: of a selector, a model, an objective of the user's, of the package's own.

What counts is the source text of the modules of a class and of its bases, and the values that a function or object
holds. Code without a file counts by what the compiler made of it, which depends on the version of Python. Python's own
library, NumPy, torch and Flower do not count: the record of a run has their versions.
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
from fedsel_flwr.simulations.scenario import Scenario, in_words
from fedsel_flwr.simulations.worlds.data import Dataset, Split
from fedsel_flwr.simulations.worlds.given_partitions import SampledPartition
from fedsel_flwr.simulations.worlds.ingredients import OwnParts, own_data_of
from fedsel_flwr.simulations.worlds.own_data import OwnData, SeededData
from fedsel_flwr.simulations.worlds.world import World

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


Fingerprints = Mapping[str, str]
"""What a run is made of -> its fingerprint."""
NAMES = ("selector", "model", "objective", "scenario", "data", "partition")
"""What there are fingerprints of."""
REFERENCES = ("model.name", "data.dataset")
"""Keys of a scenario that may name a file of the user's by its path."""
OF_SEED, DRAWN = "of seed", "drawn for seed"
"""Stand in the fingerprint of what a function makes for each seed, and of what the scenario draws for each."""


def code_of(scenario: Scenario, selector: Selector | None, own: OwnParts) -> dict[str, str]:
    """The code that makes a run what it is.

    Args:
        scenario: Of the run.
        selector: The caller's, before its first round; None: the scenario's.
        own: What the caller brings.

    Returns:
        ``selector`` with its parameters; ``model`` and ``objective``, if they are the user's.
    """
    if selector is None:
        params: Mapping[str, Any] = scenario.selectors.get(label_of(scenario.selector), {})
        said = {"selector": fingerprint(selector_class(scenario.selector), params)}
    else:
        names = inspect.signature(type(selector)).parameters.keys() - {"seed", "total_rounds"}
        held = {name: getattr(selector, name) for name in names if hasattr(selector, name)}
        said = {"selector": fingerprint(type(selector), held)}
    name = scenario.model.name
    make = load_reference(name, "model") if own.model is None and is_reference(name) else own.model
    if make is not None:
        said["model"] = fingerprint(make)
    if own.objective is not None:
        said["objective"] = fingerprint(own.objective)
    return said


def of_scenario(scenario: Scenario) -> str:
    """The fingerprint of a scenario with its defaults, without selector, seed, engine and folders."""
    said = {key: text for key, text in in_words(scenario).items() if key not in ("selector", "seed", "engine")}
    said |= {key: text.rpartition("/")[2] for key, text in said.items() if key in REFERENCES}
    return fingerprint({key: text for key, text in said.items() if not key.startswith("selectors.")})


def fingerprints(world: World, own: OwnParts, code: Fingerprints) -> dict[str, str]:
    """What a run is made of.

    Args:
        world: Of the run.
        own: What the caller brings.
        code: As :func:`code_of` says.

    Returns:
        ``code``, and ``scenario``, ``data`` and ``partition``; of the user's model its parts count too.
    """
    scenario, given = world.scenario, own_data_of(world.scenario, own)
    data, partition = of_data(world.dataset, content=given is not None), of_partition(world.partitions)
    fixed = isinstance(given, OwnData) and given.partition is not None and not callable(given.partition)
    if isinstance(given, SeededData):
        data += f" {OF_SEED} {scenario.seed}"
    elif not fixed and (given is None or given.validation is None):
        data += f" {DRAWN} {scenario.seed}"
    if not fixed:
        partition += f" {DRAWN} {scenario.seed}"
    said = {**code, "scenario": of_scenario(scenario), "data": data, "partition": partition}
    if "model" in code:
        parts = sorted({type(part) for part in world.model.modules()}, key=lambda cls: cls.__qualname__)
        said["model"] = fingerprint(code["model"], parts)
    return said


def of_plan(codes: Mapping[str, Fingerprints], world: World, own: OwnParts) -> dict[str, Any]:
    """What a comparison is made of.

    Args:
        codes: Label of each selector -> what :func:`code_of` says of it.
        world: Of the first seed.
        own: What the caller brings.

    Returns:
        ``selectors``: label -> fingerprint; ``seed``, and the others of its first run.
    """
    first = fingerprints(world, own, next(iter(codes.values())))
    selectors = {label: code["selector"] for label, code in codes.items()}
    return {"selectors": selectors, "seed": world.scenario.seed} | {
        key: first[key] for key in NAMES if key in first and key != "selector"
    }


def differing_plans(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is not the same in two plans' fingerprints, by name; selectors may be added, and other seeds come first.

    Of scenarios each run says by which key they differ.
    """
    before, now = there.get("selectors"), here["selectors"]
    known = before if isinstance(before, Mapping) else {}
    told = [f"selector {label!r}" for label in now if label in known and known[label] != now[label]]
    left_out = ("scenario",) if there.get("seed") == here["seed"] else ("scenario", "data", "partition")
    return told + [key for key in NAMES[1:] if key not in left_out and there.get(key) != here.get(key)]


def differing(there: Fingerprints, here: Fingerprints) -> list[str]:
    """What two runs have that is not the same, by name."""
    return [key for key in NAMES if there.get(key) != here.get(key)]


def check_alike(runs: Sequence[tuple[str, int, Fingerprints, str]]) -> None:
    """Refuse to pool runs that were made of different things.

    Args:
        runs: Label, seed, fingerprints and folder of each.

    Raises:
        ParameterError: Names the first thing and two folders.
    """
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    for label, seed, prints, place in runs:
        for key in NAMES if prints else ():
            own = prints.get(key, "none")
            of_one_seed = f" {DRAWN} " in own or f" {OF_SEED} " in own
            what: tuple[Any, ...] = (key, label) if key == "selector" else (key, seed if of_one_seed else None)
            other, where = seen.setdefault(what, (own, place))
            if own != other:
                who = f"selector {label!r}" if key == "selector" else key
                on = f" on seed {seed}" if of_one_seed else ""
                raise ParameterError(
                    f"the runs in {where!r} and {place!r} cannot be compared: {who} is not the same in both{on}. "
                    "Leave one out, or play it again with --resume and --replay"
                )


def shared(by_seed: Mapping[int, Fingerprints]) -> str:
    """What runs on the same seeds share, in words.

    Args:
        by_seed: Seed -> the fingerprints of one of its runs.
    """
    own = any(f" {OF_SEED} " in one.get("data", "") for one in by_seed.values())
    partitions = {one["partition"].partition(" ")[0] if "partition" in one else None for one in by_seed.values()}
    if len(by_seed) > 1 and len(partitions) == 1 and None not in partitions:
        return " and data sets, with one partition for all of them" if own else " and one partition for all of them"
    return ", data sets and partitions" if own else " and partitions"


def of_partition(partitions: Sequence[npt.NDArray[np.int64]]) -> str:
    """The fingerprint of who holds which rows.

    >>> of_partition([np.array([0, 2]), np.array([1])]) == of_partition([np.array([0]), np.array([1, 2])])
    False
    """
    found = hashlib.sha256()
    if isinstance(partitions, SampledPartition):  # nothing of it is in memory
        found.update(repr(sorted(vars(partitions).items())).encode())
        return found.hexdigest()[:LENGTH]
    for rows in partitions:
        found.update(f"{len(rows)};".encode())
        found.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
    return found.hexdigest()[:LENGTH]


@lru_cache(maxsize=2)
def of_data(dataset: Dataset, *, content: bool) -> str:
    """The fingerprint of the examples.

    Args:
        dataset: They are never changed.
        content: Whether the inputs count, as for data of the user's; those known by name are told by their labels.
    """
    found = hashlib.sha256()
    for split in (dataset.train, dataset.validation, dataset.test):
        for array in _arrays(split, content=content):
            found.update(f"{array.dtype.str}{array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:LENGTH]


def _arrays(split: Split, *, content: bool) -> list[npt.NDArray[Any]]:
    return [split.inputs, split.labels] if content else [split.labels]
