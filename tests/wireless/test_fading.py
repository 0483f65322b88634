"""The power of Rayleigh fading is exponential with mean 1."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.wireless import rayleigh_power


def test_unit_exponential() -> None:
    """Mean 1, variance 1 and P(X > x) = e^-x: each within 5 standard errors at n = 200,000."""
    n = 200_000
    power = rayleigh_power(np.random.default_rng(20), n)
    assert power.mean() == pytest.approx(1.0, abs=5 / math.sqrt(n))
    assert power.var() == pytest.approx(
        1.0, abs=5 * math.sqrt(8 / n)
    )  # Var of the sample variance: (mu4 - 1) / n = 8/n
    for x in (0.01, 0.5, 1.0, 3.0):
        tail = math.exp(-x)
        assert (power > x).mean() == pytest.approx(tail, abs=5 * math.sqrt(tail * (1 - tail) / n))


def test_it_is_the_square_of_a_rayleigh_amplitude() -> None:
    """|h|^2 of a complex normal h with variance 1/2 per part has the same quantiles.

    Standard error of the lowest one: sqrt(0.1 x 0.9 / n) / (0.9 x 0.105) = 0.7%, and 1% between two samples.
    """
    generator = np.random.default_rng(21)
    parts = generator.normal(scale=math.sqrt(0.5), size=(2, 200_000))
    levels = [0.1, 0.5, 0.9, 0.99]
    drawn = np.quantile(rayleigh_power(generator, 200_000), levels)
    np.testing.assert_allclose(drawn, np.quantile((parts**2).sum(axis=0), levels), rtol=0.04)
    np.testing.assert_allclose(drawn, -np.log1p(-np.array(levels)), rtol=0.03)


def test_shapes_and_reproducibility() -> None:
    """No size gives one float; the same generator state gives the same draws."""
    assert isinstance(rayleigh_power(np.random.default_rng(1)), float)
    assert rayleigh_power(np.random.default_rng(1), (2, 3)).shape == (2, 3)
    first, second = (rayleigh_power(np.random.default_rng(1), 4) for _ in range(2))
    np.testing.assert_array_equal(first, second)
