"""CS-UCB (Xia et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.paper import PaperStrategy


class CSUCB(PaperStrategy):
    """Trains the clients with the largest upper confidence bound on speed; see :class:`fedsel_flwr.selectors.CSUCB`.

    >>> from fedsel_flwr.strategies import CSUCB
    >>> strategy = CSUCB(clients_per_round=5, max_latency=5.0)
    >>> strategy.selector.max_latency
    5.0
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.CSUCB
