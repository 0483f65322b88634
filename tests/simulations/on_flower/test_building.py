"""From a scenario to its strategy: every base and selector, its parameters, and whole rounds without Ray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from flwr.server.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.on_flower.building import (
    check_selector,
    first_rounds,
    make_availability,
    make_strategy,
    selector_params,
)
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World, world_of
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy
from tests.simulations.cut_off_runs import parts
from tests.simulations.inprocess import play

BASES: list[tuple[type[FedAvg], dict[str, float]]] = [
    (FedAvg, {"fraction_evaluate": 0.0}), (FedProx, {"proximal_mu": 0.25}), (FedAdam, {"eta": 0.03}),
    (FedYogi, {"eta": 0.03}), (FedAvgM, {"server_learning_rate": 0.9}),
]  # fmt: skip
"""Flower's bases, and what they get of the scenario."""


def smoke(**overrides: Any) -> Scenario:
    return load_scenario("smoke", {key.replace("__", "."): value for key, value in overrides.items()})


def settings_of(scenario: Scenario, selector: Any = None) -> Any:
    return make_strategy(world_of(scenario), selector=selector).core.settings


@pytest.mark.parametrize(("base", "parameters"), BASES, ids=[base.__name__ for base, _ in BASES])
def test_every_base_builds_and_learns(base: type[FedAvg], parameters: dict[str, float]) -> None:
    scenario = smoke(
        aggregation__base=base.__name__.lower(), training__proximal_mu=0.25, training__local_epochs=5, rounds=3,
        aggregation__server_learning_rate=0.9 if base is FedAvgM else 0.03,
    )  # fmt: skip
    made = make_strategy(World(scenario)).base
    assert type(made) is base
    assert {name: getattr(made, name) for name in parameters} == parameters
    result = play(scenario)
    assert [r.num_completed for r in result.history.rounds] == [3, 3, 3]
    assert result.history.problem_counts() == {}
    accuracies = [r.accuracy for r in result.history.rounds]
    world = World(scenario)
    before = world.test(world.initial_arrays())[1]
    assert max(accuracies) > before + 0.2, (before, accuracies)


def test_strategies_of_the_papers_are_used_where_there_are_any() -> None:
    names = ("bsfl", "cs-ucb", "random", "round-robin")
    kinds = {name: type(make_strategy(world_of(smoke(selector=name)))) for name in names}
    assert (kinds["bsfl"], kinds["cs-ucb"]) == (BSFL, CSUCB)
    assert kinds["random"] is kinds["round-robin"] is SelectionStrategy


@pytest.mark.parametrize(
    ("selector", "filter", "averaging"),
    [("gpfl", None, "mean"), ("fedcm-ts", "loss", "fedpdp"), ("pczfl", None, None), ("random", None, None)],
)
def test_the_papers_options_hold_however_the_selector_is_asked_for(
    api: str, selector: str, filter: str | None, averaging: str | None
) -> None:
    """By name, and as an object; what the scenario says itself comes first."""
    scenario = smoke(selector=selector, api=api)
    made = create(selector, **selector_params(scenario, {}))
    for other, given in [(scenario, None), (smoke(selector="cs-ucb", api=api), made)]:
        settings = settings_of(other, given)
        assert settings.averaging == averaging
        assert (None if settings.filter is None else settings.filter.score) == filter
        assert settings.learning_rate == scenario.training.learning_rate
    said = smoke(
        selector=selector, api=api, aggregation__filter="accuracy", aggregation__averaging="fedpdp-exact",
        aggregation__direction_momentum=0.5,
    )  # fmt: skip
    settings = settings_of(said)
    assert (settings.averaging, settings.momentum) == ("fedpdp-exact", 0.5)
    assert settings.filter is not None
    assert settings.filter.score == "accuracy"


def test_strategy_takes_the_numbers_of_the_scenario() -> None:
    scenario = smoke(
        aggregation__min_completed=2, aggregation__wait_timeout_s=12.5, aggregation__round_timeout_s=77.0,
        wireless__max_latency_s=4.0, seed=3,
    )  # fmt: skip
    for selector in ("bsfl", "cs-ucb", "random"):
        strategy = make_strategy(world_of(scenario.model_copy(update={"selector": selector})))
        settings = strategy.core.settings
        assert (settings.max_latency, settings.min_completed, settings.channels) == (4.0, 2, 3)
        assert (settings.clock, strategy.wait_timeout, strategy.min_available) == ("virtual", 12.5, 10)
        assert settings.roll_call_timeout == 77.0  # actors of a busy machine start slowly, which must not matter
        assert strategy.selector.clients_per_round == 3
    assert settings_of(smoke(wireless__channels=2)).channels == 2


@pytest.mark.parametrize(
    ("selector", "key"), [("cs-ucb", "max_latency"), ("cs-ucb-q", "max_latency"), ("bsfl", "min_latency")]
)
def test_an_automatic_scale_leaves_the_longest_wait(api: str, selector: str, key: str) -> None:
    changes = {f"selectors.{selector}.{key}": "auto", "wireless.max_latency_s": 4.0, "api": api}
    strategy = make_strategy(world_of(load_scenario("smoke", {"selector": selector, **changes})))
    assert (getattr(strategy.selector, key), strategy.core.settings.max_latency) == ("auto", 4.0)


def test_selector_parameters_come_from_scenario_and_table() -> None:
    scenario = smoke(selectors__bsfl__alpha=3.0, seed=4)
    assert selector_params(scenario, {}) == {"clients_per_round": 3, "seed": 4, "min_latency": 0.05, "alpha": 3.0}
    ucb = smoke(selector="cs-ucb", wireless__max_latency_s=4.0)
    assert selector_params(ucb, {}) == {"clients_per_round": 3, "seed": 1, "max_latency": 4.0}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [({}, None), ({"training__local_steps": 5, "training__batch_size": 8}, 40),
     ({"training__local_steps": 5, "selectors__oort__trained_examples": 7}, 7)],
)  # fmt: skip
def test_oort_is_told_what_a_client_trains_on(overrides: dict[str, int], expected: int | None) -> None:
    """Steps times batch size; with whole passes a client trains on all that it has."""
    scenario = smoke(selector="oort", **overrides)
    assert selector_params(scenario, {})["trained_examples"] == expected
    assert make_strategy(world_of(scenario)).selector.trained_examples == expected


def test_sizes_stand_for_the_numbers_of_examples() -> None:
    """d_k of (4) by client id, whatever row the client gets."""
    scenario = smoke(partition__kind="dirichlet", partition__alpha=0.3, selectors__bsfl__data_weights="sizes")
    sizes = World(scenario).num_examples()
    assert len(set(sizes.values())) > 1
    assert selector_params(scenario, sizes)["data_weights"] == sizes


@pytest.mark.parametrize(
    ("selector", "keys"),
    [("bsfl", {"selectors__bsfl__data_weights": [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]}), ("bsfl", {}), ("random", {})],
)
def test_the_order_in_which_clients_connect_changes_nothing_but_the_seed_does(selector: str, keys: Any) -> None:
    first, *others = (parts(play(smoke(selector=selector, rounds=4, **keys), shuffle=shuffle)) for shuffle in (0, 1, 2))
    assert others == [first, first]
    assert parts(play(smoke(selector=selector, rounds=4, seed=2, **keys))) != first


@pytest.mark.parametrize(("name", "api"), [("smoke", "legacy"), ("phones", "legacy"), ("phones", "message")])
def test_history_is_that_of_the_system_model(name: str, api: str, without_ray: None) -> None:
    """Latency, energy and their parts, by client id, as the system model draws them."""
    scenario = load_scenario(name, {"rounds": 4, "api": api, "selector": "random"})
    history, world = engine.simulate(scenario).history, World(scenario)
    latest = scenario.wireless.max_latency_s
    for row in history.clients:
        drawn = world.system.draw(int(row.client_id), row.round)
        latency = drawn.download_s + drawn.compute_s + drawn.upload_s
        assert row.latency_s == pytest.approx(min(latency, latest), rel=1e-12)
        assert row.completed == (latency < latest)
        assert row.energy_j == pytest.approx(world.system.energy_j(drawn), rel=1e-12)
        if row.completed:
            parts = (drawn.download_s, drawn.compute_s, drawn.upload_s)
            assert (row.download_s, row.compute_s, row.upload_s) == pytest.approx(parts, rel=1e-12)
            assert row.num_examples == world.num_examples()[int(row.client_id)]
            assert math.isfinite(row.train_loss)
    assert history.rounds[-1].total_energy_j == pytest.approx(sum(row.energy_j for row in history.clients))
    for record in history.rounds:  # one wave: as many channels as clients
        assert record.round_s == max(row.latency_s for row in history.clients if row.round == record.round)


def test_a_trace_that_cannot_be_used_is_found_before_anything_starts() -> None:
    assert make_availability(smoke()) is None
    scenario = smoke(availability__kind="trace", availability__trace="nowhere.csv")
    for build in (make_availability, lambda s: make_strategy(world_of(s))):
        with pytest.raises(ParameterError, match=r"trace 'nowhere\.csv': the file is neither in"):
            build(scenario)


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("round,client,state\n1,0.0,down\n1,1.0,down\n", {}, "of the run, 0 to 9, got 2 other ids, such as '0.0'"),
        ("round,client,state\n1,client-0,down\n", {}, "such as 'client-0'"),
        ("round,client,state\n" + "".join(f"1,{k},down\n" for k in range(1, 11)), {}, "1 other ids, such as '10'"),
        ("round,client,state\n", {}, "got no row"),
        ("round,client,state\n6,0,down\n", {}, "ends at round 5 or before, but its first row is at round 6"),
        ("second,client,state\n1700000000,0,down\n", {}, "its first row is at second 1.7e"),
        ("second,client,state\n81,0,down\n", {"availability__seconds_per_round": 20.0}, "ends at second 80 or before"),
    ],
    ids=["floats", "names", "from 1", "empty", "late round", "epoch", "late second"],
)
def test_a_trace_that_names_nobody_or_begins_after_the_run_is_refused(
    text: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "trace.csv").write_text(text)
    own = smoke(rounds=5, availability__kind="trace", availability__trace=str(tmp_path / "trace.csv"), **keys)
    with pytest.raises(ParameterError, match=said):
        make_availability(own)


def test_the_first_rounds_of_a_run_may_come_before_its_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("round,client,state\n4,0,down\n")
    own = smoke(rounds=5, availability__kind="trace", availability__trace=str(tmp_path / "trace.csv"))
    assert (first_rounds(own, 3).rounds, first_rounds(own, 3).availability.kind) == (3, "always")
    assert first_rounds(own, 4).availability == own.availability
    assert first_rounds(own, 9) == own


def test_rounds_walk_through_a_trace_of_the_data_folder(tmp_path: Path) -> None:
    """Client 4 is away from second 2,000 to 5,000: in rounds 2 and 3 of 2,000 s each, however short the rounds."""
    (tmp_path / "phones").mkdir()
    (tmp_path / "phones" / "there.csv").write_text("second,client,state\n2000,4,down\n5000,4,up\n")
    scenario = smoke(
        rounds=5, clients_per_round=10, data__data_dir=str(tmp_path), availability__kind="trace",
        availability__trace="phones/there.csv", availability__seconds_per_round=2000.0,
    )  # fmt: skip
    rounds = play(scenario).history.rounds
    assert [r.num_available for r in rounds] == [10, 9, 9, 10, 10]
    assert rounds[-1].simulated_s < 100
    clock = scenario.availability.model_copy(update={"seconds_per_round": 0.0})
    there = make_availability(scenario.model_copy(update={"availability": clock, "rounds": 500}))
    assert there is not None
    assert [there("4", 3, s) for s in (0.0, 1999.0, 2000.0)] == [True, True, False]


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("alpha", -1, "alpha must be a finite number of at least 0, got -1"),
        ("data_weights", "size", "data_weights must be an array of numbers, got 'size'"),
        ("data_weights", [1, 2, 3], "selectors.bsfl.data_weights has 3 entries but none for client 3"),
        ("data_weights", [0.0] * 10, "data_weights must have a positive sum"),
    ],
)
def test_wrong_selector_parameters_are_found_before_anything_starts(parameter: str, value: Any, message: str) -> None:
    scenario = load_scenario("smoke", {f"selectors.bsfl.{parameter}": value})
    with pytest.raises(FedSelError, match=message):
        check_selector(scenario)
    for name in ("random", "cs-ucb"):  # theirs are fine
        check_selector(scenario.model_copy(update={"selector": name}))
