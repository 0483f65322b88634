"""The papers' strategies for Flower's Message API: the twin of each class of the legacy API.

A twin's class in :mod:`fedsel_flwr.strategies` says what the paper asks for, has the parameters, and lists the five
steps of a round. Here ``configure_train`` and ``aggregate_train`` take these steps, with nodes and messages.

>>> import numpy as np
>>> from fedsel_flwr.strategies.message import BSFL
>>> from fedsel_flwr.testing.in_process import play_round
>>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
>>> strategy = BSFL(clients_per_round=2, min_latency=0.5, alpha=0.1, max_latency=5.0, seed=1)
>>> model = [np.zeros(2)]
>>> for number in (1, 2, 3):
...     model = play_round(strategy, clients, model, number)
>>> [row.client_id for row in strategy.history.clients]  # everybody once, then the two fastest
['0', '1', '2', '3', '0', '1']
"""

from __future__ import annotations

from fedsel_flwr.strategies import bsfl, cs_ucb, fedca, gpfl, pczfl
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class BSFL(PaperStrategy, SelectionStrategy, twin=bsfl.BSFL):
    """Trades speed against even participation; see :class:`fedsel_flwr.strategies.BSFL`."""


class CSUCB(PaperStrategy, SelectionStrategy, twin=cs_ucb.CSUCB):
    """Trains the clients that answer fastest; see :class:`fedsel_flwr.strategies.CSUCB`."""


class CSUCBQ(PaperStrategy, SelectionStrategy, twin=cs_ucb.CSUCBQ):
    """Trains fast clients under a fairness constraint; see :class:`fedsel_flwr.strategies.CSUCBQ`."""


class FedCA(fedca.CombinatorialAveraging, SelectionStrategy):
    """Averages the best-scoring combination of models; see :class:`fedsel_flwr.strategies.FedCA`."""


class FedCM(fedca.CombinatorialBandit, SelectionStrategy):
    """Samples clients by how often FedCA's filter kept their models; see :class:`fedsel_flwr.strategies.FedCM`."""


class GPFL(PaperStrategy, SelectionStrategy, twin=gpfl.GPFL):
    """Trains clients whose gradients point in the model's direction; see :class:`fedsel_flwr.strategies.GPFL`."""


class PCZFL(PaperStrategy, SelectionStrategy, twin=pczfl.PCZFL):
    """Trains the clients on the Pareto front of accuracy and energy; see :class:`fedsel_flwr.strategies.PCZFL`."""
