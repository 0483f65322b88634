"""The paper's own solvers of BSFL's objective: simulated annealing and ALSA (Ben Ami et al., section V).

Kept to reproduce the paper; :func:`fedsel_flwr.selectors.sweep.maximize` finds the optimum itself, sooner.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, one_of, real, whole
from fedsel_flwr.selectors._instance import checked_instance, finite_bounds

KINDS = ("alsa", "annealing")


class Swaps(NamedTuple):
    """The neighbours of a state as two products: ``free`` x outside, and the rest of the state x ``entering``.

    Attributes:
        free: Members that may leave for any client outside.
        staying: The other members, which leave for a client of ``entering`` only.
        outside: Clients outside the state.
        entering: Clients outside for which any member may leave.
    """

    free: IntArray
    staying: IntArray
    outside: IntArray
    entering: IntArray


def anneal(
    ucb: FloatArray,
    generalization: FloatArray,
    clients_per_round: int,
    alpha: float,
    *,
    kind: str,
    steps: int,
    generator: np.random.Generator,
) -> tuple[IntArray, FloatArray]:
    """Search a set of large energy (17) from a random one.

    Args:
        ucb: Optimistic speeds, shape (K,); +inf for clients never observed.
        generalization: g_k, shape (K,), finite.
        clients_per_round: m.
        alpha: Weight of the generalization term.
        kind: "annealing" for the neighbours (18), "alsa" for (19).
        steps: How many neighbours are tried.
        generator: Draws the first state, the neighbours and the acceptances.

    Deviations:
        * The range of the finite bounds plus alpha times that of g stands in for Delta_max (14), and a finite bound
          above all others for an infinite one. While a bound is infinite, Theorem 2's condition is not guaranteed.
        * (17) prints the sum inside the minimum; it is the same number.

    Returns:
        The last state, ascending, shape (min(m, K),), and the energy after each step, shape (steps + 1,), the first
        state's at index 0.

    Raises:
        ParameterError: A parameter is out of its range, or an array of the wrong shape.

    References:
        Ben Ami et al., section V-A, equations (16) to (18), and V-B, equation (19).

    >>> speeds, values = np.array([0.9, 0.8, 0.1, 0.5]), np.array([0.0, -0.1, 0.9, 0.2])
    >>> _, energies = anneal(speeds, values, 2, 1.0, kind="alsa", steps=50, generator=np.random.default_rng(0))
    >>> round(float(energies.max()), 2)  # of the set {0, 1}: 0.8 + (0.0 - 0.1) / 2
    0.75
    """
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    one_of("kind", kind, KINDS)
    steps = whole("steps", steps, 1)
    ucb, g = checked_instance(ucb, generalization)
    if not len(ucb):
        return np.arange(0), np.zeros(steps + 1)
    ucb, delta_max = finite_bounds(ucb, g, alpha)
    if m >= len(ucb):
        return np.arange(len(ucb)), np.full(steps + 1, _energy(ucb, g, m, alpha))
    member = np.zeros(len(ucb), dtype=np.bool_)
    member[generator.permutation(len(ucb))[:m]] = True
    energies = np.empty(steps + 1)
    energies[0] = _energy(ucb[member], g[member], m, alpha)
    for i in range(1, steps + 1):
        leaving, entering = _draw(_swaps(member, ucb, g, kind), generator)
        member[leaving], member[entering] = False, True
        energy = _energy(ucb[member], g[member], m, alpha)
        temperature = delta_max / math.log(i + 1)  # T_i, section V-A
        loss = energies[i - 1] - energy
        if loss <= 0 or (temperature > 0 and generator.random() < math.exp(-loss / temperature)):  # (16)
            energies[i] = energy
        else:
            member[leaving], member[entering] = True, False
            energies[i] = energies[i - 1]
    return np.flatnonzero(member), energies


def neighbours(state: IntArray, ucb: FloatArray, generalization: FloatArray, kind: str) -> IntArray:
    """List the neighbours of a state.

    Args:
        state: Members, shape (m,).
        ucb: Bounds, shape (K,), finite.
        generalization: g_k, shape (K,).
        kind: "annealing" for (18), "alsa" for (19).

    Returns:
        One row (member that leaves, client that enters) for each neighbour, shape (n, 2), in ascending order.

    Raises:
        ParameterError: An unknown kind, or an array of the wrong shape.
    """
    one_of("kind", kind, KINDS)
    ucb, g = checked_instance(ucb, generalization)
    member = np.zeros(len(ucb), dtype=np.bool_)
    member[np.asarray(state, dtype=np.int64)] = True
    swaps = _swaps(member, ucb, g, kind)
    pairs = [(i, j) for i in swaps.free for j in swaps.outside]
    pairs += [(i, j) for i in swaps.staying for j in swaps.entering]
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def _swaps(member: BoolArray, ucb: FloatArray, g: FloatArray, kind: str) -> Swaps:
    inside, outside = np.flatnonzero(member), np.flatnonzero(~member)
    if kind == "annealing":
        return Swaps(inside, inside[:0], outside, outside[:0])  # (18)
    slowest, least = ucb[inside].min(), g[inside].min()
    leaves = (ucb[inside] == slowest) | (g[inside] == least)  # (19): S \ U is an argmin of S ...
    enters = (ucb[outside] <= slowest) | (g[outside] <= least)  # (19): ... or U \ S is one of U
    return Swaps(inside[leaves], inside[~leaves], outside, outside[enters])


def _draw(swaps: Swaps, generator: np.random.Generator) -> tuple[int, int]:
    """One neighbour, uniformly."""
    first = swaps.free.size * swaps.outside.size
    choice = int(generator.integers(first + swaps.staying.size * swaps.entering.size))
    if choice < first:
        i, j = divmod(choice, swaps.outside.size)
        return int(swaps.free[i]), int(swaps.outside[j])
    i, j = divmod(choice - first, swaps.entering.size)
    return int(swaps.staying[i]), int(swaps.entering[j])


def _energy(ucb: FloatArray, g: FloatArray, m: int, alpha: float) -> float:
    """The energy (17) of the set with these bounds and values; m may exceed its size."""
    return float(ucb.min() + alpha / m * g.sum())  # (17)
