"""Conformance suites: the promises of every selector, and of every strategy that wraps one, as checks.

Authors of selectors and strategies run them too. :func:`check_strategy` needs Flower, :func:`check_stateful` needs
Hypothesis; each imports it when it is called.

>>> from functools import partial
>>> from fedsel_flwr.selectors import create
>>> check_selector(partial(create, "random", clients_per_round=3))

==============================  =====================================================================================
room                            contents
==============================  =====================================================================================
``random_rounds``               rounds for a selector: availability, failures and reports, drawn at random
``conformance``                 ``check_selector``: choices, columns, growth, failures; ``check_stateful``
``state_conformance``           a selector's state: save, load, forget, common warm-up, another process
``stateful``                    the state machine of ``check_stateful``: calls in random order, by Hypothesis
``fleet``                       simulated clients in plain types: connections, replies and faults
``in_process``                  clients as proxies and grid of Flower's APIs; one round with functions for clients
``observed_run``                the record of a run: cohorts, replies, configs, models and reports by round
``flower_rounds``               rounds of the fleet: Flower's loop in either API
``harness``                     runs of one strategy: in full, a second time, interrupted and resumed
``strategy_conformance``        ``check_strategy``: cohorts, configs, updates and models
``strategy_state_conformance``  a strategy's state: identities, history, the selector's reports, resumption
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
