"""The conformance suite that every selector passes; authors of new selectors run it too.

>>> from functools import partial
>>> from fedsel_flwr.selectors import create
>>> check_selector(partial(create, "random", clients_per_round=3))
"""

from __future__ import annotations

from fedsel_flwr.testing.conformance import CHECKS, SelectorFactory, check_selector, play, report_for

__all__ = ["CHECKS", "SelectorFactory", "check_selector", "play", "report_for"]
