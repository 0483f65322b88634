"""The strategies for Flower's Message API (``configure_train``, ``aggregate_train``; flwr 1.22 to 1.43)."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.grids import TimedGrid
from fedsel_flwr.strategies.wrapping.paper import PAPERS, in_api

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
    "TimedGrid",
    "Validation",
]


def __getattr__(name: str) -> Any:
    """Make the strategy of a paper when it is first used."""
    if name not in PAPERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = paper = in_api(name, SelectionStrategy, __name__)
    return paper


def __dir__() -> list[str]:
    """The names there are."""
    return sorted(__all__)
