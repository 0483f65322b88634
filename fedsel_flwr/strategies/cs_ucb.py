"""CS-UCB (Xia et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class CSUCB(PaperStrategy):
    """Trains the clients with the largest upper confidence bound on speed; see :class:`fedsel_flwr.selectors.CSUCB`.

    On the server's clock ``max_latency`` may be left out: "auto" takes the slowest time seen for the rewards, and
    ``longest_wait`` (60 s) is how long a client may take. A number given as ``max_latency`` is both.

    >>> from fedsel_flwr.strategies import CSUCB
    >>> strategy = CSUCB(clients_per_round=5, max_latency=5.0)
    >>> strategy.selector.max_latency
    5.0
    >>> strategy = CSUCB(clients_per_round=5, longest_wait=30.0, clock="server")
    >>> strategy.selector.max_latency, strategy.core.settings.max_latency
    ('auto', 30.0)
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.CSUCB
    auto: ClassVar[tuple[str, ...]] = ("max_latency",)
