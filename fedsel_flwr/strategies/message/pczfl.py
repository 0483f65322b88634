"""PCZFL as a strategy of Flower's Message API."""

from __future__ import annotations

from fedsel_flwr.strategies import pczfl as legacy
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class PCZFL(PaperStrategy, SelectionStrategy, twin=legacy.PCZFL):
    """Trains the clients on the Pareto front of accuracy and energy; see :class:`fedsel_flwr.strategies.PCZFL`.

    That class says what the paper asks for and lists the five steps of a round. Here ``configure_train`` and
    ``aggregate_train`` take them, with nodes and messages.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies.message import PCZFL, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> def client(number):
    ...     return lambda model, config: ([model[0] + number], 10, {"latency_s": 0.5, "energy_score": number / 4})
    >>> interview = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = PCZFL(validation=interview, seed=1)
    >>> play_round(strategy, [client(k) for k in range(4)], [np.zeros(2)])
    [array([1.5, 1.5])]
    """
