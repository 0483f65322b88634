"""Comparison of selectors: run each selector on every seed of one scenario, and write each run when it ends."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.progress import PipeSafeConsole, Progress
from fedsel_flwr.report.run_folder import run_name
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.storage import check_links
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations.comparisons.cluster import Cluster, Watch
from fedsel_flwr.simulations.comparisons.comparison import Comparison, Run, compare_choices
from fedsel_flwr.simulations.comparisons.contenders import SelectorLike
from fedsel_flwr.simulations.comparisons.parallel_runs import (
    Executor,
    Job,
    Processes,
    RunReport,
    StartRun,
    Update,
    play_in_order,
    run_arguments,
)
from fedsel_flwr.simulations.comparisons.plan import Plan, read_plan, write_plan
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.building import first_rounds, make_strategy, selector_params
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.results import RunResult, describe_runs, hold_folder
from fedsel_flwr.simulations.run_identity import RUN
from fedsel_flwr.simulations.run_options import CHECKPOINTS, RunOptions, takes
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of


@dataclass(frozen=True)
class ComparisonOptions(RunOptions):
    """Arguments of :func:`compare`.

    Args:
        scenario: The scenario. Its selector is ignored, and its seed is the first seed.
        selectors: Names, references, classes, or callables that make a selector. Use a mapping to set labels
            (:func:`~fedsel_flwr.simulations.comparisons.contenders.read_contenders`). The value "all" means every
            selector that can run in the scenario. The result's ``left_out`` says why each other selector was left out.
        seeds: A list of seeds, or the number of consecutive seeds, starting at the scenario's seed.
        sweep: Values of selectors' parameters to try, as in ``{"selectors.bsfl.alpha": [0.3, 1, 3]}``. Each value is
            compared as a separate row, such as "bsfl alpha=0.3". With several parameters of one selector, each
            combination of their values is a row.
        engine: "vectorized" or "ray", as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        reference: Label of the selector that the others are compared with. If None, "random" if it is among the
            selectors.
        rounds_on_flower: Number of rounds of the first run that also run with Flower on Ray, before the comparison.
            These rounds check that the two engines select the same clients. With 0, there is no check.
        start_run: Function called with the label and the number of rounds of each run. If this or ``update`` is set,
            there is no progress display on standard error.
        update: Function called with each round and the number of failed clients so far.
        jobs: Number of parallel runs on the CPU, in processes that share the cores. Each process reads the data itself.
            A run is reported when it and all earlier runs have ended. If 1 or None, the runs follow one another in this
            process. If several threads share an operation, results can differ slightly with ``jobs``, through rounding.
            With ``ray_address``, the largest number of runs on the cluster. If None, as many as it has room for.
    """

    scenario: Scenario
    selectors: SelectorLike | Sequence[SelectorLike] | Mapping[str, SelectorLike]
    seeds: int | Sequence[int] = field(default=10, kw_only=True)
    sweep: Mapping[str, Sequence[Any]] | None = field(default=None, kw_only=True)
    engine: str = field(default="vectorized", kw_only=True)
    reference: str | None = field(default=None, kw_only=True)
    rounds_on_flower: int = field(default=0, kw_only=True)
    start_run: StartRun | None = field(default=None, kw_only=True)
    update: Update | None = field(default=None, kw_only=True)
    jobs: int | None = field(default=None, kw_only=True)

    def plan(self) -> Plan:
        """Return the plan of the comparison."""
        return Plan.of(
            self.scenario,
            self.selectors,
            seeds=self.seeds,
            engine=self.engine,
            sweep=self.sweep,
            own=self.own,
            reference=self.reference,
            rounds_on_flower=self.rounds_on_flower,
            jobs=self.jobs,
            where=self.where,
            device=self.device,
            checkpoints={"checkpoint_every": self.checkpoint_every},
        )


@takes(ComparisonOptions)
def compare(given: ComparisonOptions) -> Comparison:
    """Run a scenario with several selectors on the same seeds, or resume an interrupted comparison.

    Args:
        given: See :class:`ComparisonOptions` and :class:`~fedsel_flwr.simulations.run_options.RunOptions`.

    Returns:
        The comparison.

    Raises:
        ParameterError: A selector, a seed, the data or a parameter cannot be used, or the folder holds other runs.
        RunError: A simulation ended early, or a run in the folder has other settings than this call. The error names
            the key that differs.

    Example::

        comparison = compare(load_scenario("phones"), ["bsfl", Fastest, "random"], seeds=3)
        print(comparison.verdict.sentence)
    """
    plan = given.plan()
    if given.resume and given.folder is None:
        raise ParameterError(f"resume = {given.resume!r} needs the folder of the comparison. Give it as folder=")
    if given.replay and not given.resume:
        raise ParameterError("replay = True repeats runs of a folder. Set resume = True as well")
    if given.resume == "must" and given.folder is not None:
        # Only to refuse a folder without a plan.
        read_plan(Path(given.folder))
    if (tracking := given.tracking(given.scenario.name, given.scenario.num_clients)) is not None:
        given = replace(given, track=tracking.begin())
    if given.quiet or given.start_run or given.update:
        return run_plan(plan, given, given.start_run, given.update)
    with PlanProgress(plan, announces=not given.resume) as progress:
        # A terminal can have only one live display, and "Starting Ray" would be another one.
        given = replace(given, quiet=plan.plays_on_cluster and progress.is_live)
        comparison = run_plan(plan, given, progress.start_run, progress.update, progress.show_runs)
    for line in comparison.remarks():
        progress.announce(line)
    return comparison


class PlanProgress(Progress):
    """Progress of a plan: the number of runs, the rounds of each run, and the estimated time of all runs.

    Args:
        plan: The plan.
        announces: Whether to print the number and the time. Without this, for runs that may be read from the folder.
        console: Console to print on. If None, standard error.
    """

    def __init__(self, plan: Plan, *, announces: bool, console: Console | None = None) -> None:
        on_ray = plan.scenario.engine == "ray" or plan.rounds_on_flower > 0
        # Flower logs to the same terminal, and its lines would break a live display. Therefore plain lines are used.
        super().__init__(console or PipeSafeConsole(stderr=True, force_interactive=False if on_ray else None))
        self._plan, self._announces = plan, announces
        alone = plan.jobs == 1 and not plan.plays_on_cluster
        self._is_timed = alone and announces and not on_ray and plan.trial_rounds > 1
        self._ends: list[float] = []

    def start_run(self, label: str, rounds: int) -> None:
        """Begin the next run; before the first one, print the number of runs."""
        if self._announces:
            self.announce(self._plan.count_rounds())
            self._announces = False
        super().start_run(label, rounds)

    def update(self, record: RoundRecord, failures: int) -> None:
        """Show that a round has ended; print the estimated time of all runs after enough timed rounds."""
        super().update(record, failures)
        if self._is_timed:
            self._ends.append(time.monotonic())
            if len(self._ends) == self._plan.trial_rounds:
                self._is_timed = False
                self.announce(f"all runs: {self._plan.describe_time(self._ends)}")


def run_plan(
    plan: Plan,
    options: RunOptions,
    start_run: StartRun | None = None,
    update: Update | None = None,
    watch: Watch | None = None,
) -> Comparison:
    """Run a plan.

    All selectors run on the first seed, then on the next. Therefore the runs before an interruption can be compared,
    and the data of each seed are made only once.

    Args:
        plan: The plan, which has the resources, the device and how often checkpoints are written.
        options: All other options. The tracker is a :class:`~fedsel_flwr.callbacks.tracking.Tracking`.
        start_run: As in :func:`compare`.
        update: As in :func:`compare`.
        watch: On a cluster, function called with the progress of all runs.

    Returns:
        The comparison.

    Raises:
        ParameterError: As in :func:`compare`.
        RunError: As in :func:`compare`.
    """
    # Resources of Ray and the device follow below, from the plan.
    options = replace(
        RunOptions(**run_arguments(options)), **asdict(RayResources()), device="cpu", resume=bool(options.resume),
        checkpoint_every=plan.checkpoints.checkpoint_every,
    )  # fmt: skip
    comparison = Comparison(plan.scenario, reference=plan.reference, left_out=plan.left_out)
    own, folder, lock = options.own, None if options.folder is None else Path(options.folder), None
    if folder:
        names = {run_name(one.label, seed) for one in plan.selectors for seed in plan.seeds}
        check_links(folder)
        _check_folder(folder, names, single=len(names) == 1, resume=options.resume is not False)
    jobs = _jobs(plan, folder)
    # If all runs have finished, they are only read, which needs neither their data nor their selectors.
    if not all(job.is_over(replace(options, replay=False)) for job in jobs):
        _check_worlds(jobs[: len(plan.selectors)], own)
    if folder:
        lock = hold_folder(folder)
        write_plan(folder, plan.model_copy(update={"scenario": own.named_in(plan.scenario)}))
    # On a cluster, these two numbers are those of each vectorized run.
    unused = {"num_cpus": None, "num_gpus": None} if plan.plays_on_cluster else {}
    on_ray = replace(options, **asdict(plan.where) | unused)
    first_rounds_there: History | None = None
    if rounds := min(plan.rounds_on_flower, plan.scenario.rounds):
        on_round = RunReport(f"{_title(plan, jobs[0])}, with Flower on Ray", rounds, start_run, update)
        place = folder and folder / f"{run_name(jobs[0].contender.label, plan.seeds[0])}-on-flower"
        first_rounds_there = _run_on_flower(jobs[0], rounds, on_round, replace(on_ray, folder=place)).history
    here = on_ray if plan.scenario.engine == "ray" else replace(options, device=plan.device)
    executor = None
    if plan.plays_on_cluster or ((plan.jobs or 1) > 1 and len(jobs) > 1):
        # Computed here, because a worker process gets pickled classes, often without their source.
        jobs = [replace(job, place={**job.place, "code": job.code(own)}) for job in jobs]
        executor = _executor(plan, jobs, here, watch)

    def begin(job: Job) -> RunReport:
        return RunReport(_title(plan, job), job.scenario.rounds, start_run, update)

    with contextlib.closing(play_in_order(jobs, here, executor, begin)) as results:
        for job, result in zip(jobs, results, strict=True):
            run = Run(job.contender.label, own.named_in(job.scenario), result, job.place["folder"])
            if first_rounds_there and not comparison.runs:
                comparison.agreement = compare_choices(first_rounds_there, result.history)
            comparison.runs.append(run)
    if folder:
        comparison.report(folder)
    # Removing the last reference releases the lock, which must be held until the report is written.
    del lock
    return comparison


def _jobs(plan: Plan, folder: Path | None) -> list[Job]:
    """Return the runs of a plan, in the order in which they begin and are compared: by seed, then by selector."""
    pairs = list(itertools.product(plan.seeds, plan.selectors))
    # The only run of a plan is written to the plan's folder.
    several = len(pairs) > 1
    jobs = []
    for seed, one in pairs:
        place = folder / run_name(one.label, seed) if folder and several else folder
        kept = {"checkpoint_dir": plan.checkpoints.checkpoint_dir if folder else None}
        jobs.append(Job(one.scenario(plan.scenario, seed), one, {"folder": place, "label": one.label, **kept}))
    return jobs


def _title(plan: Plan, job: Job) -> str:
    """Return the name of a run in the progress display."""
    return job.contender.label if len(plan.seeds) == 1 else job.name


def _executor(plan: Plan, jobs: Sequence[Job], options: RunOptions, watch: Watch | None) -> Executor:
    """Return the executor of a plan's runs: worker processes, or a Ray cluster."""
    if not plan.plays_on_cluster:
        return Processes(plan.jobs or 1)
    folder = options.folder
    return Cluster(
        plan.where.of_runs(plan.device),
        plan.jobs,
        scenarios=[job.scenario for job in jobs],
        own=options.own,
        watch=watch,
        what_is_left=lambda: f"; {folder} holds {describe_runs(Path(folder)) or 'no run yet'}" if folder else "",
        quiet=options.quiet,
    )


def _check_worlds(jobs: Sequence[Job], brought: OwnParts) -> None:
    """Refuse data, a partition and selectors that cannot be used, before anything is written or started.

    The jobs share the world of the first seed. Only their scenarios differ.
    """
    world = world_of(brought.named_in(jobs[0].scenario), brought)
    for job in jobs:
        make_strategy(world.with_scenario(brought.named_in(job.scenario)), selector=job.selector())


def _run_on_flower(job: Job, rounds: int, on_round: Callable[[RoundRecord], None], options: RunOptions) -> RunResult:
    """Run the first rounds of a run with Flower on Ray. The selector still plans for all rounds of the scenario."""
    scenario, selector = job.scenario, job.selector()
    # Made here from the full scenario, because `simulate` would make it plan for fewer rounds.
    if selector is None:
        sizes = world_of(options.own.named_in(scenario), options.own).num_examples()
        selector = create(scenario.selector, **selector_params(scenario, sizes))
    short = first_rounds(scenario, rounds).model_copy(update={"engine": "ray"})
    arguments = run_arguments(replace(options, track=None))
    return simulate(short, selector=selector, on_round=on_round, label=job.contender.label, **arguments)


def _check_folder(folder: Path, own: Collection[str], *, single: bool, resume: bool) -> None:
    """Refuse a folder with runs of another comparison, which would later count as runs of this one.

    If interrupted runs are not resumed, they are refused too, because they must not be overwritten.
    """
    foreign = sorted({path.parent.name for path in folder.glob(f"*/{RUN}")} - {*own, *(f"{o}-on-flower" for o in own)})
    if foreign:
        raise ParameterError(
            f"{str(folder)!r} holds runs of another comparison ({', '.join(foreign[:3])}). Choose another"
        )
    places = [folder] if single else [folder / name for name in own]
    cut_off = sorted(place.name for place in places if any((place / CHECKPOINTS).glob("round-*")))
    if cut_off and not resume:
        raise ParameterError(
            f"{str(folder)!r} holds interrupted runs ({', '.join(cut_off[:3])}). Set resume=True, or take another"
        )
