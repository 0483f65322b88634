"""Untrusted folders: check what a folder that another person may have made names, links to and holds.

A plan may name code, or checkpoints elsewhere. A link leads out of the folder. ``plan.json`` and other files must have
their form before anything else reads them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import is_reference
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import REFERENCE_KEYS
from fedsel_flwr.simulations.scenario_tables import Count, CountOrZero, Table

MAX_DEPTH = 20
"""Levels of a plan; ours have four."""
PLAN_CURE = "Restore the folder from a copy, or begin a new comparison"
"""The remedy for a plan that cannot be read."""
MAX_FAULTS = 3
"""Faults of a file that an error names; there may be thousands."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters on which a terminal acts, and halves of characters, which no file can hold, but not line ends and tabs."""


def referenced_code(plan: Mapping[str, Any]) -> dict[str, str]:
    """Find what a plan names that runs code: references, and a Ray cluster, which sends objects to unpickle.

    Args:
        plan: The plan, as its file holds it.

    Returns:
        Key of the plan -> reference or address.

    >>> plan = {"selectors": [{"label": "mine", "name": "mine.py:Mine"}], "scenario": {"model": {"name": "mlp"}}}
    >>> referenced_code(plan)
    {'selectors[0].name': 'mine.py:Mine'}
    """
    named = {f"selectors[{number}].name": one["name"] for number, one in enumerate(plan["selectors"])}
    for key in REFERENCE_KEYS:
        value: Any = plan["scenario"]
        for part in key.split("."):
            value = value.get(part, {})
        named[f"scenario.{key}"] = value
    named["where.ray_address"] = plan.get("where", {}).get("ray_address")
    return {key: value for key, value in named.items() if isinstance(value, str) and is_reference(value)}


def check_trusted(folder: Path, plan: Mapping[str, Any], trust: bool, command: str) -> None:
    """Refuse to load the code that a plan names, unless the user trusts it.

    Args:
        folder: Of the plan.
        plan: The plan.
        trust: Whether it may be loaded.
        command: The command that loads it.

    Raises:
        ParameterError: Names each reference, and says what to type.
    """
    if trust or not (found := referenced_code(plan)):
        return
    named = ", ".join(f"{key} = {value!r}" for key, value in found.items())
    raise ParameterError(
        f"{str(folder)!r} names code that would run with your rights: {named}. Read it, and if you trust it, give "
        f"{command}"
    )


def check_checkpoints(folder: Path, plan: Mapping[str, Any], confirmed: str | None, command: str) -> None:
    """Refuse a folder of checkpoints outside that of the plan, unless the user has named it.

    Args:
        folder: Of the plan.
        plan: The plan.
        confirmed: The folder of checkpoints that the user has named.
        command: The command that resumes, without that folder.

    Raises:
        ParameterError: Names the folder, and says what to type.
    """
    place = outside_checkpoints(folder, plan)
    if confirmed is not None and place is None:
        raise ParameterError(
            f"{str(folder)!r} is the folder of a run, which knows its checkpoints. Leave out --checkpoint-dir, or "
            "begin with the scenario and end with --resume"
        )
    # Resolved: the user may name the same folder by another path.
    if place is not None and (confirmed is None or Path(confirmed).expanduser().resolve() != Path(place).resolve()):
        raise ParameterError(
            f"{str(folder)!r} keeps its checkpoints elsewhere, in {place!r}. Check that the folder is yours, and name "
            f"it: {command} --checkpoint-dir {shlex.quote(place)}"
        )


def check_label(label: str) -> str:
    """Return the label of a selector if it is safe in tables, LaTeX, a terminal and the name of a folder.

    Args:
        label: The label, when it is written or read.

    Raises:
        ParameterError: It cannot be part of a folder's name, or a terminal would act on it.

    >>> check_label("bsfl, alpha = 2")
    'bsfl, alpha = 2'
    """
    if not re.fullmatch(r"[^/\\]{1,100}", label) or not label.isprintable() or label.strip(". ") != label:
        raise ParameterError(
            f"label {shown(label)} cannot name a folder. Use up to 100 printable characters, no slash, no dot or space "
            "at the ends"
        )
    return label


def check_links(folder: Path) -> None:
    """Refuse links, pipes and devices anywhere inside a folder that is to be read or written.

    The folder itself and those above it may be links: the user who names the folder has chosen them.

    Args:
        folder: Of a comparison or of a run; nothing needs to be there.

    Raises:
        ParameterError: Names the first one.
    """
    # os.walk lists links to folders among the folders, and does not go into them.
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            _check_plain(Path(place) / name)


def check_entries(folder: Path) -> None:
    """Refuse links, pipes and devices directly in a folder, as :func:`check_links` does."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            _check_plain(path)


def _check_plain(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        # Another process has just removed it, as a run does with its old checkpoints.
        return
    if stat.S_ISLNK(mode):
        raise ParameterError(
            f"{str(path)!r} is a link, and a run is neither read nor written through links. Delete it, or put what it "
            "leads to in its place"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ParameterError(f"{str(path)!r} is neither a file nor a folder. Delete it")


def outside_checkpoints(folder: Path, plan: Mapping[str, Any]) -> str | None:
    """Return the folder of a plan's checkpoints if it is outside the plan's own folder."""
    place = plan.get("checkpoints", {}).get("checkpoint_dir")
    if place is None or Path(place).resolve().is_relative_to(folder.resolve()):
        return None
    return str(place)


def _unique(names: list[Any]) -> list[Any]:
    keys = [getattr(one, "label", one) for one in names]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} is there twice, expected each once")
    return names


def _read_where(given: Any) -> Any:
    # A plain dataclass: by itself pydantic would pass over unknown keys.
    if isinstance(given, RayResources):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("expected an object")
    if unknown := sorted(given.keys() - RayResources.__dataclass_fields__.keys()):
        raise ValueError(f"unknown key {shown(unknown[0])}; allowed are {', '.join(RayResources.__dataclass_fields__)}")
    return RayResources(**given)


def _writable(scenario: Scenario) -> Scenario:
    """Refuse a scenario that the file of a run cannot hold."""
    # Parameters of selectors may be anything, such as null in JSON, which TOML lacks.
    try:
        tomli_w.dumps(scenario.model_dump(exclude={"name"}))
    except TypeError as error:
        raise ValueError(f"it cannot be written as TOML: {error}") from None
    return scenario


Label = Annotated[str, AfterValidator(check_label)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class SelectorEntry(Table):
    """A selector of a plan; ``name`` is None for one that was given in Python."""

    label: Label
    name: Annotated[str, Field(min_length=1)] | None


class CheckpointOptions(Table):
    """Options of :func:`~fedsel_flwr.simulations.engine.simulate`."""

    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_every: CountOrZero | None = None


class PlanTable(Table):
    """The form of ``plan.json``: the fields of :class:`~fedsel_flwr.simulations.comparisons.plan.Plan`.

    ``fingerprints`` tell one version of code and data from another.
    """

    scenario: Annotated[Scenario, AfterValidator(_writable)]
    selectors: Annotated[list[SelectorEntry], Field(min_length=1), AfterValidator(_unique)]
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_unique)]
    reference: Label | None = None
    rounds_on_flower: CountOrZero = 0
    left_out: dict[Label, str] = Field(default_factory=dict)
    where: Annotated[RayResources, BeforeValidator(_read_where)] = RayResources()
    device: str = "cpu"
    jobs: Count = 1
    checkpoints: CheckpointOptions = CheckpointOptions()
    fingerprints: dict[str, Any] | None = None


def parse_plan(path: Path) -> dict[str, Any]:
    """Read a plan and check its form.

    Args:
        path: Its file.

    Returns:
        The plan as the file holds it.

    Raises:
        ParameterError: It is no plan; names the key, its value and what was expected.
    """
    try:
        plan = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError(f"{str(path)!r} cannot be read: {one_line(str(error))}. {PLAN_CURE}") from error
    plan = plan if isinstance(plan, dict) else {}
    # Older plans hold the number of worker processes, which no longer exist.
    plan.pop("processes", None)
    if missing := [key for key in ("scenario", "seeds", "selectors") if key not in plan]:
        raise ParameterError(f"{str(path)!r} is no plan: it lacks {', '.join(missing)}. {PLAN_CURE}")
    try:
        # First: the validator goes into nested values, and its errors print them.
        check_tree(plan)
        PlanTable.model_validate(plan)
    except (ValidationError, ParameterError) as error:
        raise ParameterError(f"{str(path)!r} is no plan: {describe_faults(error)}") from None
    return plan


def check_tree(tree: Any) -> None:
    """Refuse a file's content that is nested too deeply, or holds texts with control characters.

    Args:
        tree: The content of a JSON or TOML file.

    Raises:
        ParameterError: Names the fault.
    """
    # Level by level, not by recursion, which a deep tree would exhaust.
    level, depth = [tree], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise ParameterError(f"it is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for one in level:
            if isinstance(one, str) and _CONTROL.search(one):
                raise ParameterError(f"the text {shown(one)} holds control characters")
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
        level = below


def describe_faults(error: Exception) -> str:
    """Return a validation error's first faults in one line: key, value and what was expected; else the message."""
    if not isinstance(error, ValidationError):
        return one_line(str(error))
    faults = error.errors(include_url=False)
    # Keys and values are the file's: `shown` and `one_line` keep them from acting on a terminal.
    lines = [
        f"{one_line('.'.join(map(str, fault['loc'])))} = {shown(fault['input'])}: "
        f"{one_line(str(fault['msg']).removeprefix('Value error, '))}"
        for fault in faults[:MAX_FAULTS]
    ]
    more = len(faults) - MAX_FAULTS
    return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])
