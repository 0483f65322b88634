"""Runs of training: a scenario is simulated by the vectorized engine, and its history gives the outcomes.

The outcomes are the figures of :class:`~fedsel_flwr.report.RunSummary` (for example ``accuracy_last10``,
``score_energy`` or ``time_to_target_s``), and these:

==================  ================================================================================================
outcome             meaning
==================  ================================================================================================
best_accuracy       largest measured test accuracy
accuracy_mean       mean of all measured test accuracies
loss_last10         mean test loss of the last ten measured rounds
largest_count       largest number of rounds of one client
seen_share          share of the clients that were selected at least once
cohort              mean number of selected clients a round
cohort_late         the same without the warm-up
==================  ================================================================================================

The curves ``accuracy``, ``loss`` and ``simulated_s`` have :data:`POINTS` points. So do ``score_energy``, the sum of
1 - energy score over the selected clients, and ``seen``, the number of clients that were selected at least once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.report.summary import summarize
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import PCZFL, RoundReport
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario

POINTS = 25
"""Number of points of a curve."""


def run_training(scenario: Scenario) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Simulate a scenario.

    Args:
        scenario: The scenario.

    Returns:
        Outcomes, and curves of shape (points,).
    """
    recorded = RecordedPCZFL.of(scenario)
    outcomes, curves = outcomes_of(scenario, simulate(scenario, engine="vectorized", quiet=True, selector=recorded))
    return outcomes, curves | (recorded.balls() if recorded else {})


def outcomes_of(scenario: Scenario, result: RunResult) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Return the outcomes and the curves of a finished run."""
    history = result.history
    summary = summarize(
        history,
        selector=scenario.selector,
        seed=scenario.seed,
        num_clients=scenario.num_clients,
        target_accuracy=scenario.target_accuracy,
        target_rounds=scenario.target_rounds,
        model_bytes=scenario.model_bytes(sum(array.nbytes for array in result.arrays)),
        client_accuracies=result.client_accuracies,
    )
    outcomes = {key: float(value) for key, value in asdict(summary).items() if key not in ("selector", "seed")}
    accuracy = np.array([one.accuracy for one in history.rounds])
    loss = np.array([one.loss for one in history.rounds])
    measured = np.flatnonzero(np.isfinite(accuracy))
    counts: dict[str, int] = {}
    for row in history.clients:
        counts[row.client_id] = counts.get(row.client_id, 0) + 1
    warmup = scenario.aggregation.options()["warmup_rounds"]
    warmup = max(warmup, int(scenario.selectors.get(scenario.selector, {}).get("warmup_rounds", 0)))
    cohorts = np.array([one.num_selected for one in history.rounds], dtype=np.float64)
    outcomes |= {
        "best_accuracy": float(accuracy[measured].max()) if len(measured) else math.nan,
        "accuracy_mean": float(accuracy[measured].mean()) if len(measured) else math.nan,
        "loss_last10": float(loss[measured[-10:]].mean()) if len(measured) else math.nan,
        "largest_count": float(max(counts.values(), default=0)),
        "seen_share": len(counts) / scenario.num_clients,
        "cohort": float(cohorts.mean()),
        "cohort_late": float(cohorts[warmup:].mean()) if len(cohorts) > warmup else math.nan,
    }
    return outcomes, _curves(history, accuracy, loss)


def _curves(history: History, accuracy: FloatArray, loss: FloatArray) -> dict[str, FloatArray]:
    """Return the curves; a point is the last measured round up to it."""
    rounds = len(history.rounds)
    at = np.unique(np.round(np.linspace(1, rounds, POINTS)).astype(np.int64))
    measured = np.flatnonzero(np.isfinite(accuracy))
    curves: dict[str, FloatArray] = {"at": at.astype(np.float64)}
    if len(measured):
        latest = measured[np.maximum(np.searchsorted(measured, at - 1, side="right") - 1, 0)]
        curves |= {"accuracy": accuracy[latest], "loss": loss[latest]}
    number = np.array([row.round for row in history.clients])
    scores = np.array([row.energy_score for row in history.clients])
    first: dict[str, int] = {}
    for row in history.clients:
        first.setdefault(row.client_id, row.round)
    seen = np.bincount(list(first.values()), minlength=rounds + 1)[: rounds + 1]
    curves["seen"] = np.cumsum(seen)[at].astype(np.float64)
    curves["simulated_s"] = np.array([one.simulated_s for one in history.rounds])[at - 1]
    if len(scores) and np.isfinite(scores).all():
        spent = np.bincount(number, weights=1.0 - scores, minlength=rounds + 1)[: rounds + 1]
        curves["score_energy"] = np.cumsum(spent)[at].astype(np.float64)
    return curves


class RecordedPCZFL(PCZFL):
    """PCZFL that records its balls before training, after a quarter of the rounds, and after the last round.

    The records are further curves of a run. ``balls_rounds`` lists the recorded rounds. For each of them, t:

    * ``balls_t_x``, ``balls_t_y``, ``balls_t_radius`` and ``balls_t_front`` describe the balls that hold a client.
      ``front`` is 1 for a ball on the Pareto front, otherwise 0.
    * ``contexts_t_x`` and ``contexts_t_y`` are the clients' contexts.

    x is the accuracy, and y is the energy score.

    Args:
        total_rounds: Number of rounds.
        **params: Parameters of :class:`~fedsel_flwr.selectors.PCZFL`.
    """

    name: ClassVar[str] = PCZFL.name

    def __init__(self, *, total_rounds: int, **params: Any) -> None:
        super().__init__(**params)
        self.total_rounds = total_rounds
        self._records: dict[int, dict[str, FloatArray]] = {}

    @classmethod
    def of(cls, scenario: Scenario) -> RecordedPCZFL | None:
        """Return the recording selector of a scenario with PCZFL and seed 1; None for other scenarios."""
        # One seed is enough for a picture, and keeps the file of the runs small.
        if scenario.selector != PCZFL.name or scenario.seed != 1:
            return None
        from fedsel_flwr.simulations.on_flower.building import selector_params

        return cls(total_rounds=scenario.rounds, **selector_params(scenario, {}))

    def balls(self) -> dict[str, FloatArray]:
        """Return the records as curves."""
        curves = {"balls_rounds": np.array(sorted(self._records), dtype=np.float64)}
        for number, record in self._records.items():
            curves |= {key.format(number): value for key, value in record.items()}
        return curves

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        super()._inform(clients, columns)
        if self.round == 0:
            self._record()

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        if self.round in (max(1, self.total_rounds // 4), self.total_rounds):
            self._record()

    def _record(self) -> None:
        """Record the balls with a client, and the contexts."""
        clients = np.flatnonzero(self._registered)
        relevant = np.flatnonzero(self._domains(clients).any(axis=0))
        x, y = self._contexts(clients).T
        self._records[self.round] = {
            "balls_{}_x": self._centre[relevant, 0],
            "balls_{}_y": self._centre[relevant, 1],
            "balls_{}_radius": self._radius[relevant],
            "balls_{}_front": self._undominated(relevant).astype(np.float64),
            "contexts_{}_x": x,
            "contexts_{}_y": y,
        }
