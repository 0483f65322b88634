"""BSFL (Ben Ami et al.) as a Flower strategy: trains fast clients, but each as often as its data deserve."""

from __future__ import annotations

from fedsel_flwr import selectors
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class BSFL(PaperStrategy, SelectionStrategy):
    """Trains fast clients, but each as often as its data deserve.

    The value of a set of clients is the speed of its slowest member plus ``alpha`` times the mean generalization value
    of all members. The generalization value is positive while a client has trained less often than its data deserve,
    else negative (3), (4).

    The paper asks for:
        * Selector: :class:`fedsel_flwr.selectors.BSFL`, with all of its parameters. Its docstring has the symbols.
        * Averaging: that of ``base``. Filter and validation set: none.

    On the virtual clock ``min_latency`` is required. On the server's clock its default is "auto", the lower tenth
    percentile of the clients' mean latencies. A client that fails, or needs longer than ``max_latency``, counts as
    ``max_latency``. This class refuses a client that ``data_weights`` does not cover.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids.
        2. The selector computes an upper confidence bound of each client's speed (12). It takes the set of m clients
           with the largest value under these bounds (13).
        3. ``base`` configures the instructions. Exactly the selected clients get them and train.
        4. ``aggregate_fit`` drops unusable updates and lets ``base`` average the others.
        5. The selector counts a play of each selected client (10). The speed of a play is ``min_latency`` divided by
           the latency, and enters the client's mean speed (11). A failed client counts as a client that needed
           ``max_latency``.

    References:
        D. Ben Ami, K. Cohen, Q. Zhao, Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach, IEEE Access 13, 2025.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import BSFL
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> strategy = BSFL(clients_per_round=2, min_latency=0.5, alpha=0.1, max_latency=5.0, seed=1)
    >>> strategy.selector.alpha
    0.1
    >>> model = [np.zeros(2)]
    >>> for number in (1, 2, 3):
    ...     model = play_round(strategy, clients, model, number)
    >>> [row.client_id for row in strategy.history.clients]  # every client once, then the two fastest
    ['0', '1', '2', '3', '0', '1']
    >>> BSFL(clients_per_round=5, clock="server").selector.min_latency
    'auto'
    """

    selector_class = selectors.BSFL
    auto_on_server_clock = ("min_latency",)
