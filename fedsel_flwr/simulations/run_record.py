"""Record of a run, ``run.json``: scenario, selector, versions, and a digest of each file of a finished run.

A flipped bit in a file of numbers gives other numbers, and only a digest shows that. The record also has a digest of
itself. Digests reveal damage. They do not protect against a person who writes new digests.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
import platform
import re
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import MOST_MODEL_BYTES, atomic_write
from fedsel_flwr.rounds.storage import open_file, read_file
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.listing import scenario_names
from fedsel_flwr.simulations.scenario import Scenario, flat_settings
from fedsel_flwr.simulations.scenario_files import load_scenario

RUN = "run.json"
"""Name of the file with the record."""
FILES, DIGEST, FINGERPRINTS = "files", "digest", "fingerprints"
"""Keys of the files' digests, of the record's own digest, and of the fingerprints of code and data."""
NEEDED = (run_folder.SCENARIO, run_folder.ROUNDS, run_folder.CLIENTS, run_folder.MODEL)
"""Files of every finished run."""
NO_PARAMETERS = frozenset({"name", "description", "selector", "seed", "data.data_dir"})
"""Keys of a scenario that are no parameters of a run, or that :func:`run_parameters` lists in any case."""
CURE = "Repeat the run with --resume and --replay (replay=True), or restore the folder from a copy"
"""Cure for damage, in errors."""

logger = logging.getLogger("fedsel_flwr")


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
    name = scenario.name
    usual = load_scenario(name) if name in scenario_names() else Scenario(name=name)
    here, there = flat_settings(scenario.model_copy(update={"selectors": {}})), flat_settings(usual)
    return {
        "selector": label,
        "seed": scenario.seed,
        "scenario": name,
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


def read_fingerprints(folder: Path) -> dict[str, str]:
    """Read the fingerprints of a run's code and data; empty if an older version wrote the record without them.

    Raises:
        ParameterError: The record cannot be read, or its fingerprints are not a table of texts.
    """
    found = _read_or_refuse(folder).get(FINGERPRINTS, {})
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ParameterError(f"{str(folder / RUN)!r} is damaged: {FINGERPRINTS} must hold texts. {CURE}")
    return found


def read_versions(folder: Path) -> dict[str, str]:
    """Read the versions with which a run was made; empty if its record does not have them."""
    found = _read_or_refuse(folder).get("versions", {})
    return {str(name): str(one) for name, one in found.items()} if isinstance(found, dict) else {}


def has_digests(record: Mapping[str, Any]) -> bool:
    """Return whether the record of a finished run has a digest of each file in :data:`NEEDED`."""
    files = record.get(FILES)
    return isinstance(files, Mapping) and set(NEEDED) <= set(files)


def check_digests(folder: Path, *, finished: bool) -> None:
    """Refuse a run with a damaged file; warn if an older version wrote the run without digests.

    Args:
        folder: Folder of the run.
        finished: Whether the run has finished.

    Raises:
        ParameterError: A file is damaged. The error names it.
    """
    record = _read_or_refuse(folder)
    rest = {key: one for key, one in record.items() if key != DIGEST}
    # Records of older versions have neither key. A record with only one of them has lost the other by damage.
    if (DIGEST in record or FILES in record) and record.get(DIGEST) != _record_digest(rest):
        raise ParameterError(f"{str(folder / RUN)!r} is damaged: its digest does not match its content. {CURE}")
    if finished and not has_digests(record):
        logger.warning("%s holds a run of an older version without file digests, so damage would go unnoticed", folder)
        return
    files = record.get(FILES)
    kept: dict[str, Any] = dict(files) if isinstance(files, Mapping) else {}
    for name, expected in kept.items():
        # Only plain names are allowed. The folder may come from another person, and no file outside may be opened.
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ParameterError(f"{str(folder / RUN)!r} is damaged: {shown(name)} is not a file of a run. {CURE}")
        # A run that was interrupted between its record and its model has digests of files that resuming writes again.
        if not finished and name != run_folder.SCENARIO:
            continue
        try:
            found = digest_of_file(folder / name)
        except OSError as error:
            raise ParameterError(
                f"{str(folder / name)!r} cannot be compared with its digest: {error.strerror or error}. {CURE}"
            ) from error
        if found != expected:
            raise ParameterError(
                f"{str(folder / name)!r} is damaged: its content does not match the digest in {RUN}. {CURE}"
            )


def _record_digest(rest: Mapping[str, Any]) -> str:
    # Keys are sorted, so that the digest does not depend on the order in which they were added.
    return digest_of(json.dumps(rest, sort_keys=True).encode())
