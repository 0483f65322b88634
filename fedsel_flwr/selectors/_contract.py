"""Checks of the contract between the base class and an author's class.

They cover declarations, reports and selections. Each error names the class, the method or attribute,
and the cure.
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
from fedsel_flwr.selectors.columns import COLUMNS, INFORMED, REPORTED, check_columns
from fedsel_flwr.selectors.round_report import RoundReport
from fedsel_flwr.selectors.selector_state import KINDS, RESERVED, state_key

DECLARED = (
    "needs", "requires", "remembers", "by_client", "client_state", "scalar_state", "free_state", "paper_options",
    "asks_failed_for_ever", "may_exceed_clients_per_round", "buffers", "waves",
)  # fmt: skip
"""Attributes that a selector's class may declare."""


def check_declarations(cls: Any, base: type) -> None:
    """Check the declarations of a new selector class.

    Args:
        cls: The class. Its ``needs`` and ``requires`` become frozen sets.
        base: The base class, which has all known attributes.

    Raises:
        ParameterError: A name is misspelt, or a value does not fit its declaration.
    """
    owner = cls.__name__
    for attribute, value in vars(cls).items():
        if attribute.startswith("_") or hasattr(base, attribute) or isinstance(value, FunctionType):
            continue
        if close := difflib.get_close_matches(attribute.lower(), DECLARED, n=1, cutoff=0.8):
            raise ParameterError(
                f"{owner}.{attribute} looks like {close[0]!r}, but does not set it. Write {close[0]} = ..., or give "
                f"{attribute!r} another name"
            )
    # A property depends on the parameters of an instance, so observe checks it.
    if not isinstance(cls.needs, property) and not isinstance(cls.requires, property):
        cls.needs, cls.requires = checked_needs(owner, cls.needs, cls.requires)
    check_columns(owner, "remembers", frozenset(cls.remembers), INFORMED)
    if not isinstance(cls.scalar_state, tuple | list) or not all(isinstance(name, str) for name in cls.scalar_state):
        names = [cls.scalar_state] if isinstance(cls.scalar_state, str) else list(cls.scalar_state)
        raise ParameterError(
            f"{owner}.scalar_state must be a tuple of names, got {cls.scalar_state!r}. Write "
            f"{tuple(map(str, names))}, and set each of them to a number in __init__"
        )
    for attribute, value in cls.client_state.items():
        if np.asarray(value).dtype.kind not in KINDS:
            raise ParameterError(
                f"{owner}.client_state[{attribute!r}] must be the value of a new client: a number, a boolean or an "
                f"array of them, got {value!r}. Use a value such as 0.0"
            )
    declared = (*cls.client_state, *cls.free_state, *cls.scalar_state)
    keys = Counter(map(state_key, declared))
    for attribute in declared:
        if (key := state_key(attribute)) in RESERVED:
            raise ParameterError(
                f"{owner} declares the state {attribute!r}, but the base class already keeps "
                f"{', '.join(sorted(RESERVED))} (self.round is the number of the round). Rename it"
            )
        if keys[key] > 1:
            raise ParameterError(f"{owner} declares the state {attribute!r} twice. Rename one of them")


def checked_needs(owner: str, needs: object, requires: object) -> tuple[frozenset[str], frozenset[str]]:
    """Return both as sets of columns; raise :class:`ParameterError` for names that are not columns."""
    checked = check_columns(owner, "needs", needs, REPORTED)
    required = check_columns(owner, "requires", requires, REPORTED)
    for name in sorted(required):
        if name not in checked:
            raise ParameterError(f"{owner}.requires names {name!r}, which is not in needs. Add it there")
        if COLUMNS[name].source != "reply":
            raise ParameterError(
                f"{owner}.requires names {name!r}, which the server knows of every usable update. Leave it out"
            )
    return checked, required


def check_report(name: str, report: RoundReport, needs: frozenset[str], requires: frozenset[str]) -> None:
    """Raise :class:`ParameterError` if a report lacks a column that the selector ``name`` needs."""
    for wanted in sorted(needs - {"latency"}):
        value = getattr(report, wanted)
        if value is None:
            raise ParameterError(f"{name} needs the report column {wanted!r}, which is missing. Pass it to RoundReport")
        rows = np.asarray(value)[report.used] if np.ndim(value) else np.asarray(value)
        may_lack = COLUMNS[wanted].source == "reply" and wanted not in requires
        if np.isinf(rows).any() or (np.isnan(rows).any() and not may_lack):
            raise ParameterError(
                f"report column {wanted!r} must be finite for completed clients, got {value}. Mark others as failed"
            )


def checked_choice(owner: str, chosen: Any, available: IntArray, most: int | None = None) -> IntArray:
    """Return the result of an author's ``_select`` as ascending indices.

    Args:
        owner: The selector's class.
        chosen: An array, list or tuple.
        available: The available clients, ascending, shape (n,), n at least 1.
        most: Largest number of selected clients; None for no limit.

    Raises:
        RunError: ``chosen`` is not an array of indices, or it has an unavailable client, a client twice, or too many
            clients.
    """
    method = f"{owner}._select"
    try:
        array = np.asarray(chosen)
    # Nested lists of different lengths.
    except ValueError:
        array = np.array(chosen, dtype=object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RunError(
            f"{method} must return a one-dimensional array of indices from `available`, got {array.tolist()!r}. "
            "Return such an array, for example available[mask]"
        )
    ordered: IntArray = np.sort(array).astype(np.int64)
    if (ordered[1:] == ordered[:-1]).any() or not _all_in(ordered, available):
        raise RunError(f"{method} must return an array of different indices from `available`, got {ordered.tolist()}")
    if most is not None and ordered.size > most:
        raise RunError(
            f"{method} chose {ordered.size} clients, but may choose at most {most} (clients_per_round with "
            f"over-selection). Return that many, or set may_exceed_clients_per_round = True in {owner}"
        )
    return ordered


def _all_in(chosen: IntArray, available: IntArray) -> bool:
    """Return whether all of ``chosen`` are in ``available``, which is ascending."""
    # np.isin would sort both arrays, and this function runs in every round.
    places = np.minimum(np.searchsorted(available, chosen), available.size - 1)
    return bool((available[places] == chosen).all())


@contextmanager
def noting_declarations(owner: type) -> Iterator[None]:
    """Add to an error of an author's method how state is declared: undeclared state is its commonest cause."""
    try:
        yield
    except (AttributeError, LookupError, ValueError) as error:
        if not isinstance(error, FedSelError):
            error.add_note(
                f"If {owner.__name__} did not declare this state, declare values per client as client_state = "
                "{'_name': 0.0}, with the value of a new client, and a single number as scalar_state = ('_name',)"
            )
        raise
