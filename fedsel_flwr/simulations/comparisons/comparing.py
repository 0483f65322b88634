"""Comparison of selectors: run each selector on every seed of one scenario, and write each run when it ends."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsel_flwr.callbacks.tracking import TRACKED_CLIENTS, TrackerLike, Tracking
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.progress import PipeSafeConsole, Progress
from fedsel_flwr.report.run_folder import run_name
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.resumption import Resume
from fedsel_flwr.rounds.storage import RUN_IN_USE, FolderLock, check_links, lock_folder
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations.comparisons.cluster import Cluster, Watch
from fedsel_flwr.simulations.comparisons.comparison import Comparison, Run, compare_choices
from fedsel_flwr.simulations.comparisons.contenders import ALL, SelectorLike, runnable_selectors
from fedsel_flwr.simulations.comparisons.parallel_runs import (
    Executor,
    Job,
    Processes,
    StartRun,
    Update,
    play_in_order,
    report_last_round,
    report_progress,
)
from fedsel_flwr.simulations.comparisons.plan import FOLDER_CURE, Plan, check_plan, read_plan, write_plan
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.existing_runs import CHECKPOINTS
from fedsel_flwr.simulations.on_flower.building import first_rounds, make_strategy, selector_params
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.results import RunResult, describe_runs
from fedsel_flwr.simulations.run_identity import RUN, plan_identity
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import MakeModel, OwnParts, as_data
from fedsel_flwr.simulations.worlds.world import world_of


def compare(
    scenario: Scenario,
    selectors: SelectorLike | Sequence[SelectorLike] | Mapping[str, SelectorLike],
    *,
    seeds: int | Sequence[int] = 10,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    engine: str = "vectorized",
    reference: str | None = None,
    folder: str | Path | None = None,
    rounds_on_flower: int = 0,
    start_run: StartRun | None = None,
    update: Update | None = None,
    device: str = "cpu",
    jobs: int | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    client_cpus: float = 1,
    client_gpus: float | None = None,
    ray_address: str | None = None,
    quiet: bool = False,
    model: MakeModel | None = None,
    data: Any = None,
    objective: Objective | None = None,
    resume: Resume = False,
    replay: bool = False,
    checkpoint_every: int | None = None,
    track: TrackerLike | None = None,
    track_clients: int | Sequence[int] = TRACKED_CLIENTS,
) -> Comparison:
    """Run a scenario with several selectors on the same seeds, or resume an interrupted comparison.

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
        folder: Folder for the results. Each run is written when it ends, and the summaries are written at the end. If
            None, nothing is written.
        rounds_on_flower: Number of rounds of the first run that also run with Flower on Ray, before the comparison.
            These rounds check that the two engines select the same clients. With 0, there is no check.
        start_run: Function called with the label and the number of rounds of each run. If this or ``update`` is set,
            there is no progress display on standard error.
        update: Function called with each round and the number of failed clients so far.
        device: Device on which the vectorized engine trains.
        jobs: Number of parallel runs on the CPU, in processes that share the cores. Each process reads the data itself.
            A run is reported when it and all earlier runs have ended. If 1 or None, the runs follow one another in this
            process. If several threads share an operation, results can differ slightly with ``jobs``, through rounding.
            With ``ray_address``, the largest number of runs on the cluster. If None, as many as it has room for.
        num_cpus: Cores for Ray, as in :func:`~fedsel_flwr.simulations.engine.simulate`. This argument and the next four
            are for runs on Ray. They raise an error if no run uses Ray. For vectorized runs on a cluster: cores, and
            threads, of each run. If None, 1.
        num_gpus: GPUs for Ray. For vectorized runs on a cluster: GPUs of each run. If None, 1 if ``device`` is a GPU,
            otherwise 0.
        client_cpus: Cores per client.
        client_gpus: GPUs per client.
        ray_address: The Ray cluster to join. The runs of the vectorized engine are then tasks on the cluster
            (:mod:`~fedsel_flwr.simulations.comparisons.cluster`). With the same number of threads, a run has the
            same result on every machine of one kind. If None, the environment variable RAY_ADDRESS for the engine
            "ray", and this machine for the vectorized engine. "local" means this machine.
        quiet: Whether to print nothing on standard error. This option hides the progress, remarks on the runs, the logs
            of Flower and of this package, and the line "Starting Ray".
        model: Function that makes your torch module, as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        data: Your examples, as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        objective: Your loss and quality, as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        resume: True reads the finished runs in ``folder``, resumes the interrupted run, and runs the rest. You may add
            selectors and seeds. If the folder holds nothing, True begins a new comparison, and "must" raises an error.
            False refuses to overwrite an interrupted comparison. Code that the folder names is never loaded, because
            this call passes selectors, model and data. A run is refused if the code of its selector, model or
            objective, or its data, partition or scenario has changed. The error names what has changed.
        replay: Whether ``resume`` repeats, from the start, damaged runs and runs whose code or data changed. If False,
            such runs are refused.
        checkpoint_every: Rounds between two checkpoints, as in :func:`~fedsel_flwr.simulations.engine.simulate`. With
            0, there are no checkpoints.
        track: The tracker that receives every run, as in :func:`~fedsel_flwr.simulations.engine.simulate`. With
            ``resume``, it receives the runs that had not finished.
        track_clients: Clients whose own metrics are tracked, as in :func:`~fedsel_flwr.simulations.engine.simulate`.

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
    options: dict[str, Any] = {"quiet": quiet, "model": model, "objective": objective, "replay": replay}
    if data is not None:
        # All runs share one object, which reads the data once per seed.
        options["data"] = as_data(data)
    left_out: dict[str, str] = {}
    if isinstance(selectors, str) and selectors == ALL:
        selectors, left_out = runnable_selectors(scenario, OwnParts(model, options.get("data"), objective))
    plan = Plan.of(
        scenario,
        selectors,
        seeds=seeds,
        engine=engine,
        sweep=sweep,
        reference=reference,
        rounds_on_flower=rounds_on_flower,
        jobs=jobs,
        where=RayResources(num_cpus, num_gpus, client_cpus, client_gpus, ray_address),
        device=device,
        left_out=left_out,
        checkpoints={} if checkpoint_every is None else {"checkpoint_every": checkpoint_every},
    )
    target = None if folder is None else Path(folder)
    if resume and target is None:
        raise ParameterError(f"resume = {resume!r} needs the folder of the comparison. Give it as folder=")
    if replay and not resume:
        raise ParameterError("replay = True repeats runs of a folder. Set resume = True as well")
    if resume == "must" and target is not None:
        # Only to refuse a folder without a plan.
        read_plan(target)
    if track is not None:
        tracking = Tracking.of(track, scenario.name, scenario.num_clients, folder=folder, track_clients=track_clients)
        options["track"] = tracking.begin()
    if quiet or start_run or update:
        return run_plan(plan, target, start_run, update, resume=bool(resume), **options)
    with _PlanProgress(plan, resumes=bool(resume)) as progress:
        options["watch"] = progress.show_runs
        # A terminal can have only one live display, and "Starting Ray" would be another one.
        options["quiet"] = plan.plays_on_cluster and progress.is_live
        comparison = run_plan(plan, target, progress.start_run, progress.update, resume=bool(resume), **options)
    for line in comparison.remarks():
        progress.announce(line)
    return comparison


class _PlanProgress(Progress):
    """Progress of a plan on standard error: the rounds of each run, and the estimated time of all runs.

    Args:
        plan: The plan.
        resumes: Whether runs may be read from the folder. In this case, the time cannot be estimated.
    """

    def __init__(self, plan: Plan, *, resumes: bool) -> None:
        on_ray = plan.scenario.engine == "ray" or plan.rounds_on_flower > 0
        # Flower logs to the same terminal, and its lines would break a live display. Therefore plain lines are used.
        super().__init__(PipeSafeConsole(stderr=True, force_interactive=False if on_ray else None))
        self._plan, self._announces = plan, not resumes
        # The command line times a trial before the first run. Here a trial would run the caller's code one more time.
        alone = plan.jobs == 1 and not plan.plays_on_cluster
        self._is_timed = alone and not (resumes or on_ray) and plan.trial_rounds > 1
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
    folder: Path | None = None,
    start_run: StartRun | None = None,
    update: Update | None = None,
    *,
    resume: bool = False,
    replay: bool = False,
    track: Tracking | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Comparison:
    """Run a plan.

    All selectors run on the first seed, then on the next. Therefore the runs before an interruption can be compared,
    and the data of each seed are made only once.

    Args:
        plan: The plan.
        folder: As in :func:`compare`, like all arguments without an explanation here.
        start_run: See :func:`compare`.
        update: See :func:`compare`.
        resume: See :func:`compare`.
        replay: See :func:`compare`.
        track: The tracker.
        watch: On a cluster, function called with the progress of all runs.
        **options: Further arguments of :func:`~fedsel_flwr.simulations.engine.simulate` for all runs.

    Returns:
        The comparison.

    Raises:
        ParameterError: As in :func:`compare`.
        RunError: As in :func:`compare`.
    """
    comparison = Comparison(plan.scenario, reference=plan.reference, left_out=plan.left_out)
    own = OwnParts(options.get("model"), options.get("data"), options.get("objective"))
    lock = None
    if folder:
        names = {run_name(one.label, seed) for one in plan.contenders for seed in plan.seeds}
        check_links(folder)
        _check_folder(folder, names, single=len(names) == 1, resume=resume)
    jobs = _jobs(plan, folder)
    of_first_seed = jobs[: len(plan.contenders)]
    # If all runs have finished, they are only read, which needs neither their data nor their selectors.
    if not all(job.is_over({"resume": resume}) for job in jobs):
        _check_worlds(of_first_seed, own)
    if folder:
        # Done before anything is written, because a callable may fail to make a selector.
        codes = {job.contender.label: job.code(own) for job in of_first_seed}
        found = plan_identity(codes, world_of(own.named_in(jobs[0].scenario), own), own)
        lock = lock_comparison(folder)
        if resume and not replay:
            check_plan(folder, found)
        named = {"scenario": own.named_in(plan.scenario), "fingerprints": found}
        write_plan(folder, plan.model_copy(update=named))
        options = {"resume": resume, "replay": replay, **plan.checkpoints.model_dump(), **options}
    # On a cluster, these two numbers are those of each vectorized run.
    unused = ("num_cpus", "num_gpus") if plan.plays_on_cluster else ()
    on_ray = options | {name: getattr(plan.where, name) for name in plan.where.non_default if name not in unused}
    first_rounds_there: History | None = None
    if rounds := min(plan.rounds_on_flower, plan.scenario.rounds):
        on_round = report_progress(f"{_title(plan, jobs[0])}, with Flower on Ray", rounds, start_run, update)
        place = folder and folder / f"{run_name(jobs[0].contender.label, plan.seeds[0])}-on-flower"
        first_rounds_there = _run_on_flower(jobs[0], rounds, on_round, folder=place, **on_ray).history
    here = (on_ray if plan.scenario.engine == "ray" else options | {"device": plan.device}) | {"track": track}
    if plan.plays_on_cluster or ((plan.jobs or 1) > 1 and len(jobs) > 1):
        # Computed here, because a worker process gets pickled classes, often without their source.
        jobs = [replace(job, place={**job.place, "code": job.code(own)}) for job in jobs]
        executor = _executor(plan, jobs, own, folder, watch, quiet=bool(options.get("quiet")))
        played = _play_elsewhere(plan, jobs, here, executor, start_run, update)
    else:
        played = _play_here(plan, jobs, here, start_run, update)
    # The generator is closed even if a run fails, and then ends its worker processes.
    with contextlib.closing(played) as results:
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


def describe_effort(plan: Plan) -> str:
    """Return the number of runs and rounds, and their approximate duration: "30 runs of 300 rounds, about 45 s".

    The time comes from a trial of a few rounds of the first run, which is not kept. Runs on Ray have no trial, because
    the start of Ray alone would take longer.
    """
    counted, contender = plan.count_rounds(), plan.contenders[0]
    if plan.scenario.engine == "ray" or plan.plays_on_cluster:
        return counted
    trial = first_rounds(contender.scenario(plan.scenario, plan.seeds[0]), plan.trial_rounds)
    ends: list[float] = []
    Job(trial, contender).simulate({"device": plan.device, "quiet": True}, lambda _: ends.append(time.monotonic()))
    return f"{counted}, {plan.describe_time(ends)}" if len(ends) > 1 else counted


def _jobs(plan: Plan, folder: Path | None) -> list[Job]:
    """Return the runs of a plan, in the order in which they begin and are compared: by seed, then by selector."""
    pairs = list(itertools.product(plan.seeds, plan.contenders))
    # The only run of a plan is written to the plan's folder.
    several = len(pairs) > 1
    return [
        Job(
            one.scenario(plan.scenario, seed),
            one,
            {"folder": folder / run_name(one.label, seed) if folder and several else folder, "label": one.label},
        )
        for seed, one in pairs
    ]


def _title(plan: Plan, job: Job) -> str:
    """Return the name of a run in the progress display."""
    return job.contender.label if len(plan.seeds) == 1 else job.name


def _play_here(
    plan: Plan, jobs: Sequence[Job], options: Mapping[str, Any], start_run: StartRun | None, update: Update | None
) -> Generator[RunResult]:
    """Do one run after the other in this process."""
    for job in jobs:
        on_round = report_progress(_title(plan, job), job.scenario.rounds, start_run, update)
        # Read before the run, because afterwards the folder is always finished.
        was_over = job.is_over({**options, "replay": False})
        result = job.simulate(options, on_round)
        if was_over:
            report_last_round(result.history, update)
        yield result


def _play_elsewhere(
    plan: Plan,
    jobs: Sequence[Job],
    options: Mapping[str, Any],
    executor: Executor,
    start_run: StartRun | None,
    update: Update | None,
) -> Generator[RunResult]:
    """Do several runs at a time in other processes; report each run when it and all earlier runs have ended."""
    with contextlib.closing(play_in_order(jobs, options, executor)) as results:
        for job in jobs:
            report_progress(_title(plan, job), job.scenario.rounds, start_run, update)
            result = next(results)
            report_last_round(result.history, update)
            yield result


def _executor(
    plan: Plan, jobs: Sequence[Job], own: OwnParts, folder: Path | None, watch: Watch | None, *, quiet: bool
) -> Executor:
    """Return the executor of a plan's runs: worker processes, or a Ray cluster."""
    if not plan.plays_on_cluster:
        return Processes(plan.jobs or 1)
    return Cluster(
        plan.where.of_runs(plan.device),
        plan.jobs,
        scenarios=[job.scenario for job in jobs],
        own=own,
        watch=watch,
        what_is_left=lambda: f"; {folder} holds {describe_runs(folder) or 'no run yet'}" if folder else "",
        quiet=quiet,
    )


def _check_worlds(jobs: Sequence[Job], brought: OwnParts) -> None:
    """Refuse data, a partition and selectors that cannot be used, before anything is written or started.

    The jobs share the world of the first seed. Only their scenarios differ.
    """
    scenarios = [brought.named_in(job.scenario) for job in jobs]
    world = world_of(scenarios[0], brought)
    for job, scenario in zip(jobs, scenarios, strict=True):
        make_strategy(world.with_scenario(scenario), selector=job.selector())


def _run_on_flower(job: Job, rounds: int, on_round: Callable[[RoundRecord], None], **options: Any) -> RunResult:
    """Run the first rounds of a run with Flower on Ray. The selector still plans for all rounds of the scenario."""
    scenario, selector = job.scenario, job.selector()
    # Made here from the full scenario, because `simulate` would make it plan for fewer rounds.
    if selector is None:
        own = OwnParts(*(options.get(key) for key in ("model", "data", "objective")))
        sizes = world_of(own.named_in(scenario), own).num_examples()
        selector = create(scenario.selector, **selector_params(scenario, sizes))
    short = first_rounds(scenario, rounds).model_copy(update={"engine": "ray"})
    return simulate(short, selector=selector, on_round=on_round, label=job.contender.label, **options)


def _check_folder(folder: Path, own: Collection[str], *, single: bool, resume: bool) -> None:
    """Refuse a folder with runs of another comparison, which would later count as runs of this one.

    If interrupted runs are not resumed, they are refused too, because they must not be overwritten.
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
