"""BSFL (Ben Ami et al.) as a strategy of Flower's Message API."""

from __future__ import annotations

from fedsel_flwr.strategies import bsfl as legacy
from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class BSFL(PaperStrategy, SelectionStrategy, twin=legacy.BSFL):
    """Trades speed against even participation; see :class:`fedsel_flwr.strategies.BSFL`.

    That class says what the paper asks for and lists the five steps of a round. Here ``configure_train`` and
    ``aggregate_train`` take them, with nodes and messages.

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
