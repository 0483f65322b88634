"""FedCA's combinatorial filter on the models of a round (Kim et al., (4))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedsel_flwr.aggregation.subsets import Score, best_subset
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Filter:
    """FedCA's combinatorial filter.

    Args:
        score: "loss" or "accuracy", of the averaged logits on the validation set.
    """

    score: str = "loss"

    def __post_init__(self) -> None:
        """Check the score."""
        if self.score not in ("loss", "accuracy"):
            raise ParameterError(f"score must be 'loss' or 'accuracy', got {self.score!r}")

    def kept(self, logits: Sequence[FloatArray], labels: IntArray) -> BoolArray:
        """Choose among the models whose logits are finite.

        Args:
            logits: Of each model, shape (n_examples, n_classes).
            labels: Right classes, shape (n_examples,).

        Returns:
            Which models are kept, shape (n_models,).
        """
        return self.copies(logits, labels, np.ones(len(logits), dtype=np.int64)) > 0

    def copies(self, logits: Sequence[FloatArray], labels: IntArray, draws: IntArray) -> IntArray:
        """Choose from a multiset of models, as FedProx draws it: (4) averages and searches the copies.

        Args:
            logits: Of each model, shape (n_examples, n_classes).
            labels: Right classes, shape (n_examples,).
            draws: How often each model's client was drawn, shape (n_models,).

        Returns:
            How many copies of each model are kept, shape (n_models,).

        >>> logits = np.array([[[1.0, 0.0]], [[0.0, 2.0]]])  # right by 1, wrong by 2
        >>> Filter(score="accuracy").kept(logits, np.array([0]))
        array([ True, False])
        >>> Filter(score="accuracy").copies(logits, np.array([0]), np.array([3, 1]))  # together right by 1 / 4
        array([3, 1])
        """
        copies = [i for i, one in enumerate(logits) if np.isfinite(one).all() for _ in range(int(draws[i]))]
        if not copies:
            return np.zeros(len(logits), dtype=np.int64)
        subset, _ = best_subset(np.stack([logits[i] for i in copies]), labels, cast(Score, self.score))  # (4)
        return np.bincount(np.array(copies)[subset], minlength=len(logits)).astype(np.int64)
