"""The form of ``plan.json``, and of whatever else is read from a folder that somebody else may have made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.strangers import check_label
from fedsel_flwr.simulations.tables import Count, CountOrZero, Table
from fedsel_flwr.simulations.where import Where

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
    if isinstance(given, Where):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("expected an object")
    if unknown := sorted(given.keys() - Where.__dataclass_fields__.keys()):
        raise ValueError(f"unknown key {shown(unknown[0])}; allowed are {', '.join(Where.__dataclass_fields__)}")
    return Where(**given)


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
    """What is run in a folder, and where: the fields of :class:`~fedsel_flwr.simulations.planning.Plan`.

    ``fingerprints`` holds what tells one version of the code from another.
    """

    scenario: Annotated[Scenario, AfterValidator(_writable)]
    selectors: Annotated[list[OneSelector], Field(min_length=1), AfterValidator(_named_once)]
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_named_once)]
    reference: Label | None = None
    rounds_on_flower: CountOrZero = 0
    left_out: dict[Label, str] = Field(default_factory=dict)
    where: Annotated[Where, BeforeValidator(_where)] = Where()
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
