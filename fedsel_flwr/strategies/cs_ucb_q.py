"""CS-UCB-Q (Xia et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class CSUCBQ(PaperStrategy):
    """Trains fast clients under a fairness constraint; see :class:`fedsel_flwr.selectors.CSUCBQ`.

    On the server's clock ``max_latency`` may be left out: "auto" takes the slowest time seen for the rewards, and
    ``longest_wait`` (60 s) is how long a client may take. A number given as ``max_latency`` is both.

    Without ``fairness`` the shares follow the numbers of examples that clients report in the roll call.

    >>> from fedsel_flwr.strategies import CSUCBQ
    >>> strategy = CSUCBQ(clients_per_round=5, max_latency=5.0, fairness_scale=0.4)
    >>> strategy.selector.fairness_scale
    0.4
    >>> strategy = CSUCBQ(clients_per_round=5, longest_wait=30.0, clock="server")
    >>> strategy.selector.max_latency, strategy.core.settings.max_latency
    ('auto', 30.0)
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.CSUCBQ
    auto: ClassVar[tuple[str, ...]] = ("max_latency",)
