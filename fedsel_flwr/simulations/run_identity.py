"""Identity of a run: which code, scenario and data it was made with, and the record ``run.json`` that holds this.

An identity maps each part of a run to a fingerprint, a digest that is equal on every machine for the same code and
data. It contains no address and no path. The fingerprint of a class or function covers its name and the source text of
the modules that define it and its bases. For code of the program itself or of a notebook, it covers the text of the
class or function. Python's standard library, NumPy, torch and Flower do not count; the record has their versions.

Not noticed are changes of the values that a closure holds, of the values inside the user's own objects, of modules
that the code imports, and of code without source text.

The record also has a digest of each file of a finished run, and of itself. A flipped bit in a file of numbers gives
other numbers, and only a digest shows that. Digests reveal damage. They do not protect against a person who writes new
digests.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import MOST_MODEL_BYTES, atomic_write
from fedsel_flwr.rounds.storage import open_file, read_file
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.scenario import Scenario, course_settings, flat_settings
from fedsel_flwr.simulations.scenario_files import shipped_scenario
from fedsel_flwr.simulations.worlds.data import Dataset
from fedsel_flwr.simulations.worlds.ingredients import OwnParts, own_data_of
from fedsel_flwr.simulations.worlds.own_data import OwnData, SeededData
from fedsel_flwr.simulations.worlds.partitions import SampledPartition
from fedsel_flwr.simulations.worlds.world import World

Identity = Mapping[str, str]
"""Mapping of each part of a run, from :data:`PARTS`, to its fingerprint."""
PARTS = ("selector", "model", "objective", "scenario", "data", "partition")
"""Parts of a run that have a fingerprint."""
PATH_KEYS = ("model.name", "data.dataset", "system.devices")
"""Keys of a scenario that may hold the path of a user's file."""
OF_SEED, DRAWN = "of seed", "drawn for seed"
"""Marks in a fingerprint: the user's function made the value for the seed, or the scenario drew it for the seed."""
LENGTH = 32
"""Length of a fingerprint, in characters."""
LIBRARIES = frozenset({"builtins", "flwr", "numpy", "torch"})
"""Packages that do not count, in addition to Python's standard library."""
RUN = "run.json"
"""Name of the file with the record."""
FILES, DIGEST, IDENTITY = "files", "digest", "identity"
"""Keys of the files' digests, of the record's own digest, and of the run's identity."""
NEEDED = (run_folder.SCENARIO, run_folder.ROUNDS, run_folder.CLIENTS, run_folder.MODEL)
"""Files of every finished run."""
NO_PARAMETERS = frozenset({"name", "description", "selector", "seed", "data.data_dir"})
"""Keys of a scenario that are no parameters of a run, or that :func:`run_parameters` lists in any case."""
CURE = "Repeat the run with --resume and --replay (replay=True), or restore the folder from a copy"
"""Cure for damage, in errors."""


def code_identity(scenario: Scenario, selector: Selector | None, own: OwnParts) -> dict[str, str]:
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
        found = {"selector": fingerprint_of(selector_class(scenario.selector), params)}
    else:
        # Seed and rounds belong to the scenario, and a resumed run may have more rounds.
        names = inspect.signature(type(selector)).parameters.keys() - {"seed", "total_rounds"}
        held = {name: getattr(selector, name) for name in names if hasattr(selector, name)}
        found = {"selector": fingerprint_of(type(selector), held)}
    name = scenario.model.name
    make = load_reference(name, "model") if own.model is None and is_reference(name) else own.model
    if make is not None:
        found["model"] = fingerprint_of(make)
    if own.objective is not None:
        found["objective"] = fingerprint_of(own.objective)
    return found


def scenario_fingerprint(scenario: Scenario) -> str:
    """Return the fingerprint of a scenario and its defaults, without selector, seed, engine and folders."""
    kept = {key: text for key, text in course_settings(scenario).items() if key not in ("selector", "seed", "engine")}
    # A file's name counts without its folder, because the same file may be elsewhere on another machine.
    kept |= {key: text.rpartition("/")[2] for key, text in kept.items() if key in PATH_KEYS}
    return fingerprint_of({key: text for key, text in kept.items() if not key.startswith("selectors.")})


def identity(world: World, own: OwnParts, code: Identity) -> dict[str, str]:
    """Return the fingerprints of a run.

    Args:
        world: World of the run.
        own: The caller's model, data and objective.
        code: Identity from :func:`code_identity`.

    Returns:
        The fingerprints in ``code``, and those of ``scenario``, ``data`` and ``partition``. The fingerprint of a user's
        model then also covers the parts of the model.
    """
    scenario, given = world.scenario, own_data_of(world.scenario, own)
    data = data_fingerprint(world.dataset, content=given is not None)
    partition = partition_fingerprint(world.partitions)
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
        found["scenario"] = fingerprint_of([found["scenario"], devices])
    if "model" in code:
        # The function that builds a model does not show the classes of its layers, which may be in other files, nor
        # the sizes that a closure holds.
        parts = sorted({type(part) for part in world.model.modules()}, key=lambda cls: cls.__qualname__)
        found["model"] = fingerprint_of(code["model"], parts, [array.shape for array in world.initial_arrays()])
    return found


def check_poolable(runs: Sequence[tuple[str, int, Identity, str]]) -> None:
    """Refuse to pool runs of different code or data.

    Args:
        runs: Label, seed, fingerprints and folder of each run.

    Raises:
        ParameterError: Runs differ. The error names the first part that differs, and two folders.
    """
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    for label, seed, prints, place in runs:
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


def describe_shared(by_seed: Mapping[int, Identity]) -> str:
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
        for array in [split.inputs, split.labels] if content else [split.labels]:
            found.update(f"{array.dtype.str}{array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:LENGTH]


def fingerprint_of(*values: Any) -> str:
    """Return the fingerprint of values, in which a class or function counts with its source text.

    >>> fingerprint_of(int) == fingerprint_of(int), fingerprint_of({"a": 1}) == fingerprint_of({"a": 2})
    (True, False)
    """
    return hashlib.sha256("\n".join(map(_described, values)).encode()).hexdigest()[:LENGTH]


def _described(value: Any) -> str:
    """Return a value as text without addresses; an object counts with its class, and a dataclass with its fields."""
    # A decorator such as lru_cache hides the function.
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, functools.partial):
        return f"partial {_described([value.func, value.args, value.keywords])}"
    if isinstance(value, Mapping):
        return f"table {sorted((_described(key), _described(one)) for key, one in value.items())}"
    if isinstance(value, set | frozenset):
        return f"set {sorted(map(_described, value))}"
    if isinstance(value, list | tuple):
        return f"list {list(map(_described, value))}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__qualname__} {_source_of(value)}"
    held = {one.name: getattr(value, one.name) for one in fields(value)} if is_dataclass(value) else {}
    return f"{_described(type(value))} {_described(held)}"


def _source_of(code: Any) -> list[str]:
    """Return the source text of the modules of a class or function, or its own text."""
    found: dict[str, None] = {}
    for one in getattr(code, "__mro__", (code,)):
        name = str(getattr(one, "__module__", None))
        top = name.partition(".")[0]
        if top in LIBRARIES or (top in sys.stdlib_module_names and top != "__main__"):
            continue
        text = module_source(name)
        found[text] = None
        # A module may have several lambdas of the same name.
        if not text or one.__name__ == "<lambda>":
            found[_text_of_source(one)] = None
    return list(found)


def module_source(name: str) -> str:
    """Return the source text of a module; empty for the program itself, and for modules without text."""
    return "" if name == "__main__" else _text_of_source(sys.modules.get(name))


def _text_of_source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which a run depends."""
    packages = ("fedsel-flwr", "flwr", "torch", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def run_parameters(scenario: Scenario, label: str, selector: Selector | None = None) -> dict[str, Any]:
    """Return the parameters of a run, for trackers.

    Args:
        scenario: What is run.
        label: The selector's label.
        selector: A selector of the caller's; None: the scenario's.

    Returns:
        ``selector``, ``seed`` and ``scenario``, each parameter of the selector as ``selector.NAME``, and the version of
        each package as ``version.NAME``. Also each key of the scenario that differs from the shipped scenario of that
        name. If there is none, each key that differs from its default.

    >>> from fedsel_flwr.simulations.scenario_files import load_scenario
    >>> found = run_parameters(load_scenario("smoke", {"rounds": 7, "selector": "bsfl"}), "bsfl")
    >>> found["rounds"], found["selector.alpha"]
    (7, 1.0)
    """
    made = selector_class(scenario.selector) if selector is None else type(selector)
    own = {name: one.default for name, one in inspect.signature(made).parameters.items()}
    own = {name: one for name, one in own.items() if one is not inspect.Parameter.empty and name != "seed"}
    own |= scenario.selectors.get(label, scenario.selectors.get(label_of(scenario.selector), {}))
    own |= {name: one for name in own if isinstance(one := getattr(selector, name, None), bool | int | float | str)}
    both = (scenario, shipped_scenario(scenario.name))
    here, there = (flat_settings(one.model_dump(exclude={"selectors"})) for one in both)
    return {
        "selector": label,
        "seed": scenario.seed,
        "scenario": scenario.name,
        **{f"selector.{key}": one for key, one in own.items() if one is not None},
        **{key: one for key, one in here.items() if one != there.get(key) and key not in NO_PARAMETERS},
        **{f"version.{package}": one for package, one in versions().items()},
    }


def digest_of(data: bytes) -> str:
    """Return the digest of bytes.

    >>> digest_of(b"abc")[:20]
    'sha256:ba7816bf8f01c'
    """
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_of_file(path: Path) -> str:
    """Return the digest of a file, without reading the whole file into memory."""
    with open_file(path, MOST_MODEL_BYTES) as file:
        return f"sha256:{hashlib.file_digest(cast(BufferedReader, file), 'sha256').hexdigest()}"


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a run, with a digest of itself.

    Raises:
        OSError: The record cannot be written.
    """
    rest = {key: value for key, value in record.items() if key != DIGEST}
    with atomic_write(folder / RUN) as temporary:
        temporary.write_text(json.dumps(rest | {DIGEST: _record_digest(rest)}, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a run without checks.

    Raises:
        OSError: The record cannot be read.
        ValueError: The record is not JSON.
        TypeError: The record is not a JSON object.
        RecursionError: The record is nested too deeply.
    """
    record = json.loads(read_file(folder / RUN))
    if not isinstance(record, dict):
        raise TypeError(f"{RUN} must hold an object, got {type(record).__name__}")
    return record


def _read_or_refuse(folder: Path) -> dict[str, Any]:
    try:
        return read_record(folder)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ParameterError(f"{str(folder / RUN)!r} cannot be read: {one_line(str(error))}. {CURE}") from error


def read_identity(folder: Path) -> dict[str, str]:
    """Read the fingerprints of a run's code and data; empty if an older version wrote the record without them.

    Raises:
        ParameterError: The record cannot be read, or its fingerprints are not a table of texts.
    """
    found = _read_or_refuse(folder).get(IDENTITY, {})
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ParameterError(f"{str(folder / RUN)!r} is damaged: {IDENTITY} must hold texts. {CURE}")
    return found


def check_digests(folder: Path, *, finished: bool) -> dict[str, Any]:
    """Refuse a run with a damaged file, or without the digests of its files; return its record.

    Args:
        folder: Folder of the run.
        finished: Whether the run has finished.

    Raises:
        ParameterError: A file is damaged. The error names it.
    """
    record = _read_or_refuse(folder)
    rest = {key: one for key, one in record.items() if key != DIGEST}
    if record.get(DIGEST) != _record_digest(rest):
        raise ParameterError(f"{str(folder / RUN)!r} is damaged: its digest does not match its content. {CURE}")
    files = record.get(FILES)
    if not isinstance(files, dict) or (finished and not set(NEEDED) <= files.keys()):
        raise ParameterError(f"{str(folder / RUN)!r} is damaged: it lacks digests of the run's files. {CURE}")
    for name, expected in files.items():
        # Only plain names are allowed. The folder may come from another person, and no file outside may be opened.
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ParameterError(f"{str(folder / RUN)!r} is damaged: {shown(name)} is not a file of a run. {CURE}")
        # A run that was interrupted between its record and its model has digests of files that resuming writes again.
        if not finished and name != run_folder.SCENARIO:
            continue
        try:
            problem = "" if digest_of_file(folder / name) == expected else f"its content has another digest than {RUN}"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise ParameterError(f"{str(folder / name)!r} is damaged: {problem}. {CURE}")
    return record


def _record_digest(rest: Mapping[str, Any]) -> str:
    # Keys are sorted, so that the digest does not depend on the order in which they were added.
    return digest_of(json.dumps(rest, sort_keys=True).encode())
