"""The conformance suite of strategies, on ours: every paper's, and every selector over several bases, in both APIs."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import strategies as legacy
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.run_length import Budget
from fedsel_flwr.selectors import Random
from fedsel_flwr.testing import STRATEGY_CHECKS, check_strategy
from fedsel_flwr.testing.harness import StrategyHarness
from tests.testing.strategies_under_test import (
    APIS,
    ARRAYS,
    BASES,
    COHORT,
    FEW,
    MAX_LATENCY,
    PAPERS,
    SELECTORS,
    TRUSTING,
    paper,
    wrapped,
)

PAIRS = [
    ("legacy", "gpfl", "Krum"),
    ("message", "fedcm-ts", "FedAdam"),
    ("message", "random-by-size", "DP"),
]
"""Of all combinations those that are checked in every run."""
EACH_PAPER = [(api, name) for name in PAPERS for api in APIS]
"""Every other one in each API is checked in every run."""
ALL = [(api, selector, base) for api in APIS for selector in SELECTORS for base in BASES[api]]


def test_nothing_is_forgotten() -> None:
    for api in APIS.values():
        strategies = {name for name in api.__all__ if issubclass(getattr(api, name), api.SelectionStrategy)}
        assert PAPERS.keys() == strategies - {"SelectionStrategy"}


@pytest.mark.parametrize(("api", "name"), EACH_PAPER[::4] + EACH_PAPER[3::4])
def test_a_papers_strategy_keeps_every_promise(api: str, name: str) -> None:
    check_strategy(partial(paper, api, name), ARRAYS, num_clients=12)


@pytest.mark.slow
def test_every_papers_strategy_keeps_every_promise_in_the_other_api() -> None:
    for api, name in EACH_PAPER[1::4] + EACH_PAPER[2::4]:
        try:
            check_strategy(partial(paper, api, name), ARRAYS, num_clients=12)
        except AssertionError as error:
            raise AssertionError(f"{api}, {name}: {error}") from error


def paper_over(api: str, name: str, base: str) -> Any:
    """A paper's strategy over a base; what filters models gets a Krum that is content with one."""
    params: dict[str, Any] = {"clients_per_round": FEW if base.startswith("Fed") else COHORT, "seed": 1}
    params |= {"max_latency": MAX_LATENCY, **PAPERS[name]}
    if base == "Krum":
        params |= {"min_completed": 5}
    trusting = base == "Krum" and name in ("FedCA", "FedCM")
    return getattr(APIS[api], name)(base=(TRUSTING[api] if trusting else BASES[api][base])(), **params)


@pytest.mark.parametrize(
    ("api", "name", "base"), [("legacy", "CSUCB", "Krum"), ("message", "BSFL", "FedAdam"), ("message", "FedCM", "DP")]
)
def test_a_papers_strategy_over_a_base_keeps_every_promise(api: str, name: str, base: str) -> None:
    check_strategy(partial(paper_over, api, name, base), ARRAYS, num_clients=12)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_papers_strategy_over_every_base_keeps_every_promise() -> None:
    for api in APIS:
        for name in PAPERS:
            for base in BASES[api]:
                try:
                    check_strategy(partial(paper_over, api, name, base), ARRAYS, num_clients=12)
                except AssertionError as error:
                    raise AssertionError(f"{api}, {name} over {base}: {error}") from error


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["FedCA", "FedCM"])
def test_a_filter_that_may_keep_a_single_model_is_refused_over_a_krum_that_needs_five(api: str, name: str) -> None:
    with pytest.raises(ParameterError, match="Krum"):
        getattr(APIS[api], name)(
            base=BASES[api]["Krum"](), clients_per_round=COHORT, max_latency=MAX_LATENCY, **PAPERS[name]
        )


@pytest.mark.parametrize(("api", "selector", "base"), PAIRS)
def test_a_selector_over_a_base_keeps_every_promise(api: str, selector: str, base: str) -> None:
    check_strategy(partial(wrapped, api, selector, base), ARRAYS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_selector_over_every_base_keeps_every_promise() -> None:
    for api, selector, base in ALL:
        try:
            check_strategy(partial(wrapped, api, selector, base), ARRAYS)
        except AssertionError as error:
            raise AssertionError(f"{api}, {selector} over {base}: {error}") from error


@pytest.mark.parametrize(
    ("api", "options"),
    [
        ("legacy", {"cooldown": True}),
        ("message", {"min_completed": 3}),
        ("legacy", {"averaging": "fedpdp-exact"}),
        ("message", {"budget": Budget(simulated_s=20.0)}),
        ("legacy", {"availability": lambda client_id, number, seconds: (int(client_id) + number) % 4 > 0}),
        ("legacy", {"max_clients": 9, "evict_after": 1}),
        ("message", {"warmup_rounds": 4}),
    ],
)
def test_options_break_no_promise(api: str, options: dict[str, Any]) -> None:
    check_strategy(partial(wrapped, api, "random", "FedAvg", **options), ARRAYS)


@pytest.mark.parametrize("api", APIS)
def test_on_the_servers_clock_choices_are_not_compared(api: str) -> None:
    with pytest.warns(UserWarning, match="check_s.* was left out: with clock='server'") as told:
        check_strategy(partial(wrapped, api, "cs-ucb", "FedAvg", clock="server"), ARRAYS)
    assert len(told) == 2


@pytest.mark.parametrize("api", APIS)
def test_the_fleet_shows_everything_that_it_promises(api: str) -> None:
    harness = StrategyHarness(partial(wrapped, api, "round-robin", "FedAvg"), ARRAYS)
    run = harness.full_run
    assert {fault.name for seen in run.rounds for fault in seen.broken.values()} == {
        fault.name for fault in harness.plan.faults
    }
    nodes: dict[int, set[str]] = {}
    for node, number in run.fleet.numbers.items():
        nodes.setdefault(number, set()).add(node)
    assert len(nodes[0]) == 1
    assert all(len(names) > 1 for number, names in nodes.items() if number > 0)  # everyone else reconnects
    assert any(-1 in seen.connected.values() for seen in run.rounds)
    assert any(2 not in seen.connected.values() for seen in run.rounds)
    assert sum(record.num_completed == 0 for record in run.strategy.history.rounds) == 2
    assert sum(bool(seen.evaluated) for seen in run.rounds) == harness.plan.num_rounds
    assert sum(len(report.clients) for seen in run.rounds for report in seen.reports) == FEW * harness.plan.num_rounds


def test_the_callers_generators_stay_as_they_were() -> None:
    np.random.seed(3)  # noqa: NPY002 - to show that the global state is left alone
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    check_strategy(partial(wrapped, "legacy", "random", "DP"), ARRAYS)
    assert np.random.random() == expected  # noqa: NPY002


def test_it_needs_neither_ray_nor_torch() -> None:
    code = """
import json, sys
from tests.testing.strategies_under_test import ARRAYS, paper
from fedsel_flwr.testing import check_strategy
for api in ("legacy", "message"):
    check_strategy(lambda: paper(api, "CSUCB"), ARRAYS)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"ray", "torch", "hypothesis"} & {*json.loads(done.stdout.splitlines()[-1])}


WRONG = {
    "no strategy": (lambda: Random(clients_per_round=3), ARRAYS, "Random has no selector, base, history"),
    "a base alone": (BASES["legacy"]["FedAvg"], ARRAYS, "has no selector"),
    "arguments": (lambda seed: None, ARRAYS, r"make_strategy\(\) must build a strategy without arguments"),
    "no arrays": (partial(paper, "legacy", "CSUCB"), [], "arrays must be the initial model"),
    "a model of NaN": (partial(paper, "legacy", "CSUCB"), [np.full(3, np.nan)], r"finite numbers, got \['float64\[3"),
    "too few values": (
        partial(legacy.BSFL, clients_per_round=3, min_latency=0.1, max_latency=5.0, data_weights={"0": 1.0}),
        ARRAYS,
        "data_weights has 1 entries but none for client",
    ),
    "another model": (partial(wrapped, "legacy", "random", "FedAvg"), ARRAYS[:1], "its base starts from"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused(what: str) -> None:
    make, arrays, words = WRONG[what]
    with pytest.raises(ParameterError, match=words):
        check_strategy(make, arrays)


def test_the_same_strategy_twice_and_too_small_a_fleet_are_refused() -> None:
    only = paper("message", "BSFL")
    with pytest.raises(ParameterError, match="make_strategy returned the same strategy"):
        check_strategy(lambda: only, ARRAYS)
    with pytest.raises(ParameterError, match="num_clients must be at least 12, got 4"):
        check_strategy(partial(paper, "message", "BSFL"), ARRAYS, num_clients=4)


def test_every_check_says_in_words_what_it_promises() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all((check.__doc__ or "").strip() for check in STRATEGY_CHECKS)
    assert len({check.__name__ for check in STRATEGY_CHECKS}) == len(STRATEGY_CHECKS)
