"""Small-scale fading: the power of a Rayleigh channel.

References:
    Xia et al., "Multi-armed bandit-based client scheduling for federated learning", section V-A: "Rayleigh
    distribution with uniform variance". The square of a Rayleigh amplitude is exponential; with unit mean it leaves
    the average gain to the path loss.
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray


@overload
def rayleigh_power(generator: np.random.Generator, size: None = None) -> float: ...
@overload
def rayleigh_power(generator: np.random.Generator, size: int | tuple[int, ...]) -> NDArray[np.float64]: ...
def rayleigh_power(
    generator: np.random.Generator, size: int | tuple[int, ...] | None = None
) -> float | NDArray[np.float64]:
    """Draw the power of Rayleigh fading: exponential with mean 1.

    Args:
        generator: Source of randomness; it advances.
        size: Shape of the draws; None draws one number.

    Returns:
        Fading power, dimensionless.

    References:
        Xia et al., section V-A.

    Example:
        >>> draws = rayleigh_power(np.random.default_rng(1), 100_000)
        >>> round(float(draws.mean()), 2)
        1.0
    """
    return generator.standard_exponential(size)
