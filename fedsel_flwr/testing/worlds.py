"""Small random worlds in which a selector is played: who is there, what comes back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.columns import COLUMNS, FLAGS, SCALARS, VECTORS
from fedsel_flwr.selectors.report import RoundReport


class SelectorFactory(Protocol):
    """Builds the selector under test, with ``clients_per_round`` from 1 to 100; 3 is the quickest."""

    def __call__(self, *, seed: int | None = None) -> Selector:
        """Return a new selector that draws from ``seed``."""


MOST_PER_ROUND = 100
"""Largest ``clients_per_round`` that the suites play: the fleets grow with it."""


def made(make: SelectorFactory) -> Selector:
    """Return ``make(seed=1)``; raise :class:`ParameterError` if the suites cannot play what the factory builds."""
    try:
        selector = make(seed=1)
    except TypeError as error:
        raise ParameterError(
            f"make(seed=1) must build a selector, but: {error}; use functools.partial(MySelector, clients_per_round=3)"
        ) from error
    m = selector.clients_per_round
    if m is not None and not (isinstance(m, int | np.integer) and 1 <= m <= MOST_PER_ROUND):
        raise ParameterError(
            f"the suite plays selectors whose clients_per_round is a whole number from 1 to {MOST_PER_ROUND}, or None, "
            f"but make(seed=1) has {m!r}; build it with clients_per_round=3"
        )
    return selector


def fleet(selector: Selector, num_clients: int) -> int:
    """How many clients play where ``num_clients`` play for three a round: in proportion, so that some are left out."""
    return num_clients * max(1, math.ceil((selector.clients_per_round or 1) / 3))


MAX_LATENCY = 5.0
"""Seconds reported for failed clients in every check."""


def promise(kept: bool | np.bool_, words: str) -> None:
    """Raise :class:`AssertionError` with the promise's words unless it was kept."""
    if not kept:
        raise AssertionError(f"broken promise: {words}")


def may_lack(selector: Selector) -> frozenset[str]:
    """The columns that a completed client may lack: reported by clients, needed, not required."""
    return frozenset(name for name in selector.needs - selector.requires if COLUMNS[name].source == "reply")


def values_for(name: str, num_rows: int, world: np.random.Generator) -> FloatArray:
    """Return numbers in [0, 1) for a column of clients, shape (n,), for vectors (n, 4)."""
    return world.uniform(size=(num_rows, 4) if name in VECTORS else (num_rows,))


def report_for(
    selector: Selector,
    chosen: IntArray,
    completed: BoolArray,
    world: np.random.Generator,
    *,
    columns: Collection[str] | None = None,
    missing: float = 0.0,
    spares: float = 0.0,
) -> RoundReport:
    """Return a plausible report.

    Args:
        selector: Whose ``needs`` say which columns there are.
        chosen: The clients, shape (n,).
        completed: Who completed, shape (n,).
        world: Where the numbers come from.
        columns: The columns, in place of ``needs``.
        missing: Chance that a completed client lacks a column that it may lack.
        spares: Chance that a client was a spare, for selectors that read "spare".
    """
    latency = np.where(completed, world.uniform(0.1, 1.0, chosen.size) * (1 + chosen % 7), MAX_LATENCY)
    made: dict[str, Any] = {}
    optional = may_lack(selector)
    wanted = {*(selector.needs if columns is None else columns)} - {"latency"}
    for name in sorted(wanted - {"spare", "first"}):
        if name in SCALARS:
            made[name] = float(world.uniform())
        elif name in FLAGS:
            made[name] = completed & (world.uniform(size=chosen.size) < 0.7)
        else:
            value = values_for(name, chosen.size, world)
            value[~completed] = np.nan
            if missing and name in optional:
                value[world.uniform(size=chosen.size) < missing] = np.nan
            made[name] = value
    if "spare" in wanted and spares:
        spare = world.uniform(size=chosen.size) < spares
        latency[spare & ~completed] = MAX_LATENCY / 2  # it has not answered so far
        made["spare"] = spare
    return RoundReport(clients=chosen, completed=completed, latency=latency, **made)


def play(
    selector: Selector,
    rounds: Iterable[int],
    *,
    num_clients: int | None = None,
    availability: float = 0.8,
    dead: tuple[int, ...] = (),
) -> list[list[int]]:
    """Run rounds in a small random world and return the choices; each round's world depends on its number alone.

    Without ``num_clients`` there are ten for up to three clients a round, and in proportion for more.
    """
    choices = []
    num_clients = fleet(selector, 10) if num_clients is None else num_clients
    for number in rounds:
        world = np.random.default_rng([7, number])
        available = np.flatnonzero(world.uniform(size=num_clients) < availability)
        request = selector.probe(available)
        if request is not None:
            answers = {name: values_for(name, request.clients.size, world) for name in request.columns}
            selector.inform(request.clients, **answers)
        chosen = selector.select(available)
        completed = (world.uniform(size=chosen.size) < 0.85) & ~np.isin(chosen, dead)
        selector.observe(report_for(selector, chosen, completed, world))
        choices.append(chosen.tolist())
    return choices


def unlike(state: dict[str, Any], other: dict[str, Any]) -> str:
    """A key at which two saved states differ in any bit, in shape or type; "" if there is none."""
    if state.keys() != other.keys():
        return min(state.keys() ^ other.keys())
    for key, value in state.items():
        one, two = np.asarray(value), np.asarray(other[key])
        if one.dtype != two.dtype or one.shape != two.shape or one.tobytes() != two.tobytes():
            return key
    return ""


def not_finite(selector: Selector, state: dict[str, Any] | None = None) -> str:
    """The first key of the state that holds NaN or an infinity where a newcomer has none; "" if there is none."""
    for key, value in (selector.state_dict() if state is None else state).items():
        if not np.isfinite(value).all():
            newcomer = {name.lstrip("_"): new for name, new in selector.client_state.items()}
            if np.isfinite(newcomer.get(key, 0.0)).all():
                return key
    return ""


def promise_finite(selector: Selector, when: str, state: dict[str, Any] | None = None) -> None:
    """Raise :class:`AssertionError` if the state holds NaN or an infinity; says where columns are NaN."""
    if key := not_finite(selector, state):
        columns = sorted(selector.needs - {"latency", "spare"})
        hint = f"; in rows of failed clients the columns ({', '.join(columns)}) are NaN: read them at report.completed"
        promise(False, f"state {key!r} stays finite {when}{hint if columns else ''}")
