"""A client's hash: by hand, the same on every client, and as far apart as the angle between the data says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.clients.answering import SKETCH_BITS, sketch
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.errors import ParameterError


def test_bits_by_hand() -> None:
    """Two examples of shape (1, 2) with the mean (2, -1): bit b is whether 2 h_b1 - h_b2 is above 0."""
    planes = stream(5, "sketch", 0).standard_normal((SKETCH_BITS, 2))
    expected = [float(2 * one - other > 0) for one, other in planes.tolist()]
    assert 10 < sum(expected) < 54
    assert sketch(np.array([[[1.0, 0.0]], [[3.0, -2.0]]], np.float32), 5).tolist() == expected
    assert sketch(np.array([[[1.0, 0.0]], [[3.0, -2.0]]], np.float32), 6).tolist() != expected


def test_the_hash_says_nothing_but_bits() -> None:
    bits = sketch(np.random.default_rng(0).normal(size=(9, 28, 28)).astype(np.float32), 1)
    assert (bits.dtype, bits.shape) == (np.float32, (64,))
    assert set(bits.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("degrees", [10, 45, 90, 150])
def test_the_share_of_different_bits_is_the_angle_over_pi(degrees: int) -> None:
    """Over 100 seeds, 6,400 bits: within 4.5 standard deviations of degrees / 180."""
    angle = math.radians(degrees)
    one, other = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32)
    one[:, 0], other[:, 0], other[:, 3] = 2.0, math.cos(angle), math.sin(angle)
    shares = [float((sketch(one, seed) != sketch(other, seed)).mean()) for seed in range(100)]
    deviation = math.sqrt(degrees / 180 * (1 - degrees / 180) / 6400)
    assert abs(float(np.mean(shares)) - degrees / 180) < 4.5 * deviation


def test_no_examples() -> None:
    with pytest.raises(ParameterError, match="at least one training example, got none"):
        sketch(np.zeros((0, 3), np.float32), 1)
