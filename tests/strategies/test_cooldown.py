"""``cooldown="auto"``: on for selectors that would ask failing clients for ever, off for all others."""

from __future__ import annotations

from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Selector, names
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario_files import scenario_names
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import PCZFL, SelectionStrategy, Validation, message
from tests.golden.make_traces import selector_under_trace
from tests.strategies.helpers import FakeProxy, Federation, fedavg

FOR_EVER = {"divfl", "pczfl"}
PAPERS = ("ben-ami-", "gpfl-", "pczfl-", "xia-")


class Stubborn(Selector):
    """Chooses the first client there is."""

    asks_failed_for_ever = True

    def _select(self, available: Any) -> Any:
        return available[:1]


def played(cooldown: Any) -> list[str]:
    """Whom Stubborn chose in seven rounds; client 0 fails in all of them."""
    proxies = [FakeProxy("a", 0, fault="raises"), FakeProxy("b", 1)]
    strategy = SelectionStrategy(Stubborn(clients_per_round=1), fedavg(), min_available=1, **cooldown)
    Federation(strategy, proxies).play(7)
    return [row.client_id for row in strategy.history.clients]


def test_a_stubborn_selector_leaves_a_failing_client_out_by_default() -> None:
    """Client 0 fails in rounds 1 and 4: it is out for 2, then for 4 rounds."""
    for cooldown in ({}, {"cooldown": "auto"}, {"cooldown": True}):
        assert played(cooldown) == ["0", "1", "1", "0", "1", "1", "1"]
    assert played({"cooldown": False}) == ["0"] * 7


@pytest.mark.parametrize("strategy", [SelectionStrategy, message.SelectionStrategy])
def test_auto_asks_the_selectors_class(strategy: Any) -> None:
    for name in names():
        validation = Validation(lambda arrays, inputs: inputs, [[0.0, 1.0]], [0])
        options = {"validation": validation, "learning_rate": 0.1}
        for given, expected in ((None, name in FOR_EVER), ("auto", name in FOR_EVER), (True, True), (False, False)):
            own = options if given is None else options | {"cooldown": given}
            made = strategy(selector_under_trace(name), **own)
            assert made.core.settings.cooldown is expected, (name, given)
    with pytest.raises(ParameterError, match=r'cooldown must be True, False or "auto", got .yes.'):
        strategy(selector_under_trace("random"), cooldown="yes")


def test_a_papers_strategy_takes_it_too() -> None:
    validation = Validation(lambda arrays, inputs: inputs, [[0.0, 1.0]], [0])
    assert PCZFL(validation=validation).core.settings.cooldown is True
    assert PCZFL(validation=validation, cooldown=False).core.settings.cooldown is False


@pytest.mark.parametrize(("given", "expected"), [(None, True), ("auto", True), (True, True), (False, False)])
def test_a_scenario_says_it_too(given: Any, expected: bool) -> None:
    scenario = load_scenario("smoke", {"selector": "divfl", "aggregation.cooldown": given})
    assert make_strategy(world_of(scenario)).core.settings.cooldown is expected
    scenario = load_scenario("smoke", {"selector": "bsfl", "aggregation.cooldown": given})
    assert make_strategy(world_of(scenario)).core.settings.cooldown is (given is True)


def test_the_papers_scenarios_leave_nobody_out() -> None:
    said = {name: load_scenario(name).aggregation.cooldown for name in scenario_names()}
    assert said == {name: False if name.startswith(PAPERS) else "auto" for name in said}
    assert sum(value is False for value in said.values()) == 6


@pytest.mark.parametrize("name", sorted(FOR_EVER))
def test_fewer_of_the_chosen_fail_among_phones_of_which_some_are_too_slow(name: str) -> None:
    """Of 40 phones some always miss a deadline of 40 s: half and more of the choices fail without the cool-down."""
    failed = []
    for cooldown in (False, "auto"):
        scenario = load_scenario("phones", {
            "num_clients": 40, "clients_per_round": 4, "rounds": 60, "selector": name, "model.name": "logistic",
            "wireless.max_latency_s": 40.0, "aggregation.cooldown": cooldown,
        })  # fmt: skip
        rows = simulate(scenario, engine="vectorized").history.clients
        failed.append(sum(not row.completed for row in rows) / len(rows))
    assert failed[1] < 0.55 * failed[0], failed
