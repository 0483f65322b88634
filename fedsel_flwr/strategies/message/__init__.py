"""The strategies for Flower's Message API (``configure_train``, ``aggregate_train``; flwr 1.22 and later)."""

from __future__ import annotations

from fedsel_flwr.strategies.filter import Filter
from fedsel_flwr.strategies.history import ClientRecord, History, RoundRecord
from fedsel_flwr.strategies.message.grids import TimedGrid
from fedsel_flwr.strategies.message.papers import BSFL, CSUCB, CSUCBQ, GPFL, PCZFL, FedCA, FedCM
from fedsel_flwr.strategies.message.strategy import SelectionStrategy
from fedsel_flwr.strategies.replies import MetricKeys
from fedsel_flwr.strategies.validation import Validation

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
