"""What an author may get wrong when writing a selector, said where it happens."""

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
from fedsel_flwr.selectors._arrays import KINDS
from fedsel_flwr.selectors.columns import COLUMNS, REPORTED, check_columns
from fedsel_flwr.selectors.saving import RESERVED, state_key

DECLARED = (
    "needs", "requires", "by_client", "client_state", "scalar_state", "free_state", "paper_options",
    "asks_failed_for_ever",
)  # fmt: skip
"""What a selector's class declares."""


def check_needs(owner: str, needs: object, requires: object) -> tuple[frozenset[str], frozenset[str]]:
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


def check_class(cls: Any, base: type) -> None:
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
        cls.needs, cls.requires = check_needs(owner, cls.needs, cls.requires)
    if isinstance(cls.scalar_state, str):
        raise ParameterError(f"{owner}.scalar_state must be a tuple of names, such as ('{cls.scalar_state}',)")
    for attribute, value in cls.client_state.items():
        if np.asarray(value).dtype.kind not in KINDS:
            raise ParameterError(
                f"{owner}.client_state[{attribute!r}] must be what a new client has, a number, a boolean or an array "
                f"of them, got {value!r}"
            )
    keys = Counter(map(state_key, (*cls.client_state, *cls.free_state, *cls.scalar_state)))
    for key, count in keys.items():
        if count > 1 or key in RESERVED:
            raise ParameterError(f"{owner} declares the state {key!r} twice or as the base class does; rename it")


def checked_choice(owner: str, chosen: Any, available: IntArray) -> IntArray:
    """Return what ``_select`` returned as ascending indices.

    Args:
        owner: The selector's class.
        chosen: An array, list or tuple.
        available: Who could be chosen, shape (n,).

    Raises:
        RunError: It is something else, or names somebody who is not available, or twice.
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
    if ordered is None or (ordered[1:] == ordered[:-1]).any() or not np.isin(ordered, available).all():
        raise RunError(
            f"{method} must return different clients of those available, as an array of "
            f"indices, got {(array if ordered is None else ordered).tolist()}"
        )
    return ordered.astype(np.int64)


@contextmanager
def explained(selector: Any, method: str) -> Iterator[None]:
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
