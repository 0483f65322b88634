"""BSFL (Ben Ami et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class BSFL(PaperStrategy):
    """Trades speed against even participation; see :class:`fedsel_flwr.selectors.BSFL`.

    On the server's clock ``min_latency`` may be left out: "auto" takes the fastest time seen. ``max_latency`` is the
    longest wait for a client.

    >>> from fedsel_flwr.strategies import BSFL
    >>> strategy = BSFL(clients_per_round=5, min_latency=0.05, alpha=2.0, max_latency=5.0)
    >>> strategy.selector.alpha
    2.0
    >>> BSFL(clients_per_round=5, clock="server").selector.min_latency
    'auto'
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.BSFL
    auto: ClassVar[tuple[str, ...]] = ("min_latency",)
