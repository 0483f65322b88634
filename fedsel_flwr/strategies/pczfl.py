"""PCZFL as a Flower strategy of either API."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class PCZFL(PaperStrategy):
    """Trains the clients on the Pareto front of accuracy and energy; see :class:`fedsel_flwr.selectors.PCZFL`.

    ``validation`` is the server's interview set. Clients report ``energy_score``, or ``energy_j``, from which the
    score is derived.
    """

    selector_class: ClassVar[type[selectors.Selector]] = selectors.PCZFL
