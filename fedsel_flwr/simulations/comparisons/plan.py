"""Plan of a comparison: check it before the first run, run it, and resume it from its folder."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shlex
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsel_flwr.callbacks.tracking import Tracking
from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import run_name
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.storage import check_links
from fedsel_flwr.simulations.comparisons.cluster_runs import run_on_cluster
from fedsel_flwr.simulations.comparisons.cluster_tasks import Watch
from fedsel_flwr.simulations.comparisons.comparison import Comparison, Run, choose_reference
from fedsel_flwr.simulations.comparisons.contenders import (
    Contender,
    SelectorLike,
    read_contenders,
    sweep_contenders,
)
from fedsel_flwr.simulations.comparisons.flower_agreement import compare_choices, run_on_flower
from fedsel_flwr.simulations.comparisons.parallel_runs import (
    Job,
    StartRun,
    Update,
    report_last_round,
    report_progress,
    run_in_parallel,
)
from fedsel_flwr.simulations.comparisons.plan_files import (
    PlanForm,
    SelectorEntry,
    check_checkpoints,
    check_folder,
    check_plan,
    check_trusted,
    lock_comparison,
    read_plan,
    write_plan,
)
from fedsel_flwr.simulations.engine import ENGINES, check_engine, check_jobs, simulate
from fedsel_flwr.simulations.existing_runs import has_finished
from fedsel_flwr.simulations.on_flower.building import check_selectors, first_rounds, make_availability, make_strategy
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.run_identity import plan_identity
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import check_selector_tables, describe_faults, replace_keys
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of

OPTIONS = ("reference", "rounds_on_flower", "left_out", "where", "device", "jobs", "checkpoints")
"""Keys of a plan's form that have a default."""
TRIAL_ROUNDS = 3
"""Rounds that are timed to estimate the duration of a comparison."""


@dataclass(frozen=True)
class Plan:
    """Plan of a comparison, checked as far as possible before the first run.

    Attributes:
        form: The part of the plan that ``plan.json`` holds.
        contenders: The selectors, including those from Python code.
    """

    form: PlanForm
    contenders: Sequence[Contender]

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        selectors: SelectorLike | Sequence[SelectorLike | Contender] | Mapping[str, SelectorLike],
        *,
        seeds: int | Sequence[int],
        engine: str,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        **options: Any,
    ) -> Plan:
        """Make a plan. Arguments and errors are those of ``compare``; options are the other keys of the form."""
        if not isinstance(scenario, Scenario):
            raise ParameterError(
                f"scenario must be a Scenario, got {type(scenario).__name__}. Make one with load_scenario"
            )
        scenario = scenario.model_copy(update={"engine": one_of("engine", engine, ENGINES)})
        where, device = options.get("where", RayResources()), options.get("device", "cpu")
        rounds = whole("rounds_on_flower", options.get("rounds_on_flower", 0), 0)
        on_cluster = _check_places(scenario, where, device, rounds)
        jobs = check_jobs(scenario, options.get("jobs"), device, on_cluster=on_cluster)
        make_availability(scenario)
        contenders = sweep_contenders(read_contenders(selectors), {} if sweep is None else sweep, scenario)
        _check_parameters(scenario, contenders)
        if rounds and engine == "ray":
            raise ParameterError(
                "rounds_on_flower must be 0 if the engine of all runs is 'ray'. Leave it out, or use 'vectorized'"
            )
        reference = choose_reference(options.get("reference"), [one.label for one in contenders])
        entries = [SelectorEntry(label=one.label, name=one.name, params=dict(one.params)) for one in contenders]
        fixed = {"rounds_on_flower": rounds, "jobs": jobs, "reference": reference}
        try:
            form = PlanForm(
                scenario=scenario, selectors=entries, seeds=_read_seeds(seeds, scenario.seed), **options | fixed
            )
        except ValidationError as error:
            raise ParameterError(f"the plan of these runs cannot be saved: {describe_faults(error)}") from None
        return cls(form, contenders)

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
        form = found.model_copy(update=where)
        given = {key: value for key, value in (scenario or {}).items() if value is not None}
        if "jobs" not in where and form.plays_on_cluster != found.plays_on_cluster:
            # The number was for other machines.
            form = form.model_copy(update={"jobs": None})
        if nameless := [one.label for one in form.selectors if one.name is None]:
            raise ParameterError(
                f"selector {nameless[0]!r} in {str(folder)!r} was passed in Python. Resume it in Python, with "
                "compare(..., resume=True) and the same selectors"
            )
        # Checked first, because making the plan loads the code that it names.
        check_trusted(folder, form, trust, f"{command} --trust", given)
        check_checkpoints(folder, form, checkpoint_dir, command)
        changed = replace_keys(form.scenario.model_dump(), given)
        named = [Contender(one.label, one.name, params=one.params) for one in form.selectors]
        options = {key: getattr(form, key) for key in OPTIONS}
        return cls.of(changed, named, seeds=form.seeds, engine=changed.engine, **options)

    def resume_options(self, folder: Path) -> str:
        """Return the command-line options that resume the plan in its folder, including those that trust its code."""
        place = self.form.outside_checkpoints(folder)
        named = "" if place is None else f" --checkpoint-dir {shlex.quote(place)}"
        return f"--resume {shlex.quote(str(folder))}{named}{' --trust' if self.form.distrusted(folder) else ''}"

    def describe_effort(self) -> str:
        """Return the number of runs and rounds, and their approximate duration: "30 runs of 300 rounds, about 45 s".

        The time comes from a trial of a few rounds of the first run, which is not kept. Runs on Ray have no trial,
        because the start of Ray alone would take longer.
        """
        form, counted = self.form, self.count_rounds()
        if form.scenario.engine == "ray" or form.plays_on_cluster:
            return counted
        first = self.contenders[0].scenario(form.scenario, form.seeds[0])
        trial, ends = first_rounds(first, self.trial_rounds), []
        simulate(
            trial,
            selector=self.contenders[0].selector(trial),
            on_round=lambda record: ends.append(time.monotonic()),
            device=form.device,
            quiet=True,
        )
        return f"{counted}, {self.describe_time(ends)}" if len(ends) > 1 else counted

    @property
    def trial_rounds(self) -> int:
        """Number of rounds that are timed to estimate the duration of a comparison."""
        scenario = self.form.scenario
        return min(scenario.rounds, int(scenario.aggregation.options()["warmup_rounds"]) + TRIAL_ROUNDS)

    def count_rounds(self) -> str:
        """Describe the number of runs and rounds, for example "30 runs of 300 rounds"."""
        runs = len(self.contenders) * len(self.form.seeds)
        counted = f"{runs} run{'' if runs == 1 else 's'} of {self.form.scenario.rounds} rounds"
        if self.form.plays_on_cluster:
            return f"{counted} on the Ray cluster at {self.form.where.address}"
        return f"{counted} on Ray" if self.form.scenario.engine == "ray" else counted

    def describe_time(self, ends: Sequence[float]) -> str:
        """Estimate the duration of all runs from the times at which rounds ended, for example "about 45 s"."""
        # The first round is not timed, because it also compiles code and reads the data.
        seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        seconds *= self.form.scenario.rounds * len(self.contenders) * len(self.form.seeds) / (self.form.jobs or 1)
        return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"

    def run(
        self,
        folder: Path | None = None,
        start_run: StartRun | None = None,
        update: Update | None = None,
        resume: bool = False,
        replay: bool = False,
        track: Tracking | None = None,
        watch: Watch | None = None,
        **options: Any,
    ) -> Comparison:
        """Run the plan. Arguments, result and errors are those of ``compare``; options are passed to ``simulate``.

        On a cluster, ``watch`` is called with the progress of all runs.

        All selectors run on the first seed, then on the next. Therefore the runs before an interruption can be
        compared, and the data of each seed are made only once.
        """
        form = self.form
        comparison = Comparison(form.scenario, reference=form.reference, left_out=form.left_out)
        brought = OwnParts(options.get("model"), options.get("data"), options.get("objective"))
        lock = None
        if folder:
            names = {run_name(one.label, seed) for one in self.contenders for seed in form.seeds}
            check_links(folder)
            check_folder(folder, names, single=self._is_single, resume=resume)
        # Runs begin, and are compared, in this order: by seed, then by selector.
        runs = [
            Job(one.scenario(form.scenario, seed), one, self._run_place(folder, one, seed))
            for seed, one in itertools.product(form.seeds, self.contenders)
        ]
        of_first_seed = runs[: len(self.contenders)]
        # If all runs have finished, they are only read, which needs neither their data nor their selectors.
        if not resume or not all(job.place["folder"] and has_finished(job.place["folder"]) for job in runs):
            _check_worlds(of_first_seed, brought)
        if folder:
            # Done before anything is written, because a callable may fail to make a selector.
            codes = {job.contender.label: job.code(brought) for job in of_first_seed}
            found = plan_identity(codes, world_of(brought.named_in(runs[0].scenario), brought), brought)
            lock = lock_comparison(folder)
            if resume and not replay:
                check_plan(folder, found)
            named = {"scenario": brought.named_in(form.scenario), "fingerprints": found}
            write_plan(folder, form.model_copy(update=named))
            options = {"resume": resume, "replay": replay, **form.checkpoints.model_dump(), **options}
        on_flower: History | None = None
        # On a cluster, these two numbers are those of each vectorized run.
        unused = ("num_cpus", "num_gpus") if form.plays_on_cluster else ()
        on_ray = options | {name: getattr(form.where, name) for name in form.where.non_default if name not in unused}
        if rounds := min(form.rounds_on_flower, form.scenario.rounds):
            first, place = runs[0], folder and folder / f"{run_name(runs[0].contender.label, form.seeds[0])}-on-flower"
            on_round = report_progress(f"{self._title(first)}, with Flower on Ray", rounds, start_run, update)
            on_flower = run_on_flower(
                first.scenario, rounds, first.selector(), on_round, folder=place, label=first.contender.label, **on_ray
            ).history
        play = self._play_sequentially
        if form.plays_on_cluster or ((form.jobs or 1) > 1 and not self._is_single):
            play = partial(self._play_elsewhere, folder=folder, watch=watch)
            # Computed here, because a worker process gets pickled classes, often without their source.
            runs = [replace(job, place={**job.place, "code": job.code(brought)}) for job in runs]
        here = (on_ray if form.scenario.engine == "ray" else options | {"device": form.device}) | {"track": track}
        # The generator is closed even if a run fails, and then ends its worker processes.
        with contextlib.closing(play(runs, here, start_run, update)) as results:
            for job, result in zip(runs, results, strict=True):
                run = Run(job.contender.label, brought.named_in(job.scenario), result, job.place["folder"])
                if on_flower and not comparison.runs:
                    comparison.agreement = compare_choices(on_flower, result.history)
                comparison.runs.append(run)
        if folder:
            comparison.report(folder)
        # Removing the last reference releases the lock, which must be held until the report is written.
        del lock
        return comparison

    @property
    def _is_single(self) -> bool:
        """Whether the plan has only one run, which is then written to the plan's folder."""
        return len(self.contenders) * len(self.form.seeds) == 1

    def _run_place(self, folder: Path | None, one: Contender, seed: int) -> dict[str, Any]:
        """Return the folder and the label of a run, as options of ``simulate``."""
        place = folder / run_name(one.label, seed) if folder and not self._is_single else folder
        return {"folder": place, "label": one.label}

    def _title(self, job: Job) -> str:
        """Return the name of a run in the progress display."""
        label = job.contender.label
        return label if len(self.form.seeds) == 1 else f"{label}, seed {job.scenario.seed}"

    def _play_sequentially(
        self, runs: Sequence[Job], options: Mapping[str, Any], start_run: StartRun | None, update: Update | None
    ) -> Generator[RunResult]:
        """Do one run after the other in this process."""
        for job in runs:
            on_round = report_progress(self._title(job), job.scenario.rounds, start_run, update)
            place = job.place["folder"]
            # Read before the run, because afterwards the folder is always finished.
            was_over = bool(options.get("resume")) and place is not None and has_finished(place)
            result = simulate(job.scenario, selector=job.selector(), on_round=on_round, **options, **job.place)
            if was_over and update:
                report_last_round(result.history, update)
            # A copy is in memory. A history that reads a file keeps it open, and systems limit their number.
            yield replace(result, history=copy.copy(result.history))

    def _play_elsewhere(
        self,
        runs: Sequence[Job],
        options: Mapping[str, Any],
        start_run: StartRun | None,
        update: Update | None,
        *,
        folder: Path | None,
        watch: Watch | None,
    ) -> Generator[RunResult]:
        """Do several runs at a time in other processes; report each run when it and all earlier runs have ended."""
        form = self.form
        if form.plays_on_cluster:
            played = run_on_cluster(runs, options, form.where.of_runs(form.device), form.jobs, folder, watch)
        else:
            played = run_in_parallel(runs, options, form.jobs or 1)
        with contextlib.closing(played) as results:
            for job in runs:
                report_progress(self._title(job), job.scenario.rounds, start_run, update)
                result = next(results)
                if update:
                    report_last_round(result.history, update)
                yield result


def _check_places(scenario: Scenario, where: RayResources, device: str, rounds_on_flower: int) -> bool:
    """Refuse machines and resources that the runs cannot use; return whether they are tasks on a Ray cluster."""
    if scenario.engine != "vectorized" or where.ray_address is None:
        check_engine(scenario, where, device, rounds_on_flower)
        return False
    if not where.names_cluster:
        # "local" means this machine, where the vectorized engine runs without Ray.
        here = where if rounds_on_flower else replace(where, ray_address=None)
        check_engine(scenario, here, device, rounds_on_flower)
        return False
    # The device is on the nodes. This machine may have none.
    check_engine(scenario, RayResources())
    own = ("client_cpus", "client_gpus") if rounds_on_flower == 0 else ()
    if unused := [name for name in own if name in where.non_default]:
        raise ParameterError(
            f"{unused[0]} is for clients of the engine 'ray'. Set the cores and GPUs of each vectorized run on the "
            "cluster with num_cpus and num_gpus"
        )
    where.of_runs(device).check()
    return True


def _check_parameters(scenario: Scenario, contenders: Sequence[Contender]) -> None:
    """Refuse parameters of the named selectors that are unknown, missing or out of range."""
    for one in contenders:
        if one.name:
            own = one.scenario(scenario, scenario.seed)
            if one.params:
                # Only the parameters of the sweep are checked, because reading the scenario checked its tables.
                swept = own.model_copy(update={"selectors": {one.table: dict(one.params)}})
                check_selector_tables(scenario.name, swept, [one.name])
            check_selectors(own, [one.name])


def _check_worlds(jobs: Sequence[Job], brought: OwnParts) -> None:
    """Refuse data, a partition and selectors that cannot be used, before anything is written or started.

    The jobs share the world of the first seed. Only their scenarios differ.
    """
    scenarios = [brought.named_in(job.scenario) for job in jobs]
    world = world_of(scenarios[0], brought)
    for job, scenario in zip(jobs, scenarios, strict=True):
        make_strategy(world.with_scenario(scenario), selector=job.selector())


def _read_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Read the seeds of a comparison: a number of seeds, counted up from the first, or a list of seeds."""
    # A text is a sequence too, so "12" would be read as the seeds 1 and 2.
    if isinstance(seeds, str):
        raise ParameterError(f"seeds must be a whole number of seeds, or a list of seeds, got the text {seeds!r}")
    if not isinstance(seeds, Sequence):
        return list(range(first, first + whole("seeds", seeds, 1)))
    numbers = [whole("seeds", seed, 0) for seed in seeds]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ParameterError(
            f"seeds must be a number of seeds, or a list of at least one seed without repeats, got {list(seeds)}"
        )
    return numbers
