"""Solvers of BSFL's objective, equation (13) of Ben Ami et al.: the exact sweep and the paper's two annealing methods.

:func:`maximize` finds the optimum in O(K log K). :func:`anneal` reproduces the paper's simulated annealing and ALSA.
"""

from __future__ import annotations

import math
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, column, one_of, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._draws import top

KINDS = ("alsa", "annealing")
"""The paper's two methods; they differ in the neighbours of a set."""
SLICE = 4096
"""Number of clients that the sweep processes at a time."""


def maximize(ucb: FloatArray, generalization: FloatArray, clients_per_round: int, alpha: float) -> IntArray:
    """Solve (13) exactly: the set S of m clients with the largest min ucb + (alpha / m) sum of g over S.

    Sort the clients by falling ucb. The best set whose slowest member is client i holds the m largest g among the first
    i clients. One sweep with a heap of size m visits every i, in O(K log K).

    The result is deterministic. Among equal sets, the one with the larger smallest ucb wins, then the one whose members
    have larger ucb, then the order of the input. Among sets of infinite value, the one with the larger sum of g wins.

    Args:
        ucb: Optimistic speeds, shape (K,); +inf for clients without a play.
        generalization: g_k, shape (K,), finite.
        clients_per_round: m; for m >= K the result is all K clients.
        alpha: Weight of the generalization term, at least 0.

    Returns:
        Indices of the selected clients, ascending, shape (min(m, K),).

    Raises:
        ParameterError: Shapes differ, ``ucb`` holds NaN or -inf, ``generalization`` is not finite, m < 1, alpha < 0.

    References:
        Ben Ami et al., equation (13).

    >>> maximize(np.array([0.9, 0.8, 0.1]), np.array([0.0, -0.1, 0.9]), 2, 1.0)  # 0.75, 0.55 with the slow one
    array([0, 1])
    >>> maximize(np.array([0.9, 0.8, 0.1]), np.array([0.0, -0.1, 0.9]), 2, 3.0)
    array([0, 2])
    """
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    ucb, g = _checked_instance(ucb, generalization)
    if m >= len(ucb):
        return np.arange(len(ucb))
    ucb, _ = finite_bounds(ucb, g, alpha)
    sweep = _Sweep(ucb, g, m, alpha / m)
    end, length = m, max(4 * m, SLICE)
    # The sweep usually ends early, and sorting all K clients would take longer than the rest.
    order = top(ucb, length)
    sweep.start(order)
    while end < len(ucb) and not sweep.finished(float(ucb[order[end - 1]])):
        if end == len(order):
            length *= 16
            order = top(ucb, length)
        sweep.advance(order, end, min(end + SLICE, len(order)))
        end = min(end + SLICE, len(order))
    ahead = order[: sweep.best_end]
    return np.sort(ahead[top(g[ahead], m)])


class _Sweep:
    """Sweep that finds the best set among the fastest i clients, for growing i.

    Args:
        ucb: Bounds, finite.
        g: Generalization values, finite.
        m: Size of a set.
        scale: alpha / m.

    Attributes:
        best_end: The value of i of the best set so far.
    """

    def __init__(self, ucb: FloatArray, g: FloatArray, m: int, scale: float) -> None:
        self._ucb, self._g, self._m, self._scale = ucb, g, m, scale
        largest, fastest = float(np.abs(g).max()), float(np.abs(ucb).max())
        # No set has a larger sum of g.
        self._most: float = sum(np.partition(g, len(g) - m)[len(g) - m :].tolist())
        # Bound on the rounding error of a value: the running sum of g adds at most 2 K + m numbers. Without this bound
        # the sweep might end before the best set.
        additions = 2.0 * len(g) + m
        self._rounding = 2.0**-50 * (scale * additions * (m + 2.0) * largest + fastest)

    def start(self, order: IntArray) -> None:
        """Process the m fastest clients; ``order`` holds at least m indices, from fast to slow."""
        # The m largest g so far, with the smallest on top.
        self._heap: list[float] = self._g[order[: self._m]].tolist()
        self._total: float = sum(self._heap)
        heapify(self._heap)
        self._best: float = float(self._ucb[order[self._m - 1]]) + self._scale * self._total  # (13)
        self.best_end = self._m

    def finished(self, speed: float) -> bool:
        """Return whether no set with a client as slow as ``speed`` can exceed the best set so far."""
        return speed + self._scale * self._most + self._rounding <= self._best  # (13)

    def advance(self, order: IntArray, start: int, end: int) -> None:
        """Process the clients from ``start`` to ``end`` of ``order``."""
        values = self._g[order[start:end]]
        # Only these can enter the heap, because its smallest value never falls.
        better = np.flatnonzero(values > self._heap[0])
        for i, value, speed in zip(
            better.tolist(), values[better].tolist(), self._ucb[order[start + better]].tolist(), strict=True
        ):
            if value > self._heap[0]:
                self._total += value - heapreplace(self._heap, value)
                score = speed + self._scale * self._total  # (13)
                if score > self._best:
                    self._best, self.best_end = score, start + i + 1


def anneal(
    ucb: FloatArray,
    generalization: FloatArray,
    clients_per_round: int,
    alpha: float,
    *,
    kind: str,
    steps: int,
    generator: np.random.Generator,
    temperature: float = 1.0,
) -> tuple[IntArray, FloatArray]:
    """Search for a set of large energy (17) by simulated annealing, from a random set.

    Args:
        ucb: Optimistic speeds, shape (K,); +inf for clients without a play.
        generalization: g_k, shape (K,), finite.
        clients_per_round: m.
        alpha: Weight of the generalization term.
        kind: "annealing" for the neighbours (18), "alsa" for (19).
        steps: Number of neighbours to try.
        generator: Generator of the first state, the neighbours and the acceptances.
        temperature: Factor of the temperature, above 0; 1 is the paper's.

    Deviations:
        * The range of the finite bounds plus alpha times the range of g replaces Delta_max (14). One finite bound above
          all others replaces the infinite bounds. While a bound is infinite, Theorem 2's condition is not guaranteed.
        * (17) has the sum inside the minimum in the paper; it is the same number.

    Returns:
        The last state, ascending, shape (min(m, K),), and the energies, shape (steps + 1,). Index 0 holds the energy of
        the first state, index i that after step i.

    Raises:
        ParameterError: A parameter is out of range, or an array has the wrong shape.

    References:
        Ben Ami et al., section V-A, equations (16) to (18), and V-B, equation (19).

    >>> speeds, values = np.array([0.9, 0.8, 0.1, 0.5]), np.array([0.0, -0.1, 0.9, 0.2])
    >>> _, energies = anneal(speeds, values, 2, 1.0, kind="alsa", steps=50, generator=np.random.default_rng(0))
    >>> round(float(energies.max()), 2)  # set {0, 1}: 0.8 + (0.0 - 0.1) / 2
    0.75
    """
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    one_of("kind", kind, KINDS)
    steps = whole("steps", steps, 1)
    ucb, g = _checked_instance(ucb, generalization)
    if not len(ucb):
        return np.arange(0), np.zeros(steps + 1)
    ucb, delta_max = finite_bounds(ucb, g, alpha)
    start = real("temperature", temperature, above=0.0) * delta_max
    if m >= len(ucb):
        return np.arange(len(ucb)), np.full(steps + 1, _energy(ucb, g, m, alpha))
    member = np.zeros(len(ucb), dtype=np.bool_)
    member[generator.permutation(len(ucb))[:m]] = True
    energies = np.empty(steps + 1)
    energies[0] = _energy(ucb[member], g[member], m, alpha)
    for i in range(1, steps + 1):
        leaving, entering = _draw_neighbour(_swaps(member, ucb, g, kind), generator)
        member[leaving], member[entering] = False, True
        energy = _energy(ucb[member], g[member], m, alpha)
        now = start / math.log(i + 1)  # T_i, section V-A
        loss = energies[i - 1] - energy
        if loss <= 0 or (now > 0 and generator.random() < math.exp(-loss / now)):  # (16)
            energies[i] = energy
        else:
            member[leaving], member[entering] = True, False
            energies[i] = energies[i - 1]
    return np.flatnonzero(member), energies


class _Swaps(NamedTuple):
    """Neighbours of a state as two products: ``free`` x ``outside`` and ``staying`` x ``entering``.

    Attributes:
        free: Members that any client outside may replace.
        staying: The other members, which only a client of ``entering`` may replace.
        outside: Clients outside the state.
        entering: Clients outside that may replace any member.
    """

    free: IntArray
    staying: IntArray
    outside: IntArray
    entering: IntArray


def _swaps(member: BoolArray, ucb: FloatArray, g: FloatArray, kind: str) -> _Swaps:
    """Return the neighbours of the state with the marked members."""
    inside, outside = np.flatnonzero(member), np.flatnonzero(~member)
    if kind == "annealing":
        return _Swaps(inside, inside[:0], outside, outside[:0])  # (18)
    slowest, least = ucb[inside].min(), g[inside].min()
    leaves = (ucb[inside] == slowest) | (g[inside] == least)  # (19): S \ U is an argmin of S ...
    enters = (ucb[outside] <= slowest) | (g[outside] <= least)  # (19): ... or U \ S is one of U
    return _Swaps(inside[leaves], inside[~leaves], outside, outside[enters])


def _draw_neighbour(swaps: _Swaps, generator: np.random.Generator) -> tuple[int, int]:
    """Draw a neighbour uniformly, and return the member that leaves and the client that enters."""
    # One number selects one of all pairs, so that the products need no list.
    first = swaps.free.size * swaps.outside.size
    choice = int(generator.integers(first + swaps.staying.size * swaps.entering.size))
    if choice < first:
        i, j = divmod(choice, swaps.outside.size)
        return int(swaps.free[i]), int(swaps.outside[j])
    i, j = divmod(choice - first, swaps.entering.size)
    return int(swaps.staying[i]), int(swaps.entering[j])


def _energy(ucb: FloatArray, g: FloatArray, m: int, alpha: float) -> float:
    """Return the energy (17) of the set with these bounds and values; m may exceed the size of the set."""
    return float(ucb.min() + alpha / m * g.sum())  # (17)


def _checked_instance(ucb: FloatArray, generalization: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return copies of both arrays; raise :class:`ParameterError` if (13) is undefined for them."""
    ucb = column("ucb", ucb, len(np.atleast_1d(ucb)))
    g = column("generalization", generalization, len(ucb))
    if np.isnan(ucb).any() or np.isneginf(ucb).any() or not np.isfinite(g).all():
        raise ParameterError(
            "ucb must hold numbers or +inf and generalization finite numbers, got NaN or an infinity. Replace them"
        )
    return ucb, g


def finite_bounds(ucb: FloatArray, g: FloatArray, alpha: float) -> tuple[FloatArray, float]:
    """Replace infinite bounds by one finite bound that is large enough to keep the order of any two sets.

    Args:
        ucb: Bounds, shape (K,), K >= 1; may hold +inf.
        g: Generalization values, shape (K,).
        alpha: Weight of the generalization term.

    Returns:
        The bounds, and the range of the finite bounds + alpha times the range of ``g``. This number replaces Delta_max
        (14), which needs the true means. No two sets of finite bounds differ by more, but sets with a replaced bound
        may.
    """
    finite = ucb[np.isfinite(ucb)]
    spread = float((np.ptp(finite) if finite.size else 0.0) + alpha * np.ptp(g))  # stands in for Delta_max (14)
    return np.where(np.isfinite(ucb), ucb, finite.max(initial=0.0) + spread + 1.0), spread
