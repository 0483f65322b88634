"""Plan of a comparison: its checks, its file ``plan.json``, the code that it names, and whether it can be resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, cast

import tomli_w
from pydantic import AfterValidator, Field, PlainSerializer, ValidationError

from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.errors import ParameterError, disk_errors
from fedsel_flwr.operating_system import shell_line
from fedsel_flwr.references import is_reference
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.rounds.storage import check_links, read_file
from fedsel_flwr.rounds.untrusted import one_line
from fedsel_flwr.simulations.comparisons.comparison import choose_reference
from fedsel_flwr.simulations.comparisons.contenders import (
    ALL,
    Contender,
    Label,
    SelectorLike,
    check_parameters,
    read_contenders,
    runnable_selectors,
    sweep_contenders,
)
from fedsel_flwr.simulations.engine import ENGINES, check_engine, check_jobs
from fedsel_flwr.simulations.on_flower.building import make_availability
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.results import has_begun, read_label
from fedsel_flwr.simulations.run_identity import RUN
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import (
    REFERENCE_KEYS,
    check_tree,
    describe_faults,
    replace_keys,
    shipped_scenario,
)
from fedsel_flwr.simulations.scenario_tables import Count, CountOrZero, Table
from fedsel_flwr.simulations.worlds.ingredients import OwnParts

logger = logging.getLogger("fedsel_flwr")
PLAN = "plan.json"
"""Name of the file with the plan."""
PLACEMENT_KEYS = {"where", "device", "jobs", "checkpoints"}
"""Keys of a plan about resources, which do not change what it runs."""
TRIAL_ROUNDS = 3
"""Rounds that are timed to estimate the duration of a comparison."""
FILE_KEYS = ("availability.trace", "system.devices", "data.data_dir")
"""Keys of a scenario that name files."""
MOST_SHOWN = 200
"""Largest number of characters that an error shows of a reference."""
PLAN_CURE = "Restore the folder from a copy, or begin a new comparison"
"""Cure for a plan that cannot be read."""


def _unique(names: list[Any]) -> list[Any]:
    keys = [getattr(one, "label", one) for one in names]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} occurs twice. Give each selector its own label, and each seed once")
    return names


Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Where = Annotated[RayResources, PlainSerializer(lambda one: {name: getattr(one, name) for name in one.non_default})]


class CheckpointOptions(Table):
    """Checkpoint options of :func:`~fedsel_flwr.simulations.engine.simulate`."""

    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    checkpoint_every: CountOrZero | None = None


class Plan(Table):
    """Plan of a comparison, checked as far as possible before the first run. Its fields are the keys of ``plan.json``.

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
    """

    scenario: Scenario
    selectors: Annotated[list[Contender], Field(min_length=1), AfterValidator(_unique)]
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_unique)]
    reference: Label | None = None
    rounds_on_flower: CountOrZero = 0
    left_out: dict[Label, str] = Field(default_factory=dict)
    where: Where = RayResources()
    device: str = "cpu"
    jobs: Count | None = 1
    checkpoints: CheckpointOptions = CheckpointOptions()

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        selectors: SelectorLike | Sequence[SelectorLike | Contender] | Mapping[str, SelectorLike],
        *,
        seeds: int | Sequence[int],
        engine: str,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        own: OwnParts = OwnParts(),  # noqa: B008 (frozen)
        **options: Any,
    ) -> Plan:
        """Make a plan. Arguments and errors are those of ``compare``; options are other keys of the plan."""
        if not isinstance(scenario, Scenario):
            raise ParameterError(f"scenario must be a Scenario, as of load_scenario, got {type(scenario).__name__}")
        scenario = scenario.model_copy(update={"engine": one_of("engine", engine, ENGINES)})
        where, device = options.get("where", RayResources()), options.get("device", "cpu")
        rounds = whole("rounds_on_flower", options.get("rounds_on_flower", 0), 0)
        on_cluster = _check_places(scenario, where, device, rounds)
        jobs = check_jobs(scenario, options.get("jobs"), device, on_cluster=on_cluster)
        make_availability(scenario)
        if isinstance(selectors, str) and selectors == ALL:
            selectors, options["left_out"] = runnable_selectors(scenario, own)
        contenders = sweep_contenders(read_contenders(selectors), {} if sweep is None else sweep, scenario)
        check_parameters(scenario, contenders)
        if rounds and engine == "ray":
            raise ParameterError("rounds_on_flower must be 0 if the engine of all runs is 'ray'")
        reference = choose_reference(options.get("reference"), [one.label for one in contenders])
        fixed = {"rounds_on_flower": rounds, "jobs": jobs, "reference": reference}
        try:
            return cls(
                scenario=scenario, selectors=contenders, seeds=_read_seeds(seeds, scenario.seed), **options | fixed
            )
        except ValidationError as error:
            raise ParameterError(f"the plan of these runs cannot be saved: {describe_faults(error)}") from None

    @classmethod
    def load(
        cls,
        folder: Path,
        scenario: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        checkpoint_dir: str | None = None,
        command: str = "fedsel compare --resume FOLDER",
        **where: Any,
    ) -> Plan:
        """Read the plan in a folder.

        Args:
            folder: Folder of a comparison or a run.
            scenario: Changes to the scenario, dotted key -> value.
            trust: Whether code that the plan names may be loaded.
            checkpoint_dir: Folder of the plan's checkpoints. The user must name it if it is outside the plan's folder.
            command: The command that the user typed, for errors.
            **where: Values of ``where``, ``device`` and ``jobs`` that replace those of the plan.

        Raises:
            ParameterError: There is no plan, or it needs a part that only Python code can pass. Also raised if the plan
                names code and is not trusted, or if its checkpoints are elsewhere.
        """
        # A Ray cluster in the arguments replaces that of the plan, which then needs no trust.
        found = read_plan(folder)
        plan = found.model_copy(update=where)
        given = {key: value for key, value in (scenario or {}).items() if value is not None}
        if "jobs" not in where and plan.plays_on_cluster != found.plays_on_cluster:
            # The number was for other machines.
            plan = plan.model_copy(update={"jobs": None})
        if nameless := [one.label for one in plan.selectors if one.name is None]:
            raise ParameterError(
                f"selector {nameless[0]!r} in {str(folder)!r} was passed in Python. Resume it in Python, with "
                "compare(..., resume=True) and the same selectors"
            )
        # Checked first, because making the plan loads the code that it names.
        check_trusted(folder, plan, trust, f"{command} --trust", given)
        check_checkpoints(folder, plan, checkpoint_dir, command)
        changed = replace_keys(plan.scenario.model_dump(), given)
        options = {key: getattr(plan, key) for key in cls.model_fields.keys() - {"scenario", "selectors", "seeds"}}
        return cls.of(changed, plan.selectors, seeds=plan.seeds, engine=changed.engine, **options)

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
        both = (self.scenario, shipped_scenario(self.scenario.name))
        for key in FILE_KEYS:
            mine, theirs = (attrgetter(key)(one) for one in both)
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

    def resume_options(self, folder: Path) -> str:
        """Return the command-line options that resume the plan in its folder, including those that trust its code."""
        place = self.outside_checkpoints(folder)
        named = "" if place is None else f" --checkpoint-dir {shell_line(place)}"
        return f"--resume {shell_line(str(folder))}{named}{' --trust' if self.distrusted(folder) else ''}"

    @property
    def trial_rounds(self) -> int:
        """Number of rounds that are timed to estimate the duration of a comparison."""
        return min(self.scenario.rounds, int(self.scenario.aggregation.options()["warmup_rounds"]) + TRIAL_ROUNDS)

    def count_rounds(self) -> str:
        """Describe the number of runs and rounds, for example "30 runs of 300 rounds"."""
        runs = len(self.selectors) * len(self.seeds)
        counted = f"{runs} run{'' if runs == 1 else 's'} of {self.scenario.rounds} rounds"
        if self.plays_on_cluster:
            return f"{counted} on the Ray cluster at {self.where.address}"
        return f"{counted} on Ray" if self.scenario.engine == "ray" else counted

    def describe_time(self, ends: Sequence[float]) -> str:
        """Estimate the duration of all runs from the times at which rounds ended, for example "about 45 s"."""
        # The first round is not timed, because it also compiles code and reads the data.
        seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        seconds *= self.scenario.rounds * len(self.selectors) * len(self.seeds)
        return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def check_trusted(folder: Path, plan: Plan, trust: bool, command: str, given: Collection[str] = ()) -> None:
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


def check_checkpoints(folder: Path, plan: Plan, confirmed: str | None, command: str) -> None:
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
        raise ParameterError(f"{str(folder)!r} has its own checkpoints. Leave out --checkpoint-dir")
    # Paths are resolved, because the user may name the same folder by another path.
    if place is not None and (confirmed is None or Path(confirmed).expanduser().resolve() != Path(place).resolve()):
        raise ParameterError(
            f"{str(folder)!r} keeps its checkpoints elsewhere, in {place!r}. Check that the folder is yours, and name "
            f"it: {command} --checkpoint-dir {shell_line(place)}"
        )


def write_plan(folder: Path, plan: Plan) -> None:
    """Write a plan to its folder.

    Raises:
        RunError: The plan cannot be written.
    """
    with disk_errors(folder), atomic_write(folder / PLAN) as temporary:
        temporary.write_text(json.dumps(plan.model_dump(), indent=2) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> Plan:
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
            raise ParameterError(f"{str(folder)!r} holds nothing to resume: it has no {PLAN} and no {RUN}")
        label, scenario = read_label(folder)
        return Plan(
            scenario=scenario, selectors=[Contender(label=label, name=scenario.selector)], seeds=[scenario.seed]
        )
    try:
        plan = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError(f"{str(path)!r} cannot be read: {one_line(str(error))}. {PLAN_CURE}") from error
    try:
        # Checked first, because the validator descends into nested values, and its errors print them.
        check_tree(plan)
        found = Plan.model_validate(plan)
        # Selectors' parameters may have any value, such as null in JSON, which the file of a run cannot hold.
        tomli_w.dumps(found.scenario.model_dump(exclude={"name"}))
        for one in found.selectors:
            tomli_w.dumps(one.params)
    except (ValidationError, ParameterError, TypeError) as error:
        raise ParameterError(f"{str(path)!r} is not a plan: {describe_faults(error)}") from None
    return found


def find_newest_run(plan: Plan, root: Path, skipped: Callable[[str], None] = logger.warning) -> Path:
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


def _check_places(scenario: Scenario, where: RayResources, device: str, rounds_on_flower: int) -> bool:
    """Refuse machines and resources that the runs cannot use; return whether they are tasks on a Ray cluster."""
    if scenario.engine != "vectorized" or not where.names_cluster:
        if scenario.engine == "vectorized" and not rounds_on_flower:
            # "local" means this machine, where the vectorized engine runs without Ray.
            where = replace(where, ray_address=None)
        check_engine(scenario, where, device, rounds_on_flower)
        return False
    # The device is on the nodes. This machine may have none.
    check_engine(scenario, RayResources())
    own = ("client_cpus", "client_gpus") if rounds_on_flower == 0 else ()
    if unused := [name for name in own if name in where.non_default]:
        raise ParameterError(f"{unused[0]} is for clients of the engine 'ray'. Set num_cpus and num_gpus of each run")
    where.of_runs(device).check()
    return True


def _read_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Read the seeds of a comparison: a number of seeds, counted up from the first, or a list of seeds."""
    # A text is a sequence too, but no list of seeds.
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        return list(range(first, first + whole("seeds", seeds, 1)))
    return [whole("seeds", seed, 0) for seed in seeds]
