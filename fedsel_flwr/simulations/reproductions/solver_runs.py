"""Runs of solvers: ALSA, simulated annealing and the exact solver maximize BSFL's objective, Ben Ami (13).

The solver and its steps are those of the scenario's table ``selectors.bsfl``. An *energy* is the value (17) of a set.

A run on one instance has these outcomes:

====================  ==============================================================================================
outcome               meaning
====================  ==============================================================================================
energy                energy of the last state, which is the solver's result
mean_energy           mean energy of the states after all steps
best_energy           largest energy of a visited state
best_energy_in_time   the same if ALSA and annealing have equal time instead of equal steps
gap, best_gap         energy of the best set of all, minus ``energy`` or ``best_energy``
solver_ms             processor milliseconds of the search with equal time, or of the exact solver
====================  ==============================================================================================

A run on pairs gives shares of the instances on which ALSA is above annealing:

====================  ==============================================================================================
outcome               meaning
====================  ==============================================================================================
last_above            ... in the energy of the last state, after equal steps
best_above            ... in the largest energy of a visited state, after equal steps
last_above_in_time    the first share if both have equal time, and ``best_above_in_time`` the second
last_above_listed     the first share if a step takes as long as listing all neighbours, and ``best_above_listed`` the
                      second
exact_above           share of the instances on which the exact solver is at or above every visited state of both
====================  ==============================================================================================

Curve: ``energy`` at 25 steps.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors.bsfl_solvers import KINDS, anneal, maximize
from fedsel_flwr.simulations.reproductions.paper_figure import Search, points_of
from fedsel_flwr.simulations.scenario import Scenario

STREAM = 98
"""Number that separates the draws of this module from other draws of the same seed."""
PACE = 1.7
"""Steps of annealing in the time of one step of ALSA, measured on instances of 10 to 499 clients."""
NEIGHBOURS = 4
"""Clients of a set that may leave it under ALSA, on average at most, below (19). Under annealing, all m may leave."""
LARGEST = 500
"""Pairs have fewer clients than this."""
ALPHAS = (0.1, 1.0, 10.0)
"""Weights of the generalization in pairs."""


def run_solvers(scenario: Scenario, search: Search) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Search for the best set on one instance, or compare ALSA with annealing on several instances.

    Args:
        scenario: The scenario. Its seed, its numbers of clients, and the table of BSFL are used.
        search: The search.

    Returns:
        Outcomes, and curves of shape (points,).
    """
    table = scenario.selectors["bsfl"]
    steps = int(table.get("solver_steps", 1000))
    if search.pairs:
        return _compare(scenario.seed, steps, search), {}
    generator = np.random.default_rng([scenario.seed, STREAM])
    m, alpha, solver = scenario.clients_per_round, float(table.get("alpha", 1.0)), str(table.get("solver", "exact"))
    ucb, g = draw_instance(generator, scenario.num_clients, m, search.instances)
    start = time.process_time()
    optimum = energy_of(maximize(ucb, g, m, alpha), ucb, g, alpha)
    energies = np.full(steps + 1, optimum)
    if solver != "exact":
        start, most = time.process_time(), steps_in_time(solver, steps)
        _, energies = anneal(
            ucb, g, m, alpha, kind=solver, steps=most, generator=generator, temperature=search.temperature
        )
    milliseconds = 1e3 * (time.process_time() - start)
    equal, at = energies[: steps + 1], points_of(steps, 0)
    last, best = float(equal[-1]), float(equal.max())
    outcomes = {
        "energy": last, "mean_energy": float(equal[1:].mean()), "best_energy": best,
        "best_energy_in_time": float(energies.max()), "gap": optimum - last, "best_gap": optimum - best,
        "solver_ms": milliseconds,
    }  # fmt: skip
    return outcomes, {"at": at.astype(np.float64), "energy": equal[at]}


def draw_instance(
    generator: np.random.Generator, num_clients: int, clients_per_round: int, instances: str
) -> tuple[FloatArray, FloatArray]:
    """Draw the bounds (12) and the generalization values (3) of an instance.

    "bandit": the clients have mean speeds from U[0.1, 0.9]. In 100 to 10,000 rounds, each was selected a binomial
    number of times. "uniform": bounds from U[0, 1] and values from U[-1, 1].

    Args:
        generator: Generator of the draws.
        num_clients: K.
        clients_per_round: m.
        instances: "bandit" or "uniform".

    Returns:
        Bounds and values, both of shape (num_clients,).
    """
    if instances == "uniform":
        return generator.random(num_clients), generator.uniform(-1.0, 1.0, num_clients)
    m, rounds = clients_per_round, int(generator.integers(100, 10_000))
    plays = np.maximum(generator.binomial(rounds, m / num_clients, num_clients), 1)
    ucb = generator.uniform(0.1, 0.9, num_clients) + np.sqrt((m + 1) * np.log(rounds) / plays)  # (12)
    return ucb, m / num_clients - plays / rounds  # (3) with beta = 1


def _compare(seed: int, steps: int, search: Search) -> dict[str, float]:
    """Compare ALSA with annealing on several instances of different sizes."""
    above = Counter[str]()
    for number in range(search.pairs):
        generator = np.random.default_rng([seed, STREAM, number])
        k = int(generator.integers(10, LARGEST))
        m = int(generator.integers(1, max(2, k // 2)))
        alpha = float(generator.choice(ALPHAS))
        ucb, g = draw_instance(generator, k, m, search.instances)
        how: dict[str, Any] = {"generator": generator, "temperature": search.temperature}
        alsa, annealing = (
            anneal(ucb, g, m, alpha, kind=kind, steps=steps_in_time(kind, steps), **how)[1] for kind in KINDS
        )
        ends = {"": steps, "_in_time": steps_in_time("annealing", steps), "_listed": steps_if_listed(m, steps)}
        for name, end in ends.items():
            above[f"last_above{name}"] += bool(alsa[-1] > annealing[end])
            above[f"best_above{name}"] += bool(alsa.max() > annealing[: end + 1].max())
        optimum = energy_of(maximize(ucb, g, m, alpha), ucb, g, alpha)
        above["exact_above"] += bool(optimum >= max(alsa.max(), annealing.max()) - 1e-9)
    return {name: count / search.pairs for name, count in above.items()}


def steps_in_time(kind: str, steps: int) -> int:
    """Return the steps of a solver in the time in which ALSA takes ``steps`` steps.

    >>> steps_in_time("alsa", 1000), steps_in_time("annealing", 1000)
    (1000, 1700)
    """
    return round(PACE * steps) if kind == "annealing" else steps


def steps_if_listed(clients_per_round: int, steps: int) -> int:
    """Return the steps of annealing if the time of a step grows with the number of neighbours.

    A set has m (K - m) neighbours under annealing (18), and about 4 (K - m) under ALSA (19).

    >>> steps_if_listed(25, 1000), steps_if_listed(2, 1000)
    (160, 1000)
    """
    return max(1, min(steps, round(NEIGHBOURS * steps / clients_per_round)))


def energy_of(chosen: IntArray, ucb: FloatArray, g: FloatArray, alpha: float) -> float:
    """Return the energy (17) of a set."""
    return float(ucb[chosen].min() + alpha * g[chosen].mean())  # (17)
