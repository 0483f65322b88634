"""Flower strategies that choose their clients with a selector.

The names here are for Flower's legacy API (``configure_fit``, ``aggregate_fit``); the same ones for the Message API
stand in :mod:`fedsel_flwr.strategies.message`. They are loaded when first used: ``import fedsel_flwr.strategies`` alone
loads nothing of Flower.

======================  =============================================================================================
``adapter``             options and attributes of every strategy, around the course of a round
``between_rounds``      the checkpoint, the central evaluation, and the word to whoever waits for a round
``resuming``            when checkpoints are written, and how a run goes on; ``made_for``: from which of them
``base_state``          what base strategies keep from round to round
``paper``               what the papers' strategies share; the list of them, of which both APIs' classes are made
``bsfl``, ``gpfl``, …   what each paper asks of a strategy
``bases``               what must be known of the base strategies that are wrapped; ``trees``: of boosted trees
``waiting``             waiting for clients, never for ever
``silence``             why there is no answer, in plain words
``legacy``, ``message`` Flower's two APIs: ``strategy`` (the wrapper), ``asking`` (roll call and probes), ``cohort`` or
                        ``grids`` (what a base sees of Flower), ``replies`` or ``records`` and ``cleaning`` (between
                        Flower's types and ours, and what a base sees of the replies),
                        ``saving`` (models in checkpoints)
======================  =============================================================================================
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedsel_flwr.strategies.wrapping.paper import PAPERS, in_api

if TYPE_CHECKING:
    from fedsel_flwr.aggregation.filter import Filter
    from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord
    from fedsel_flwr.rounds.measuring import Validation
    from fedsel_flwr.rounds.settings import MetricKeys
    from fedsel_flwr.strategies.selection_strategy import SelectionStrategy

_HOMES = {
    "ClientRecord": "rounds.history",
    "Filter": "aggregation.filter",
    "History": "rounds.history",
    "MetricKeys": "rounds.settings",
    "RoundRecord": "rounds.history",
    "SelectionStrategy": "strategies.selection_strategy",
    "Validation": "rounds.measuring",
}

__all__ = [
    "BSFL",
    "CSUCB",
    "CSUCBQ",
    "GPFL",
    "PCZFL",
    "ClientRecord",
    "FedCA",
    "FedCM",
    "Filter",
    "History",
    "MetricKeys",
    "RoundRecord",
    "SelectionStrategy",
    "Validation",
]


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name in PAPERS:
        value: Any = in_api(name, __getattr__("SelectionStrategy"), __name__)
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"fedsel_flwr.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names that can be loaded."""
    return sorted(__all__)
