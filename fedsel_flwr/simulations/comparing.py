"""Comparing selectors: every selector on every seed of one scenario, each run written as it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.building import check_selectors, make_availability
from fedsel_flwr.simulations.comparison import Comparison, Run, reference_of, run_name
from fedsel_flwr.simulations.contenders import Contender, Given, contenders
from fedsel_flwr.simulations.engine import ENGINES, check_engine, simulate
from fedsel_flwr.simulations.ingredients import MakeModel, Own, as_own_data
from fedsel_flwr.simulations.on_flower import agreement, run_on_flower
from fedsel_flwr.simulations.scenario import Scenario

StartRun = Callable[[str, int], None]
Update = Callable[[RoundRecord, int], None]


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
    num_cpus: int | None = None,
    model: MakeModel | None = None,
    data: Any = None,
    objective: Objective | None = None,
) -> Comparison:
    """Run a scenario with several selectors on the same seeds.

    Args:
        scenario: The scenario; its selector is passed over, and its seed is the first one.
        selectors: Names, references, classes, or callables that make a selector; with labels of one's own as a mapping
            (:func:`~fedsel_flwr.simulations.contenders.contenders`).
        seeds: How many, counted up from the scenario's; or the seeds themselves.
        engine: "vectorized" or "ray", as in :func:`~fedsel_flwr.simulations.engine.simulate`.
        reference: The selector that the others are compared with, by its label; None takes "random" where it runs.
        folder: Where each run is written as it ends, and at last what is made of them; None: nowhere.
        rounds_on_flower: So many rounds of the first run are played before, with Flower on Ray, to check that both
            engines choose alike; 0: none.
        start_run: Told the label and the rounds of each run.
        update: Told each round and the failed clients so far.
        device: Where the vectorized engine trains.
        num_cpus: On Ray, actors; None takes every core.
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
    plan = Plan.of(
        scenario, selectors, seeds=seeds, engine=engine, reference=reference, rounds_on_flower=rounds_on_flower
    )
    target = None if folder is None else Path(folder)
    options: dict[str, Any] = {"device": device, "num_cpus": num_cpus, "model": model, "objective": objective}
    if data is not None:
        options["data"] = as_own_data(data)  # once: it is read once for each seed
    return plan.run(target, start_run, update, **options)


@dataclass(frozen=True)
class Plan:
    """What is to be compared, checked as far as can be before anything runs.

    Attributes:
        scenario: Of all runs, with their engine.
        them: The selectors.
        seeds: The seeds.
        reference: The label of the selector to compare with.
        rounds_on_flower: So many rounds of the first run with Flower on Ray before.
    """

    scenario: Scenario
    them: Sequence[Contender]
    seeds: Sequence[int]
    reference: str | None
    rounds_on_flower: int

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
    ) -> Plan:
        """Make the plan; arguments and errors are those of :func:`compare`."""
        if not isinstance(scenario, Scenario):
            raise ParameterError(
                f"scenario must be a Scenario, as load_scenario makes one, got {type(scenario).__name__}"
            )
        if engine not in ENGINES:
            raise ParameterError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        scenario = scenario.model_copy(update={"engine": engine})
        check_engine(scenario)
        make_availability(scenario)
        them = contenders(selectors)
        check_selectors(scenario, [one.name for one in them if one.name])
        rounds = whole("rounds_on_flower", rounds_on_flower, 0)
        if rounds and engine == "ray":
            raise ParameterError("rounds_on_flower must be 0 where Ray is the engine of all runs")
        told = reference_of(reference, [one.label for one in them])
        return cls(scenario, them, _seeds(seeds, scenario.seed), told, rounds)

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
        comparison = Comparison(self.scenario, reference=self.reference)
        brought = Own(options.get("model"), options.get("data"), options.get("objective"))
        single = len(self.them) * len(self.seeds) == 1
        on_flower: History | None = None
        for seed in self.seeds:
            for one in self.them:
                own = one.scenario(self.scenario, seed)
                label = one.label if len(self.seeds) == 1 else f"{one.label}, seed {seed}"
                if self.rounds_on_flower and not comparison.runs:
                    told = _telling(f"{label}, with Flower on Ray", self.rounds_on_flower, start_run, update)
                    on_flower = self._on_flower(one, own, folder, told, options)
                told = _telling(label, own.rounds, start_run, update)
                selector, place = one.selector(own), folder
                if folder and not single:
                    place = folder / run_name(one.label, seed)
                result = simulate(own, selector=selector, on_round=told, folder=place, label=one.label, **options)
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


def _telling(
    label: str, rounds: int, start_run: StartRun | None, update: Update | None
) -> Callable[[RoundRecord], None]:
    """Tell that a run starts; return what tells each of its rounds, together with the failed clients so far."""
    failed = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal failed
        failed += record.num_selected - record.num_completed
        if update:
            update(record, failed)

    if start_run:
        start_run(label, rounds)
    return on_round


def _seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    if isinstance(seeds, str):
        raise ParameterError(f"seeds must be a whole number of seeds, or a list of seeds, got the text {seeds!r}")
    if not isinstance(seeds, Sequence):
        return list(range(first, first + whole("seeds", seeds, 1)))
    numbers = [whole("seeds", seed, 0) for seed in seeds]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ParameterError(f"seeds must be a number of seeds, or at least one seed and none twice, got {list(seeds)}")
    return numbers
