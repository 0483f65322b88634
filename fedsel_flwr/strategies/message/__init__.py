"""The strategies for Flower's Message API (``configure_train``, ``aggregate_train``; flwr 1.22 to 1.43).

Each paper's class is the twin of the legacy API's class, and inherits the paper's requirements from it.

=======================  ==============================================================================================
``bsfl``                 twin of :class:`fedsel_flwr.strategies.BSFL`
``cs_ucb``               twin of :class:`fedsel_flwr.strategies.CSUCB`
``cs_ucb_q``             twin of :class:`fedsel_flwr.strategies.CSUCBQ`
``fedca``                twin of :class:`fedsel_flwr.strategies.FedCA`
``fedcm``                twin of :class:`fedsel_flwr.strategies.FedCM`
``gpfl``                 twin of :class:`fedsel_flwr.strategies.GPFL`
``pczfl``                twin of :class:`fedsel_flwr.strategies.PCZFL`
``selection_strategy``   any selector around any base strategy: the round that all papers share
=======================  ==============================================================================================
"""

from __future__ import annotations

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies.message.bsfl import BSFL
from fedsel_flwr.strategies.message.cs_ucb import CSUCB
from fedsel_flwr.strategies.message.cs_ucb_q import CSUCBQ
from fedsel_flwr.strategies.message.fedca import FedCA
from fedsel_flwr.strategies.message.fedcm import FedCM
from fedsel_flwr.strategies.message.gpfl import GPFL
from fedsel_flwr.strategies.message.pczfl import PCZFL
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
