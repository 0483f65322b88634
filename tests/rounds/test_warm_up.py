"""A warm-up that all selectors share: what strategies and scenarios make of it, in both APIs and both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import GPFL, LocalAccuracy, Random, create
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.app import drive
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.rounds.written import MODEL, Written, core_of, facts, play_round, reply
from tests.simulations import inprocess
from tests.simulations.inprocess import choices
from tests.strategies.either_api import make
from tests.strategies.numpy_world import validation

NODES = [str(k) for k in range(10)]
KEYS: dict[str, Any] = {
    "num_clients": 8, "clients_per_round": 3, "rounds": 5, "aggregation.warmup_rounds": 2, "model.name": "logistic",
    "clients.energy_score_low": 0.5, "data.local_test_fraction": 0.2, "selectors.tifl.tiers": 2,
    "selectors.tifl.interval": 2, "training.local_epochs": 1,
}  # fmt: skip


def scenario(selector: str, **overrides: Any) -> Scenario:
    return load_scenario("digits", {**KEYS, "selector": selector, **overrides})


def test_everybody_there_is_asked_and_nobody_is_probed() -> None:
    """Probes begin in round 3, when there is something to choose; over-selection too."""
    core = core_of(LocalAccuracy(clients_per_round=2, seed=0), warmup_rounds=2, over_selection=0.5)
    transport = Written(facts(*NODES), {node: {"local_accuracy": 0.1, "latency_s": 1.0} for node in NODES})
    assert sorted(core.choose(NODES, MODEL, transport)) == NODES
    assert core.collector.waits_for(len(NODES)) is None
    core.collect({})
    core.finish()
    assert sorted(core.choose(NODES[:2], MODEL, transport)) == NODES[:2]  # fewer than a round asks otherwise
    assert core.collector.waits_for(2) is None
    core.collect({})
    core.finish()
    assert transport.probed == []
    assert len(core.choose(NODES, MODEL, transport)) == 3
    assert core.collector.waits_for(3) == 2
    assert core.collector.waits_for(4) is None  # more than asked: an opening that measures everybody
    assert len(transport.probed) == 1


def test_a_core_is_resumed_in_the_middle_of_it() -> None:
    straight, first, second = (core_of(Random(clients_per_round=2, seed=4), warmup_rounds=3) for _ in range(3))
    expected = [play_round(straight, NODES) for _ in range(8)]
    asked = [play_round(first, NODES) for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert asked + [play_round(second, NODES) for _ in range(6)] == expected
    assert [len(cohort) for cohort in expected] == [10] * 3 + [2] * 5


def test_an_opening_that_keeps_the_model_gives_way() -> None:
    """A selector of somebody's own that measures in round 1, and knows of no warm-up."""

    class Measures(Random):
        keeps_model = True

    for rounds, enough in ((0, False), (1, True)):
        core = core_of(Measures(clients_per_round=2, seed=0), warmup_rounds=rounds, over_selection=0.5)
        chosen = core.choose(NODES, MODEL, Written(facts(*NODES)))
        assert core.collector.waits_for(3) is None
        assert core.collect(dict.fromkeys(chosen, reply())).enough is enough


def test_a_warm_up_that_leaves_nothing_is_refused(api: str) -> None:
    keys = {"validation": validation(), "learning_rate": 0.1}
    with pytest.raises(ParameterError, match=r"warmup_rounds = 5 .* total_rounds = 5"):
        make(api, GPFL(clients_per_round=2, total_rounds=5), warmup_rounds=5, **keys)
    with pytest.raises(ParameterError, match=r"warmup_rounds = 5 leaves gpfl"):
        make(api, "GPFL", clients_per_round=2, total_rounds=5, warmup_rounds=5, **keys)
    made = make(api, "GPFL", clients_per_round=2, total_rounds=5, warmup_rounds=4, **keys)
    assert made.selector.common_warmup == 4


@pytest.mark.parametrize("selector", ["gpfl", "pczfl", "oort", "pisces", "tifl"])
def test_both_apis_and_both_engines_do_the_same(selector: str) -> None:
    chosen = scenario(selector)
    together = simulate(chosen, engine="vectorized")
    legacy = inprocess.play(chosen)
    message = scenario(selector, api="message")
    flower = drive(inprocess.grid_of(message), message)
    assert choices(together) == choices(legacy) == choices(flower)
    sizes = [record.num_selected for record in together.history.rounds]
    assert sizes[:2] == [8, 8]
    assert sizes[2:] == [3, 3, 3] or selector == "pczfl"
    for other in (legacy, flower):
        difference = max(np.abs(a - b).max() for a, b in zip(together.arrays, other.arrays, strict=True))
        assert difference <= 1e-4


def test_gpfl_s_direction_begins_in_it() -> None:
    """After one round every client has a projection on the mean of the gradients, and they differ."""
    selector = create("gpfl", clients_per_round=3, total_rounds=5, seed=1)
    simulate(scenario("gpfl", **{"rounds": 2, "aggregation.warmup_rounds": 1}), engine="vectorized", selector=selector)
    projection = selector.state_dict()["projection"]
    assert (projection != 0.0).all()
    assert len(np.unique(projection)) == 8
    assert selector.state_dict()["plays"].sum() == 8 + 3
