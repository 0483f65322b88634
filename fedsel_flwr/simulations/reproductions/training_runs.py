"""Runs of training: a scenario is simulated by the vectorized engine, and its history gives the outcomes.

The outcomes are the figures of :class:`~fedsel_flwr.report.RunSummary` (for example ``accuracy_last10``,
``score_energy`` or ``time_to_target_s``), and these:

==================  ================================================================================================
outcome             meaning
==================  ================================================================================================
best_accuracy       largest measured test accuracy
accuracy_mean       mean of all measured test accuracies
late_gain           mean accuracy of the last ten measured rounds, minus that of the last ten in the first half
loss_last10         mean test loss of the last ten measured rounds
loss_over_time      mean over the simulated time of the last measured test loss; the first one counts from 0 s. The
                    time ends with the budget ``simulated_s`` of the scenario, or with the run
accuracy_over_time  the same for the test accuracy
largest_count       largest number of rounds of one client
seen_share          share of the clients that were selected at least once
coverage_rounds     rounds until every client was selected at least once; if some never were, the rounds of the run + 1
client_spread       standard deviation, over the clients, of the final model's accuracy for each client's data
cohort              mean number of selected clients a round
cohort_late         the same without the warm-up
simulated_s_200     simulated seconds of the first 200 rounds
run_s               processor seconds of the run, without the time to load the data
==================  ================================================================================================

``run_s`` differs from run to run, and from machine to machine.

The curves ``accuracy``, ``loss`` and ``simulated_s`` have 25 points. So do ``score_energy``, the sum of
1 - energy score over the selected clients, and ``seen``, the number of clients that were selected at least once. The
curve ``counts`` is the number of rounds of a client over the client's ``rank``. The client that was selected most often
has rank 1. ``record`` holds each accuracy that was above all earlier ones, over ``record_at``, its round.

GPFL begins with a round in which all clients compute a gradient, and the model does not change. This round is left out
of ``largest_count``, ``seen_share``, ``coverage_rounds``, ``seen`` and ``counts``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import PCZFL, RoundReport, Selector
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.reproductions.paper_figure import points_of
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import world_of

TIMED_ROUNDS = 200
"""Number of rounds of ``simulated_s_200``, as in GPFL's Fig. 6."""


def run_training(scenario: Scenario) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Simulate a scenario.

    Args:
        scenario: The scenario.

    Returns:
        Outcomes, and curves of shape (points,).
    """
    # Loads the data before the clock starts. Runs of the same seed share the data.
    world_of(scenario.model_copy(update={"engine": "vectorized"}))
    recorded, start = RecordedPCZFL.of(scenario), time.process_time()
    result = simulate(scenario, engine="vectorized", quiet=True, selector=recorded)
    seconds = time.process_time() - start
    outcomes, curves = outcomes_of(scenario, result)
    return outcomes | {"run_s": seconds}, curves | (recorded.balls() if recorded else {})


def outcomes_of(scenario: Scenario, result: RunResult) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Return the outcomes and the curves of a finished run."""
    history, summary = result.history, result.summary(scenario, scenario.selector)
    outcomes = {key: float(value) for key, value in asdict(summary).items() if key not in ("selector", "seed")}
    names = ("accuracy", "loss", "simulated_s", "num_selected")
    accuracy, loss, seconds, cohorts = (
        np.array([getattr(one, name) for one in history.rounds], dtype=np.float64) for name in names
    )
    measured = np.flatnonzero(np.isfinite(accuracy))
    first, counts = _participation(scenario, history)
    rounds, covered = len(history.rounds), len(first) == scenario.num_clients
    warmup = scenario.aggregation.options()["warmup_rounds"]
    warmup = max(warmup, int(scenario.selectors.get(scenario.selector, {}).get("warmup_rounds", 0)))
    outcomes |= {
        "best_accuracy": float(accuracy[measured].max()) if len(measured) else math.nan,
        "accuracy_mean": float(accuracy[measured].mean()) if len(measured) else math.nan,
        "late_gain": summary.accuracy_last10 - summary.accuracy_50,
        "loss_last10": float(loss[measured[-10:]].mean()) if len(measured) else math.nan,
        "largest_count": float(max(counts.values(), default=0)),
        "seen_share": len(counts) / scenario.num_clients,
        "coverage_rounds": float(max(first.values()) if covered else rounds + 1),
        "client_spread": float(np.std(result.client_accuracies)) if len(result.client_accuracies) else math.nan,
        "cohort": float(cohorts.mean()),
        "cohort_late": float(cohorts[warmup:].mean()) if len(cohorts) > warmup else math.nan,
        "simulated_s_200": float(seconds[min(TIMED_ROUNDS, rounds) - 1]),
        "loss_over_time": _mean_over_time(seconds[measured], loss[measured], scenario.simulated_s),
        "accuracy_over_time": _mean_over_time(seconds[measured], accuracy[measured], scenario.simulated_s),
    }
    return outcomes, _curves(scenario, history, accuracy, loss)


def _mean_over_time(seconds: FloatArray, values: FloatArray, end: float) -> float:
    """Return the mean over time of the last measured value; the first value counts from 0 s.

    Args:
        seconds: Simulated time of each measurement, s.
        values: The measured values.
        end: End of the mean, s; 0 means the last measurement. Later measurements do not count.

    >>> _mean_over_time(np.array([1.0, 3.0, 5.0]), np.array([0.2, 0.4, 0.8]), 4.0)  # (3 x 0.2 + 1 x 0.4) / 4
    0.25
    """
    if not len(values):
        return math.nan
    end = end or float(seconds[-1])
    starts = np.minimum(np.concatenate([[0.0], seconds[1:]]), end)
    return float(np.diff(starts, append=end) @ values / end)


def _participation(scenario: Scenario, history: History) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first round and the number of rounds of each client that was selected.

    An initialization, which only measures the clients, is left out. Round 1 is then the round after it.
    """
    # A common warm-up, which trains the model, takes the place of the initialization.
    measures = selector_class(scenario.selector).keeps_model is not Selector.keeps_model
    skipped = 1 if measures and not scenario.aggregation.options()["warmup_rounds"] else 0
    first, counts = dict[str, int](), dict[str, int]()
    for row in history.clients:
        if row.round > skipped:
            first.setdefault(row.client_id, row.round - skipped)
            counts[row.client_id] = counts.get(row.client_id, 0) + 1
    return first, counts


def _curves(scenario: Scenario, history: History, accuracy: FloatArray, loss: FloatArray) -> dict[str, FloatArray]:
    """Return the curves; a point is the last measured round up to it."""
    rounds = len(history.rounds)
    at = points_of(rounds)
    measured = np.flatnonzero(np.isfinite(accuracy))
    curves: dict[str, FloatArray] = {"at": at.astype(np.float64)}
    if len(measured):
        latest = measured[np.maximum(np.searchsorted(measured, at - 1, side="right") - 1, 0)]
        curves |= {"accuracy": accuracy[latest], "loss": loss[latest]}
        earlier = np.maximum.accumulate(np.append(-np.inf, accuracy[measured[:-1]]))
        records = measured[accuracy[measured] > earlier]
        curves |= {"record_at": (records + 1).astype(np.float64), "record": accuracy[records]}
    number = np.array([row.round for row in history.clients])
    scores = np.array([row.energy_score for row in history.clients])
    first, counts = _participation(scenario, history)
    seen = np.bincount(list(first.values()), minlength=rounds + 1)[: rounds + 1]
    curves["seen"] = np.cumsum(seen)[at].astype(np.float64)
    most_first = np.zeros(scenario.num_clients)
    most_first[: len(counts)] = sorted(counts.values(), reverse=True)
    rank = points_of(scenario.num_clients)
    curves |= {"rank": rank.astype(np.float64), "counts": most_first[rank - 1]}
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
        balls = {"x": self._centre[relevant, 0], "y": self._centre[relevant, 1], "radius": self._radius[relevant]}
        balls["front"] = self._undominated(relevant).astype(np.float64)
        contexts = dict(zip("xy", self._contexts(clients).T, strict=True))
        record = {f"balls_{{}}_{name}": own for name, own in balls.items()}
        self._records[self.round] = record | {f"contexts_{{}}_{name}": own for name, own in contexts.items()}
