"""Federated-learning client selection as Flower strategies.

The algorithms live in :mod:`fedsel_flwr.selectors` (NumPy only), the Flower strategies that carry them in
:mod:`fedsel_flwr.strategies`. Importing this package loads neither Flower nor torch nor ray.
"""

from __future__ import annotations

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, StateError

__version__ = "0.1.0"

__all__ = ["FedSelError", "ParameterError", "RunError", "StateError", "__version__"]
