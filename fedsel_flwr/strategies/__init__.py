"""Flower strategies that choose their clients with a selector.

The names here are for Flower's legacy API (``configure_fit``, ``aggregate_fit``). They are loaded when first used, so
that :mod:`fedsel_flwr.rounds.core` can be used without Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsel_flwr.aggregation.filter import Filter
    from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
    from fedsel_flwr.rounds.replies import MetricKeys
    from fedsel_flwr.rounds.validation import Validation
    from fedsel_flwr.strategies.bsfl import BSFL
    from fedsel_flwr.strategies.cs_ucb import CSUCB
    from fedsel_flwr.strategies.cs_ucb_q import CSUCBQ
    from fedsel_flwr.strategies.fedca import FedCA, FedCM
    from fedsel_flwr.strategies.gpfl import GPFL
    from fedsel_flwr.strategies.legacy import SelectionStrategy
    from fedsel_flwr.strategies.pczfl import PCZFL

_HOMES = {
    "BSFL": "strategies.bsfl",
    "CSUCB": "strategies.cs_ucb",
    "CSUCBQ": "strategies.cs_ucb_q",
    "ClientRecord": "rounds.history",
    "FedCA": "strategies.fedca",
    "FedCM": "strategies.fedca",
    "Filter": "aggregation.filter",
    "GPFL": "strategies.gpfl",
    "History": "rounds.history",
    "MetricKeys": "rounds.replies",
    "PCZFL": "strategies.pczfl",
    "RoundRecord": "rounds.history",
    "SelectionStrategy": "strategies.legacy",
    "Validation": "rounds.validation",
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
    return getattr(importlib.import_module(f"fedsel_flwr.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The names that can be loaded."""
    return sorted(__all__)
