"""Every selector by name, and the variants that behave in another way, pass the conformance suite."""

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
VARIANTS = {name: partial(create, name, clients_per_round=3, **PARAMETERS.get(name, {})) for name in names()} | {
    "random-by-size-replacement": partial(create, "random-by-size", clients_per_round=3, replacement=True),
    "bsfl-auto": partial(create, "bsfl", clients_per_round=3, min_latency="auto"),
    "cs-ucb-auto": partial(create, "cs-ucb", clients_per_round=3, max_latency="auto"),
    "cs-ucb-q-auto": partial(create, "cs-ucb-q", clients_per_round=3, max_latency="auto"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", VARIANTS)
def test_conformance(name, check):
    check(VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_order_of_calls(name):
    """Sequences of inform, probe, select, observe, forget, save, load and newcomers."""
    check_stateful(VARIANTS[name], sequences=100 if name in names() else 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_many_orders_of_calls(name):
    check_stateful(VARIANTS[name], sequences=2000, steps=40)
