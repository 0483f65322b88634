"""Clients stand uniformly over a disc."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import uniform_disc


def test_uniform_over_the_area() -> None:
    """P(d < r) = (r/R)^2: half the radius holds a quarter; within 5 standard errors at n = 200,000."""
    n = 200_000
    distance = uniform_disc(np.random.default_rng(3), size=n)
    assert distance.max() < 0.5
    assert distance.min() >= 0.001
    for share in (0.1, 0.5, 0.9):
        inside = share**2
        assert (distance < share * 0.5).mean() == pytest.approx(inside, abs=5 * math.sqrt(inside * (1 - inside) / n))
    assert distance.mean() == pytest.approx(0.5 * 2 / 3, abs=5 * 0.5 / math.sqrt(18 * n))  # 2R/3, variance R^2/18


def test_minimum_distance() -> None:
    """With a minimum of half the radius, the inner quarter of the points stands on the minimum."""
    distance = uniform_disc(np.random.default_rng(3), radius_km=2.0, min_distance_km=1.0, size=10_000)
    assert distance.min() == 1.0
    assert (distance == 1.0).mean() == pytest.approx(0.25, abs=0.022)
    assert uniform_disc(np.random.default_rng(3), radius_km=1.0, min_distance_km=1.0) == 1.0


def test_one_draw_is_a_float_equal_to_the_formula() -> None:
    """R sqrt(u) with the generator's next u."""
    u = np.random.default_rng(9).random()
    drawn = uniform_disc(np.random.default_rng(9), radius_km=0.7)
    assert isinstance(drawn, float)
    assert drawn == pytest.approx(0.7 * math.sqrt(u), rel=1e-15)


@pytest.mark.parametrize(
    ("radius", "minimum", "name"),
    [
        (0.0, 0.0, "radius_km"),
        (math.nan, 0.001, "radius_km"),
        (math.inf, 0.001, "radius_km"),
        (0.5, 0.6, "min_distance_km"),
        (0.5, -0.1, "min_distance_km"),
        (0.5, math.nan, "min_distance_km"),
    ],
)
def test_wrong_radius(radius: float, minimum: float, name: str) -> None:
    """The message starts with the name of what is wrong."""
    with pytest.raises(ParameterError, match=f"^{name} must"):
        uniform_disc(np.random.default_rng(1), radius_km=radius, min_distance_km=minimum)
