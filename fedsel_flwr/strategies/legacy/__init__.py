"""The strategy for Flower's legacy API (``configure_fit``, ``aggregate_fit``) that the papers' strategies build on."""

from __future__ import annotations

from fedsel_flwr.strategies.legacy.strategy import SelectionStrategy

__all__ = ["SelectionStrategy"]
