"""The direction in which the global model goes, and how far each client's gradient points there (GPFL).

===========  ==========================  =================================================================
paper        here                        meaning
===========  ==========================  =================================================================
d_k          row of ``gradients``        (w^{t-1} - w_k) / eta, the sum over client k's local steps
G^t          ``_direction``              gamma G^{t-1} + (w^{t-1} - w^t) / eta, G^0 = 0
eta          ``learning_rate``           the clients' nominal initial learning rate
gamma        ``momentum``                momentum of the direction
===========  ==========================  =================================================================

References:
    S. Na, Y. Liang, S.-M. Yiu, GPFL, equation (3) and the text around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds import saving


class Direction:
    """Follows the global model.

    Args:
        learning_rate: eta, above 0.
        momentum: gamma, at least 0 and below 1.

    Raises:
        ParameterError: A parameter is out of range.

    >>> import numpy as np
    >>> direction = Direction(learning_rate=0.5, momentum=0.1)
    >>> direction.move(np.array([1.0, 2.0]), np.array([1.0, 0.0]))  # G = (0, 2) / .5
    >>> direction.project(direction.gradients(np.array([[1.5, -1.0]])))  # d = (-3, 2); <d, G> / |G|
    array([2.])
    """

    def __init__(self, learning_rate: float, momentum: float = 0.1) -> None:
        self.learning_rate = real("learning_rate", learning_rate, above=0.0)
        self.momentum = real("momentum", momentum, at_least=0.0)
        if self.momentum >= 1.0:
            raise ParameterError(f"momentum must be below 1, got {momentum!r}")
        self._direction: FloatArray | None = None

    def gradients(self, updates: FloatArray, *, in_place: bool = False) -> FloatArray:
        """d_k of updates w_k - w^{t-1}, both of shape (n_models, parameters); ``in_place`` overwrites the updates."""
        return np.divide(updates, -self.learning_rate, out=updates if in_place else None)  # d_k

    def start(self, gradients: FloatArray) -> None:
        """Begin with the mean of these gradients, shape (n_models, parameters)."""
        self._direction = gradients.mean(axis=0)  # G of round 1, ours

    def move(self, before: FloatArray, after: FloatArray) -> None:
        """Follow the global model from ``before`` to ``after``, shape (parameters,)."""
        old = np.zeros_like(before) if self._direction is None else self._direction
        self._direction = self.momentum * old + (before - after) / self.learning_rate  # G^t

    def project(self, gradients: FloatArray) -> FloatArray:
        """c_k of these gradients, shape (n_models, parameters), on the direction; 0 while it has no length."""
        if self._direction is None or not (length := float(np.linalg.norm(self._direction))):
            return np.zeros(len(gradients))
        return np.asarray(gradients @ self._direction / length)  # (3) of GPFL

    def state_dict(self) -> saving.State:
        """G; an empty array before the first."""
        return {"direction": np.zeros(0) if self._direction is None else self._direction.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, self.state_dict())
        direction = saving.array("direction", state["direction"], np.float64)
        self._direction = direction if direction.size else None

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""
