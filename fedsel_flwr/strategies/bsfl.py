"""BSFL (Ben Ami et al.) as a Flower strategy: fast clients, each as often as its data deserve."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class BSFL(PaperStrategy, SelectionStrategy):
    """Trades speed against even participation.

    The paper asks for:
        * Selector: :class:`fedsel_flwr.selectors.BSFL`, with all of its parameters.
        * Averaging: that of ``base``. Filter and validation set: none.
        * Refused: a client that ``data_weights`` does not cover, and on the virtual clock a missing ``min_latency``.

    On the server's clock ``min_latency`` may be left out: "auto" takes the fastest time seen. ``max_latency`` is the
    longest wait for a client.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks newcomers for their ids.
        2. The selector takes the m clients whose slowest upper confidence bound on speed, plus ``alpha`` times their
           mean generalization value, is largest (13).
        3. ``base`` configures the instructions; exactly the chosen clients get them and train.
        4. ``aggregate_fit`` drops unusable updates and lets ``base`` average the others.
        5. The selector counts a play of each chosen client (10), and takes ``min_latency`` / latency into its mean
           speed (11). A client that failed counts as one that needed ``max_latency``.

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
    >>> [row.client_id for row in strategy.history.clients]  # everybody once, then the two fastest
    ['0', '1', '2', '3', '0', '1']
    >>> BSFL(clients_per_round=5, clock="server").selector.min_latency
    'auto'
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.BSFL
    auto_on_server_clock: ClassVar[tuple[str, ...]] = ("min_latency",)
