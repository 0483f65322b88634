"""Runs of training: a scenario is simulated by the vectorized engine, and its history gives the outcomes.

The outcomes are the figures of :class:`~fedsel_flwr.report.RunSummary` (for example ``accuracy_last10``,
``score_energy`` or ``time_to_target_s``), and these:

==================  ================================================================================================
outcome             meaning
==================  ================================================================================================
best_accuracy       largest measured test accuracy
accuracy_mean       mean of all measured test accuracies
loss_last10         mean test loss of the last ten measured rounds
loss_over_time      mean over the simulated time of the last measured test loss; the first one counts from 0 s. The
                    time ends with the budget ``simulated_s`` of the scenario, or with the run
accuracy_over_time  the same for the test accuracy
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
from dataclasses import asdict

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.report.summary import summarize
from fedsel_flwr.rounds.history import History
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
    return outcomes_of(scenario, simulate(scenario, engine="vectorized", quiet=True))


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
    seconds = np.array([one.simulated_s for one in history.rounds])
    outcomes |= {
        "loss_over_time": _mean_over_time(seconds[measured], loss[measured], scenario.simulated_s),
        "accuracy_over_time": _mean_over_time(seconds[measured], accuracy[measured], scenario.simulated_s),
    }
    return outcomes, _curves(history, accuracy, loss)


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
