"""A comparison as a plan: checked before anything runs, run, and gone on with from the folder that keeps it."""

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
from fedsel_flwr.simulations.comparisons.comparison import Comparison, Run, reference_of, run_name
from fedsel_flwr.simulations.comparisons.contenders import Contender, Given, contenders
from fedsel_flwr.simulations.comparisons.flower_agreement import agreement, run_on_flower
from fedsel_flwr.simulations.comparisons.parallel_runs import (
    Job,
    StartRun,
    Update,
    check_jobs,
    side_by_side,
    tell_last,
    telling,
)
from fedsel_flwr.simulations.comparisons.plan_files import (
    FINGERPRINTS,
    check_folder,
    check_plan,
    held_folder,
    read_plan,
    seeds_from,
    write_plan,
)
from fedsel_flwr.simulations.engine import ENGINES, check_engine, simulate
from fedsel_flwr.simulations.existing_runs import has_finished
from fedsel_flwr.simulations.fingerprints import code_of, of_plan
from fedsel_flwr.simulations.on_flower.building import (
    check_selectors,
    make_availability,
    make_strategy,
)
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.parallelism import Staff, check_processes
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import merged
from fedsel_flwr.simulations.untrusted_folders import check_checkpoints, check_links, check_trusted, code_in, outside
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of


@dataclass(frozen=True)
class Plan:
    """What is to be compared, checked as far as can be before anything runs.

    Attributes:
        scenario: Of all runs, with their engine.
        them: The selectors.
        seeds: The seeds.
        reference: The label of the selector to compare with.
        rounds_on_flower: So many rounds of the first run with Flower on Ray before.
        processes: How many train in the vectorized engine; None: by the sizes.
        where: What Ray is given.
        device: Where the vectorized engine trains.
        left_out: Where all selectors were to run: those that cannot, and why.
        checkpoints: Options of :func:`~fedsel_flwr.simulations.engine.simulate`.
        jobs: So many runs at a time.
    """

    scenario: Scenario
    them: Sequence[Contender]
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
        selectors: Given | Sequence[Given] | Mapping[str, Given],
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
        """Make the plan; :func:`~fedsel_flwr.simulations.comparisons.comparing.compare` has arguments and errors."""
        if not isinstance(scenario, Scenario):
            raise ParameterError(
                f"scenario must be a Scenario, as load_scenario makes one, got {type(scenario).__name__}"
            )
        if engine not in ENGINES:
            raise ParameterError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        scenario = scenario.model_copy(update={"engine": engine})
        where = where or RayResources()
        processes = check_processes(scenario, processes, device)
        check_engine(scenario, where, device, rounds_on_flower)
        jobs = check_jobs(scenario, jobs, device)
        make_availability(scenario)
        them = contenders(selectors)
        check_selectors(scenario, [one.name for one in them if one.name])
        rounds = whole("rounds_on_flower", rounds_on_flower, 0)
        if rounds and engine == "ray":
            raise ParameterError("rounds_on_flower must be 0 where Ray is the engine of all runs")
        told = reference_of(reference, [one.label for one in them])
        return cls(
            scenario, them, seeds_from(seeds, scenario.seed), told, rounds, processes, where, device, left_out or {},
            checkpoints or {}, jobs,
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
        """Read the plan that is run in a folder.

        Args:
            folder: Of a comparison, or of a run.
            scenario: Keys of the scenario that are to be changed, dotted.
            trust: Whether code that the plan names may be loaded.
            checkpoint_dir: The folder of its checkpoints, if that lies outside: the reader names it himself.
            command: What was typed, for errors.
            **where: ``where``, ``device``, ``processes`` and ``jobs`` in place of those of the plan.

        Raises:
            ParameterError: There is none, it needs something that only Python code can give, it names code and is not
                trusted, or its checkpoints are elsewhere.
        """
        said = read_plan(folder)
        nameless = [one["label"] for one in said["selectors"] if one["name"] is None]
        if nameless:
            raise ParameterError(
                f"selector {nameless[0]!r} in {str(folder)!r} was given in Python: go on there, with compare(..., "
                "resume=True) and the same selectors"
            )
        check_trusted(folder, said | ({"where": {}} if "where" in where else {}), trust, f"{command} --trust")
        check_checkpoints(folder, said, checkpoint_dir, command)
        changed = merged(said["scenario"], scenario or {})
        return cls.of(
            changed,
            {one["label"]: one["name"] for one in said["selectors"]},
            seeds=said["seeds"],
            engine=changed.engine,
            **{key: said[key] for key in ("reference", "rounds_on_flower", "left_out", "checkpoints") if key in said},
            **{"device": said.get("device", "cpu"), "processes": said.get("processes"), "jobs": said.get("jobs", 1)}
            | {"where": RayResources(**said.get("where", {}))}
            | where,
        )

    def resumed_by(self, folder: Path) -> str:
        """The options that resume the plan in its folder: what it would be refused without is among them."""
        said = self.said()
        place = outside(folder, said)
        named = "" if place is None else f" --checkpoint-dir {shlex.quote(place)}"
        return f"--resume {shlex.quote(str(folder))}{named}{' --trust' if code_in(said) else ''}"

    def said(self) -> dict[str, Any]:
        """The plan as its folder keeps it."""
        return {
            "scenario": self.scenario.model_dump(),
            "selectors": [{"label": one.label, "name": one.name} for one in self.them],
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

        Every selector runs on the first seed, then on the next: what there is after an interruption can be compared,
        and the data of a seed are made once.
        """
        single = len(self.them) * len(self.seeds) == 1
        comparison = Comparison(self.scenario, reference=self.reference, left_out=dict(self.left_out))
        brought = OwnParts(options.get("model"), options.get("data"), options.get("objective"))
        held = None
        if folder:
            names = {run_name(one.label, seed) for one in self.them for seed in self.seeds}
            check_links(folder)
            check_folder(folder, names, single=single, resume=resume)
        places = [self._place(folder, one, seed, single)["folder"] for one in self.them for seed in self.seeds]
        if not resume or not all(place is not None and has_finished(place) for place in places):
            self._check(brought)
        if folder:
            made_of = self._made_of(brought)  # before anything is written: what was given may not make a selector
            held = held_folder(folder)
            if resume and not replay:
                check_plan(folder, made_of)
            named = {"scenario": brought.named_in(self.scenario).model_dump()}
            write_plan(folder, self.said() | named | {FINGERPRINTS: made_of})
            options = {"resume": resume, "replay": replay, **self.checkpoints, **options}
        on_flower: History | None = None
        on_ray = options | {name: getattr(self.where, name) for name in self.where.non_default}
        runs = [
            Job(one.scenario(self.scenario, seed), one, self._place(folder, one, seed, single))
            for seed, one in itertools.product(self.seeds, self.them)
        ]
        if self.rounds_on_flower:
            first, label = runs[0], self._told(runs[0])
            told = telling(f"{label}, with Flower on Ray", self.rounds_on_flower, start_run, update)
            on_flower = self._on_flower(first.contender, first.scenario, folder, told, on_ray)
        play = self._in_turn if self.jobs == 1 or single else self._side_by_side
        if play == self._side_by_side:  # only this process is sure to have the source
            runs = [
                replace(job, place={**job.place, "code": self._code(job.contender, job.scenario.seed, brought)})
                for job in runs
            ]
        here = on_ray if self.scenario.engine == "ray" else options | {"device": self.device}
        with contextlib.closing(play(runs, here, start_run, update)) as results:
            for job, result in zip(runs, results, strict=True):
                run = Run(job.contender.label, brought.named_in(job.scenario), result)
                if on_flower and not comparison.runs:
                    comparison.agreement = agreement(on_flower, result.history)
                comparison.runs.append(run)
        if folder:
            comparison.report(folder)
        del held  # from here on other processes may write there
        return comparison

    def _check(self, brought: OwnParts) -> None:
        """Refuse data, a partition and selectors that cannot be used: before anything is written or started.

        The selectors share the world of the first seed, in which each differs by its scenario alone.
        """
        scenarios = [brought.named_in(one.scenario(self.scenario, self.seeds[0])) for one in self.them]
        world = world_of(scenarios[0], brought)
        for one, scenario in zip(self.them, scenarios, strict=True):
            make_strategy(world.with_scenario(scenario), selector=one.selector(scenario))

    def _code(self, one: Contender, seed: int, brought: OwnParts) -> dict[str, str]:
        """The fingerprints of a run's code, taken in this process, which has the source."""
        own = one.scenario(self.scenario, seed)
        return code_of(own, one.selector(own), brought)

    def _made_of(self, brought: OwnParts) -> dict[str, Any]:
        """The fingerprints that the folder keeps of the plan."""
        codes = {one.label: self._code(one, self.seeds[0], brought) for one in self.them}
        own = brought.named_in(self.them[0].scenario(self.scenario, self.seeds[0]))
        return of_plan(codes, world_of(own, brought), brought)

    def _place(self, folder: Path | None, one: Contender, seed: int, single: bool) -> dict[str, Any]:
        """What a run is called, and where it is written."""
        place = folder / run_name(one.label, seed) if folder and not single else folder
        return {"folder": place, "label": one.label}

    def _told(self, job: Job) -> str:
        """What the progress calls a run."""
        label = job.contender.label
        return label if len(self.seeds) == 1 else f"{label}, seed {job.scenario.seed}"

    def _in_turn(
        self, runs: Sequence[Job], options: Mapping[str, Any], start_run: StartRun | None, update: Update | None
    ) -> Generator[RunResult]:
        """Play one run after the other, here."""
        with Staff(self.processes) as staff:
            here = options if self.scenario.engine == "ray" else {**options, "processes": staff}
            for job in runs:
                told = telling(self._told(job), job.scenario.rounds, start_run, update)
                selector, place = job.contender.selector(job.scenario), job.place["folder"]
                was_over = bool(options.get("resume")) and place is not None and has_finished(place)
                result = simulate(job.scenario, selector=selector, on_round=told, **here, **job.place)
                if was_over and update:
                    tell_last(result.history, update)
                yield result

    def _side_by_side(
        self, runs: Sequence[Job], options: Mapping[str, Any], start_run: StartRun | None, update: Update | None
    ) -> Generator[RunResult]:
        """Play several runs at a time, in other processes; each is told of when it and all before it have ended."""
        here = {**options, "processes": self.processes, "on_wait": None}
        with contextlib.closing(side_by_side(runs, here, self.jobs)) as results:
            for job in runs:
                telling(self._told(job), job.scenario.rounds, start_run, update)
                result = next(results)
                if update:
                    tell_last(result.history, update)
                yield result

    def _on_flower(
        self,
        one: Contender,
        own: Scenario,
        folder: Path | None,
        told: Callable[[RoundRecord], None],
        options: Mapping[str, Any],
    ) -> History:
        """The first rounds of the first run, with Flower on Ray."""
        rounds = min(self.rounds_on_flower, own.rounds)
        place = folder and folder / f"{run_name(one.label, own.seed)}-on-flower"
        result = run_on_flower(own, rounds, one.selector(own), told, folder=place, label=one.label, **options)
        return result.history
