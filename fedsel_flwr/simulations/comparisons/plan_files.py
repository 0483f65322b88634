"""Files of a plan: the content of ``plan.json``, the code that it names, and the folder of a comparison."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, cast

import tomli_w
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.references import is_reference
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.rounds.storage import RUN_IN_USE, FolderLock, check_links, lock_folder, read_file
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.simulations.existing_runs import CHECKPOINTS, REPLAY_CURE, has_begun
from fedsel_flwr.simulations.listing import scenario_names
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.results import read_label
from fedsel_flwr.simulations.run_identity import RUN, changed_plan_parts
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import (
    REFERENCE_KEYS,
    check_label,
    check_tree,
    describe_faults,
    load_scenario,
)
from fedsel_flwr.simulations.scenario_tables import Count, CountOrZero, Table

logger = logging.getLogger("fedsel_flwr")
PLAN = "plan.json"
"""Name of the file with the plan."""
PLACEMENT_KEYS = {"where", "device", "jobs", "checkpoints", "fingerprints"}
"""Keys of a plan about resources or versions of code, which do not change what it runs."""
FOLDER_CURE = "Choose a folder that can be written to"
"""Cure if the folder cannot be written to."""
FILE_KEYS = ("availability.trace", "system.devices", "data.data_dir")
"""Keys of a scenario that name files."""
MOST_SHOWN = 200
"""Largest number of characters that an error shows of a reference."""
PLAN_CURE = "Restore the folder from a copy, or begin a new comparison"
"""Cure for a plan that cannot be read."""


def _unique(names: list[Any]) -> list[Any]:
    keys = [getattr(one, "label", one) for one in names]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} occurs twice, expected only once")
    return names


def _read_where(given: Any) -> Any:
    # For a plain dataclass, pydantic alone would ignore unknown keys.
    if isinstance(given, RayResources):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("expected an object")
    if unknown := sorted(given.keys() - RayResources.__dataclass_fields__.keys()):
        raise ValueError(f"unknown key {shown(unknown[0])}; allowed are {', '.join(RayResources.__dataclass_fields__)}")
    return RayResources(**given)


Label = Annotated[str, AfterValidator(check_label)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Where = Annotated[
    RayResources,
    BeforeValidator(_read_where),
    PlainSerializer(lambda where: {name: getattr(where, name) for name in where.non_default}),
]


class SelectorEntry(Table):
    """A selector of a plan; ``name`` is None for one that was given in Python, ``params`` are those of a sweep."""

    label: Label
    name: Annotated[str, Field(min_length=1)] | None
    params: dict[str, Any] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Left out if empty, so that earlier versions can resume a plan without a sweep.
        return {key: value for key, value in dump(self).items() if key != "params" or value}


class CheckpointOptions(Table):
    """Checkpoint options of :func:`~fedsel_flwr.simulations.engine.simulate`."""

    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_every: CountOrZero | None = None


class PlanForm(Table):
    """Content of ``plan.json``.

    Attributes:
        scenario: Scenario of all runs, with their engine.
        selectors: The selectors.
        seeds: The seeds.
        reference: Label of the selector that the others are compared with.
        rounds_on_flower: Rounds of the first run that also run on Flower and Ray before the comparison.
        left_out: With "all" selectors, those that cannot run -> the reason.
        where: Resources of Ray.
        device: Device on which the vectorized engine trains.
        jobs: Number of parallel runs. If None, as many as the Ray cluster has room for.
        checkpoints: Checkpoint options of :func:`~fedsel_flwr.simulations.engine.simulate`.
        fingerprints: Identity of code and data when the plan was written
            (:func:`~fedsel_flwr.simulations.run_identity.plan_identity`).
    """

    scenario: Scenario
    selectors: Annotated[list[SelectorEntry], Field(min_length=1), AfterValidator(_unique)]
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_unique)]
    reference: Label | None = None
    rounds_on_flower: CountOrZero = 0
    left_out: dict[Label, str] = Field(default_factory=dict)
    where: Where = RayResources()
    device: str = "cpu"
    jobs: Count | None = 1
    checkpoints: CheckpointOptions = CheckpointOptions()
    fingerprints: dict[str, Any] | None = None

    @property
    def plays_on_cluster(self) -> bool:
        """Whether the runs are tasks on a Ray cluster. Only an address in the plan decides, not RAY_ADDRESS."""
        return self.scenario.engine == "vectorized" and self.where.names_cluster

    def distrusted(self, folder: Path) -> dict[str, str]:
        """Find the keys that need trust: references to code, a Ray cluster, and files outside the plan's folder.

        A Ray cluster sends pickled objects. Files that a shipped scenario of this name reads need no trust.

        Args:
            folder: Folder of the plan.

        Returns:
            Key of the plan -> reference, address or path.
        """
        named = {f"selectors[{number}].name": one.name for number, one in enumerate(self.selectors)}
        named |= {f"scenario.{key}": attrgetter(key)(self.scenario) for key in REFERENCE_KEYS}
        named["where.ray_address"] = self.where.ray_address
        found = {key: value for key, value in named.items() if value is not None and is_reference(value)}
        name = self.scenario.name
        shipped = load_scenario(name) if name in scenario_names() else Scenario(name=name)
        for key in FILE_KEYS:
            mine, theirs = (attrgetter(key)(one) for one in (self.scenario, shipped))
            if mine and mine != theirs and not Path(mine).expanduser().resolve().is_relative_to(folder.resolve()):
                found[f"scenario.{key}"] = mine
        return found

    def outside_checkpoints(self, folder: Path) -> str | None:
        """Return the folder of the checkpoints if it is outside the plan's folder, else None."""
        place = self.checkpoints.checkpoint_dir
        return None if place is None or Path(place).resolve().is_relative_to(folder.resolve()) else place

    def work(self) -> dict[str, Any]:
        """Return the part of the plan that determines its runs, without the resources."""
        # Converted as in a file, where tuples become lists.
        return cast(dict[str, Any], json.loads(json.dumps(self.model_dump(exclude=PLACEMENT_KEYS))))


def check_trusted(folder: Path, plan: PlanForm, trust: bool, command: str, given: Collection[str] = ()) -> None:
    """Refuse to load the code and the files elsewhere that a plan names, unless the user trusts it.

    Args:
        folder: Folder of the plan.
        plan: The plan.
        trust: Whether the code may be loaded.
        given: Keys of the scenario that the user has set in place of the plan.
        command: The command that loads it.

    Raises:
        ParameterError: The code is not trusted. The error names each reference and the command to type.
    """
    found = {key: value for key, value in plan.distrusted(folder).items() if key.removeprefix("scenario.") not in given}
    if trust or not found:
        return
    named = ", ".join(f"{key} = {value[:MOST_SHOWN]!r}" for key, value in found.items())
    raise ParameterError(
        f"the files in {str(folder)!r} name code, which would run with your rights, or other files: {named}. "
        f"Read that code. If you trust it, enter: {command}"
    )


def check_checkpoints(folder: Path, plan: PlanForm, confirmed: str | None, command: str) -> None:
    """Refuse a folder of checkpoints outside the plan's folder, unless the user has named it.

    Args:
        folder: Folder of the plan.
        plan: The plan.
        confirmed: The folder of checkpoints that the user has named.
        command: The command that resumes, without the folder of checkpoints.

    Raises:
        ParameterError: The user has not named the folder. The error names it and the command to type.
    """
    place = plan.outside_checkpoints(folder)
    if confirmed is not None and place is None:
        raise ParameterError(
            f"{str(folder)!r} is the folder of a run, which has its checkpoints. Leave out --checkpoint-dir, or name "
            "the scenario and end with --resume"
        )
    # Paths are resolved, because the user may name the same folder by another path.
    if place is not None and (confirmed is None or Path(confirmed).expanduser().resolve() != Path(place).resolve()):
        raise ParameterError(
            f"{str(folder)!r} keeps its checkpoints elsewhere, in {place!r}. Check that the folder is yours, and name "
            f"it: {command} --checkpoint-dir {shlex.quote(place)}"
        )


def write_plan(folder: Path, plan: PlanForm) -> None:
    """Write a plan to its folder.

    Raises:
        RunError: The plan cannot be written.
    """
    try:
        with atomic_write(folder / PLAN) as temporary:
            temporary.write_text(json.dumps(plan.model_dump(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{str(folder)!r} cannot be written: {error.strerror or error}. {FOLDER_CURE}") from error


def read_plan(folder: Path) -> PlanForm:
    """Read the plan in a folder, or make a plan from the record of a single run.

    Raises:
        ParameterError: The folder has nothing to resume, contains a link, or its file is not a plan. The error names
            the key, its value and the expected value.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ParameterError(f"{str(folder)!r} {what}. Give the folder of the run, or of the comparison, to resume")
    check_links(folder)
    path = folder / PLAN
    if not path.is_file():
        if not has_begun(folder):
            raise ParameterError(
                f"{str(folder)!r} holds nothing to resume: it has no {PLAN} and no {RUN}, which fedsel run and "
                "compare write first. Give another folder, or leave --resume out"
            )
        label, scenario = read_label(folder)
        return PlanForm(
            scenario=scenario, selectors=[SelectorEntry(label=label, name=scenario.selector)], seeds=[scenario.seed]
        )
    try:
        plan = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError(f"{str(path)!r} cannot be read: {one_line(str(error))}. {PLAN_CURE}") from error
    plan = plan if isinstance(plan, dict) else {}
    # Older plans have the key "processes", which no longer exists.
    plan.pop("processes", None)
    if missing := [key for key in ("scenario", "seeds", "selectors") if key not in plan]:
        raise ParameterError(f"{str(path)!r} is not a plan: it lacks {', '.join(missing)}. {PLAN_CURE}")
    try:
        # Checked first, because the validator descends into nested values, and its errors print them.
        check_tree(plan)
        form = PlanForm.model_validate(plan)
        # Selectors' parameters may have any value, such as null in JSON, which the file of a run cannot hold.
        tomli_w.dumps(form.scenario.model_dump(exclude={"name"}))
        for one in form.selectors:
            tomli_w.dumps(one.params)
    except (ValidationError, ParameterError, TypeError) as error:
        raise ParameterError(f"{str(path)!r} is not a plan: {describe_faults(error)}") from None
    return form


def check_plan(folder: Path, here: Mapping[str, Any]) -> None:
    """Refuse to resume a comparison whose selectors, model, data or scenario have changed.

    Args:
        folder: Folder of the comparison.
        here: The fingerprints of the code and data of this process
            (:func:`~fedsel_flwr.simulations.run_identity.plan_identity`).

    Raises:
        RunError: A part has changed. The error names it.
    """
    # If there is no plan, or a plan without fingerprints, each run compares its fingerprints when it is resumed.
    there = read_plan(folder).fingerprints if (folder / PLAN).is_file() else None
    if there is not None and (names := changed_plan_parts(there, here)):
        raise RunError(
            f"{str(folder)!r} was started with other code or data. Changed since then: {', '.join(names)}. "
            f"{REPLAY_CURE}"
        )


def find_newest_run(plan: PlanForm, root: Path, skipped: Callable[[str], None] = logger.warning) -> Path:
    """Find the newest folder with the same plan.

    Args:
        plan: A plan.
        root: The folder of all runs.
        skipped: Function called with the reason for each newer folder whose plan cannot be read.

    Raises:
        ParameterError: There is no such folder.
    """
    # Links are included, so that reading one refuses it by name. The time of the link counts, not that of its target.
    found = [place for place in root.glob(f"*/{PLAN}") if place.is_file() or place.is_symlink()]
    for place in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            there = read_plan(place.parent)
        except ParameterError as error:
            skipped(f"a folder is skipped: {error}")
            continue
        if there.work() == plan.work():
            return place.parent
    raise ParameterError(
        f"no run in {str(root)!r} was started with these arguments. Give its folder, as in --resume runs/NAME, or "
        "leave --resume out"
    )


def check_folder(folder: Path, own: Collection[str], *, single: bool, resume: bool) -> None:
    """Refuse a folder with runs of another comparison, which would later count as runs of this one.

    Args:
        folder: Folder of the comparison.
        own: Names of the comparison's runs.
        single: Whether the folder also holds the files of its only run.
        resume: Whether interrupted runs are resumed. If not, they are refused, because they must not be overwritten.

    Raises:
        ParameterError: There are such runs. The error names them.
    """
    foreign = sorted({path.parent.name for path in folder.glob(f"*/{RUN}")} - {*own, *(f"{o}-on-flower" for o in own)})
    if foreign:
        raise ParameterError(
            f"folder {str(folder)!r} holds runs of another comparison ({', '.join(foreign[:3])}). Choose a new "
            "folder, or delete these runs"
        )
    places = [folder] if single else [folder / name for name in own]
    cut_off = sorted(place.name for place in places if any((place / CHECKPOINTS).glob("round-*")))
    if cut_off and not resume:
        raise ParameterError(
            f"folder {str(folder)!r} holds interrupted runs ({', '.join(cut_off[:3])}). Resume them with "
            "resume=True, choose a new folder, or delete this one"
        )


def lock_comparison(folder: Path) -> FolderLock | None:
    """Create the folder of a comparison if needed, and lock it for this process.

    Returns:
        The lock, which is held until its last reference is gone; None if folders cannot be locked.

    Raises:
        RunError: The folder cannot be created, or another process writes there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{str(folder)!r} cannot be written: {error.strerror or error}. {FOLDER_CURE}") from error
    return lock_folder(folder, RUN_IN_USE)
