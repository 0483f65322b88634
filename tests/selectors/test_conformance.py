"""Every selector by name passes the conformance suite."""

from functools import partial

import pytest

from fedsel_flwr.selectors import create, names
from fedsel_flwr.testing import CHECKS, check_stateful

PARAMETERS = {
    "cs-ucb": {"max_latency": 5.0},
    "bsfl": {"min_latency": 0.1, "alpha": 1.0},
    "cs-ucb-q": {"max_latency": 5.0},
    "gpfl": {"total_rounds": 100},
    "fedcs": {"deadline": 2.0},
    "fedcor": {"warmup_rounds": 3, "interval": 4},
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", names())
def test_conformance(name, check):
    check(partial(create, name, clients_per_round=3, **PARAMETERS.get(name, {})))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_sampling_with_replacement(check):
    check(partial(create, "random-by-size", clients_per_round=3, replacement=True))


AUTO = {"bsfl": "min_latency", "cs-ucb": "max_latency", "cs-ucb-q": "max_latency"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", AUTO)
def test_conformance_of_auto(name, check):
    check(partial(create, name, clients_per_round=3, **{AUTO[name]: "auto"}))


@pytest.mark.parametrize("name", AUTO)
def test_every_order_of_calls_of_auto(name):
    check_stateful(partial(create, name, clients_per_round=3, **{AUTO[name]: "auto"}), sequences=20)


@pytest.mark.parametrize("name", names())
def test_every_order_of_calls(name):
    """100 sequences of inform, probe, select, observe, forget, save, load and newcomers."""
    check_stateful(partial(create, name, clients_per_round=3, **PARAMETERS.get(name, {})))


def test_every_order_of_calls_of_sampling_with_replacement():
    check_stateful(partial(create, "random-by-size", clients_per_round=3, replacement=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_many_orders_of_calls(name):
    make = partial(create, name, clients_per_round=3, **PARAMETERS.get(name, {}))
    check_stateful(make, sequences=2000, steps=40)
