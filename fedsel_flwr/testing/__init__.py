"""Conformance suites: checks of the promises of every selector, and of every strategy that wraps a selector.

Run them on your own selectors and strategies too. :func:`check_strategy` needs Flower, and :func:`check_stateful` needs
Hypothesis. Each imports its library when it is called.

>>> from functools import partial
>>> from fedsel_flwr.selectors import create
>>> check_selector(partial(create, "random", clients_per_round=3))

========================  ========================================================================================
room                      contents
========================  ========================================================================================
``random_rounds``         random rounds for a selector: availability, failures and reports
``conformance``           ``check_selector``: choices, columns, growth, failures, saved states; ``check_stateful``
``stateful``              the state machine of ``check_stateful``: calls in random order, from Hypothesis
``fleet``                 simulated clients in plain types: connections, replies and faults
``in_process``            clients in this process, behind Flower's APIs; rounds as in Flower's loop
``harness``               runs of one strategy and their record: in full, a second time, interrupted and resumed
``strategy_conformance``  ``check_strategy``: cohorts, configs, updates, models, identities, history, resuming
========================  ========================================================================================
"""

from __future__ import annotations

from fedsel_flwr.testing.conformance import CHECKS, check_selector, check_stateful
from fedsel_flwr.testing.harness import StrategyFactory
from fedsel_flwr.testing.random_rounds import SelectorFactory, play, report_for
from fedsel_flwr.testing.strategy_conformance import STRATEGY_CHECKS, check_strategy

__all__ = [
    "CHECKS", "STRATEGY_CHECKS", "SelectorFactory", "StrategyFactory", "check_selector", "check_stateful",
    "check_strategy", "play", "report_for",
]  # fmt: skip
