"""FedCA's combinatorial filter on the models of a round (Kim et al., (4))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedsel_flwr.aggregation import best_subset
from fedsel_flwr.aggregation.subsets import Score
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
        kept = np.zeros(len(logits), dtype=np.bool_)
        finite = [i for i, one in enumerate(logits) if np.isfinite(one).all()]
        if finite:
            subset, _ = best_subset(np.stack([logits[i] for i in finite]), labels, cast(Score, self.score))
            kept[np.array(finite)[subset]] = True
        return kept
