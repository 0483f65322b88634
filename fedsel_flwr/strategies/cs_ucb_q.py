"""CS-UCB-Q (Xia et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.paper import PaperStrategy


class CSUCBQ(PaperStrategy):
    """Trains fast clients under a fairness constraint; see :class:`fedsel_flwr.selectors.CSUCBQ`.

    Without ``fairness`` the shares follow the numbers of examples that clients report in the roll call.

    >>> from fedsel_flwr.strategies import CSUCBQ
    >>> strategy = CSUCBQ(clients_per_round=5, max_latency=5.0, fairness_scale=0.4)
    >>> strategy.selector.fairness_scale
    0.4
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.CSUCBQ
