"""Flower strategies that choose their clients with a selector.

The names here are for Flower's legacy API (``configure_fit``, ``aggregate_fit``). They are loaded when first used, so
that :mod:`fedsel_flwr.strategies.core` can be used without Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsel_flwr.strategies.bsfl import BSFL
    from fedsel_flwr.strategies.cs_ucb import CSUCB
    from fedsel_flwr.strategies.cs_ucb_q import CSUCBQ
    from fedsel_flwr.strategies.fedca import FedCA, FedCM
    from fedsel_flwr.strategies.filter import Filter
    from fedsel_flwr.strategies.gpfl import GPFL
    from fedsel_flwr.strategies.history import ClientRecord, History, RoundRecord
    from fedsel_flwr.strategies.legacy import SelectionStrategy
    from fedsel_flwr.strategies.pczfl import PCZFL
    from fedsel_flwr.strategies.replies import MetricKeys
    from fedsel_flwr.strategies.validation import Validation

_HOMES = {
    "BSFL": "bsfl",
    "CSUCB": "cs_ucb",
    "CSUCBQ": "cs_ucb_q",
    "ClientRecord": "history",
    "FedCA": "fedca",
    "FedCM": "fedca",
    "Filter": "filter",
    "GPFL": "gpfl",
    "History": "history",
    "MetricKeys": "replies",
    "PCZFL": "pczfl",
    "RoundRecord": "history",
    "SelectionStrategy": "legacy",
    "Validation": "validation",
}

__all__ = [
    "BSFL",
    "CSUCB",
    "CSUCBQ",
    "GPFL",
    "PCZFL",
    "ClientRecord",
    "FedCA",
    "FedCM",
    "Filter",
    "History",
    "MetricKeys",
    "RoundRecord",
    "SelectionStrategy",
    "Validation",
]


def __getattr__(name: str) -> Any:
    """Load a strategy when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The names that can be loaded."""
    return sorted(__all__)
