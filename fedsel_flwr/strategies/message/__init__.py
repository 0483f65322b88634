"""The strategies for Flower's Message API (``configure_train``, ``aggregate_train``; flwr 1.22 and later)."""

from __future__ import annotations

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
from fedsel_flwr.rounds.replies import MetricKeys
from fedsel_flwr.rounds.validation import Validation
from fedsel_flwr.strategies.message.grids import TimedGrid
from fedsel_flwr.strategies.message.papers import BSFL, CSUCB, CSUCBQ, GPFL, PCZFL, FedCA, FedCM
from fedsel_flwr.strategies.message.strategy import SelectionStrategy

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
