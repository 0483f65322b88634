"""Selectors by name, for scenario files and the command line."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.bsfl import BSFL
from fedsel_flwr.selectors.by_size import RandomBySize
from fedsel_flwr.selectors.cs_ucb import CSUCB
from fedsel_flwr.selectors.cs_ucb_q import CSUCBQ
from fedsel_flwr.selectors.fedcm import FedCMTS, FedCMUCB
from fedsel_flwr.selectors.gpfl import GPFL
from fedsel_flwr.selectors.local_accuracy import LocalAccuracy
from fedsel_flwr.selectors.pczfl import PCZFL
from fedsel_flwr.selectors.round_robin import RoundRobin
from fedsel_flwr.selectors.uniform import Random

_ALL: tuple[type[Selector], ...] = (
    BSFL, CSUCB, CSUCBQ, FedCMTS, FedCMUCB, GPFL, LocalAccuracy, PCZFL, Random, RandomBySize, RoundRobin,
)  # fmt: skip
_CLASSES: dict[str, type[Selector]] = {cls.name: cls for cls in _ALL}


def names() -> tuple[str, ...]:
    """Return the names :func:`create` knows, sorted.

    >>> len(names())
    11
    """
    return tuple(sorted(_CLASSES))


def selector_class(name: str) -> type[Selector]:
    """Return the class behind ``name``; raises :class:`ParameterError` for an unknown one."""
    if name not in _CLASSES:
        close = difflib.get_close_matches(str(name), _CLASSES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ParameterError(f"unknown selector {name!r}{hint}; choose one of {', '.join(names())}")
    return _CLASSES[name]


def create(name: str, **params: Any) -> Selector:
    """Build a selector from its name and keyword parameters.

    Args:
        name: One of :func:`names`.
        **params: The parameters of the selector's class.

    Returns:
        The selector.

    Raises:
        ParameterError: An unknown name or parameter, a missing parameter, or a value out of range.
    """
    cls = selector_class(name)
    accepted = inspect.signature(cls).parameters
    unknown = sorted(params.keys() - accepted.keys())
    missing = [key for key, p in accepted.items() if p.default is p.empty and key not in params]
    if unknown or missing:
        problem = f"does not know {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise ParameterError(f"selector {name!r} {problem}; its parameters are {', '.join(accepted)}")
    return cls(**params)
