"""The conformance suites: what every selector, and every strategy that wraps one, must do.

Authors of new ones run them too; :func:`check_strategy` needs Flower and loads it when it is called.

>>> from functools import partial
>>> from fedsel_flwr.selectors import create
>>> check_selector(partial(create, "random", clients_per_round=3))
"""

from __future__ import annotations

from fedsel_flwr.testing.conformance import CHECKS, check_selector
from fedsel_flwr.testing.stateful import check_stateful
from fedsel_flwr.testing.strategy_conformance import STRATEGY_CHECKS, check_strategy
from fedsel_flwr.testing.trial import StrategyFactory
from fedsel_flwr.testing.worlds import SelectorFactory, play, report_for

__all__ = [
    "CHECKS",
    "STRATEGY_CHECKS",
    "SelectorFactory",
    "StrategyFactory",
    "check_selector",
    "check_stateful",
    "check_strategy",
    "play",
    "report_for",
]
