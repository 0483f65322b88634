"""Uniformly random selection, the baseline of every paper."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr.checks import IntArray
from fedsel_flwr.selectors.base import Selector


class Random(Selector):
    """Chooses uniformly at random without replacement, as FedAvg does.

    Deviations: none.

    Args:
        clients_per_round: How many clients to choose each round (m).
        seed: Seed of the selector's generator.

    References:
        McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
        Algorithm 1.

    >>> import numpy as np
    >>> Random(clients_per_round=2, seed=3).select(np.arange(5)).size
    2
    """

    name: ClassVar[str] = "random"

    def _select(self, available: IntArray) -> IntArray:
        return self._generator.permutation(available)[: self.asked_per_round]
