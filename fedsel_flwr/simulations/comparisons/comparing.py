"""Comparison of selectors: run each selector on every seed of one scenario, and write each run when it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.callbacks.tracking import TRACKED_CLIENTS, TrackerLike, Tracking
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.progress import PipeSafeConsole, Progress
from fedsel_flwr.rounds.checkpoints import Resume
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.simulations.comparisons.comparison import Comparison
from fedsel_flwr.simulations.comparisons.contenders import ALL, SelectorLike, runnable_selectors
from fedsel_flwr.simulations.comparisons.parallel_runs import StartRun, Update
from fedsel_flwr.simulations.comparisons.plan import Plan
from fedsel_flwr.simulations.comparisons.plan_files import read_plan
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import MakeModel, OwnParts, as_data


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
            (:mod:`~fedsel_flwr.simulations.comparisons.cluster_runs`). With the same number of threads, a run has the
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
        return plan.run(target, start_run, update, resume=bool(resume), **options)
    with _PlanProgress(plan, resumes=bool(resume)) as progress:
        options["watch"] = progress.show_runs
        # A terminal can have only one live display, and "Starting Ray" would be another one.
        options["quiet"] = plan.form.plays_on_cluster and progress.is_live
        comparison = plan.run(target, progress.start_run, progress.update, resume=bool(resume), **options)
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
        form = plan.form
        on_ray = form.scenario.engine == "ray" or form.rounds_on_flower > 0
        # Flower logs to the same terminal, and its lines would break a live display. Therefore plain lines are used.
        super().__init__(PipeSafeConsole(stderr=True, force_interactive=False if on_ray else None))
        self._plan, self._announces = plan, not resumes
        # The command line times a trial before the first run. Here a trial would run the caller's code one more time.
        alone = form.jobs == 1 and not form.plays_on_cluster
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
