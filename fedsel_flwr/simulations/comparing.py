"""Comparing selectors: every selector on every seed of one scenario, each run written as it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.building import check_selectors, make_availability
from fedsel_flwr.simulations.checking import ENGINES, check_engine
from fedsel_flwr.simulations.comparison import Comparison, Run, reference_of, run_name
from fedsel_flwr.simulations.contenders import Contender, Given, contenders
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.everyone import ALL, every_selector
from fedsel_flwr.simulations.ingredients import MakeModel, Own, as_own_data
from fedsel_flwr.simulations.on_flower import agreement, run_on_flower
from fedsel_flwr.simulations.results import RUN
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.staffing import Staff, check_processes
from fedsel_flwr.simulations.telling import StartRun, Update, telling
from fedsel_flwr.simulations.where import Where


def compare(
    scenario: Scenario,
    selectors: Given | Sequence[Given] | Mapping[str, Given],
    *,
    seeds: int | Sequence[int] = 5,
    engine: str = "vectorized",
    reference: str | None = None,
    folder: str | Path | None = None,
    rounds_on_flower: int = 0,
    start_run: StartRun | None = None,
    update: Update | None = None,
    device: str = "cpu",
    processes: int | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    client_cpus: float = 1,
    client_gpus: float | None = None,
    ray_address: str | None = None,
    quiet: bool = False,
    model: MakeModel | None = None,
    data: Any = None,
    objective: Objective | None = None,
) -> Comparison:
    """Run a scenario with several selectors on the same seeds.

    Args:
        scenario: The scenario; its selector is passed over, and its seed is the first one.
        selectors: Names, references, classes, or callables that make a selector; with labels of one's own as a mapping
            (:func:`~fedsel_flwr.simulations.contenders.contenders`). "all": every one that can run there; the result's
            ``left_out`` says of the others why not.
        seeds: How many, counted up from the scenario's; or the seeds themselves.
        engine: "vectorized" or "ray", as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        reference: The selector that the others are compared with, by its label; None takes "random" where it runs.
        folder: Where each run is written as it ends, and at last what is made of them; None: nowhere.
        rounds_on_flower: So many rounds of the first run are played before, with Flower on Ray, to check that both
            engines choose alike; 0: none.
        start_run: Told the label and the rounds of each run.
        update: Told each round and the failed clients so far.
        device: Where the vectorized engine trains.
        processes: How many processes train there, as in :func:`~fedsel_flwr.simulations.engine.simulate`; they stay for
            all runs.
        num_cpus: Cores that Ray gets, as in :func:`~fedsel_flwr.simulations.engine.simulate`; this and the next four
            are for the runs on Ray, and refused where there is none.
        num_gpus: GPUs that Ray gets.
        client_cpus: Cores that a client takes.
        client_gpus: GPUs that a client takes.
        ray_address: The Ray cluster to join; None takes RAY_ADDRESS.
        quiet: Keep Flower's log, this package's, and "Starting Ray ..." from standard error.
        model: Makes a torch module of your own, as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        data: Examples of your own, likewise.
        objective: Loss and quality of your own, likewise.

    Returns:
        The comparison.

    Raises:
        ParameterError: A selector, a seed, the data or a parameter cannot be used.
        RunError: A simulation broke off.

    Example::

        comparison = compare(load_scenario("phones"), ["bsfl", Fastest, "random"], seeds=3)
        print(comparison.verdict.sentence)
    """
    options: dict[str, Any] = {"quiet": quiet, "model": model, "objective": objective}
    if data is not None:
        options["data"] = as_own_data(data)  # once: it is read once for each seed
    left_out: dict[str, str] = {}
    if isinstance(selectors, str) and selectors == ALL:
        selectors, left_out = every_selector(scenario, Own(model, options.get("data"), objective))
    plan = Plan.of(
        scenario,
        selectors,
        seeds=seeds,
        engine=engine,
        reference=reference,
        rounds_on_flower=rounds_on_flower,
        processes=processes,
        where=Where(num_cpus, num_gpus, client_cpus, client_gpus, ray_address),
        device=device,
    )
    target = None if folder is None else Path(folder)
    comparison = plan.run(target, start_run, update, **options)
    comparison.left_out = left_out
    return comparison


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
    """

    scenario: Scenario
    them: Sequence[Contender]
    seeds: Sequence[int]
    reference: str | None
    rounds_on_flower: int
    processes: int | None = None
    where: Where = field(default_factory=Where)
    device: str = "cpu"

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
        where: Where | None = None,
        device: str = "cpu",
    ) -> Plan:
        """Make the plan; arguments and errors are those of :func:`compare`."""
        if not isinstance(scenario, Scenario):
            raise ParameterError(
                f"scenario must be a Scenario, as load_scenario makes one, got {type(scenario).__name__}"
            )
        if engine not in ENGINES:
            raise ParameterError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        scenario = scenario.model_copy(update={"engine": engine})
        where = where or Where()
        check_processes(scenario, processes, device)
        check_engine(scenario, where, device, rounds_on_flower)
        make_availability(scenario)
        them = contenders(selectors)
        check_selectors(scenario, [one.name for one in them if one.name])
        rounds = whole("rounds_on_flower", rounds_on_flower, 0)
        if rounds and engine == "ray":
            raise ParameterError("rounds_on_flower must be 0 where Ray is the engine of all runs")
        told = reference_of(reference, [one.label for one in them])
        return cls(scenario, them, _seeds(seeds, scenario.seed), told, rounds, processes, where, device)

    def run(
        self,
        folder: Path | None = None,
        start_run: StartRun | None = None,
        update: Update | None = None,
        **options: Any,
    ) -> Comparison:
        """Run everything; arguments, result and errors are those of :func:`compare`, options go to ``simulate``.

        Every selector runs on the first seed, then on the next: what there is after an interruption can be compared,
        and the data of a seed are made once.
        """
        if folder:
            _check_folder(folder, {run_name(one.label, seed) for one in self.them for seed in self.seeds})
        comparison = Comparison(self.scenario, reference=self.reference)
        brought = Own(options.get("model"), options.get("data"), options.get("objective"))
        single = len(self.them) * len(self.seeds) == 1
        on_flower: History | None = None
        on_ray = {name: getattr(self.where, name) for name in self.where.asked}
        with Staff(self.processes) as staff:
            vectorized = {"device": self.device, "processes": staff}
            here = on_ray if self.scenario.engine == "ray" else vectorized
            for seed, one in itertools.product(self.seeds, self.them):
                own = one.scenario(self.scenario, seed)
                label = one.label if len(self.seeds) == 1 else f"{one.label}, seed {seed}"
                if self.rounds_on_flower and not comparison.runs:
                    told = telling(f"{label}, with Flower on Ray", self.rounds_on_flower, start_run, update)
                    on_flower = self._on_flower(one, own, folder, told, on_ray | options)
                told = telling(label, own.rounds, start_run, update)
                selector, place = one.selector(own), folder
                if folder and not single:
                    place = folder / run_name(one.label, seed)
                result = simulate(
                    own, selector=selector, on_round=told, folder=place, label=one.label, **here, **options
                )
                run = Run(one.label, brought.named_in(own), result)
                if on_flower and not comparison.runs:
                    comparison.agreement = agreement(on_flower, result.history)
                comparison.runs.append(run)
        if folder:
            comparison.report(folder)
        return comparison

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


def _check_folder(folder: Path, own: Collection[str]) -> None:
    """Refuse a folder with runs that this comparison would not write anew: they would be taken for its own later.

    Raises:
        ParameterError: Says which.
    """
    foreign = sorted({path.parent.name for path in folder.glob(f"*/{RUN}")} - {*own, *(f"{o}-on-flower" for o in own)})
    if foreign:
        raise ParameterError(
            f"folder {str(folder)!r} holds runs of another comparison ({', '.join(foreign[:3])}): give a new one, or "
            "delete them"
        )


def _seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    if isinstance(seeds, str):
        raise ParameterError(f"seeds must be a whole number of seeds, or a list of seeds, got the text {seeds!r}")
    if not isinstance(seeds, Sequence):
        return list(range(first, first + whole("seeds", seeds, 1)))
    numbers = [whole("seeds", seed, 0) for seed in seeds]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ParameterError(f"seeds must be a number of seeds, or at least one seed and none twice, got {list(seeds)}")
    return numbers
