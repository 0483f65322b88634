"""CS-UCB-Q (Xia et al.) as a strategy of Flower's Message API."""

from __future__ import annotations

from fedsel_flwr.strategies import cs_ucb_q as legacy
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class CSUCBQ(PaperStrategy, SelectionStrategy, twin=legacy.CSUCBQ):
    """Trains fast clients under a fairness constraint; see :class:`fedsel_flwr.strategies.CSUCBQ`.

    That class says what the paper asks for and lists the five steps of a round. Here ``configure_train`` and
    ``aggregate_train`` take them, with nodes and messages.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies.message import CSUCBQ
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> shares = {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.9}
    >>> strategy = CSUCBQ(clients_per_round=2, max_latency=5.0, fairness=shares, queue_weight=0.9, seed=1)
    >>> model = [np.zeros(2)]
    >>> for number in range(1, 6):
    ...     model = play_round(strategy, clients, model, number)
    >>> [row.client_id for row in strategy.history.clients]  # client 3 is the slowest
    ['0', '1', '0', '3', '0', '3', '2', '3', '1', '3']
    """
