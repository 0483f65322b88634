"""GPFL (Na et al.) as a strategy of Flower's Message API."""

from __future__ import annotations

from fedsel_flwr.strategies import gpfl as legacy
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class GPFL(PaperStrategy, SelectionStrategy, twin=legacy.GPFL):
    """Trains clients whose gradients point in the global model's direction; see :class:`fedsel_flwr.strategies.GPFL`.

    That class says what the paper asks for and lists the five steps of a round. Here ``configure_train`` and
    ``aggregate_train`` take them, with nodes and messages.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies.message import GPFL, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> held_out = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = GPFL(clients_per_round=2, total_rounds=10, learning_rate=0.1, validation=held_out, seed=1)
    >>> model = play_round(strategy, clients, [np.zeros(2)])
    >>> model, strategy.history.rounds[0].num_selected  # round 1 measures everybody and keeps the model
    ([array([0., 0.])], 4)
    >>> play_round(strategy, clients, model, 2)
    [array([2.5, 2.5])]
    """
