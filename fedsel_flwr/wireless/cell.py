"""The cell's random draws: clients uniformly over a disc around the access point, and Rayleigh fading.

References:
    Xia et al., "Multi-armed bandit-based client scheduling for federated learning", section V-A: "Rayleigh
    distribution with uniform variance". The square of a Rayleigh amplitude is exponential; with unit mean it leaves
    the average gain to the path loss.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np
from numpy.typing import NDArray

from fedsel_flwr.errors import ParameterError


@overload
def uniform_disc(
    generator: np.random.Generator, *, radius_km: float = 0.5, min_distance_km: float = 0.001, size: None = None
) -> float: ...
@overload
def uniform_disc(
    generator: np.random.Generator,
    *,
    radius_km: float = 0.5,
    min_distance_km: float = 0.001,
    size: int | tuple[int, ...],
) -> NDArray[np.float64]: ...
def uniform_disc(
    generator: np.random.Generator,
    *,
    radius_km: float = 0.5,
    min_distance_km: float = 0.001,
    size: int | tuple[int, ...] | None = None,
) -> float | NDArray[np.float64]:
    """Draw the distance to the centre of points that are uniform over a disc.

    A point is within d of the centre with probability (d / radius)^2, so the distance is radius x sqrt(U[0, 1)).

    Args:
        generator: Source of randomness; it advances.
        radius_km: Radius of the disc, km.
        min_distance_km: Points nearer than this are moved out to it, km, at most `radius_km`.
        size: Shape of the draws; None draws one number.

    Returns:
        Distances in km.

    Raises:
        ParameterError: Unless 0 <= min_distance_km <= radius_km, both finite, and radius_km > 0.

    References:
        Xia et al., section V-A; the smallest distance is ours.

    Example:
        >>> distance = uniform_disc(np.random.default_rng(1), size=100_000)
        >>> round(float((distance < 0.25).mean()), 2)
        0.25
    """
    if not (math.isfinite(radius_km) and radius_km > 0):
        raise ParameterError(f"radius_km must be a finite number above 0, got {radius_km!r}. Give the disc's radius")
    if not 0 <= min_distance_km <= radius_km:
        raise ParameterError(
            f"min_distance_km must lie between 0 and radius_km = {radius_km!r}, got {min_distance_km!r}. "
            "Lower it or enlarge the disc"
        )
    distance = np.maximum(radius_km * np.sqrt(generator.random(size)), min_distance_km)
    return float(distance) if size is None else distance


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
