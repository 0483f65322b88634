"""Random rounds for a selector: availability, completions, and reported values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.columns import COLUMNS, FLAGS, SCALARS, VECTORS
from fedsel_flwr.selectors.round_report import RoundReport

MOST_PER_ROUND = 100
"""Largest ``clients_per_round`` that the suites accept, because the fleets grow with it."""
MAX_LATENCY = 5.0
"""Seconds reported for failed clients."""


class SelectorFactory(Protocol):
    """Builds the selector under test, with ``clients_per_round`` from 1 to 100. 3 is the fastest."""

    def __call__(self, *, seed: int | None = None) -> Selector:
        """Return a new selector that draws from ``seed``."""


def play(
    selector: Selector,
    rounds: Iterable[int],
    *,
    num_clients: int | None = None,
    availability: float = 0.8,
    completing: float = 0.85,
    dead: tuple[int, ...] = (),
    shuffled: bool = False,
    **report: Any,
) -> list[list[int]]:
    """Play random rounds, check the promises of every choice, and return the choices.

    The generator of a round depends only on the round's number, so two selectors can play the same rounds.

    Args:
        selector: The selector.
        rounds: Numbers of the rounds.
        num_clients: Number of clients. None takes ten for up to three clients a round, and proportionally more above.
        availability: Chance that a client is available.
        completing: Chance that a chosen client completes.
        dead: Clients that never complete.
        shuffled: Whether the selector gets ``available`` in random order.
        **report: Further options of :func:`report_for`.

    Raises:
        AssertionError: A choice breaks a promise (:func:`choose`).
    """
    choices = []
    num_clients = fleet_size(selector, 10) if num_clients is None else num_clients
    for number in rounds:
        rng = np.random.default_rng([7, number])
        available = np.flatnonzero(rng.uniform(size=num_clients) < availability)
        request = selector.probe(available)
        if request is not None:
            selector.inform(request.clients, **side_information(request.columns, request.clients.size, rng))
        # From a separate generator, because the round's values must not depend on the order.
        given = np.random.default_rng([5, number]).permutation(available) if shuffled else available
        chosen = choose(selector, given)
        completed = (rng.uniform(size=chosen.size) < completing) & ~np.isin(chosen, dead)
        selector.observe(report_for(selector, chosen, completed, rng, **report))
        choices.append(chosen.tolist())
    return choices


def choose(selector: Selector, available: IntArray) -> IntArray:
    """Let a selector choose and return the choice.

    Raises:
        AssertionError: The choice breaks a promise. Every selector must choose available clients, each once, as many
            as ``expected_count`` returns, and must leave ``available`` unchanged.
    """
    before, expected = available.copy(), selector.expected_count(available.size)
    try:
        chosen = selector.select(available)
    except RunError as error:
        # Selector.select refuses a wrong choice. In a test, such a choice is a broken promise.
        what = "every chosen client is available, and chosen once"
        if "may_exceed_clients_per_round" in str(error):
            what = "no more clients are chosen than clients_per_round says"
        raise AssertionError(f"broken promise: {what}: {error}") from None
    promise(np.array_equal(available, before), "select leaves `available` as it was")
    promise(np.isin(chosen, available).all(), "every chosen client is available")
    promise(np.unique(chosen).size == chosen.size, "no client is chosen twice")
    promise(expected in (None, chosen.size), f"{expected} clients are chosen, as expected_count says")
    promise(chosen.size > 0 or not available.size, "clients are chosen if clients are available")
    return chosen


def report_for(
    selector: Selector,
    chosen: IntArray,
    completed: BoolArray,
    rng: np.random.Generator,
    *,
    columns: Collection[str] | None = None,
    missing: float = 0.0,
    spares: float = 0.0,
) -> RoundReport:
    """Return a random report of a round.

    Args:
        selector: The selector, whose ``needs`` name the columns.
        chosen: The clients, shape (n,).
        completed: Whether each client completed, shape (n,).
        rng: Generator of the values.
        columns: The columns, instead of ``needs``.
        missing: Chance that a completed client lacks a column that it may lack.
        spares: Chance that a client is a spare, for selectors that read "spare".
    """
    latency = np.where(completed, rng.uniform(0.1, 1.0, chosen.size) * (1 + chosen % 7), MAX_LATENCY)
    values: dict[str, Any] = {}
    optional = optional_columns(selector)
    wanted = {*(selector.needs if columns is None else columns)} - {"latency"}
    for name in sorted(wanted - {"spare", "first"}):
        if name in SCALARS:
            values[name] = float(rng.uniform())
        elif name in FLAGS:
            values[name] = completed & (rng.uniform(size=chosen.size) < 0.7)
        else:
            value = values_for(name, chosen.size, rng)
            value[~completed] = np.nan
            if missing and name in optional:
                value[rng.uniform(size=chosen.size) < missing] = np.nan
            values[name] = value
    if "spare" in wanted and spares:
        spare = rng.uniform(size=chosen.size) < spares
        # The latency of a spare without an answer is the time that the server waited, below the longest latency.
        latency[spare & ~completed] = MAX_LATENCY / 2
        values["spare"] = spare
    return RoundReport(clients=chosen, completed=completed, latency=latency, **values)


def side_information(
    names: Iterable[str], num_rows: int, rng: np.random.Generator, *, missing: float = 0.0
) -> dict[str, FloatArray]:
    """Return random values of columns for ``Selector.inform``, each NaN with the chance ``missing``."""
    values = {name: values_for(name, num_rows, rng) for name in names}
    for column in values.values() if missing else ():
        column[rng.uniform(size=num_rows) < missing] = np.nan
    return values


def values_for(name: str, num_rows: int, rng: np.random.Generator) -> FloatArray:
    """Return values of a column in [0, 1): numbers of shape (n,), or vectors of shape (n, 4)."""
    return rng.uniform(size=(num_rows, 4) if name in VECTORS else (num_rows,))


def optional_columns(selector: Selector) -> frozenset[str]:
    """Return the columns that a completed client may lack: needed and reported by clients, but not required."""
    return frozenset(name for name in selector.needs - selector.requires if COLUMNS[name].source == "reply")


def fleet_size(selector: Selector, num_clients: int) -> int:
    """Return the number of clients: ``num_clients`` for up to three clients a round, and proportionally more above.

    Every round then leaves some clients out.
    """
    return num_clients * max(1, math.ceil((selector.clients_per_round or 1) / 3))


def build_selector(make: SelectorFactory) -> Selector:
    """Return ``make(seed=1)``; raise :class:`ParameterError` if the suites cannot test its result."""
    try:
        selector = make(seed=1)
    except TypeError as error:
        raise ParameterError(
            f"make(seed=1) must build a selector, but raised: {error}. Use functools.partial(MySelector, "
            "clients_per_round=3)"
        ) from error
    m = selector.clients_per_round
    if m is not None and not (isinstance(m, int | np.integer) and 1 <= m <= MOST_PER_ROUND):
        raise ParameterError(
            f"clients_per_round must be a whole number from 1 to {MOST_PER_ROUND}, or None, for this suite, but "
            f"make(seed=1) has {m!r}. Build the selector with clients_per_round=3"
        )
    return selector


def promise(kept: bool | np.bool_, words: str) -> None:
    """Raise :class:`AssertionError` with the words of the promise if it is broken."""
    if not kept:
        raise AssertionError(f"broken promise: {words}")


def promise_finite(selector: Selector, when: str, state: dict[str, Any] | None = None) -> None:
    """Raise :class:`AssertionError` if the state contains NaN or infinity, with a hint about rows of failed clients."""
    if key := nonfinite_key(selector, state):
        columns = sorted(selector.needs - {"latency", "spare"})
        hint = f"; in rows of failed clients the columns ({', '.join(columns)}) are NaN: read them at report.completed"
        promise(False, f"state {key!r} stays finite {when}{hint if columns else ''}")


def nonfinite_key(selector: Selector, state: dict[str, Any] | None = None) -> str:
    """Return the first key of the state with NaN or infinity where a new client has neither, "" if there is none."""
    for key, value in (selector.state_dict() if state is None else state).items():
        if not np.isfinite(value).all():
            newcomer = {name.lstrip("_"): new for name, new in selector.client_state.items()}
            if np.isfinite(newcomer.get(key, 0.0)).all():
                return key
    return ""


def loaded(make: SelectorFactory, state: dict[str, Any], *, seed: int) -> Selector:
    """Return a new selector that has loaded the state; raise :class:`AssertionError` if it refuses the state."""
    selector = make(seed=seed)
    try:
        selector.load_state_dict(state)
    except StateError as error:
        raise AssertionError(
            f"broken promise: a selector takes its own state: {error}. Keep the declared type of arrays, and of "
            "numbers the type that __init__ gives them"
        ) from error
    return selector


def promise_refused(refusal: type[Exception], call: Callable[[], object], words: str) -> str:
    """Return the message of a refused call; raise :class:`AssertionError` if the call is not refused."""
    try:
        call()
    except refusal as error:
        return str(error)
    raise AssertionError(f"broken promise: {words} refused with {refusal.__name__}")


def promise_as_new(rows: Any, value: Any, words: str) -> None:
    """Raise :class:`AssertionError` unless every row equals ``value``."""
    rows = np.asarray(rows)
    new = np.broadcast_to(np.asarray(value), rows.shape)
    promise(np.array_equal(rows, new, equal_nan=new.dtype.kind == "f"), words)


def promise_forgotten(attribute: str, before: Any, after: Any, gone: IntArray, value: Any) -> None:
    """Raise :class:`AssertionError` unless a ``forget`` made the rows ``gone`` as new and left all others.

    Args:
        attribute: The attribute in ``client_state``, for the message.
        before: Its rows before the call.
        after: Its rows after the call.
        gone: Indices of the forgotten clients; those beyond the rows do not count.
        value: A new client's row.
    """
    before, after = np.asarray(before), np.asarray(after)
    gone = gone[gone < len(after)]
    promise_as_new(after[gone], value, f"forget resets {attribute!r} of a client")
    kept = np.delete(before, gone, 0).tobytes() == np.delete(after, gone, 0).tobytes()
    promise(kept, f"forget leaves {attribute!r} of the other clients as it is")


def differing_key(state: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a key at which two saved states differ in any bit, shape or type, "" if they are the same."""
    if state.keys() != other.keys():
        return min(state.keys() ^ other.keys())
    for key, value in state.items():
        one, two = np.asarray(value), np.asarray(other[key])
        if one.dtype != two.dtype or one.shape != two.shape or one.tobytes() != two.tobytes():
            return key
    return ""
