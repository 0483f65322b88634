"""What goes into an author's methods and what comes out; errors name the class, the method and the way out.

The declarations of a selector's class, looked at when the class is made.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.selectors.columns import COLUMNS, REPORTED, check_columns
from fedsel_flwr.selectors.round_report import RoundReport
from fedsel_flwr.selectors.selector_state import KINDS, RESERVED, state_key


def check_report(name: str, report: RoundReport, needs: frozenset[str], requires: frozenset[str]) -> None:
    """Raise :class:`ParameterError` where a report lacks what the selector ``name`` needs."""
    for wanted in sorted(needs - {"latency"}):
        value = getattr(report, wanted)
        if value is None:
            raise ParameterError(f"{name} needs the report column {wanted!r}, but it is missing")
        rows = np.asarray(value)[report.used] if np.ndim(value) else np.asarray(value)
        may_lack = COLUMNS[wanted].source == "reply" and wanted not in requires
        if np.isinf(rows).any() or (np.isnan(rows).any() and not may_lack):
            raise ParameterError(f"report column {wanted!r} must be finite for completed clients, got {value}")


def checked_choice(owner: str, chosen: Any, available: IntArray, most: int | None = None) -> IntArray:
    """Return what ``_select`` returned as ascending indices.

    Args:
        owner: The selector's class.
        chosen: An array, list or tuple.
        available: Who could be chosen, ascending, shape (n,), n at least 1.
        most: How many may be chosen; None sets no limit.

    Raises:
        RunError: It is something else, or names somebody who is not available, or twice, or too many.
    """
    method = f"{owner}._select"
    if chosen is None:
        raise RunError(f"{method} returned None; end it with `return chosen`, an array of indices of those available")
    if isinstance(chosen, set | frozenset):
        raise RunError(f"{method} returned a set, which has no order; return an array of indices, such as sorted(...)")
    if not isinstance(chosen, np.ndarray | list | tuple):
        raise RunError(f"{method} must return an array of indices of those available, got {chosen!r}")
    try:
        array = np.asarray(chosen)
    except ValueError:
        raise RunError(f"{method} must return a one-dimensional array of indices, got {chosen!r}") from None
    if array.dtype == np.bool_:
        raise RunError(f"{method} returned booleans; return indices: available[mask] in place of mask")
    if array.ndim == 1 and not array.size:
        return np.empty(0, dtype=np.int64)
    ordered = np.sort(array) if array.ndim == 1 and array.dtype.kind in "iu" else None
    if ordered is None or (ordered[1:] == ordered[:-1]).any() or not _all_in(ordered, available):
        raise RunError(
            f"{method} must return different clients of those available, as an array of "
            f"indices, got {(array if ordered is None else ordered).tolist()}{_choice_fault(ordered, array, available)}"
        )
    if most is not None and ordered.size > most:
        raise RunError(
            f"{method} chose {ordered.size} clients, but may choose {most} at most, as clients_per_round says; return "
            f"that many, or declare may_exceed_clients_per_round = True in {owner} if its algorithm needs more"
        )
    return ordered.astype(np.int64)


def _choice_fault(ordered: IntArray | None, array: Any, available: IntArray) -> str:
    """What is wrong with a choice, in a few words."""
    if ordered is None:
        return f": {array.dtype} of shape {array.shape}"
    values, counts = np.unique(ordered, return_counts=True)
    strangers = values[~np.isin(values, available)]
    told = [f"{value} is not available" for value in strangers[:3].tolist()]
    told += [f"{value} stands there {n} times" for value, n in zip(values, counts, strict=True) if n > 1]
    return ": " + ", ".join(told[:6])


def _all_in(chosen: IntArray, available: IntArray) -> bool:
    """Whether all of ``chosen`` are in ``available``, which ascends."""
    places = np.minimum(np.searchsorted(available, chosen), available.size - 1)
    return bool((available[places] == chosen).all())


@contextmanager
def explaining_undeclared_state(selector: Any, method: str) -> Iterator[None]:
    """Name the class, the method and what to declare where an author's method trips over undeclared state.

    Raises:
        RunError: In place of the error of an attribute that was never set, or that does not grow with the fleet.
    """
    try:
        yield
    except FedSelError:
        raise
    except AttributeError as error:
        if error.obj is not selector or error.name is None:
            raise
        raise RunError(_undeclared(selector, method, error, error.name, "which nothing sets")) from error
    except (LookupError, ValueError) as error:
        if isinstance(error, ValueError) and "broadcast" not in str(error):
            raise
        short = _not_growing(selector)
        if not short:
            raise
        reason = f"which does not grow with the fleet ({selector._registered.size} clients)"
        raise RunError(_undeclared(selector, method, error, short, reason)) from error


def _undeclared(selector: Any, method: str, error: Exception, attribute: str, reason: str) -> str:
    return (
        f"{type(selector).__name__}.{method} ended with {type(error).__name__} ({error}): it may use self.{attribute}, "
        f"{reason}; declare what is kept for each client with a new client's value, client_state = "
        f"{{{attribute!r}: 0.0}}, one number with scalar_state = ({attribute!r},), set in __init__"
    )


def _not_growing(selector: Any) -> str:
    """The attribute that is shorter than the fleet and not declared; "" if there is none."""
    declared = {*selector.client_state, *selector.free_state, *selector.scalar_state, "_registered"}
    attributes: dict[str, Any] = vars(selector)
    for attribute, value in attributes.items():
        held = np.shape(value)[:1] if isinstance(value, np.ndarray) else ()
        held = (len(value),) if isinstance(value, list | dict) else held
        if attribute not in declared and held and held[0] < selector._registered.size:
            return attribute
    return ""


DECLARED = (
    "needs", "requires", "by_client", "client_state", "scalar_state", "free_state", "paper_options",
    "asks_failed_for_ever", "may_exceed_clients_per_round",
)  # fmt: skip
"""What a selector's class declares."""


def checked_needs(owner: str, needs: object, requires: object) -> tuple[frozenset[str], frozenset[str]]:
    """Return both as sets of columns; raise :class:`ParameterError` where they are none."""
    checked = check_columns(owner, "needs", needs, REPORTED)
    required = check_columns(owner, "requires", requires, REPORTED)
    for name in sorted(required):
        if name not in checked:
            raise ParameterError(f"{owner}.requires names {name!r}, which is not in needs; add it there")
        if COLUMNS[name].source != "reply":
            raise ParameterError(
                f"{owner}.requires names {name!r}, which no client reports and every usable one has; leave it out"
            )
    return checked, required


def check_declarations(cls: Any, base: type) -> None:
    """Look through the declarations of a new selector class.

    Args:
        cls: The class; ``needs`` and ``requires`` become frozen sets.
        base: The class of all selectors, whose attributes are known.

    Raises:
        ParameterError: A name is misspelt, or a value cannot be what it declares.
    """
    owner = cls.__name__
    for attribute, value in vars(cls).items():
        if attribute.startswith("_") or hasattr(base, attribute) or isinstance(value, FunctionType):
            continue
        if close := difflib.get_close_matches(attribute.lower(), DECLARED, n=1, cutoff=0.8):
            raise ParameterError(
                f"{owner}.{attribute} looks like {close[0]!r}, which it would not set: write {close[0]} = ..., or give "
                f"{attribute!r} another name"
            )
    if not isinstance(cls.needs, property) and not isinstance(cls.requires, property):
        cls.needs, cls.requires = checked_needs(owner, cls.needs, cls.requires)
    if not isinstance(cls.scalar_state, tuple | list) or not all(isinstance(name, str) for name in cls.scalar_state):
        names = [cls.scalar_state] if isinstance(cls.scalar_state, str) else list(cls.scalar_state)
        raise ParameterError(
            f"{owner}.scalar_state must be a tuple of names, such as {tuple(map(str, names))}, each a number that "
            f"__init__ sets; got {cls.scalar_state!r}"
        )
    for attribute, value in cls.client_state.items():
        if np.asarray(value).dtype.kind not in KINDS:
            raise ParameterError(
                f"{owner}.client_state[{attribute!r}] must be what a new client has, a number, a boolean or an array "
                f"of them, got {value!r}"
            )
    declared = (*cls.client_state, *cls.free_state, *cls.scalar_state)
    keys = Counter(map(state_key, declared))
    for attribute in declared:
        if (key := state_key(attribute)) in RESERVED:
            raise ParameterError(
                f"{owner} declares the state {attribute!r}, but the base class keeps one of that name (it keeps "
                f"{', '.join(sorted(RESERVED))}; self.round is the number of the round); rename it"
            )
        if keys[key] > 1:
            raise ParameterError(f"{owner} declares the state {attribute!r} twice; rename one of them")
