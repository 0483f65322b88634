"""GPFL as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class GPFL(PaperStrategy):
    """Trains the clients whose gradients point the global model's way; see :class:`fedsel_flwr.selectors.GPFL`.

    Round 1 measures every available client and keeps the model. Models are averaged without weights (section II);
    give the clients' nominal initial ``learning_rate`` and a ``validation`` set.
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.GPFL
