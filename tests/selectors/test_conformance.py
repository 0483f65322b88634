"""Every selector by name, and the variants that behave in another way, pass the conformance suite."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from fedsel_flwr.selectors import create, names
from fedsel_flwr.selectors.registry import example
from fedsel_flwr.testing import CHECKS, check_stateful, play
from fedsel_flwr.testing.conformance import check_spawned_process

three = partial(create, clients_per_round=3)
VARIANTS = {name: partial(three, name, **example(name)) for name in names()} | {
    "fedcor": partial(three, "fedcor", warmup_rounds=3, interval=4),
    "random-by-size-replacement": partial(three, "random-by-size", replacement=True),
    "bsfl-alsa": partial(three, "bsfl", min_latency=0.1, solver="alsa", solver_steps=20),
    "bsfl-annealing": partial(three, "bsfl", min_latency=0.1, solver="annealing", solver_steps=20),
    "bsfl-auto": partial(three, "bsfl", min_latency="auto"),
    "cs-ucb-auto": partial(three, "cs-ucb", max_latency="auto"),
    "cs-ucb-q-auto": partial(three, "cs-ucb-q", max_latency="auto"),
    "active-fl-utility": partial(three, "active-fl", accuracy_weight=0.5),
    "divfl-utility": partial(three, "divfl", accuracy_weight=0.5),
    "power-of-choice-utility": partial(three, "power-of-choice", candidates=5, accuracy_weight=0.5),
}


def choices():
    return {name: play(make(seed=11), range(30)) for name, make in VARIANTS.items()}


def test_a_fresh_process_chooses_alike():
    """The check of a spawned process, for all in one: sets have another order there."""
    code = "import json; from tests.selectors.test_conformance import choices; print(json.dumps(choices()))"
    environment = os.environ | {"PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) == choices()


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check is not check_spawned_process], ids=lambda check: check.__name__
)
@pytest.mark.parametrize("name", VARIANTS)
def test_conformance(name, check):
    check(VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_order_of_calls(name):
    """Sequences of inform, probe, select, observe, forget, save, load and newcomers."""
    check_stateful(VARIANTS[name], sequences=12 if name in names() else 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_many_orders_of_calls(name):
    check_stateful(VARIANTS[name], sequences=2000, steps=40)
