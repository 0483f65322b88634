"""The factor ``exploration`` of the confidence radius: (12) of Ben Ami et al., (18) and (26) of Xia et al."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World

SCALED = {"bsfl": {"min_latency": 1.0, "alpha": 0.0}, "cs-ucb": {"max_latency": 10.0},
          "cs-ucb-q": {"max_latency": 10.0, "queue_weight": 0.0}}  # fmt: skip
EACH = pytest.mark.parametrize("name", sorted(SCALED))


def choices(name: str, slower: float, factor: float, seeds: int = 1) -> set[int]:
    """Choices of round 6: client 0 was played four times at 2 s and more, client 1 once at 4 s and more."""
    found = set()
    for seed in range(seeds):
        selector = create(name, clients_per_round=1, seed=seed, exploration=factor, **SCALED[name])
        for client, seconds in [(0, 2.0 + slower)] * 4 + [(1, 4.0 + slower)]:
            chosen = selector.select(np.array([client]))
            selector.observe(RoundReport(clients=chosen, completed=[True], latency=[seconds]))
        found |= set(selector.select(np.arange(2)).tolist())
    return found


def test_rounds_by_hand() -> None:
    """Client 0 has the better mean, client 1 the larger radius, which decides above a factor x.

    BSFL, min_latency 1: speeds .5 and .25; (m+1) ln(t-1) = 2 ln 5 = 3.2189; radii sqrt(3.2189/4) = .8971 and
        sqrt(3.2189/1) = 1.7941. Client 1 leads if .25 < (1.7941 - .8971) x = .8971 x, so above x = .2787.
    CS-UCB, max_latency 10: rewards .8 and .6; (m+1) ln t = 2 ln 6 = 3.5835; radii .9465 and 1.8930: above .2113.
    CS-UCB-Q: rewards .8 and .6; 2 ln t = 3.5835 too, but cut at 1. At x = 1 both bounds are 1: drawn. At .3: 1.0
        (1.084 cut) and 1.0 (1.168 cut) are drawn too, so rewards are lowered by 4 s: .4 and .2, at .3 .6840 and .7679,
        at .2 .5893 and .5786.
    """
    for name, slower in (("bsfl", 0.0), ("cs-ucb", 0.0), ("cs-ucb-q", 4.0)):
        assert [choices(name, slower, factor) for factor in (0.0, 0.2, 0.3)] == [{0}, {0}, {1}]
    assert choices("bsfl", 0.0, 1.0) == choices("cs-ucb", 0.0, 1.0) == {1}
    assert choices("cs-ucb-q", 0.0, 1.0, seeds=20) == {0, 1}


@EACH
def test_0_is_greedy(name: str) -> None:
    """Unknown clients come first; then whoever has the best mean."""
    rng = np.random.default_rng(3)
    selector = create(name, clients_per_round=2, seed=1, exploration=0.0, **SCALED[name])
    sums, plays = np.zeros(8), np.zeros(8)
    for number in range(100):
        chosen = selector.select(np.arange(8))
        if number >= 4:
            mean = sums / plays
            assert mean[chosen].min() >= np.delete(mean, chosen).max() - 1e-12
        latency = rng.uniform(1.5, 9.5, 2)
        selector.observe(RoundReport(clients=chosen, completed=[True, True], latency=latency))
        sums[chosen] += 1.0 / latency if name == "bsfl" else 1.0 - latency / 10.0
        plays[chosen] += 1
        assert number != 3 or (plays == 1).all()


@EACH
def test_it_is_a_parameter_of_scenarios_and_a_finite_number(name: str) -> None:
    scenario = load_scenario("smoke", {"selector": name, f"selectors.{name}.exploration": 0.5})
    assert make_strategy(World(scenario)).selector.exploration == 0.5
    for value in (-0.1, math.nan, math.inf, "1"):
        wrong: dict[str, Any] = {"exploration": value}
        with pytest.raises(ParameterError, match="exploration must be"):
            create(name, clients_per_round=2, **wrong, **SCALED[name])
