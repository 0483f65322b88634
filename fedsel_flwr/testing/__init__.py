"""Conformance suites: checks of the promises of every selector, and of every strategy that wraps a selector.

Run them on your own selectors and strategies too. :func:`check_strategy` needs Flower, and :func:`check_stateful` needs
Hypothesis. Each imports its library when it is called.

>>> from functools import partial
>>> from fedsel_flwr.selectors import create
>>> check_selector(partial(create, "random", clients_per_round=3))

==============================  =====================================================================================
room                            contents
==============================  =====================================================================================
``random_rounds``               random rounds for a selector: availability, failures and reports
``conformance``                 ``check_selector``: choices, columns, growth and failures; ``check_stateful``
``state_conformance``           checks of a selector's state: save, load, forget, common warm-up, another process
``stateful``                    the state machine of ``check_stateful``: calls in random order, from Hypothesis
``fleet``                       simulated clients in plain types: connections, replies and faults
``in_process``                  clients in this process, behind Flower's APIs; one round with functions as clients
``observed_run``                the record of a run: cohorts, replies, configs, models and reports by round
``flower_rounds``               rounds with the fleet: Flower's loop in either API
``harness``                     runs of one strategy: in full, a second time, interrupted and resumed
``strategy_conformance``        ``check_strategy``: cohorts, configs, updates and models
``strategy_state_conformance``  checks of a strategy's state: identities, history, the selector's reports, resuming
==============================  =====================================================================================
"""

from __future__ import annotations

from fedsel_flwr.testing.conformance import CHECKS, check_selector, check_stateful
from fedsel_flwr.testing.harness import StrategyFactory
from fedsel_flwr.testing.random_rounds import SelectorFactory, play, report_for
from fedsel_flwr.testing.strategy_conformance import STRATEGY_CHECKS, check_strategy

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
