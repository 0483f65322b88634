"""Plan of a comparison: check it before anything runs, run it, and resume it from its folder."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.comparisons.comparison import Comparison, Run, choose_reference, run_name
from fedsel_flwr.simulations.comparisons.contenders import Contender, SelectorLike, read_contenders
from fedsel_flwr.simulations.comparisons.flower_agreement import compare_choices, run_on_flower
from fedsel_flwr.simulations.comparisons.parallel_runs import (
    Job,
    StartRun,
    Update,
    check_jobs,
    report_last_round,
    report_progress,
    run_in_parallel,
)
from fedsel_flwr.simulations.comparisons.plan_files import (
    FINGERPRINTS,
    check_folder,
    check_plan,
    lock_comparison,
    read_plan,
    read_seeds,
    write_plan,
)
from fedsel_flwr.simulations.engine import ENGINES, check_engine, simulate
from fedsel_flwr.simulations.existing_runs import has_finished
from fedsel_flwr.simulations.fingerprints import code_fingerprints, plan_fingerprints
from fedsel_flwr.simulations.on_flower.building import (
    check_selectors,
    make_availability,
    make_strategy,
)
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.parallelism import TrainerPool, check_processes
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import replace_keys
from fedsel_flwr.simulations.untrusted_folders import (
    check_checkpoints,
    check_links,
    check_trusted,
    outside_checkpoints,
    referenced_code,
)
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of


@dataclass(frozen=True)
class Plan:
    """Plan of a comparison, checked as far as possible before anything runs.

    Attributes:
        scenario: Of all runs, with their engine.
        contenders: The selectors.
        seeds: The seeds.
        reference: Label of the selector that the others are compared with.
        rounds_on_flower: Rounds of the first run that Flower on Ray plays first.
        processes: Number of processes that train in the vectorized engine; None: by the sizes.
        where: Resources of Ray.
        device: Device on which the vectorized engine trains.
        left_out: If all selectors were to run: those that cannot, and why.
        checkpoints: Options of :func:`~fedsel_flwr.simulations.engine.simulate`.
        jobs: Number of runs at a time.
    """

    scenario: Scenario
    contenders: Sequence[Contender]
    seeds: Sequence[int]
    reference: str | None
    rounds_on_flower: int
    processes: int | None = None
    where: RayResources = field(default_factory=RayResources)
    device: str = "cpu"
    left_out: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    jobs: int = 1

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        selectors: SelectorLike | Sequence[SelectorLike] | Mapping[str, SelectorLike],
        *,
        seeds: int | Sequence[int],
        engine: str,
        reference: str | None = None,
        rounds_on_flower: int = 0,
        processes: int | None = None,
        where: RayResources | None = None,
        device: str = "cpu",
        left_out: Mapping[str, str] | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        jobs: int = 1,
    ) -> Plan:
        """Make a plan; arguments and errors are those of ``compare``."""
        if not isinstance(scenario, Scenario):
            raise ParameterError(
                f"scenario must be a Scenario, got {type(scenario).__name__}. Make one with load_scenario"
            )
        if engine not in ENGINES:
            raise ParameterError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        scenario = scenario.model_copy(update={"engine": engine})
        where = where or RayResources()
        processes = check_processes(scenario, processes, device)
        check_engine(scenario, where, device, rounds_on_flower)
        jobs = check_jobs(scenario, jobs, device)
        make_availability(scenario)
        contenders = read_contenders(selectors)
        check_selectors(scenario, [one.name for one in contenders if one.name])
        rounds = whole("rounds_on_flower", rounds_on_flower, 0)
        if rounds and engine == "ray":
            raise ParameterError(
                "rounds_on_flower must be 0 if the engine of all runs is 'ray'. Leave it out, or use 'vectorized'"
            )
        compared_with = choose_reference(reference, [one.label for one in contenders])
        return cls(
            scenario, contenders, read_seeds(seeds, scenario.seed), compared_with, rounds, processes, where, device,
            left_out or {}, checkpoints or {}, jobs,
        )  # fmt: skip

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
        """Read the plan of a folder.

        Args:
            folder: Of a comparison, or of a run.
            scenario: Keys of the scenario that are to be changed, dotted.
            trust: Whether code that the plan names may be loaded.
            checkpoint_dir: The folder of its checkpoints, which the user must name if it is outside the plan's.
            command: The command that was typed, for errors.
            **where: ``where``, ``device``, ``processes`` and ``jobs`` in place of those of the plan.

        Raises:
            ParameterError: There is no plan, it needs something that only Python code can give, it names code and is
                not trusted, or its checkpoints are elsewhere.
        """
        plan = read_plan(folder)
        nameless = [one["label"] for one in plan["selectors"] if one["name"] is None]
        if nameless:
            raise ParameterError(
                f"selector {nameless[0]!r} in {str(folder)!r} was given in Python. Resume there, with compare(..., "
                "resume=True) and the same selectors"
            )
        # Before anything of the plan is used: making the plan loads the code that it names. A Ray cluster given now
        # replaces that of the plan, which then needs no trust.
        check_trusted(folder, plan | ({"where": {}} if "where" in where else {}), trust, f"{command} --trust")
        check_checkpoints(folder, plan, checkpoint_dir, command)
        changed = replace_keys(plan["scenario"], scenario or {})
        return cls.of(
            changed,
            {one["label"]: one["name"] for one in plan["selectors"]},
            seeds=plan["seeds"],
            engine=changed.engine,
            **{key: plan[key] for key in ("reference", "rounds_on_flower", "left_out", "checkpoints") if key in plan},
            **{"device": plan.get("device", "cpu"), "processes": plan.get("processes"), "jobs": plan.get("jobs", 1)}
            | {"where": RayResources(**plan.get("where", {}))}
            | where,
        )

    def resume_options(self, folder: Path) -> str:
        """Return the command line's options that resume the plan in its folder, those of trust included."""
        plan = self.as_dict()
        place = outside_checkpoints(folder, plan)
        named = "" if place is None else f" --checkpoint-dir {shlex.quote(place)}"
        return f"--resume {shlex.quote(str(folder))}{named}{' --trust' if referenced_code(plan) else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as its file holds it."""
        return {
            "scenario": self.scenario.model_dump(),
            "selectors": [{"label": one.label, "name": one.name} for one in self.contenders],
            "seeds": list(self.seeds),
            "reference": self.reference,
            "rounds_on_flower": self.rounds_on_flower,
            "left_out": dict(self.left_out),
            "where": {name: getattr(self.where, name) for name in self.where.non_default},
            "device": self.device,
            "processes": self.processes,
            "jobs": self.jobs,
            "checkpoints": dict(self.checkpoints),
        }

    def run(
        self,
        folder: Path | None = None,
        start_run: StartRun | None = None,
        update: Update | None = None,
        resume: bool = False,
        replay: bool = False,
        **options: Any,
    ) -> Comparison:
        """Run everything; arguments, result and errors are those of ``compare``, options go to ``simulate``.

        Every selector runs on the first seed, then on the next. So the runs that an interruption leaves can be
        compared, and the data of a seed are made once.
        """
        comparison = Comparison(self.scenario, reference=self.reference, left_out=dict(self.left_out))
        brought = OwnParts(options.get("model"), options.get("data"), options.get("objective"))
        lock = None
        if folder:
            names = {run_name(one.label, seed) for one in self.contenders for seed in self.seeds}
            check_links(folder)
            check_folder(folder, names, single=self._is_single, resume=resume)
        # By seed, then by selector: the order in which runs begin, and in which they are compared.
        runs = [
            Job(one.scenario(self.scenario, seed), one, self._run_place(folder, one, seed))
            for seed, one in itertools.product(self.seeds, self.contenders)
        ]
        # Runs that have all finished are only read back, for which neither their data nor their selectors are needed.
        if not resume or not all(job.place["folder"] and has_finished(job.place["folder"]) for job in runs):
            self._check_worlds(brought)
        if folder:
            # Before anything is written: a callable may fail to make a selector.
            fingerprints = self._fingerprints(brought)
            lock = lock_comparison(folder)
            if resume and not replay:
                check_plan(folder, fingerprints)
            named = {"scenario": brought.named_in(self.scenario).model_dump()}
            write_plan(folder, self.as_dict() | named | {FINGERPRINTS: fingerprints})
            options = {"resume": resume, "replay": replay, **self.checkpoints, **options}
        on_flower: History | None = None
        on_ray = options | {name: getattr(self.where, name) for name in self.where.non_default}
        if self.rounds_on_flower:
            title = f"{self._title(runs[0])}, with Flower on Ray"
            on_round = report_progress(title, self.rounds_on_flower, start_run, update)
            on_flower = self._play_on_flower(runs[0], folder, on_round, on_ray)
        play = self._play_sequentially if self.jobs == 1 or self._is_single else self._play_in_parallel
        if play == self._play_in_parallel:
            # Taken here: a worker process gets pickled classes, often without their source.
            codes = [self._code_fingerprints(job.contender, job.scenario.seed, brought) for job in runs]
            runs = [replace(job, place={**job.place, "code": code}) for job, code in zip(runs, codes, strict=True)]
        here = on_ray if self.scenario.engine == "ray" else options | {"device": self.device}
        # Closed even if a run fails: the generator then ends its worker processes.
        with contextlib.closing(play(runs, here, start_run, update)) as results:
            for job, result in zip(runs, results, strict=True):
                run = Run(job.contender.label, brought.named_in(job.scenario), result)
                if on_flower and not comparison.runs:
                    comparison.agreement = compare_choices(on_flower, result.history)
                comparison.runs.append(run)
        if folder:
            comparison.report(folder)
        # The lock is released with its last reference, and must last until the report is written.
        del lock
        return comparison

    @property
    def _is_single(self) -> bool:
        """Whether the plan has one run only, which is written to the plan's own folder."""
        return len(self.contenders) * len(self.seeds) == 1

    def _check_worlds(self, brought: OwnParts) -> None:
        """Refuse data, a partition and selectors that cannot be used, before anything is written or started.

        The selectors share the world of the first seed, in which each differs by its scenario alone.
        """
        scenarios = [brought.named_in(one.scenario(self.scenario, self.seeds[0])) for one in self.contenders]
        world = world_of(scenarios[0], brought)
        for one, scenario in zip(self.contenders, scenarios, strict=True):
            make_strategy(world.with_scenario(scenario), selector=one.selector(scenario))

    def _code_fingerprints(self, one: Contender, seed: int, brought: OwnParts) -> dict[str, str]:
        """Return the fingerprints of a run's code."""
        own = one.scenario(self.scenario, seed)
        return code_fingerprints(own, one.selector(own), brought)

    def _fingerprints(self, brought: OwnParts) -> dict[str, Any]:
        """Return the fingerprints that the folder keeps of the plan."""
        codes = {one.label: self._code_fingerprints(one, self.seeds[0], brought) for one in self.contenders}
        own = brought.named_in(self.contenders[0].scenario(self.scenario, self.seeds[0]))
        return plan_fingerprints(codes, world_of(own, brought), brought)

    def _run_place(self, folder: Path | None, one: Contender, seed: int) -> dict[str, Any]:
        """Return folder and label of a run, as options of ``simulate``."""
        place = folder / run_name(one.label, seed) if folder and not self._is_single else folder
        return {"folder": place, "label": one.label}

    def _title(self, job: Job) -> str:
        """Return the name of a run in the progress display."""
        label = job.contender.label
        return label if len(self.seeds) == 1 else f"{label}, seed {job.scenario.seed}"

    def _play_sequentially(
        self, runs: Sequence[Job], options: Mapping[str, Any], start_run: StartRun | None, update: Update | None
    ) -> Generator[RunResult]:
        """Play one run after the other in this process."""
        # One pool for all runs: its workers start once.
        with TrainerPool(self.processes) as pool:
            here = options if self.scenario.engine == "ray" else {**options, "processes": pool}
            for job in runs:
                on_round = report_progress(self._title(job), job.scenario.rounds, start_run, update)
                selector, place = job.contender.selector(job.scenario), job.place["folder"]
                # Asked before the run, which leaves the folder finished in any case.
                was_over = bool(options.get("resume")) and place is not None and has_finished(place)
                result = simulate(job.scenario, selector=selector, on_round=on_round, **here, **job.place)
                if was_over and update:
                    report_last_round(result.history, update)
                yield result

    def _play_in_parallel(
        self, runs: Sequence[Job], options: Mapping[str, Any], start_run: StartRun | None, update: Update | None
    ) -> Generator[RunResult]:
        """Play several runs at a time in worker processes; report each when it and all before it have ended."""
        here = {**options, "processes": self.processes}
        with contextlib.closing(run_in_parallel(runs, here, self.jobs)) as results:
            for job in runs:
                report_progress(self._title(job), job.scenario.rounds, start_run, update)
                result = next(results)
                if update:
                    report_last_round(result.history, update)
                yield result

    def _play_on_flower(
        self, job: Job, folder: Path | None, on_round: Callable[[RoundRecord], None], options: Mapping[str, Any]
    ) -> History:
        """Play the first rounds of a run with Flower on Ray."""
        scenario, label = job.scenario, job.contender.label
        rounds = min(self.rounds_on_flower, scenario.rounds)
        place = folder and folder / f"{run_name(label, scenario.seed)}-on-flower"
        selector = job.contender.selector(scenario)
        return run_on_flower(scenario, rounds, selector, on_round, folder=place, label=label, **options).history
