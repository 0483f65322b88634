"""CS-UCB and CS-UCB-Q (Xia et al.) as Flower strategies: fast clients, in CS-UCB-Q each with its share of rounds."""

from __future__ import annotations

from fedsel_flwr import selectors
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class CSUCB(PaperStrategy, SelectionStrategy):
    """Trains the clients that answer fastest, by an upper confidence bound on their reward.

    The paper asks for:
        * Selector: :class:`fedsel_flwr.selectors.CSUCB`, with all of its parameters.
        * Averaging: that of ``base``. Filter and validation set: none.

    On the virtual clock ``max_latency`` is required.

    On the server's clock ``max_latency`` is optional. Its default "auto" scales the rewards by the slowest completed
    play, and ``longest_wait`` (60 s) limits the wait for a client. A number as ``max_latency`` sets both.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids.
        2. The selector takes the m clients with the largest mean reward plus confidence radius (18). Clients without a
           play come first.
        3. ``base`` configures the instructions. Exactly the selected clients get them and train.
        4. ``aggregate_fit`` drops unusable updates and lets ``base`` average the others.
        5. The selector adds the reward 1 - latency / ``max_latency`` of each selected client to its mean (16), (17).
           A failed client counts as a client that needed ``max_latency``.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import CSUCB
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> strategy = CSUCB(clients_per_round=2, max_latency=5.0, seed=1)
    >>> strategy.selector.max_latency
    5.0
    >>> model = [np.zeros(2)]
    >>> for number in (1, 2, 3):
    ...     model = play_round(strategy, clients, model, number)
    >>> [row.client_id for row in strategy.history.clients]  # every client once, then the two fastest
    ['0', '1', '2', '3', '0', '1']
    >>> strategy = CSUCB(clients_per_round=5, longest_wait=30.0, clock="server")
    >>> strategy.selector.max_latency, strategy.core.settings.max_latency
    ('auto', 30.0)
    """

    selector_class = selectors.CSUCB
    auto_on_server_clock = ("max_latency",)


class CSUCBQ(PaperStrategy, SelectionStrategy):
    """Trains fast clients under a fairness constraint: each client gets at least its share of the rounds.

    The paper asks for:
        * Selector: :class:`fedsel_flwr.selectors.CSUCBQ`, with all of its parameters.
        * Averaging: that of ``base``. Filter and validation set: none.

    On the virtual clock ``max_latency`` is required. This class refuses a ``fairness`` that does not cover a client or
    that has a sum above m, and a share above ``max_participation``.

    On the server's clock ``max_latency`` is optional. Its default "auto" scales the rewards by the slowest completed
    play, and ``longest_wait`` (60 s) limits the wait for a client. A number as ``max_latency`` sets both.

    Without ``fairness``, the shares follow the numbers of examples that clients report in the roll call.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids and data sizes.
        2. Each client's virtual queue grows by its share, and falls by 1 if the last round selected the client (27).
           The selector takes the m clients with the largest weighted sum of optimistic reward (26) and queue (28).
        3. ``base`` configures the instructions. Exactly the selected clients get them and train.
        4. ``aggregate_fit`` drops unusable updates and lets ``base`` average the others.
        5. The selector adds the reward 1 - latency / ``max_latency`` of each selected client to its mean (16), (17).
           A failed client counts as a client that needed ``max_latency``, and as served.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import CSUCBQ
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> shares = {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.9}
    >>> strategy = CSUCBQ(clients_per_round=2, max_latency=5.0, fairness=shares, queue_weight=0.9, seed=1)
    >>> strategy.selector.queue_weight
    0.9
    >>> model = [np.zeros(2)]
    >>> for number in range(1, 6):
    ...     model = play_round(strategy, clients, model, number)
    >>> [row.client_id for row in strategy.history.clients]  # client 3 is the slowest
    ['0', '1', '0', '3', '0', '3', '2', '3', '1', '3']
    >>> strategy = CSUCBQ(clients_per_round=5, longest_wait=30.0, clock="server")
    >>> strategy.selector.max_latency, strategy.core.settings.max_latency
    ('auto', 30.0)
    """

    selector_class = selectors.CSUCBQ
    auto_on_server_clock = ("max_latency",)
