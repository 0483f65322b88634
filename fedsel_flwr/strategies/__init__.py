"""Flower strategies in which a selector chooses the clients.

The names here are for Flower's legacy API (``configure_fit``, ``aggregate_fit``). The same names for the Message API
(``configure_train``, ``aggregate_train``) are in :mod:`fedsel_flwr.strategies.message`.

>>> from fedsel_flwr.selectors import RoundRobin
>>> from fedsel_flwr.strategies import BSFL, SelectionStrategy
>>> SelectionStrategy(RoundRobin(clients_per_round=5)).base.fraction_evaluate  # any selector, any base strategy
0.0
>>> BSFL(clients_per_round=5, min_latency=0.05).selector.name  # a paper: its selector and its other requirements
'bsfl'

=======================  ==============================================================================================
``bsfl``                 BSFL: trains fast clients, but each as often as its data deserve
``cs_ucb``               CS-UCB and CS-UCB-Q: train fast clients, CS-UCB-Q under a fairness constraint
``fedca``                FedCA and FedCM: average the combination of the round's models with the best score
``gpfl``                 GPFL: trains clients whose gradients point in the global model's direction
``pczfl``                PCZFL: trains clients on the Pareto front of accuracy and energy
``selection_strategy``   any selector around any base strategy: the round that all papers share
``message``              the twins of these classes for the Message API
``wrapping``             wrapping a base strategy: transport, waiting, failures and checkpoints, for both APIs
=======================  ==============================================================================================
"""

from __future__ import annotations

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.flower_entries import installed_version, warn_if_newer
from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies.bsfl import BSFL
from fedsel_flwr.strategies.cs_ucb import CSUCB, CSUCBQ
from fedsel_flwr.strategies.fedca import FedCA, FedCM
from fedsel_flwr.strategies.gpfl import GPFL
from fedsel_flwr.strategies.pczfl import PCZFL
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy

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

warn_if_newer(installed_version())
