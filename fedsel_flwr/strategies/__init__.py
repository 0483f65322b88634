"""Flower strategies that choose their clients with a selector.

The names here are for Flower's legacy API (``configure_fit``, ``aggregate_fit``). The same names for the Message API
(``configure_train``, ``aggregate_train``) are in :mod:`fedsel_flwr.strategies.message`.

>>> from fedsel_flwr.selectors import RoundRobin
>>> from fedsel_flwr.strategies import BSFL, SelectionStrategy
>>> SelectionStrategy(RoundRobin(clients_per_round=5)).base.fraction_evaluate  # any selector, any Flower strategy
0.0
>>> BSFL(clients_per_round=5, min_latency=0.05).selector.name  # a paper: its selector, and what else it asks for
'bsfl'

=======================  ==============================================================================================
``bsfl``                 BSFL: speed against even participation
``cs_ucb``               CS-UCB: the largest upper confidence bounds on speed
``cs_ucb_q``             CS-UCB-Q: fast clients under a fairness constraint
``fedca``                FedCA: the best combination of the round's models is averaged
``fedcm``                FedCM: FedCA, with clients sampled by how often their models were kept
``gpfl``                 GPFL: gradients that point in the global model's direction
``pczfl``                PCZFL: the Pareto front of accuracy and energy
``selection_strategy``   any selector around any base strategy: the round, which all papers share
``message``              the twins of these files, for the Message API
``wrapping``             wrapping a base strategy: transport, waiting, failures, checkpoints, for both APIs
=======================  ==============================================================================================
"""

from __future__ import annotations

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies.bsfl import BSFL
from fedsel_flwr.strategies.cs_ucb import CSUCB
from fedsel_flwr.strategies.cs_ucb_q import CSUCBQ
from fedsel_flwr.strategies.fedca import FedCA
from fedsel_flwr.strategies.fedcm import FedCM
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
