"""The declarations of a selector's class, looked at when the class is made."""

from __future__ import annotations

import difflib
from collections import Counter
from types import FunctionType
from typing import Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._arrays import KINDS
from fedsel_flwr.selectors.columns import COLUMNS, REPORTED, check_columns
from fedsel_flwr.selectors.saving import RESERVED, state_key

DECLARED = (
    "needs", "requires", "by_client", "client_state", "scalar_state", "free_state", "paper_options",
    "asks_failed_for_ever", "may_exceed_clients_per_round",
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
