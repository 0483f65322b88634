"""FedCA and FedCM (Kim et al.) as Flower strategies."""

from __future__ import annotations

from fedsel_flwr.strategies.combinatorial import CombinatorialAveraging, CombinatorialBandit
from fedsel_flwr.strategies.legacy import SelectionStrategy


class FedCA(CombinatorialAveraging, SelectionStrategy):
    """Averages the best combination of a round's models; see :class:`CombinatorialAveraging` for the parameters."""


class FedCM(CombinatorialBandit, SelectionStrategy):
    """FedCA with bandit sampling; see :class:`CombinatorialBandit` for the parameters."""
