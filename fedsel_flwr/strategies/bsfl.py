"""BSFL (Ben Ami et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.paper import PaperStrategy


class BSFL(PaperStrategy):
    """Trades speed against even participation; see :class:`fedsel_flwr.selectors.BSFL`.

    >>> from fedsel_flwr.strategies import BSFL
    >>> strategy = BSFL(clients_per_round=5, min_latency=0.05, alpha=2.0, max_latency=5.0)
    >>> strategy.selector.alpha
    2.0
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.BSFL
