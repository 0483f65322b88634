"""The conformance suite plays any number of clients a round from 1 to 100, and refuses others in words."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.testing import CHECKS, check_selector, check_stateful
from fedsel_flwr.testing.conformance import check_dead_client, check_empty_and_short, check_many_clients
from fedsel_flwr.testing.state_conformance import check_spawned_process

QUICK = [check for check in CHECKS if check not in (check_spawned_process, check_many_clients)]
"""The others take a second each whatever the number is, and play it in the suite's own tests."""
SELECTORS: dict[str, dict[str, Any]] = {
    "active-fl": {}, "bsfl": {"min_latency": 0.1}, "cs-ucb": {"max_latency": 5.0}, "gpfl": {"total_rounds": 100},
    "lsh": {}, "power-of-choice": {}, "tifl": {},
}  # fmt: skip


@pytest.mark.parametrize("clients_per_round", [1, 2, 8])
@pytest.mark.parametrize("name", SELECTORS)
def test_good_selectors_pass(name: str, clients_per_round: int) -> None:
    for check in QUICK:
        check(partial(create, name, clients_per_round=clients_per_round, **SELECTORS[name]))


@pytest.mark.parametrize("clients_per_round", [1, 8])
def test_every_order_of_calls(clients_per_round: int) -> None:
    make = partial(create, "cs-ucb", clients_per_round=clients_per_round, max_latency=5.0)
    check_stateful(make, sequences=10)


class Clinging(Random):
    """Asks client 0 whenever it is there, dead or alive."""

    def _select(self, available: IntArray) -> IntArray:
        score = np.zeros(max(available) + 1)
        score[0] = 1.0
        return self._largest(score, available)


class Stingy(Random):
    """Chooses one client fewer than it says."""

    def _select(self, available: IntArray) -> IntArray:
        return super()._select(available)[:-1]


@pytest.mark.parametrize("clients_per_round", [1, 3, 8, 20])
def test_broken_promises_are_found_whatever_the_number(clients_per_round: int) -> None:
    with pytest.raises(AssertionError, match="a dead client is not asked for ever"):
        check_dead_client(partial(Clinging, clients_per_round=clients_per_round))
    with pytest.raises(AssertionError, match=r"[12] clients are chosen, as expected_count says"):
        check_empty_and_short(partial(Stingy, clients_per_round=clients_per_round))


def test_a_selector_of_one_that_takes_both_is_found() -> None:
    class Greedy(Random):
        def _select(self, available: IntArray) -> IntArray:
            return available

    with pytest.raises(AssertionError, match="no more clients are chosen than clients_per_round says"):
        check_empty_and_short(partial(Greedy, clients_per_round=1))


class Odd(Random):
    """Has a number that is none."""

    def __init__(self, *, clients_per_round: Any, seed: int | None = None) -> None:
        super().__init__(clients_per_round=3, seed=seed)
        self.clients_per_round = clients_per_round


@pytest.mark.parametrize("number", [0, 101, 2.5, "3"])
@pytest.mark.parametrize("check", [check_selector, check_stateful])
def test_other_numbers_are_refused(check: Any, number: Any) -> None:
    with pytest.raises(ParameterError, match="clients_per_round must be a whole number from 1 to 100, or None"):
        check(partial(Odd, clients_per_round=number))
