"""The conformance suite of strategies: ours keep every promise, each one broken on purpose is named."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr import strategies as legacy
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.flights import Flights
from fedsel_flwr.rounds.run_length import Budget
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import MetricKeys, message
from fedsel_flwr.testing import STRATEGY_CHECKS, check_strategy
from fedsel_flwr.testing.harness import StrategyHarness
from fedsel_flwr.testing.strategy_conformance import check_buffered_rounds
from tests.processes import run_python
from tests.testing.broken_strategies import BROKEN, Break
from tests.testing.strategies_under_test import APIS, ARRAYS, BASES, FEW, PAPERS, SELECTORS, paper, wrapped


def offline(client_id: str, number: int, seconds: float) -> bool:
    """Whether a client takes part: three rounds of four."""
    return (int(client_id) + number) % 4 > 0


PLAYED: list[tuple[Any, ...]] = [
    (paper, "legacy", "CSUCBQ"),
    (paper, "message", "FedCA"),
    (paper, "message", "GPFL"),
    (paper, "legacy", "CSUCB", "Krum"),
    (paper, "message", "BSFL", "FedAdam"),
    (wrapped, "legacy", "gpfl", "Krum"),
    (wrapped, "message", "fedcm-ts", "FedAdam"),
    (wrapped, "message", "random-by-size", "DP"),
]
"""Of all combinations those that are checked in every run."""
ALL = [
    *[(paper, api, name) for name in PAPERS for api in APIS],
    *[(paper, api, name, base) for api in APIS for name in PAPERS for base in BASES[api]],
    *[(wrapped, api, selector, base) for api in APIS for selector in SELECTORS for base in BASES[api]],
]


def test_nothing_is_forgotten() -> None:
    for api in APIS.values():
        strategies = {name for name in api.__all__ if issubclass(getattr(api, name), api.SelectionStrategy)}
        assert PAPERS.keys() == strategies - {"SelectionStrategy"}


def keeps_every_promise(build: Any, *names: str) -> None:
    check_strategy(partial(build, *names), ARRAYS, num_clients=12 if build is paper else None)


@pytest.mark.parametrize("names", PLAYED, ids=lambda names: "-".join(names[1:]))
def test_every_promise_is_kept_and_the_callers_generators_stay_as_they_were(names: tuple[Any, ...]) -> None:
    np.random.seed(3)  # noqa: NPY002 - to show that the global state is left alone
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    keeps_every_promise(*names)
    assert np.random.random() == expected  # noqa: NPY002


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_other_promise_is_kept() -> None:
    for names in ALL:
        if names not in PLAYED:
            try:
                keeps_every_promise(*names)
            except AssertionError as error:
                raise AssertionError(f"{names[1:]}: {error}") from error


@pytest.mark.parametrize(
    ("api", "options"),
    [
        ("legacy", {"cooldown": True}),
        ("message", {"min_completed": 3}),
        ("legacy", {"averaging": "fedpdp-exact"}),
        ("message", {"budget": Budget(simulated_s=20.0)}),
        ("legacy", {"availability": offline}),
        ("legacy", {"max_clients": 9, "evict_after": 1}),
        ("message", {"warmup_rounds": 4}),
        ("message", {"concurrency": 2 * FEW}),
    ],
)
def test_options_break_no_promise(api: str, options: dict[str, Any]) -> None:
    check_strategy(partial(wrapped, api, "random", "FedAvg", **options), ARRAYS)


@pytest.mark.parametrize(
    ("name", "broken", "promise"),
    [
        ("free", lambda self, rows, chosen: np.ones(len(rows), dtype=np.bool_), "clients at work are not asked"),
        ("calls", property(lambda self: 9), "at most 8 clients are at work"),
    ],
)
def test_broken_buffered_rounds_are_noticed(name: str, broken: Any, promise: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Flights, name, broken)
    harness = StrategyHarness(partial(wrapped, "message", "random", "FedAvg", concurrency=2 * FEW), ARRAYS)
    with pytest.raises(AssertionError, match=promise):
        check_buffered_rounds(harness)


def test_on_the_servers_clock_choices_are_not_compared(api: str) -> None:
    with pytest.warns(UserWarning, match="check_s.* was left out: with clock='server'") as told:
        check_strategy(partial(wrapped, api, "cs-ucb", "FedAvg", clock="server"), ARRAYS)
    assert len(told) == 2


def test_the_fleet_shows_everything_that_it_promises(api: str) -> None:
    harness = StrategyHarness(partial(wrapped, api, "round-robin", "FedAvg"), ARRAYS)
    run, planned = harness.full_run, {fault.name for fault in harness.plan.faults}
    assert {fault.name for seen in run.rounds for fault in seen.broken.values()} == planned
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


def test_choices_without_a_seed_are_found_out(api: str) -> None:
    with pytest.raises(AssertionError, match=r"the same seed gives the same selections; from round \d+ on they differ"):
        check_strategy(partial(wrapped, api, "random", "FedAvg", {"seed": None}), ARRAYS)


def test_no_check_goes_without_a_broken_strategy() -> None:
    # Two checks are of no strategy: that of its clients' columns, and that of seeds.
    assert len(BROKEN) + 2 >= len(STRATEGY_CHECKS) == len({check.__name__ for check in STRATEGY_CHECKS})


def test_a_selector_that_would_learn_nothing_is_found_before_any_deployment(api: str, caplog: Any) -> None:
    reported = {"num-examples", "latency_s", "eval_loss"}
    said = r"the clients report what the selector reads; round 1: no reply has rms_loss .*rms_loss='eval_loss'"
    with pytest.raises(AssertionError, match=f"(?s)broken promise: {said}"):
        check_strategy(partial(wrapped, api, "oort", "FedAvg"), ARRAYS, reported=reported)
    keys = MetricKeys(rms_loss="eval_loss")
    check_strategy(partial(wrapped, api, "oort", "FedAvg", metric_keys=keys), ARRAYS, reported=reported)
    assert not caplog.messages
    check_strategy(partial(wrapped, api, "oort", "FedAvg"), ARRAYS)
    (line,) = caplog.messages
    assert line.startswith("check_strategy: oort reads rms_loss. ")


CSUCB = partial(paper, "legacy", "CSUCB")
FEW_WEIGHTS = {"clients_per_round": 3, "min_latency": 0.1, "max_latency": 5.0, "data_weights": {"0": 1.0}}
ONLY = paper("message", "BSFL")


@pytest.mark.parametrize(
    ("make", "arrays", "num_clients", "words"),
    [
        (lambda: Random(clients_per_round=3), ARRAYS, None, "Random has no selector, base, history"),
        (BASES["legacy"]["FedAvg"], ARRAYS, None, "has no selector"),
        (lambda seed: None, ARRAYS, None, r"make_strategy\(\) must build a strategy without arguments"),
        (CSUCB, [], None, "arrays must be the initial model"),
        (CSUCB, [np.full(3, np.nan)], None, r"finite numbers, got \['float64\[3"),
        (CSUCB, ARRAYS, 4, "num_clients must be at least 12, got 4"),
        (partial(legacy.BSFL, **FEW_WEIGHTS), ARRAYS, None, "data_weights has 1 entries but none for client"),
        (partial(wrapped, "legacy", "random", "FedAvg"), ARRAYS[:1], None, "its base starts from"),
        (lambda: ONLY, ARRAYS, None, "make_strategy returned the same strategy"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, arrays: Any, num_clients: int | None, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        check_strategy(make, arrays, num_clients=num_clients)


def test_it_needs_neither_ray_nor_torch_nor_hypothesis() -> None:
    """Without Hypothesis the state machine of selectors says so."""
    code = """
import json, sys
from functools import partial
from tests.testing.strategies_under_test import ARRAYS, paper
from fedsel_flwr.selectors import Random
from fedsel_flwr.testing import check_stateful, check_strategy
for api in ("legacy", "message"):
    check_strategy(partial(paper, api, "CSUCB"), ARRAYS)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
sys.modules["hypothesis"] = None
check_stateful(partial(Random, clients_per_round=3))
"""
    done = run_python("-c", code, status=1)
    assert not {"ray", "torch", "hypothesis"} & {*json.loads(done.stdout.splitlines()[-1])}
    assert "RunError: check_stateful needs Hypothesis" in done.stderr


class NamedStart(FedAvg):
    """Takes some arguments by their places, and the others by name."""

    def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, timeout: float = 3600, **kwargs: Any) -> Any:
        return super().start(grid, initial_arrays, num_rounds, timeout, **kwargs)


class EveryOtherRound(FedAvg):
    """Configures nobody in the rounds with even numbers."""

    def configure_train(self, server_round: int, *args: Any) -> Any:
        return super().configure_train(server_round, *args) if server_round % 2 else []


@pytest.mark.parametrize("base", [NamedStart, EveryOtherRound])
def test_a_base_with_a_start_of_its_own_and_one_that_skips_rounds_keep_every_promise(base: Any) -> None:
    def build() -> Any:
        return message.SelectionStrategy(Random(clients_per_round=7, seed=1), base(), max_latency=5.0)

    check_strategy(build, ARRAYS)
