"""FedCM (Kim et al.) as a strategy of Flower's Message API."""

from __future__ import annotations

from fedsel_flwr.strategies.fedcm import CombinatorialBandit
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy


class FedCM(CombinatorialBandit, SelectionStrategy):
    """Samples clients by how often FedCA's filter kept their models; see :class:`fedsel_flwr.strategies.FedCM`.

    That class says what the paper asks for, has the parameters, and lists the five steps of a round. Here
    ``configure_train`` and ``aggregate_train`` take them, with nodes and messages.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies.message import FedCM, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> held_out = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = FedCM(clients_per_round=2, validation=held_out, seed=1)
    >>> model = [np.zeros(2)]
    >>> for number in range(1, 11):
    ...     model = play_round(strategy, clients, model, number)
    >>> asked = [row.client_id for row in strategy.history.clients]
    >>> [asked.count(str(number)) for number in range(4)]  # client 3 takes the largest steps: its models are kept
    [2, 4, 4, 10]
    """
