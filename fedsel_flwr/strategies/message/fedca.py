"""FedCA (Kim et al.) as a strategy of Flower's Message API."""

from __future__ import annotations

from fedsel_flwr.strategies.fedca import CombinatorialAveraging
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy


class FedCA(CombinatorialAveraging, SelectionStrategy):
    """Averages the best-scoring combination of models; see :class:`fedsel_flwr.strategies.FedCA`.

    That class says what the paper asks for, has the parameters, and lists the five steps of a round. Here
    ``configure_train`` and ``aggregate_train`` take them, with nodes and messages.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies.message import FedCA, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> held_out = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = FedCA(clients_per_round=3, validation=held_out, seed=1)
    >>> play_round(strategy, clients, [np.zeros(2)])
    [array([2., 2.])]
    >>> [(row.client_id, row.kept) for row in strategy.history.clients]  # the larger the model, the smaller the loss
    [('0', False), ('1', False), ('2', True)]
    """
