"""The strategies for Flower's Message API (``configure_train``, ``aggregate_train``; flwr 1.22 or newer).

Each paper's class is the twin of the legacy API's class, and inherits the paper's requirements from it.

=======================  ==============================================================================================
``papers``               the papers' strategies, twins of the classes in :mod:`fedsel_flwr.strategies`
``selection_strategy``   any selector around any base strategy: the round that all papers share
=======================  ==============================================================================================
"""

from __future__ import annotations

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies.message.papers import BSFL, CSUCB, CSUCBQ, GPFL, PCZFL, FedCA, FedCM
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.grids import TimedGrid

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
