"""Every selector by name passes the conformance suite."""

from functools import partial

import numpy as np
import pytest

from fedsel_flwr.checks import IntArray
from fedsel_flwr.selectors import Random, create, names
from fedsel_flwr.testing import CHECKS, check_selector

PARAMETERS = {
    "cs-ucb": {"max_latency": 5.0},
    "bsfl": {"min_latency": 0.1, "alpha": 1.0},
    "cs-ucb-q": {"max_latency": 5.0},
    "gpfl": {"total_rounds": 100},
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", names())
def test_conformance(name, check):
    check(partial(create, name, clients_per_round=3, **PARAMETERS.get(name, {})))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_sampling_with_replacement(check):
    check(partial(create, "random-by-size", clients_per_round=3, replacement=True))


class Greedy(Random):
    """Breaks several promises: always the same clients, unavailable ones and global randomness included."""

    def _select(self, available: IntArray) -> IntArray:
        return np.array([0, 1, 2])


class GlobalState(Random):
    """Draws from the global generator."""

    def _select(self, available: IntArray) -> IntArray:
        return np.random.permutation(available)[:3]  # noqa: NPY002


class Forgetful(Random):
    """Keeps state that it does not save."""

    def __init__(self, *, clients_per_round, seed=None):
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self._shift = 0

    def _select(self, available: IntArray) -> IntArray:
        self._shift += 1
        return np.roll(available, self._shift)[:3]


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Greedy, "every chosen client is available"),
        (GlobalState, "the order of `available` does not matter|same seed"),
        (Forgetful, "save, load, continue"),
    ],
)
def test_the_suite_catches_broken_selectors(broken, promise):
    with pytest.raises(AssertionError, match=promise):
        check_selector(partial(broken, clients_per_round=3))
