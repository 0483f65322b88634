"""Clients on whose data the model does worst, a baseline of Xia et al."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors.base import Probe, Selector


class LocalAccuracy(Selector):
    """Asks every available client for the current model's accuracy on its test data and takes the lowest m.

    Deviations: the paper does not say how the server learns the accuracies. Here they are a probe before each round,
    whose time and energy are charged; clients whose answer is NaN come last; one that is not informed about keeps its
    former answer. In a common warm-up of all selectors nobody is asked.

    Args:
        clients_per_round: How many clients to choose each round (m).
        seed: Seed of the generator that breaks ties.

    References:
        Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B,
        "local accuracy based scheduling".

    >>> import numpy as np
    >>> selector = LocalAccuracy(clients_per_round=1)
    >>> selector.probe(np.arange(3)).columns
    ('local_accuracy',)
    >>> selector.inform(np.arange(3), local_accuracy=np.array([0.9, 0.4, 0.7]))
    >>> selector.select(np.arange(3))
    array([1])
    """

    name: ClassVar[str] = "local-accuracy"
    asks: ClassVar[frozenset[str]] = frozenset({"local_accuracy"})
    client_state: ClassVar[dict[str, float | int]] = {"_accuracy": 2.0}  # 2, above every accuracy, where unknown

    _accuracy: FloatArray

    def _probe(self, available: IntArray) -> Probe:
        return Probe(clients=available, columns=("local_accuracy",))

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(-self._accuracy, available)

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        if "local_accuracy" in columns:
            answers = columns["local_accuracy"]
            self._accuracy[clients] = np.where(np.isfinite(answers), answers, 2.0)
