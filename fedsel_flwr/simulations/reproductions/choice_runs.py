"""Runs of choices: a selector selects from drawn latencies, and no client trains.

The latencies come from the scenario's system model (:mod:`fedsel_flwr.clients.system`,
:mod:`fedsel_flwr.clients.phones`). All arms of a figure get the same latencies and the same available clients on a
seed. Columns other than latency, completion and number of examples have the same value for every client.

====================  ==============================================================================================
outcome               meaning
====================  ==============================================================================================
regret                regret of means after the last round, as in :mod:`fedsel_flwr.theory.regret`
regret_realized       the same with the realized reward of each round, as the papers print it
regret_20             regret of means after 20 rounds, and ``realized_20`` the same with realized rewards; also after
                      100 and 1,000 rounds
regret_late           regret of means in the last half of the rounds, and ``realized_late`` with realized rewards
bound                 printed bound (29) of Xia on the regret of CS-UCB-Q
growth                exponent of the regret in the last half of the rounds: 1 if it is linear, near 0 if logarithmic
log_fit, linear_fit   share of the variance of the regret that a + b ln t, or a + b t, explains
log_over_linear       log_fit minus linear_fit: above 0 if the logarithm explains more
seconds_per_round     mean duration of a round, s
failed                number of selected clients that did not complete
lowest_margin         smallest difference between a client's share of rounds and its fairness c_k
margin_1, ...         this difference for client 1, and so on, with at most five clients
violated_1, ...       1 if this difference is below minus :data:`TOLERANCE`, otherwise 0
rounds_to_fair        rounds until no client's difference falls below minus :data:`TOLERANCE` any more; all rounds, if
                      one does after the last round
largest_count         largest number of rounds of one client
jain                  Jain's index of the numbers of rounds
bonus                 mean over the clients of sqrt((m+1) ln t / n), the bonus of UCB, after the last round
rounds_to_bonus_01    rounds until this mean falls below 0.1; infinity if it does not
equal_shares_bonus_01  the same if every client was selected equally often, from the formula and not from the run
====================  ==============================================================================================

Curves are the outcomes ``regret``, ``regret_realized``, ``bound``, ``failed``, ``seconds`` and ``margin_1`` (and so
on) at 25 rounds. ``average`` and ``average_realized`` are the regrets divided by the number of rounds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray
from fedsel_flwr.clients.device import System, quasirandom_points
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.choices import select_rounds
from fedsel_flwr.report.summary import jain_index
from fedsel_flwr.selectors import CSUCBQ, Selector, create
from fedsel_flwr.simulations.reproductions.paper_figure import Regret, points_of
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.theory import bsfl_regret, cs_ucb_q_regret_bound, fair_optimum, fair_regret, xia_regret

TOLERANCE = 0.01
"""Largest difference by which a client's share of rounds may be below its fairness c_k, because (6) is a limit."""
EARLY_ROUNDS = (20, 100, 1000)
"""Rounds after which the regret is an outcome, beside the last round."""
MOST_MARGINS = 5
"""Largest number of clients whose differences from the fairness are separate outcomes."""
STREAM = 31
"""Number that separates the draws of this module from other draws of the same seed."""
NEUTRAL = {
    "local_accuracy": 0.5, "loss": 1.0, "rms_loss": 1.0, "batch_loss": 1.0, "accuracy": 0.5, "energy_score": 0.5,
    "num_examples": 1.0,
}  # fmt: skip
"""Column -> its value for every client."""


def run_choices(scenario: Scenario, regret: Regret) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Run a scenario's selector on drawn latencies.

    Args:
        scenario: The scenario. Its data, model and training are not used.
        regret: The regret.

    Returns:
        Outcomes, and curves of shape (points,).

    Raises:
        ParameterError: The selector needs a column that only training gives.
    """
    system = scenario.system_model(np.asarray(_sizes(scenario)), model_bytes=int(scenario.system.payload_bytes))
    latency, available = draw_rounds(scenario, system)
    selector = _selector(scenario)
    rounds, m, longest = scenario.rounds, scenario.clients_per_round, system.max_latency_s
    completed, capped = latency < longest, np.minimum(latency, longest)
    columns = {name: np.full(scenario.num_clients, value) for name, value in NEUTRAL.items()}
    chosen = select_rounds(selector, capped, completed, [np.flatnonzero(here) for here in available], columns)
    number = np.arange(1, rounds + 1)
    seconds = np.where(chosen, capped, 0.0).max(axis=1)
    plays = np.cumsum(chosen, axis=0)
    # Each outcome after the last round, and each curve in every round.
    courses = {"failed": np.cumsum((chosen & ~completed).sum(axis=1)), "seconds": np.cumsum(seconds)}
    outcomes = {
        "seconds_per_round": seconds.mean(), "failed": courses["failed"][-1], "largest_count": plays[-1].max(),
        "jain": jain_index(plays[-1]), "lowest_margin": math.nan, **_bonus(plays, m),
    }  # fmt: skip
    if regret.fairness:
        margins = plays / number[:, np.newaxis] - np.array(regret.fairness)
        outcomes |= _fairness(margins)
        courses |= {f"margin_{k}": own for k, own in enumerate(margins.T[:MOST_MARGINS], 1)}
    if regret.kind != "none":
        means, realized = _regrets(regret, system, chosen, capped, m)
        courses |= {"regret": means, "regret_realized": realized}
        courses |= {"average": means / number, "average_realized": realized / number}
        outcomes |= {"regret": means[-1], "regret_realized": realized[-1]}
        for early in EARLY_ROUNDS:
            last = min(early, rounds) - 1
            outcomes |= {f"regret_{early}": means[last], f"realized_{early}": realized[last]}
        half = max(rounds // 2, 1) - 1
        outcomes |= _growth(means)
        outcomes |= {"regret_late": means[-1] - means[half], "realized_late": realized[-1] - realized[half]}
    at = points_of(rounds)
    curves = {"at": at.astype(np.float64), **{name: course[at - 1] for name, course in courses.items()}}
    if regret.kind != "none" and regret.fairness and isinstance(selector, CSUCBQ):
        weight = selector.queue_weight
        curves["bound"] = np.array([cs_ucb_q_regret_bound(regret.fairness, m, weight, int(t)) for t in at])
        outcomes["bound"] = curves["bound"][-1]
    return {name: float(value) for name, value in outcomes.items()}, curves


def draw_rounds(scenario: Scenario, system: System) -> tuple[FloatArray, BoolArray]:
    """Draw the latencies and the available clients of all rounds, equal for all selectors on a seed.

    Returns:
        Latencies that are not capped, s, and whether a client is available, both of shape (rounds, num_clients).
    """
    generator = np.random.default_rng([scenario.seed, STREAM])
    size = scenario.rounds, scenario.num_clients
    latency = system.latencies(generator.random((*size, 3)))
    present = generator.random(size)
    if scenario.availability.kind == "trace":
        raise ParameterError("availability.kind = 'trace' needs a clock. Set 'always' or 'bernoulli' for choices")
    share = scenario.availability.probability if scenario.availability.kind == "bernoulli" else 1.0
    return latency, present < share


def _sizes(scenario: Scenario) -> list[int]:
    """Return each client's number of examples: those of the partition, otherwise equal ones."""
    return list(scenario.partition.sizes) or [scenario.partition.examples_per_client] * scenario.num_clients


def _selector(scenario: Scenario) -> Selector:
    """Return the scenario's selector; refuse one that needs columns of training."""
    from fedsel_flwr.simulations.on_flower.building import selector_params

    selector = create(scenario.selector, **selector_params(scenario, dict(enumerate(_sizes(scenario)))))
    if lacking := set(selector.needs) - NEUTRAL.keys() - {"latency", "completed"}:
        raise ParameterError(
            f"selector {scenario.selector!r} reads {', '.join(sorted(lacking))}, which only training gives. "
            "Use the runner 'training'"
        )
    selector.inform(np.arange(scenario.num_clients), num_examples=np.array(_sizes(scenario), dtype=np.float64))
    return selector


def _regrets(
    regret: Regret, system: System, chosen: BoolArray, capped: FloatArray, clients_per_round: int
) -> tuple[FloatArray, FloatArray]:
    """Return the cumulative regret of means and of realized rewards, both of shape (rounds,)."""
    points = np.repeat(quasirandom_points()[:, np.newaxis], system.num_clients, axis=1)
    longest, m = system.max_latency_s, clients_per_round
    exact = np.minimum(system.latencies(points), longest)

    def reward(seconds: FloatArray) -> FloatArray:
        if regret.kind == "bsfl":
            return np.asarray(np.minimum(1.0, regret.min_latency / seconds))
        return 1.0 - seconds / longest  # Xia (5)

    mean = reward(exact).mean(axis=0)
    if regret.kind == "xia":
        means = xia_regret(mean, chosen, m)
    elif regret.kind == "fair":
        best, _ = fair_optimum(mean, regret.availability, list(regret.fairness), m)
        means = fair_regret(mean, chosen, best, m)
    else:
        means = bsfl_regret(mean, chosen, m, regret.alpha, regret.beta, regret.data_weights or None, regret.quantized)
    # The terms of generalization are the same in both. A round without available clients has reward 0 in both.
    taken = chosen.any(axis=1)
    expected = np.where(chosen, mean, np.inf)[taken].min(axis=1)
    seen = np.where(chosen, reward(capped), np.inf)[taken].min(axis=1)
    lost = np.zeros(len(chosen))
    lost[taken] = expected - seen
    # The difference of a realized reward and its mean is unknown once they are rounded.
    return means, np.asarray(means + (math.nan if regret.quantized else np.cumsum(lost)))


def _fairness(margins: FloatArray) -> dict[str, float]:
    """Return how far the shares of rounds are from the fairness.

    Args:
        margins: Share of the rounds so far minus c_k, shape (rounds, num_clients).
    """
    last = dict(enumerate(margins[-1, :MOST_MARGINS].tolist(), 1))
    unfair = np.flatnonzero((margins < -TOLERANCE).any(axis=1))
    reached = int(unfair[-1]) + 2 if len(unfair) else 1
    return {
        "lowest_margin": float(margins[-1].min()),
        "rounds_to_fair": float(min(reached, len(margins))),
        **{f"margin_{k}": value for k, value in last.items()},
        **{f"violated_{k}": float(value < -TOLERANCE) for k, value in last.items()},
    }


def _growth(regret: FloatArray) -> dict[str, float]:
    """Return how the regret grows with the rounds."""
    rounds = len(regret)
    number = np.arange(1.0, rounds + 1)
    half = rounds // 2
    rising = regret[half - 1] > 0 and regret[-1] > 0
    growth = math.log(regret[-1] / regret[half - 1]) / math.log(rounds / half) if rising else math.nan
    logarithm, line = _explained(np.log(number), regret), _explained(number, regret)
    return {"growth": float(growth), "log_fit": logarithm, "linear_fit": line, "log_over_linear": logarithm - line}


def _explained(x: FloatArray, y: FloatArray) -> float:
    """Return the share of the variance of y that a + b x explains; NaN if y is constant."""
    return math.nan if y.std() == 0 else float(np.corrcoef(x, y)[0, 1] ** 2)


def _bonus(plays: Any, clients_per_round: int) -> dict[str, float]:
    """Return the mean bonus of UCB (Xia (18), Ben Ami (12)) at the end, and the rounds until it falls below 0.1."""
    number = np.arange(1, len(plays) + 1)[:, np.newaxis]
    with np.errstate(divide="ignore", invalid="ignore"):
        bonus = np.sqrt((clients_per_round + 1) * np.log(number) / plays).mean(axis=1)
    below = np.flatnonzero(bonus < 0.1)
    # The bonus of round 1 is 0, because ln 1 = 0.
    below = below[below > 0]
    return {
        "bonus": float(bonus[-1]),
        "rounds_to_bonus_01": float(below[0] + 1) if len(below) else math.inf,
        "equal_shares_bonus_01": _rounds_with_equal_shares(plays.shape[1], clients_per_round),
    }


def _rounds_with_equal_shares(num_clients: int, clients_per_round: int) -> float:
    """Return the rounds t at which sqrt((m+1) ln t / (t m/K)), the bonus with equal shares, falls to 0.1.

    >>> round(_rounds_with_equal_shares(20, 5))  # 2,400 ln 24,229 = 24,229
    24229
    """
    factor = 100.0 * (clients_per_round + 1) * num_clients / clients_per_round
    rounds = factor * math.log(factor)
    for _ in range(50):  # t = factor ln t; the right side changes more slowly than t, so that the iteration converges
        rounds = factor * math.log(rounds)
    return rounds
