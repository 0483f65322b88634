"""The conformance suite that every selector passes; authors of new selectors run it too.

>>> from functools import partial
>>> from fedsel_flwr.selectors import create
>>> check_selector(partial(create, "random", clients_per_round=3))
"""

from __future__ import annotations

from fedsel_flwr.testing.conformance import CHECKS, check_selector
from fedsel_flwr.testing.stateful import check_stateful
from fedsel_flwr.testing.worlds import SelectorFactory, play, report_for

__all__ = ["CHECKS", "SelectorFactory", "check_selector", "check_stateful", "play", "report_for"]
