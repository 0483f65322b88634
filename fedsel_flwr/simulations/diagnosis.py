"""Diagnosis of a finished run: divergence, no updates, late clients; regret, and accuracy of each client and class.

A run has diverged if its loss is not finite, its clients send no finite models, or its model is no better than
guessing.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.objectives import OBJECTIVES, fraction_correct, fresh_copy
from fedsel_flwr.clients.training import outputs, read_only_tensor
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.history import LATE, ClientRecord, History
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.untrusted import SIMULATED_FAULTS, shown
from fedsel_flwr.simulations.results import Columns, RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import fair_regret, xia_genie

logger = logging.getLogger("fedsel_flwr")
WINDOW = 5
"""Consecutive rounds with the same fault before a run counts as diverged."""
MANY_LATE = 0.1
"""Share of late selections above which the longest wait is probably too short."""
MAX_CLIENTS = 10_000
"""Largest number of clients for which the regret is computed. The table of choices has a cell per client and round."""
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


def finished_run(world: World, strategy: Any, arrays: Arrays) -> RunResult:
    """End the metrics of a strategy whose rounds are over, log what was simulated, and return the run's result.

    Args:
        world: The scenario's world.
        strategy: The selection strategy.
        arrays: The final model.

    Returns:
        History, final model and diagnosis.
    """
    # Flower does not tell a strategy of the legacy API that the run has ended.
    strategy.end_metrics()
    history = strategy.history
    log_simulated_faults(history, strategy.core.settings.has_spares)
    timing = strategy.core.stopwatch.columns(len(history.rounds))
    return RunResult(history, arrays, diagnose(world, history), timing=timing)


def late_share(scenario: Scenario, history: History) -> float:
    """Return the share of a run's selections in which the client reached the longest wait, ``wireless.max_latency_s``.

    Args:
        scenario: Scenario of the run.
        history: History of the run.

    Returns:
        The share. 0 if over-selection, ``wait_for`` or a deadline ends rounds earlier, because clients are then late by
        design.
    """
    options = scenario.aggregation.options()
    asked = sum(record.num_selected for record in history.rounds)
    ends_early = options["over_selection"] or options["wait_for"] or options["round_deadline_s"] is not None
    if not asked or ends_early:
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


def derived_tables(world: World, result: RunResult) -> dict[str, Columns]:
    """Compute the tables of a finished run: name -> columns.

    The tables need the true latencies and every client's examples. Neither a selector nor a server knows them.

    Args:
        world: The scenario's world.
        result: Result of the run.

    Returns:
        ``regret`` if the system model defines the latencies and the rounds wait for them, and ``classes`` if the
        scenario asks for it.
    """
    tables: dict[str, Columns] = {}
    # A buffered round does not wait for its clients, so it loses no seconds to the slowest one.
    waits = not any(row.buffered for row in result.history.clients)
    if waits and world.scenario.clients.latency_mode == "model" and world.scenario.num_clients <= MAX_CLIENTS:
        tables["regret"] = regret(world, result.history.clients, len(result.history.rounds))
    if world.scenario.per_class_accuracy:
        tables["classes"] = per_class_accuracy(world, result.arrays)
    return tables


def client_accuracies(world: World, arrays: Arrays) -> FloatArray:
    """Compute the model's accuracy for each client, on examples that no client trained on.

    If the scenario sets local test examples aside, they measure the client's accuracy. If not, the test set measures
    it, with each class weighted by its share of the client's examples.

    Args:
        world: The clients' examples and the test set.
        arrays: The model.

    Returns:
        Accuracies, shape (num_clients,); NaN for a client if the test set has none of its classes. Shape (0,) if there
        are more than :data:`MAX_CLIENTS` clients. Also shape (0,) without local test examples, if the labels are not
        classes.
    """
    scenario = world.scenario
    own = scenario.data.local_test_fraction > 0
    if scenario.num_clients > MAX_CLIENTS or not (own or world.objective.quality is fraction_correct):
        return np.empty(0)
    model = fresh_copy(world.model, arrays)
    return _on_own_examples(world, model) if own else _on_test_set(world, model)


def _on_own_examples(world: World, model: nn.Module) -> FloatArray:
    """Return the accuracy of a model on each client's test examples."""
    data, tested = world.dataset.train, [rows for _, rows in world.train_test_rows(range(world.scenario.num_clients))]
    # Clients may share examples, but the model evaluates each example once.
    needed = np.unique(np.concatenate(tested))
    found, labels = outputs(model, data.inputs[needed]), read_only_tensor(data.labels)
    return np.array([world.objective.quality(found[np.searchsorted(needed, rows)], labels[rows]) for rows in tested])


def _on_test_set(world: World, model: nn.Module) -> FloatArray:
    """Return the accuracy of a model on the test set, for each client weighted by its share of each class."""
    test, classes = world.dataset.test, world.dataset.num_classes
    labels, trained = np.asarray(test.labels), np.asarray(world.dataset.train.labels)
    right = outputs(model, test.inputs).argmax(-1).numpy() == labels
    tested = np.bincount(labels, minlength=classes)
    held = np.array([
        np.bincount(trained[world.train_rows(k)], minlength=classes) for k in range(world.scenario.num_clients)
    ])  # fmt: skip
    # A class that is missing from the test set counts for no client.
    held[:, tested == 0] = 0
    by_class = np.bincount(labels, weights=right, minlength=classes) / np.maximum(tested, 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(held @ by_class / held.sum(axis=1))


def regret(world: World, clients: Sequence[ClientRecord], rounds: int) -> Columns:
    """Compute the seconds lost per round, compared with the m clients of the lowest mean latency (Xia, (14)).

    Args:
        world: The world, whose system model defines the mean latencies.
        clients: The clients chosen in each round.
        rounds: Number of rounds.

    Raises:
        RunError: A client or a round does not belong to the scenario.

    Returns:
        The columns ``round``, ``Theta`` and ``theta``. Theta is the seconds lost since the start, tau_max times the
        regret. theta = Theta / round.
    """
    scenario, longest = world.scenario, world.system.max_latency_s
    # A client that does not answer has reward 0. Latencies are capped at the maximum, so no reward is below 0.
    answers = 1.0 - world.dropout.probability
    mean_reward = answers * (1.0 - mean_latencies(world.system) / longest)  # mean of Xia (5)
    chosen = np.zeros((rounds, scenario.num_clients), dtype=np.bool_)
    known = {str(client): client for client in range(scenario.num_clients)}
    for row in clients:
        if row.client_id not in known or not 1 <= row.round <= rounds:
            raise RunError(
                f"the history holds client {shown(row.client_id)} in round {row.round}, but the scenario has clients "
                f"0 to {scenario.num_clients - 1} and {rounds} rounds. It was resumed from checkpoints of another "
                "run. Begin a new run"
            )
        chosen[row.round - 1, known[row.client_id]] = True
    _, best = xia_genie(mean_reward, scenario.clients_per_round)
    number = np.arange(1, rounds + 1)
    lost = longest * fair_regret(mean_reward, chosen, best)  # Theta, section V of Xia
    return {"round": number, "Theta": lost, "theta": lost / number}


def per_class_accuracy(world: World, arrays: Arrays) -> Columns:
    """Compute the model's accuracy on each client's examples of each class (Kim, Fig. 5).

    Args:
        world: The clients' training examples.
        arrays: The model.

    Returns:
        The columns ``client``, ``label``, ``num_examples`` and ``accuracy``, with a row for each class that a client
        has.
    """
    model, data = fresh_copy(world.model, arrays), world.dataset.train
    labels = np.asarray(data.labels)
    # One pass computes all outputs, because clients may share examples.
    right = (outputs(model, data.inputs).argmax(-1).numpy() == labels).astype(np.float64)
    rows: list[tuple[int, int, int, float]] = []
    for k in range(world.scenario.num_clients):
        own = world.train_rows(k)
        counts, hits = np.bincount(labels[own]), np.bincount(labels[own], weights=right[own])
        rows += [(k, int(c), int(counts[c]), float(hits[c] / counts[c])) for c in np.flatnonzero(counts)]
    columns = zip(*rows, strict=True)
    return dict(zip(("client", "label", "num_examples", "accuracy"), map(np.array, columns), strict=True))
