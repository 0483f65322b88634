"""Synthetic data for linear regression, drawn by the seed: no file, no network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import real, whole
from fedsel_flwr.clients.streams import stream

Numbers = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A linear model with noise: y = w·x + b + noise, x of independent standard normal features.

    w is normal with variance 1 / num_features, so that w·x has a variance of about 1, and b is standard normal. The
    best R² is about 1 / (1 + noise²).

    Deviations: Ben Ami et al. give neither the number of examples, nor that of features, nor a law of anything; all of
    them are ours. Their non-i.i.d. scenario differs from the i.i.d. one in how much data each client has (section V-A):
    that is the partition's part, for example ``partition.kind = "sizes"``.

    Args:
        num_examples: How many examples, at least 1.
        num_features: How many features, at least 1.
        noise: Standard deviation of the noise, at least 0.

    Raises:
        ParameterError: If a value is out of its range.

    References:
        D. Ben Ami, K. Cohen and Q. Zhao, "Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach", section V, Figs. 5 and 8: "synthetic data for linear regression".
    """

    num_examples: int = 6000
    num_features: int = 20
    noise: float = 0.5

    def __post_init__(self) -> None:
        """Check every value."""
        whole("synthetic_examples", self.num_examples, 1)
        whole("synthetic_features", self.num_features, 1)
        real("synthetic_noise", self.noise, at_least=0.0)

    def draw(self, seed: int) -> Numbers:
        """Draw the examples.

        Args:
            seed: Seed of the run.

        Returns:
            Inputs, float32 of shape (num_examples, num_features), and numbers to predict, float32 of shape
            (num_examples,).

        Example:
            >>> inputs, numbers = Synthetic(num_examples=3, num_features=2).draw(seed=1)
            >>> inputs.shape, numbers.shape
            ((3, 2), (3,))
        """
        generator = stream(seed, "synthetic", 0)
        weights = generator.standard_normal(self.num_features) / np.sqrt(self.num_features)
        bias = generator.standard_normal()
        inputs = generator.standard_normal((self.num_examples, self.num_features))
        noise = self.noise * generator.standard_normal(self.num_examples)
        numbers = inputs @ weights + bias + noise
        return inputs.astype(np.float32), numbers.astype(np.float32)
