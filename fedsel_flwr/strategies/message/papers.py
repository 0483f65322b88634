"""The papers' strategies for the Message API; see the classes of the same names in :mod:`fedsel_flwr.selectors`."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr import selectors
from fedsel_flwr.strategies.combinatorial import CombinatorialAveraging, CombinatorialBandit
from fedsel_flwr.strategies.message.strategy import SelectionStrategy
from fedsel_flwr.strategies.paper import PaperStrategy


class CSUCB(PaperStrategy, SelectionStrategy):
    """CS-UCB (Xia et al.): see :class:`fedsel_flwr.selectors.CSUCB`."""

    selector_class: ClassVar[type[selectors.Selector]] = selectors.CSUCB


class CSUCBQ(PaperStrategy, SelectionStrategy):
    """CS-UCB-Q (Xia et al.): see :class:`fedsel_flwr.selectors.CSUCBQ`."""

    selector_class: ClassVar[type[selectors.Selector]] = selectors.CSUCBQ


class BSFL(PaperStrategy, SelectionStrategy):
    """BSFL (Ben Ami et al.): see :class:`fedsel_flwr.selectors.BSFL`."""

    selector_class: ClassVar[type[selectors.Selector]] = selectors.BSFL


class PCZFL(PaperStrategy, SelectionStrategy):
    """PCZFL: see :class:`fedsel_flwr.selectors.PCZFL`; ``validation`` is the server's interview set."""

    selector_class: ClassVar[type[selectors.Selector]] = selectors.PCZFL


class GPFL(PaperStrategy, SelectionStrategy):
    """GPFL: see :class:`fedsel_flwr.selectors.GPFL`; give ``learning_rate`` and ``validation``."""

    selector_class: ClassVar[type[selectors.Selector]] = selectors.GPFL


class FedCA(CombinatorialAveraging, SelectionStrategy):
    """FedCA (Kim et al.): see :class:`CombinatorialAveraging` for the parameters."""


class FedCM(CombinatorialBandit, SelectionStrategy):
    """FedCM (Kim et al.): see :class:`CombinatorialBandit` for the parameters."""
