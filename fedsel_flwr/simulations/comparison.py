"""Selectors side by side: every selector on every seed, one folder with all that came out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedsel_flwr.report.plots import plot_comparison
from fedsel_flwr.report.summary import RunSummary, summarize
from fedsel_flwr.report.verdict import Verdict, verdict
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower import Agreement, agreement, run_on_flower
from fedsel_flwr.simulations.results import write_run
from fedsel_flwr.simulations.scenario import Scenario

StartRun = Callable[[str, int], None]
Update = Callable[[RoundRecord, int], None]


@dataclass
class Comparison:
    """Runs of one scenario under several selectors and seeds.

    Args:
        scenario: The scenario; its selector and seed are replaced run by run.
        selectors: Names of selectors.
        seeds: How many seeds, counted up from the scenario's.
        folder: Where everything is written.
        reference: The selector that the verdict compares the others with; None: no verdict.
        rounds_on_flower: So many rounds of the first run are played before, with Flower on Ray; 0: none.

    Attributes:
        summaries: One a run, so far.
        histories: The runs' histories, by selector.
        verdict: After the last run, where there is a reference.
        agreement: After the first run, where it was played on Ray before.
    """

    scenario: Scenario
    selectors: Sequence[str]
    seeds: int
    folder: Path
    reference: str | None = None
    rounds_on_flower: int = 0
    verdict: Verdict | None = None
    agreement: Agreement | None = None
    summaries: list[RunSummary] = field(default_factory=list)
    histories: dict[str, list[History]] = field(default_factory=dict)

    def plan(self) -> list[Scenario]:
        """The scenario of each run, in order: every selector on the first seed, then on the next.

        So what is there after an interruption can be compared, and a seed's data are made once.
        """
        return [
            self.scenario.model_copy(update={"selector": name, "seed": self.scenario.seed + i})
            for i in range(self.seeds)
            for name in self.selectors
        ]

    def run(self, start_run: StartRun, update: Update) -> list[RunSummary]:
        """Run everything, writing each run as it ends, and picture and verdict after the last.

        Args:
            start_run: Told the label and the rounds of each run.
            update: Told each round and the failed clients so far.

        Returns:
            One summary a run.

        Raises:
            ParameterError: The scenario's data or parameters cannot be used.
            RunError: A simulation broke off.
        """
        single = len(self.plan()) == 1
        on_flower = self._play_on_flower(start_run, update) if self.rounds_on_flower else None
        for scenario in self.plan():
            label = scenario.selector if self.seeds == 1 else f"{scenario.selector}, seed {scenario.seed}"
            start_run(label, scenario.rounds)
            result = simulate(scenario, on_round=_counting(update))
            target = self.folder if single else self.folder / f"{scenario.selector}-seed{scenario.seed}"
            write_run(target, scenario, result)
            if on_flower and not self.agreement:
                self.agreement = agreement(on_flower, result.history)
            self._add(scenario, result.history)
        if self.reference:
            self.verdict = verdict(self.summaries, self.reference, self.scenario.target_accuracy)
        self._draw()
        self._write("summary.json", [asdict(summary) for summary in self.summaries])
        if self.verdict:
            engines = {"engines": asdict(self.agreement)} if self.agreement else {}
            self._write("verdict.json", asdict(self.verdict) | engines)
        return self.summaries

    def _play_on_flower(self, start_run: StartRun, update: Update) -> History:
        """The first run's first rounds, with Flower on Ray."""
        scenario = self.plan()[0]
        rounds = min(self.rounds_on_flower, scenario.rounds)
        start_run(f"{scenario.selector}, seed {scenario.seed}, with Flower on Ray", rounds)
        result = run_on_flower(scenario, rounds, _counting(update))
        short = scenario.model_copy(update={"rounds": rounds, "engine": "ray"})
        write_run(self.folder / f"{scenario.selector}-seed{scenario.seed}-on-flower", short, result)
        return result.history

    def _write(self, name: str, figures: object) -> None:
        text = json.dumps(_json(figures), indent=2, allow_nan=False)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")

    def _add(self, scenario: Scenario, history: History) -> None:
        self.histories.setdefault(scenario.selector, []).append(history)
        self.summaries.append(
            summarize(
                history,
                selector=scenario.selector,
                seed=scenario.seed,
                num_clients=scenario.num_clients,
                target_accuracy=scenario.target_accuracy,
            )
        )

    def _draw(self) -> None:
        s = self.scenario
        plot_comparison(
            self.histories,
            self.folder / "comparison.png",
            num_clients=s.num_clients,
            target_accuracy=s.target_accuracy,
            title=f"{s.name}: {s.num_clients} clients, {s.clients_per_round} a round",
            differences=self.verdict.times if self.verdict else (),
        )


def _counting(update: Update) -> Callable[[RoundRecord], None]:
    """Told each round of one run, tells it on together with the failed clients so far."""
    failed = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal failed
        failed += record.num_selected - record.num_completed
        update(record, failed)

    return on_round


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _json(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_json(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
