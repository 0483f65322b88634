"""A folder that somebody else may have made: the code that its plan names, and ways that lead out of it.

The form of ``plan.json``, and of whatever else is read from a folder that somebody else may have made.
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
from fedsel_flwr.simulations.scenario_files import REFERRING
from fedsel_flwr.simulations.scenario_tables import Count, CountOrZero, Table


def code_in(said: Mapping[str, Any]) -> dict[str, str]:
    """Find what a plan names that runs code: references, and a Ray cluster, which sends objects to unpickle.

    Args:
        said: The plan, as its file holds it.

    Returns:
        Key of the plan -> reference or address.

    >>> plan = {"selectors": [{"label": "mine", "name": "mine.py:Mine"}], "scenario": {"model": {"name": "mlp"}}}
    >>> code_in(plan)
    {'selectors[0].name': 'mine.py:Mine'}
    """
    named = {f"selectors[{number}].name": one["name"] for number, one in enumerate(said["selectors"])}
    for key in REFERRING:
        value: Any = said["scenario"]
        for part in key.split("."):
            value = value.get(part, {})
        named[f"scenario.{key}"] = value
    named["where.ray_address"] = said.get("where", {}).get("ray_address")
    return {key: value for key, value in named.items() if isinstance(value, str) and is_reference(value)}


def check_trusted(folder: Path, said: Mapping[str, Any], trust: bool, again: str) -> None:
    """Refuse to load the code that a plan names, unless its reader trusts it.

    Args:
        folder: Of the plan.
        said: The plan.
        trust: Whether it may be loaded.
        again: What to type to have it loaded.

    Raises:
        ParameterError: Names each reference, and says what to type.
    """
    if trust or not (found := code_in(said)):
        return
    named = ", ".join(f"{key} = {value!r}" for key, value in found.items())
    raise ParameterError(
        f"{str(folder)!r} names code that would run with your rights: {named}. Read it, and if you trust it, give "
        f"{again}"
    )


def check_checkpoints(folder: Path, said: Mapping[str, Any], confirmed: str | None, command: str) -> None:
    """Refuse a folder of checkpoints outside that of the plan, unless its reader has named it himself.

    Args:
        folder: Of the plan.
        said: The plan.
        confirmed: The folder of checkpoints that the reader has named.
        command: What to type, without that folder.

    Raises:
        ParameterError: Names the folder, and says what to type.
    """
    place = outside(folder, said)
    if confirmed is not None and place is None:
        raise ParameterError(
            f"{str(folder)!r} is the folder of a run, which knows its checkpoints: leave out --checkpoint-dir, or "
            "begin with the scenario and end with --resume"
        )
    if place is not None and (confirmed is None or Path(confirmed).expanduser().resolve() != Path(place).resolve()):
        raise ParameterError(
            f"{str(folder)!r} keeps its checkpoints elsewhere, in {place!r}. Check that the folder is yours, and name "
            f"it: {command} --checkpoint-dir {shlex.quote(place)}"
        )


def check_label(label: str) -> str:
    """Return the label of a selector; checked when it is written and when it is read.

    It stands in tables and LaTeX, on the terminal, and in the name of a folder.

    Args:
        label: What the selector is to be called.

    Raises:
        ParameterError: It cannot be part of a folder's name, or a terminal would act on it.

    >>> check_label("bsfl, alpha = 2")
    'bsfl, alpha = 2'
    """
    if not re.fullmatch(r"[^/\\]{1,100}", label) or not label.isprintable() or label.strip(". ") != label:
        raise ParameterError(
            f"label {shown(label)} names a folder: use up to 100 printable characters, no slash, no dot or space at "
            "the ends"
        )
    return label


def check_links(folder: Path) -> None:
    """Refuse links, pipes and devices anywhere inside a folder that is to be read or written.

    The folder itself and those above it may be links: whoever names it has chosen them.

    Args:
        folder: Of a comparison or of a run; nothing needs to be there.

    Raises:
        ParameterError: Names the first one.
    """
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
    except FileNotFoundError:  # another process has just removed it
        return
    if stat.S_ISLNK(mode):
        raise ParameterError(
            f"{str(path)!r} is a link, and leads out of its folder: a run is neither read nor written through links. "
            "Delete it, or put what it leads to in its place"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ParameterError(f"{str(path)!r} is neither a file nor a folder: delete it")


def outside(folder: Path, said: Mapping[str, Any]) -> str | None:
    """The folder of the checkpoints of a plan, if that is not inside the plan's own."""
    place = said.get("checkpoints", {}).get("checkpoint_dir")
    if place is None or Path(place).resolve().is_relative_to(folder.resolve()):
        return None
    return str(place)


DEEPEST = 20
"""Levels of a plan; ours have four."""
FAULTS = 3
"""Faults of a file that are named; there may be thousands."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal acts on, and halves of characters, which no file can hold; line ends and tabs are text."""


def _named_once(names: list[Any]) -> list[Any]:
    keys = [getattr(one, "label", one) for one in names]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} stands there twice")
    return names


def _where(given: Any) -> Any:
    if isinstance(given, RayResources):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("expected an object")
    if unknown := sorted(given.keys() - RayResources.__dataclass_fields__.keys()):
        raise ValueError(f"unknown key {shown(unknown[0])}; allowed are {', '.join(RayResources.__dataclass_fields__)}")
    return RayResources(**given)


def _writable(scenario: Scenario) -> Scenario:
    """Refuse what cannot stand in the file of a run's scenario: parameters of selectors may be anything else."""
    try:
        tomli_w.dumps(scenario.model_dump(exclude={"name"}))
    except TypeError as error:
        raise ValueError(f"it cannot be written as TOML: {error}") from None
    return scenario


Label = Annotated[str, AfterValidator(check_label)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class OneSelector(Table):
    """A selector of a plan; ``name`` is None for one that was given in Python."""

    label: Label
    name: Annotated[str, Field(min_length=1)] | None


class CheckpointOptions(Table):
    """Options of :func:`~fedsel_flwr.simulations.engine.simulate`."""

    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_every: CountOrZero | None = None


class PlanTable(Table):
    """What is run in a folder, and where: the fields of :class:`~fedsel_flwr.simulations.comparisons.plan.Plan`.

    ``fingerprints`` holds what tells one version of the code from another.
    """

    scenario: Annotated[Scenario, AfterValidator(_writable)]
    selectors: Annotated[list[OneSelector], Field(min_length=1), AfterValidator(_named_once)]
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_named_once)]
    reference: Label | None = None
    rounds_on_flower: CountOrZero = 0
    left_out: dict[Label, str] = Field(default_factory=dict)
    where: Annotated[RayResources, BeforeValidator(_where)] = RayResources()
    device: str = "cpu"
    processes: Count | None = None
    jobs: Count = 1
    checkpoints: CheckpointOptions = CheckpointOptions()
    fingerprints: dict[str, Any] | None = None


def parse_plan(path: Path) -> dict[str, Any]:
    """Read a plan and check its form.

    Args:
        path: Its file.

    Returns:
        The plan as it stands there.

    Raises:
        ParameterError: It is no plan; says which key, what came and what was expected.
    """
    try:
        said = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError(f"{str(path)!r} cannot be read: {one_line(str(error))}") from error
    said = said if isinstance(said, dict) else {}
    if missing := [key for key in ("scenario", "seeds", "selectors") if key not in said]:
        raise ParameterError(f"{str(path)!r} is no plan: it lacks {', '.join(missing)}")
    try:
        check_tree(said)
        PlanTable.model_validate(said)
    except (ValidationError, ParameterError) as error:
        raise ParameterError(f"{str(path)!r} is no plan: {faults_of(error)}") from None
    return said


def check_tree(tree: Any) -> None:
    """Refuse what is nested too deeply, and texts with control characters, before anything else looks at it.

    Args:
        tree: What JSON or TOML holds.

    Raises:
        ParameterError: Says what.
    """
    level, depth = [tree], 0
    while level:
        if (depth := depth + 1) > DEEPEST:
            raise ParameterError(f"it is nested more than {DEEPEST} levels deep")
        below: list[Any] = []
        for one in level:
            if isinstance(one, str) and _CONTROL.search(one):
                raise ParameterError(f"the text {shown(one)} holds control characters")
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
        level = below


def faults_of(error: Exception) -> str:
    """The first faults in one line: key, value and what was expected; of other errors what they say."""
    if not isinstance(error, ValidationError):
        return one_line(str(error))
    faults = error.errors(include_url=False)
    lines = [
        f"{one_line('.'.join(map(str, fault['loc'])))} = {shown(fault['input'])}: "
        f"{one_line(str(fault['msg']).removeprefix('Value error, '))}"
        for fault in faults[:FAULTS]
    ]
    more = len(faults) - FAULTS
    return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])
