"""Compare selectors: run each on every seed of one scenario, and write each run as it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    jobs: int = 1,
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
) -> Comparison:
    """Run a scenario with several selectors on the same seeds, or resume a comparison that was cut off.

    Args:
        scenario: The scenario; its selector is ignored, and its seed is the first one.
        selectors: Names, references, classes, or callables that make a selector. To set the labels, give a mapping
            (:func:`~fedsel_flwr.simulations.comparisons.contenders.read_contenders`). "all" compares each selector
            that can run there; the result's ``left_out`` says why the others cannot.
        seeds: The number of seeds, counted up from the scenario's, or the seeds themselves.
        sweep: Values of selectors' parameters to try, as in ``{"selectors.bsfl.alpha": [0.3, 1, 3]}``. Each value is a
            separate row, such as "bsfl alpha=0.3". Several parameters of a selector give every combination.
        engine: "vectorized" or "ray", as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        reference: The selector that the others are compared with, by its label; None takes "random" if it runs.
        folder: Folder to which each run is written as it ends, and at last the summaries; None: none.
        rounds_on_flower: Rounds of the first run that are played first with Flower on Ray, to check that both engines
            select the same clients; 0: none.
        start_run: Called with the label and the rounds of each run. This and ``update`` take the place of the progress
            on standard error.
        update: Called with each round and the number of failed clients so far.
        device: Device on which the vectorized engine trains.
        jobs: Number of runs at a time on the CPU, in processes that share the cores. Each reads the data itself, and is
            reported when it and all before it have ended. The runs are the same up to rounding, if several threads
            share an operation. 1: one after the other, in this process.
        num_cpus: Cores that Ray gets, as in :func:`~fedsel_flwr.simulations.engine.simulate`; this and the next four
            are for the runs on Ray, and refused if there are none.
        num_gpus: GPUs that Ray gets.
        client_cpus: Cores that a client takes.
        client_gpus: GPUs that a client takes.
        ray_address: The Ray cluster to join; None takes RAY_ADDRESS.
        quiet: Show nothing on standard error: no progress and no remarks on the runs, neither Flower's log nor this
            package's, and no "Starting Ray".
        model: Makes your own torch module, as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        data: Your own examples, likewise.
        objective: Your own loss and quality, likewise.
        resume: True reads finished runs of the ``folder`` back, resumes the one that was cut off, and runs the rest;
            selectors and seeds may be added. If the folder holds nothing, a new comparison begins, which "must"
            refuses. False refuses to overwrite what was cut off. Code that the folder names is never loaded:
            selectors, model and data are those of this call. A run is refused if the code of its selector, model or
            objective, its data, partition or scenario has changed; the error names which.
        replay: With ``resume``: play the runs again that do not fit or are damaged, in place of refusing them.
        checkpoint_every: Rounds between two checkpoints, as in :func:`~fedsel_flwr.simulations.engine.simulate`; 0:
            none.

    Returns:
        The comparison.

    Raises:
        ParameterError: A selector, a seed, the data or a parameter cannot be used, or the folder holds something else.
        RunError: A simulation broke off, or a run in the folder is another one; names the key that differs.

    Example::

        comparison = compare(load_scenario("phones"), ["bsfl", Fastest, "random"], seeds=3)
        print(comparison.verdict.sentence)
    """
    options: dict[str, Any] = {"quiet": quiet, "model": model, "objective": objective, "replay": replay}
    if data is not None:
        # One object for all runs, which reads the data once for each seed.
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
        # Only to refuse a folder without one.
        read_plan(target)
    if quiet or start_run or update:
        return plan.run(target, start_run, update, resume=bool(resume), **options)
    with _PlanProgress(plan, resumes=bool(resume)) as progress:
        comparison = plan.run(target, progress.start_run, progress.update, resume=bool(resume), **options)
    for line in comparison.remarks():
        progress.announce(line)
    return comparison


class _PlanProgress(Progress):
    """Progress of a plan on standard error: the effort, as the first run begins, and the course of each run.

    Args:
        plan: The plan.
        resumes: Whether runs may be read back: the effort is then unknown.
    """

    def __init__(self, plan: Plan, *, resumes: bool) -> None:
        form = plan.form
        on_ray = form.scenario.engine == "ray" or form.rounds_on_flower > 0
        # Flower's log goes to the same terminal: plain lines among its own, not a live display across them.
        super().__init__(PipeSafeConsole(stderr=True, force_interactive=False if on_ray else None))
        self._plan, self._announces = plan, not resumes
        # The command line times a trial before the first run. Here a trial would run the caller's own code once more.
        self._is_timed = not (resumes or on_ray or form.jobs > 1) and plan.trial_rounds > 1
        self._ends: list[float] = []

    def start_run(self, label: str, rounds: int) -> None:
        """Begin the next run; announce the number of runs before the first one."""
        if self._announces:
            self.announce(self._plan.count_rounds())
            self._announces = False
        super().start_run(label, rounds)

    def update(self, record: RoundRecord, failures: int) -> None:
        """Show that a round has ended; announce how long all runs take when enough rounds have been timed."""
        super().update(record, failures)
        if self._is_timed:
            self._ends.append(time.monotonic())
            if len(self._ends) == self._plan.trial_rounds:
                self._is_timed = False
                self.announce(f"all runs: {self._plan.describe_time(self._ends)}")
