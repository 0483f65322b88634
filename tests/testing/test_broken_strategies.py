"""Each promise of the strategies' conformance suite is broken on purpose; the suite must name it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fedsel_flwr.testing import STRATEGY_CHECKS, check_strategy
from tests.testing.broken_strategies import BROKEN, Break
from tests.testing.strategies_under_test import APIS, ARRAYS, wrapped

PAIRS = [(api, broken) for broken in BROKEN for api in APIS]
QUICK = PAIRS[::4] + PAIRS[3::4]
"""Each once, half of them in either API."""


def broken_strategy(api: str, broken: Break) -> Any:
    strategy = wrapped(api, "cs-ucb", "FedAvg")
    broken(strategy, api)
    return strategy


def expect_complaint(api: str, broken: Break) -> None:
    with pytest.raises(AssertionError, match=f"(?s)broken promise: {BROKEN[broken]}"):
        check_strategy(partial(broken_strategy, api, broken), ARRAYS)


@pytest.mark.parametrize(("api", "broken"), QUICK, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_the_broken_promise_is_named(api: str, broken: Break) -> None:
    expect_complaint(api, broken)


@pytest.mark.slow
def test_it_is_named_in_the_other_api_as_well() -> None:
    for api, broken in PAIRS:
        if (api, broken) not in QUICK:
            expect_complaint(api, broken)


@pytest.mark.parametrize("api", APIS)
def test_choices_without_a_seed_are_found_out(api: str) -> None:
    with pytest.raises(AssertionError, match="the same seed gives the same choices, from round 1 on they differ: give"):
        check_strategy(partial(wrapped, api, "random", "FedAvg", {"seed": None}), ARRAYS)


def test_no_check_goes_without_a_broken_strategy() -> None:
    assert len(BROKEN) + 1 >= len(STRATEGY_CHECKS)
