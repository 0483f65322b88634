"""The factor ``exploration`` of the confidence radius: (12) of Ben Ami et al., (18) and (26) of Xia et al."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import strategies
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.strategies import message
from fedsel_flwr.testing import play as play_world
from tests.golden.make_traces import FOLDER, PARAMETERS, ROUNDS

SCALED = {"bsfl": {"min_latency": 1.0, "alpha": 0.0}, "cs-ucb": {"max_latency": 10.0},
          "cs-ucb-q": {"max_latency": 10.0, "queue_weight": 0.0}}  # fmt: skip
CLASSES = {"bsfl": "BSFL", "cs-ucb": "CSUCB", "cs-ucb-q": "CSUCBQ"}
EACH = pytest.mark.parametrize("name", sorted(SCALED))


def played(name: str, rounds: list[tuple[int, float]], **parameters: Any) -> Any:
    """A selector of one client a round after some rounds, each with the client that was there and its seconds."""
    selector = create(name, clients_per_round=1, **{"seed": 0, **SCALED[name], **parameters})
    for client, seconds in rounds:
        selector.observe(RoundReport(clients=selector.select(np.array([client])), completed=[True], latency=[seconds]))
    return selector


def choice(selector: Any) -> int:
    return int(selector.select(np.arange(2))[0])


@pytest.mark.parametrize(
    ("name", "factor", "chosen"),
    [("bsfl", 1.0, 1), ("bsfl", 0.3, 1), ("bsfl", 0.2, 0), ("bsfl", 0.0, 0), ("cs-ucb", 1.0, 1), ("cs-ucb", 0.3, 1),
     ("cs-ucb", 0.2, 0), ("cs-ucb", 0.0, 0), ("cs-ucb-q", 1.0, None), ("cs-ucb-q", 0.3, 1), ("cs-ucb-q", 0.2, 0),
     ("cs-ucb-q", 0.0, 0)],
)  # fmt: skip
def test_rounds_by_hand(name: str, factor: float, chosen: int | None) -> None:
    """One client a round. Client 0 is played four times at 2 s, client 1 once at 4 s; round 6 chooses.

    BSFL, min_latency 1: speeds .5 and .25; (m+1) ln(t-1) = 2 ln 5 = 3.2189; radii sqrt(3.2189/4) = .8971 and
        sqrt(3.2189/1) = 1.7941. Client 1 leads if .25 < (1.7941 - .8971) x = .8971 x, so above x = .2787.
    CS-UCB, max_latency 10: rewards .8 and .6; (m+1) ln t = 2 ln 6 = 3.5835; radii .9465 and 1.8930: above .2113.
    CS-UCB-Q: rewards .8 and .6; 2 ln t = 3.5835 too, but cut at 1. At x = 1 both bounds are 1: drawn. At .3: 1.0
        (1.084 cut) and 1.0 (1.168 cut) are drawn too, so rewards are lowered by 4 s: .4 and .2, at .3 .6840 and .7679,
        at .2 .5893 and .5786.
    """
    slow = 4.0 if name == "cs-ucb-q" and chosen is not None else 0.0
    selector = played(name, [(0, 2.0 + slow)] * 4 + [(1, 4.0 + slow)], exploration=factor)
    if chosen is not None:
        assert choice(selector) == chosen
        return
    assert {choice(played(name, [(0, 2.0)] * 4 + [(1, 4.0)], exploration=factor, seed=s)) for s in range(20)} == {0, 1}


@pytest.mark.parametrize("factor", [0.0, 0.25, 1.0, 3.0])
def test_the_bound_is_the_mean_and_the_scaled_radius(factor: float) -> None:
    """Speeds .5 and .25 as above: .5 + x sqrt(2 ln 5 / 4), .25 + x sqrt(2 ln 5)."""
    selector = played("bsfl", [(0, 2.0)] * 4 + [(1, 4.0)], exploration=factor)
    selector.select(np.arange(2))
    radius = math.sqrt(2 * math.log(5))
    np.testing.assert_allclose(selector._bounds(), [0.5 + factor * radius / 2, 0.25 + factor * radius], rtol=1e-14)


@EACH
def test_1_is_the_golden_trace(name: str) -> None:
    selector = create(name, clients_per_round=3, seed=2021, exploration=1.0, **PARAMETERS[name])
    choices = play_world(selector, range(ROUNDS), num_clients=7, availability=0.85, dead=(6,))
    assert choices == json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["choices"]


@EACH
def test_0_is_greedy(name: str) -> None:
    """Unknown clients come first; then, for 200 rounds, whoever has the best mean."""
    rng = np.random.default_rng(3)
    selector = create(name, clients_per_round=2, seed=1, exploration=0.0, **SCALED[name])
    sums, plays = np.zeros(8), np.zeros(8)
    for _ in range(200):
        chosen = selector.select(np.arange(8))
        if (plays > 0).all():
            mean = sums / plays
            assert mean[chosen].min() >= np.delete(mean, chosen).max() - 1e-12
        latency = rng.uniform(1.5, 9.5, 2)
        selector.observe(RoundReport(clients=chosen, completed=[True, True], latency=latency))
        sums[chosen] += 1.0 / latency if name == "bsfl" else 1.0 - latency / 10.0
        plays[chosen] += 1
    assert plays.max() > 20


@EACH
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1"])
def test_what_is_no_factor_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match="exploration must be"):
        create(name, clients_per_round=2, exploration=value, **SCALED[name])


@EACH
def test_it_reaches_the_selector_from_both_apis_and_from_a_scenario(name: str) -> None:
    for module in (strategies, message):
        strategy = getattr(module, CLASSES[name])
        assert inspect.signature(strategy).parameters["exploration"].default == 1.0
        made = strategy(clients_per_round=2, exploration=0.25, **SCALED[name])
        assert made.selector.exploration == 0.25
    scenario = load_scenario("smoke", {"selector": name, f"selectors.{name}.exploration": 0.5})
    assert make_strategy(World(scenario)).selector.exploration == 0.5
    assert make_strategy(World(load_scenario("smoke", {"selector": name}))).selector.exploration == 1.0
