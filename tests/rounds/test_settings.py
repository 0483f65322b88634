"""Options are declared once (``tests/test_new_column.py`` declares one more): settings and scenarios."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any
from unittest.mock import Mock

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.settings import Options, Settings, resolve_settings
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.selectors.registry import example
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
    selector = Random(clients_per_round=2)
    vars(selector)["plan_rounds"] = told = Mock()
    SelectionStrategy(selector, over_selection=0.5, warmup_rounds=3)
    told.assert_called_once_with(over_selection=0.5, warmup_rounds=3)
    # the core writes nothing onto the selector itself
    assert (selector.over_selection, selector.common_warmup) == (0.0, 0)


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


EXCLUDED: list[tuple[str, dict[str, Any], str]] = [
    # over-selection, deadlines, and so many replies
    ("pczfl", {"over_selection": 0.5}, r"over_selection = 0\.5 .* pczfl decides itself"),
    ("random", {"over_selection": -0.1}, "over_selection"),
    ("random", {"over_selection": NAN}, "over_selection"),
    ("random", {"round_deadline_s": 0.0}, "round_deadline_s"),
    ("random", {"round_deadline_s": "soon"}, "round_deadline_s"),
    ("everyone", {"wait_for": 0}, "wait_for must be a whole number of at least 1"),
    ("everyone", {"wait_for": 2, "min_completed": 3}, "wait_for = 2 does not fit min_completed = 3"),
    ("random", {"wait_for": 3}, "wait_for = 3 does not fit clients_per_round = 2"),
    ("random", {"wait_for": 1, "over_selection": 0.5}, "both say when a round ends"),
    ("random", {"wait_for": 1, "concurrency": 4}, "wait_for belongs to rounds that wait"),
    *(("random", {"clock": "server", **one}, "the legacy API's server waits for every client")
      for one in ({"over_selection": 0.5}, {"wait_for": 1}, {"round_deadline_s": 5.0})),
    # late updates
    ("random", {"late": "use"}, "needs rounds that end early"),
    ("random", {"late": "later", "wait_for": 1}, "late must be one of"),
    ("random", {"late": "use", "concurrency": 4}, "late belongs to rounds that wait"),
    ("random", {"late": "damped", "wait_for": 1, "late_scale_coff": 10.0}, "late_scale_coff is for late = 'use'"),
    ("random", {"late_scale_coff": 10.0, "wait_for": 1}, "late_scale_coff is for late updates"),
    ("random", {"late": "use", "wait_for": 1, "averaging": "fedavg-absent"}, "adds updates to a plain mean"),
    ("random", {"late": "use", "wait_for": 1, "compare_models": False}, "return the model that they got"),
    ("random", {"max_staleness": 2, "wait_for": 1}, "max_staleness is for buffered rounds and late updates"),
    ("fedcm-ucb", {"late": "use", "wait_for": 1}, "FedCA's filter"),
    # buffered rounds
    ("random", {"concurrency": 5}, "multiple of the 2"),
    ("random", {"concurrency": 4, "buffer": 4}, "must be clients_per_round = 2"),
    ("random", {"buffer": 2}, "buffer is for buffered rounds"),
    ("random", {"max_staleness": 2}, "max_staleness is for buffered rounds"),
    ("random", {"weighting": "uniform"}, "weighting is for buffered rounds"),
    ("random", {"concurrency": 4, "weighting": "uniform", "averaging": "fedpdp"}, "contradicts"),
    ("random", {"concurrency": 4, "channels": 3}, "channels = 3"),
    ("random", {"concurrency": 4, "warmup_rounds": 1}, "warmup_rounds"),
    ("random", {"concurrency": 4, "over_selection": 0.5}, "over_selection"),
    ("random", {"concurrency": 4, "round_deadline_s": 5.0}, "round_deadline_s"),
    ("random", {"concurrency": 4, "compare_models": False}, "compare_models"),
    *((name, {"concurrency": 4}, f"{name} needs rounds that wait") for name in ("fedcs", "pczfl", "fedcor", "gpfl")),
]  # fmt: skip
"""Selectors, options that exclude each other or that the selector excludes, and what is said of them."""


@pytest.mark.parametrize(("selector", "options", "said"), EXCLUDED)
def test_options_that_do_not_go_together_are_refused_by_name(selector: str, options: dict[str, Any], said: str) -> None:
    count = {} if selector in ("everyone", "fedcs", "pczfl") else {"clients_per_round": 2}
    with pytest.raises(ParameterError, match=said):
        SelectionStrategy(create(selector, seed=0, **example(selector) | count), **options)
