"""Fingerprints of a run's code and data: digests that are equal on every machine for the same code and data.

Fingerprints contain no id, address or path, so that runs from two machines can be compared.

The fingerprint of a class or function covers the source text of the modules that define it and its bases. It also
covers the values that a function or object holds. Code without a file is represented by its bytecode, which depends on
the version of Python. Python's standard library, NumPy, torch and Flower do not count. The record of a run has their
versions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import pickle
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from joblib.hashing import NumpyHasher

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

logger = logging.getLogger("fedsel_flwr")
Fingerprints = Mapping[str, str]
"""Mapping of each part of a run, from :data:`PARTS`, to its fingerprint."""
PARTS = ("selector", "model", "objective", "scenario", "data", "partition")
"""Parts of a run that have a fingerprint."""
PATH_KEYS = ("model.name", "data.dataset", "system.devices")
"""Keys of a scenario that may hold the path of a user's file."""
OF_SEED, DRAWN = "of seed", "drawn for seed"
"""Marks in a fingerprint: the user's function made the value for the seed, or the scenario drew it for the seed."""
LENGTH = 32
"""Length of a fingerprint, in characters."""
CODE = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
PLAIN = (tuple, int, float, str, frozenset, list, dict, type(None))
"""Types of the class attributes that count if a class has no file."""
LIBRARIES = frozenset({"builtins", "flwr", "numpy", "torch"})
"""Packages that do not count, in addition to Python's standard library."""


def code_fingerprints(scenario: Scenario, selector: Selector | None, own: OwnParts) -> dict[str, str]:
    """Return the fingerprints of a run's code.

    Args:
        scenario: Scenario of the run.
        selector: The caller's selector before its first round. If None, the scenario's.
        own: The caller's model, data and objective.

    Returns:
        Fingerprint of ``selector``, with its parameters, and of ``model`` and ``objective`` if the user brought them.
    """
    if selector is None:
        params: Mapping[str, Any] = scenario.selectors.get(label_of(scenario.selector), {})
        found = {"selector": fingerprint(selector_class(scenario.selector), params)}
    else:
        # Seed and rounds belong to the scenario, and a resumed run may have more rounds.
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
    """Return the fingerprint of a scenario and its defaults, without selector, seed, engine and folders."""
    kept = {key: text for key, text in course_settings(scenario).items() if key not in ("selector", "seed", "engine")}
    # A file's name counts without its folder, because the same file may be elsewhere on another machine.
    kept |= {key: text.rpartition("/")[2] for key, text in kept.items() if key in PATH_KEYS}
    return fingerprint({key: text for key, text in kept.items() if not key.startswith("selectors.")})


def fingerprints(world: World, own: OwnParts, code: Fingerprints) -> dict[str, str]:
    """Return the fingerprints of a run.

    Args:
        world: World of the run.
        own: The caller's model, data and objective.
        code: Fingerprints from :func:`code_fingerprints`.

    Returns:
        The fingerprints in ``code``, and those of ``scenario``, ``data`` and ``partition``. The fingerprint of a user's
        model then also covers the parts of the model.
    """
    scenario, given = world.scenario, own_data_of(world.scenario, own)
    data, partition = (
        data_fingerprint(world.dataset, content=given is not None),
        partition_fingerprint(world.partitions),
    )
    # The marks separate intended differences between seeds from differences between runs of the same seed.
    fixed = isinstance(given, OwnData) and given.partition is not None and not callable(given.partition)
    if isinstance(given, SeededData):
        data += f" {OF_SEED} {scenario.seed}"
    elif not fixed and (given is None or given.validation is None):
        data += f" {DRAWN} {scenario.seed}"
    if not fixed:
        partition += f" {DRAWN} {scenario.seed}"
    found = {**code, "scenario": scenario_fingerprint(scenario), "data": data, "partition": partition}
    if (devices := getattr(world.system, "devices", None)) is not None:  # the file may change while its name stays
        found["scenario"] = fingerprint([found["scenario"], devices])
    if "model" in code:
        # The function that builds a model does not show the classes of its layers, which may be in other files.
        parts = sorted({type(part) for part in world.model.modules()}, key=lambda cls: cls.__qualname__)
        found["model"] = fingerprint(code["model"], parts)
    return found


def plan_fingerprints(codes: Mapping[str, Fingerprints], world: World, own: OwnParts) -> dict[str, Any]:
    """Return the fingerprints of a comparison.

    Args:
        codes: Label of each selector -> its :func:`code_fingerprints`.
        world: World of the first seed.
        own: The caller's model, data and objective.

    Returns:
        A table with ``selectors`` (label -> fingerprint), ``seed``, and the other fingerprints of the first run.
    """
    first = fingerprints(world, own, next(iter(codes.values())))
    selectors = {label: code["selector"] for label, code in codes.items()}
    return {"selectors": selectors, "seed": world.scenario.seed} | {
        key: first[key] for key in PARTS if key in first and key != "selector"
    }


def changed_plan_parts(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts in which the fingerprints of two plans differ.

    The new plan may have more selectors, and may begin with another seed.
    """
    before, now = there.get("selectors"), here["selectors"]
    known = before if isinstance(before, Mapping) else {}
    changed = [f"selector {label!r}" for label in now if label in known and known[label] != now[label]]
    # The scenario is left out, because resuming a run reports the key that differs. Data may differ between seeds.
    left_out = ("scenario",) if there.get("seed") == here["seed"] else ("scenario", "data", "partition")
    return changed + [key for key in PARTS[1:] if key not in left_out and there.get(key) != here.get(key)]


def changed_parts(there: Fingerprints, here: Fingerprints) -> list[str]:
    """Return the parts in which two runs differ."""
    return [key for key in PARTS if there.get(key) != here.get(key)]


def check_poolable(runs: Sequence[tuple[str, int, Fingerprints, str]]) -> None:
    """Refuse to pool runs of different code or data, and warn about runs without fingerprints.

    Args:
        runs: Label, seed, fingerprints and folder of each run.

    Raises:
        ParameterError: Runs differ. The error names the first part that differs, and two folders.
    """
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    for label, seed, prints, place in runs:
        if not prints:
            logger.warning(
                "%s holds a run of an older version without fingerprints. Its selector, data or partition may "
                "differ from the other runs",
                place,
            )
            continue
        for key in PARTS:
            own = prints.get(key, "none")
            of_one_seed = f" {DRAWN} " in own or f" {OF_SEED} " in own
            what: tuple[Any, ...] = (key, label) if key == "selector" else (key, seed if of_one_seed else None)
            other, where = seen.setdefault(what, (own, place))
            if own != other:
                part = f"selector {label!r}" if key == "selector" else key
                on = f" on seed {seed}" if of_one_seed else ""
                raise ParameterError(
                    f"the runs in {where!r} and {place!r} cannot be compared: {part} is not the same in both{on}. "
                    "Leave one out, or repeat it with --resume and --replay"
                )


def describe_shared(by_seed: Mapping[int, Fingerprints]) -> str:
    """Describe what the runs of each seed have in common, as the end of a sentence.

    Args:
        by_seed: Seed -> fingerprints of one of its runs.
    """
    own = any(f" {OF_SEED} " in one.get("data", "") for one in by_seed.values())
    partitions = {one["partition"].partition(" ")[0] if "partition" in one else None for one in by_seed.values()}
    if len(by_seed) > 1 and len(partitions) == 1 and None not in partitions:
        return " and data sets, with one partition for all of them" if own else " and one partition for all of them"
    return ", data sets and partitions" if own else " and partitions"


def partition_fingerprint(partitions: Sequence[npt.NDArray[np.int64]]) -> str:
    """Return the fingerprint of a partition, that is, of the rows that each client holds.

    >>> one, other = [np.array([0, 2]), np.array([1])], [np.array([0]), np.array([1, 2])]
    >>> partition_fingerprint(one) == partition_fingerprint(other)
    False
    """
    found = hashlib.sha256()
    # A sampled partition draws rows on demand, and its parameters determine them.
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
        content: Whether the inputs count, as they do for the user's data. The labels identify data sets with a name.
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
    """Return the fingerprint of classes and functions, and of the values that they hold.

    >>> fingerprint(int) == fingerprint(int), fingerprint({"a": 1}) == fingerprint({"a": 2})
    (True, False)
    """
    return str(_SourceHasher("sha256").hash(values))[:LENGTH]


class _SourceHasher(NumpyHasher):  # type: ignore[misc]
    """Hasher of any value that represents classes and functions by their source, not by their names.

    joblib's hasher pickles a value in a form that does not depend on the process or on object identities.
    """

    def __init__(self, hash_name: str) -> None:
        super().__init__(hash_name)
        # By id, together with the object. Without a reference to the object, another object could get its id.
        self._seen: dict[int, Any] = {}

    def save(self, obj: Any) -> None:
        """Add a value; a value that cannot be pickled is represented by its type."""
        try:
            super().save(self._stand_in(obj))
        except (pickle.PicklingError, TypeError, AttributeError):
            super().save(type(obj).__qualname__)

    def _stand_in(self, obj: Any) -> Any:
        """Return the value that is hashed in place of an object."""
        # The state of a generator does not count, because the scenario has the run's seed.
        if isinstance(obj, np.random.Generator | np.random.BitGenerator | torch.Generator):
            return type(obj).__qualname__
        if isinstance(obj, torch.Tensor):
            return obj.detach().cpu().numpy()
        if isinstance(obj, np.generic):
            return str(obj.dtype), obj.tolist()
        if isinstance(obj, set | frozenset):
            return sorted(fingerprint(one) for one in obj)
        # A code object counts without its file and line numbers.
        if isinstance(obj, CodeType):
            return obj.co_code, obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_consts
        if isinstance(obj, property):
            return obj.fget, obj.fset, obj.fdel
        if isinstance(obj, staticmethod | classmethod):
            return obj.__func__
        if isinstance(obj, functools.cached_property):
            return obj.func
        if not isinstance(obj, type | FunctionType) or not _counts(obj.__module__):
            return obj
        # A class and its methods refer to each other, so classes are hashed only once.
        seen = id(obj) in self._seen
        self._seen[id(obj)] = obj
        return obj.__qualname__ if seen else (obj.__qualname__, *_source_of(obj))


def _source_of(code: type | FunctionType) -> list[Any]:
    """Return the source of a class or function (its parts if it has no file), and the values that a function holds."""
    if isinstance(code, type):
        modules = dict.fromkeys(one.__module__ for one in code.__mro__ if _counts(one.__module__))
        texts = {name: module_source(name) for name in modules}
        bodies = [_body(one) for one in code.__mro__ if one.__module__ in texts and texts[one.__module__] is None]
        return [[text for text in texts.values() if text is not None], bodies]
    text = module_source(code.__module__)
    cells = [_cell_content(cell) for cell in code.__closure__ or ()]
    held = [code.__defaults__, code.__kwdefaults__, cells]
    # A module may have several lambdas, which all share this name.
    if text is not None:
        return [text, held, code.__code__ if code.__name__ == "<lambda>" else None]
    return [code.__code__, held, _used_by(code)]


def _used_by(function: FunctionType) -> dict[str, Any]:
    """Return the functions and classes that a function without a file uses from its module, directly or indirectly."""
    found: dict[str, Any] = {}
    unread = [function]
    # Not by recursion, because a notebook's functions may call each other in long chains.
    while unread:
        for name in unread.pop().__code__.co_names:
            used = function.__globals__.get(name)
            if name not in found and isinstance(used, FunctionType | type) and used.__module__ == function.__module__:
                if isinstance(used, FunctionType):
                    unread.append(used)
                found[name] = (used.__code__, used.__defaults__) if isinstance(used, FunctionType) else used
    return found


def _body(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that its author wrote; the others hold addresses, line numbers or caches."""
    return {
        name: value
        for name, value in vars(cls).items()
        # Newer versions of Python add a function for annotations.
        if (isinstance(value, CODE) and name != "__annotate_func__")
        or (isinstance(value, PLAIN) and not name.startswith(("__", "_abc_")))
    }


def _cell_content(cell: Any) -> Any:
    # A cell is empty until its variable is assigned.
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _counts(module: str) -> bool:
    """Return whether the source of a module counts; the source of the program itself always counts."""
    top = module.partition(".")[0]
    return top not in LIBRARIES and (top not in sys.stdlib_module_names or top == "__main__")


def module_source(name: str) -> str | None:
    """Return the source text of a module; None for the program itself, notebook cells, and modules without text."""
    # The program's text also contains, for example, the number of seeds, and changes with it.
    if name == "__main__" or (module := sys.modules.get(name)) is None:
        return None
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return None
