"""Selectors side by side: every selector on every seed, one folder with all that came out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedsel_flwr.report.plots import plot_comparison
from fedsel_flwr.report.summary import RunSummary, summarize
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import write_run
from fedsel_flwr.simulations.scenario import Scenario


@dataclass
class Comparison:
    """Runs of one scenario under several selectors and seeds.

    Args:
        scenario: The scenario; its selector and seed are replaced run by run.
        selectors: Names of selectors.
        seeds: How many seeds, counted up from the scenario's.
        folder: Where everything is written.
    """

    scenario: Scenario
    selectors: Sequence[str]
    seeds: int
    folder: Path
    summaries: list[RunSummary] = field(default_factory=list)
    histories: dict[str, list[History]] = field(default_factory=dict)

    def plan(self) -> list[Scenario]:
        """The scenario of each run, in order: every seed of the first selector, then of the next."""
        return [
            self.scenario.model_copy(update={"selector": name, "seed": self.scenario.seed + i})
            for name in self.selectors
            for i in range(self.seeds)
        ]

    def run(
        self, start_run: Callable[[str, int], None], update: Callable[[RoundRecord, int], None]
    ) -> list[RunSummary]:
        """Run everything, writing each run as it ends and the picture after the last.

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
        for scenario in self.plan():
            label = scenario.selector if self.seeds == 1 else f"{scenario.selector}, seed {scenario.seed}"
            start_run(label, scenario.rounds)
            failed = 0

            def on_round(record: RoundRecord) -> None:
                nonlocal failed
                failed += record.num_selected - record.num_completed
                update(record, failed)

            result = simulate(scenario, on_round=on_round)
            target = self.folder if single else self.folder / f"{scenario.selector}-seed{scenario.seed}"
            write_run(target, scenario, result)
            self._add(scenario, result.history)
        self._draw()
        summaries = [{key: _json(value) for key, value in asdict(summary).items()} for summary in self.summaries]
        text = json.dumps(summaries, indent=2, allow_nan=False)
        (self.folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        return self.summaries

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
        )


def _json(value: object) -> object:
    """JSON has no NaN and no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
