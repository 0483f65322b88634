"""How updates are averaged, and which of them (Kim et al.): NumPy only."""

from __future__ import annotations

from fedsel_flwr.aggregation.filter import best_subset
from fedsel_flwr.aggregation.schemes import SCHEMES, Averaging, averaging

__all__ = ["SCHEMES", "Averaging", "averaging", "best_subset"]
