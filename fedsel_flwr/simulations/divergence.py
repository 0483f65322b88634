"""Diagnosis of a finished run: it has diverged, no client delivered an update, or many clients were late.

A run has diverged if its loss is not finite, its clients send no finite models, or its model is no better than
guessing.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter

import numpy as np

from fedsel_flwr.clients.objectives import OBJECTIVES
from fedsel_flwr.rounds.history import LATE, History
from fedsel_flwr.rounds.untrusted import SIMULATED_FAULTS
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World

logger = logging.getLogger("fedsel_flwr")
WINDOW = 5
"""Consecutive rounds with the same fault before a run counts as diverged."""
MANY_LATE = 0.1
"""Share of late selections above which the longest wait is probably too short."""
CURE = "Lower training.learning_rate"
"""Usual cure for divergence."""


def diagnose(world: World, history: History) -> str:
    """Return what is wrong with a finished run, and log it.

    Args:
        world: The scenario's world. Its test set determines what guessing achieves.
        history: History of the run.

    Returns:
        One sentence. Empty if nothing is wrong, or if the run has too few measured rounds for a diagnosis.
    """
    # The order matters: a model that is not finite is also no better than guessing, but the first reason helps more.
    found = (
        _loss_not_finite(history)
        or _no_finite_models(history)
        or _no_updates(history)
        or _no_better_than_guessing(world, history)
    )
    if found:
        logger.warning("%s", found)
    return found


def late_share(scenario: Scenario, history: History) -> float:
    """Return the share of a run's selections in which the client reached the longest wait, ``wireless.max_latency_s``.

    Args:
        scenario: Scenario of the run.
        history: History of the run.

    Returns:
        The share. 0 if over-selection or a deadline ends rounds earlier, because clients are then late by design.
    """
    options = scenario.aggregation.options()
    asked = sum(record.num_selected for record in history.rounds)
    if not asked or options["over_selection"] or options["round_deadline_s"] is not None:
        return 0.0
    return history.problem_counts()[LATE] / asked


def chance_level(world: World) -> float:
    """Return the quality that guessing achieves, plus two standard errors; NaN if it is unknown.

    Args:
        world: The world, whose test set is used.

    Returns:
        For classes, the share of the most frequent class. For numbers to predict, 0, which is the R² of their mean. NaN
        if the caller defines the quality.
    """
    if world.objective is not OBJECTIVES[world.dataset.task]:
        return math.nan
    if world.dataset.task == "regression":
        return 0.0
    labels = world.dataset.test.labels.astype(np.int64, copy=False)
    # Two standard errors of a share on a test set of this size, because chance exceeds the plain share half of the
    # time.
    share = float(np.bincount(labels).max() / len(labels))
    return math.nan if share == 1 else share + 2 * math.sqrt(share * (1 - share) / len(labels))


def _loss_not_finite(history: History) -> str:
    measured = [record for record in history.rounds if not math.isnan(record.accuracy)]
    if not measured or math.isfinite(measured[-1].loss):
        return ""
    return f"the run diverged: the loss of round {measured[-1].round} is {measured[-1].loss}. {CURE}"


def _no_finite_models(history: History) -> str:
    last = [record for record in history.rounds if record.num_selected][-WINDOW:]
    if len(last) < WINDOW or any(record.num_completed for record in last):
        return ""
    rows = history.clients[-sum(record.num_selected for record in last) :]
    if not any(re.search("arrays: (not finite|.*beyond)", row.problem) for row in rows):
        return ""
    return (
        f"the run diverged: in rounds {last[0].round} to {last[-1].round} no client sent a model of finite size, so "
        f"the model did not change. {CURE}"
    )


def _no_updates(history: History) -> str:
    asked = sum(record.num_selected for record in history.rounds)
    if not asked or any(record.num_completed for record in history.rounds):
        return ""
    # The last thousand rows represent all rows, because a long history must be read from the disk.
    reasons = Counter(row.problem for row in history.clients[-min(asked, 1000) :])
    return f"no update was usable in {len(history.rounds)} rounds. Most frequent reason: {reasons.most_common(1)[0][0]}"


def _no_better_than_guessing(world: World, history: History) -> str:
    last = [record for record in history.rounds if not math.isnan(record.accuracy)][-WINDOW:]
    if len(last) < WINDOW or not max(record.accuracy for record in last) <= chance_level(world):
        return ""
    best = max(record.accuracy for record in last)
    return (
        f"the run diverged or has learned nothing: in its last {WINDOW} measured rounds the model is no better than "
        f"guessing (at most {best:.3g}). {CURE}, or give it more rounds"
    )


def log_simulated_faults(history: History, spares: bool = False) -> None:
    """Log one warning after a simulation, with the number of stragglers and lost replies.

    Args:
        history: The run's history.
        spares: Whether rounds asked more clients than they waited for. The history counts the other clients as late.
    """
    counts = history.problem_counts()
    told = [f"{counts[kind]:,} {kind}" for kind in SIMULATED_FAULTS if counts[kind]]
    if told:
        asked = sum(record.num_selected for record in history.rounds)
        more = ", including replies that no round waited for" if spares else ""
        logger.warning("%s of %s expected replies in %s rounds%s. The history lists the clients", ", ".join(told),
                       f"{asked:,}", f"{len(history.rounds):,}", more)  # fmt: skip
