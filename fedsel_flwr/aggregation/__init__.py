"""Aggregation of updates by Kim et al.: the model filter and the averaging schemes. NumPy only.

===========  =====================================================================
``filter``   FedCA's combinatorial filter, which selects the models to average
``schemes``  averaging schemes: the weights of the kept models and of the old one
===========  =====================================================================
"""

from __future__ import annotations

from fedsel_flwr.aggregation.filter import best_subset
from fedsel_flwr.aggregation.schemes import SCHEMES, Averaging, averaging

__all__ = ["SCHEMES", "Averaging", "averaging", "best_subset"]
