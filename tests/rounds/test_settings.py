"""Options are declared once (``tests/test_new_column.py`` declares one more): settings and scenarios."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.settings import Options, Settings, resolve_settings
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.scenario_files import replace_keys
from fedsel_flwr.strategies import SelectionStrategy
from tests.strategies.either_api import selection


def test_a_scenarios_keys_are_the_options_that_name_one() -> None:
    table = load_scenario("smoke").aggregation
    own = {"filter", "base", "server_learning_rate", "round_timeout_s"}
    declared = {one.metadata["key"] for one in fields(Options) if one.metadata.get("key")}
    assert set(type(table).model_fields) == own | declared
    options = load_scenario("smoke", {"aggregation.max_examples": 7, "aggregation.filter": "accuracy"}).aggregation
    assert options.options()["max_examples"] == 7
    assert options.options()["filter"].score == "accuracy"
    # 0 and "" stand for None, as TOML has none; a plan's null is refused
    unset = ("round_deadline_s", "max_update_norm", "max_examples", "max_participation", "averaging", "filter")
    assert [table.options()[name] for name in unset] == [None] * len(unset)
    for name in unset:
        with pytest.raises(ParameterError, match=name):
            replace_keys({**load_scenario("smoke").model_dump(), "aggregation": {name: None}}, {})


@pytest.mark.parametrize("value", [10**400, 2**53 + 1, True, "3", float("nan"), [3]])
def test_numbers_that_no_array_holds_are_refused_in_python_and_in_scenarios(value: Any) -> None:
    for name in ("max_examples", "min_completed", "warmup_rounds"):
        with pytest.raises(ParameterError, match=f"^{name} must be "):
            SelectionStrategy(Random(clients_per_round=1), **{name: value})
        with pytest.raises(ParameterError, match=rf"aggregation\.{name} = .*: {name} must be "):
            load_scenario("smoke", {f"aggregation.{name}": value})


def test_what_is_not_given_is_the_selectors_or_its_papers() -> None:
    selector = create("cs-ucb", clients_per_round=3, max_latency=7.0)
    settings = resolve_settings(selector)
    assert (settings.max_latency, settings.channels, settings.averaging, settings.filter) == (7.0, 3, None, None)
    assert resolve_settings(create("pczfl")).channels is None
    gpfl = create("gpfl", clients_per_round=3, total_rounds=9)
    assert resolve_settings(gpfl).averaging == "mean"
    assert resolve_settings(gpfl, averaging="fedpdp").averaging == "fedpdp"
    with pytest.raises(ParameterError, match=r"max_latency is 5\.0 for the strategy but 7\.0 for"):
        resolve_settings(selector, max_latency=5.0)
    for wrong in ({"clock": "sundial"}, {"channels": 0}, {"clock_slack": -1.0}, {"averaging": "median"}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            Settings(**wrong)  # type: ignore[arg-type]


def test_the_selector_is_told_of_the_strategys_rounds_in_a_call() -> None:
    told = []

    class Told(Random):
        def plan_rounds(self, **plan: Any) -> None:
            told.append(plan)

    strategy = SelectionStrategy(Told(clients_per_round=2), over_selection=0.5, warmup_rounds=3)
    assert told == [{"over_selection": 0.5, "warmup_rounds": 3}]
    # the core writes nothing onto the selector itself
    assert (strategy.selector.over_selection, strategy.selector.common_warmup) == (0.0, 0)


def test_none_is_no_limit_where_the_help_says_so() -> None:
    assert resolve_settings(Random(clients_per_round=1), busy_timeout=None).busy_timeout is None


NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, str, tuple[Any, ...]]] = [
    ("max_clients max_new_per_round evict_after max_examples min_available min_completed channels",
     "must be a whole number of at least 1, got", (0, -1, -1.0, 1.5, "3", NAN, True)),
    ("warmup_rounds", "must be a whole number of at least 0, got", (-1, "3")),
    ("max_latency max_update_norm roll_call_timeout", "must be a finite number above 0, got",
     (0, -1.0, NAN, INF, "5", True)),
    ("busy_timeout wait_timeout clock_slack", "must be a finite number of at least 0, got", (-1.0, NAN, "1", True)),
    ("wait_timeout", "must be a finite number of at least 0, got", (None,)),
    ("max_participation", "must be a finite number above 0 and of at most 1, got", (0.0, -0.5, 1.5, NAN, "0.5", True)),
    ("compare_models cooldown", 'must be True, False or "auto", got', (None, 1, "yes", "True")),
    ("identity", "must be one of node, key, name, claim, got", ("names",)),
    ("clock", "must be one of virtual, server, got", ("sundial",)),
    ("metrics_address", "must be a port or HOST:PORT, .*, got", ("nowhere",)),
    ("should_stop", "must be a function of a round's number and the history, got bool", (True,)),
    ("availability", "must be a function or a list of client ids, got", ("clinic-a", 5)),
    ("availability", "lists no client", ([],)), ("availability", "lists", ([True], [""])),
]  # fmt: skip
"""Options, what is said of them, and values that are refused so."""


@pytest.mark.parametrize(("options", "said", "values"), WRONG)
def test_wrong_values_are_refused_by_name(api: str, options: str, said: str, values: tuple[Any, ...]) -> None:
    for name in options.split():
        for value in values:
            shown = "" if name == "should_stop" or value == [] else repr(value[0] if isinstance(value, list) else value)
            with pytest.raises(ParameterError, match=rf"^{name} {said} ?{re.escape(shown)}"):
                selection(api, 1, **{name: value})
