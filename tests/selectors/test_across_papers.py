"""What the papers' selectors do alike, beyond the conformance suite."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.registry import example
from tests.selectors.rounds import play, report

NAN = math.nan
WRONG: dict[str, list[tuple[str, Any]]] = {
    "active-fl": [("dropped", 1.1), ("temperature", -1.0), ("uniform", -0.1), ("accuracy_weight", 1.1)],
    "bsfl": [
        ("alpha", -1.0), ("alpha", NAN), ("beta", -1), ("beta", 0), ("clients_per_round", 0), ("solver", "brute"),
        ("data_weights", [1.0, -1.0]), ("data_weights", [0.0, 0.0]), ("data_weights", [1.0, NAN]),
        ("data_weights", [[1.0, 2.0]]), ("exploration", -0.1), ("exploration", math.inf), ("solver_steps", 0),
        ("solver_steps", -5),
    ],
    "cpow-d": [("candidates", 1)],
    "cs-ucb": [("clients_per_round", 0), ("exploration", -0.1)],
    "cs-ucb-q": [
        ("queue_weight", -0.1), ("queue_weight", 1.1), ("queue_weight", NAN), ("fairness_scale", -0.5),
        ("fairness_scale", 1.5), ("fairness_scale", NAN), ("clients_per_round", 0), ("fairness", [0.5, -0.1]),
        ("fairness", [0.5, 1.5]), ("fairness", [0.5, NAN]), ("fairness", [[0.5, 0.5]]), ("fairness", {0: -0.1}),
        ("fairness", {0: NAN}),
    ],
    "divfl": [
        ("epsilon", 0.0), ("epsilon", 1.0), ("sketch_size", 0), ("max_clients", 0), ("accuracy_weight", NAN),
    ],
    "fedcor": [
        ("warmup_rounds", 0), ("interval", 0), ("gamma", 0.0), ("gamma", 1.5), ("beta", 0.0), ("fit", "newton"),
        ("learning_rate", 0.0), ("max_clients", 0),
    ],
    "fedcs": [("deadline", 0.0), ("channels", 0), ("refresh_rounds", 0), ("clients_per_round", 0)],
    "gpfl": [
        ("total_rounds", 0), ("rho", -0.5), ("rho", NAN), ("exploration", -1.0), ("loss_sign", "minus"),
        ("sort_by", "C"), ("clients_per_round", 0),
    ],
    "lsh": [("bits", 0), ("accuracy_weight", 1.5)],
    "nccb": [("exploration", -1.0), ("clusters", 0)],
    "oort": [
        ("exploration", 1.5), ("penalty", -1), ("pacer_step", 0), ("first_percentile", 101),
        ("score_range", "largest"), ("trained_examples", 0),
    ],
    "pczfl": [("uncertainty", -0.1), ("uncertainty", NAN), ("warmup_rounds", -1), ("clients_per_round", 0)],
    "pisces": [
        ("exploration", 1.5), ("exploration_decay", -0.1), ("exploration_min", NAN), ("staleness_penalty", -0.5),
        ("clients_per_round", 0),
    ],
    "power-of-choice": [("candidates", 1), ("accuracy_weight", -0.1)],
    "random-by-size": [("replacement", 1), ("replacement", "yes"), ("replacement", None)],
    "rpow-d": [("candidates", 1)],
    "tifl": [("credits", (1, 2)), ("credits", 0), ("tiers", 0), ("interval", 0)],
}  # fmt: skip


def build(name: str, **parameters: Any) -> Any:
    return create(name, **{"clients_per_round": 2, "seed": 0} | example(name) | parameters)


@pytest.mark.parametrize(
    ("name", "parameter", "value"), [(name, *wrong) for name, table in WRONG.items() for wrong in table]
)
def test_wrong_parameters_are_refused_by_name(name: str, parameter: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=parameter):
        build(name, **{parameter: value})


@pytest.mark.parametrize("name", sorted(WRONG.keys() | {"fedcm-ts", "fedcm-ucb"}))
def test_ties_are_broken_at_random(name: str) -> None:
    """Four equal clients, one of them next: each 50 times in 200 seeds (4.5 sd = 28)."""
    counts = Counter[int]()
    for seed in range(200):
        selector = build(name, clients_per_round=1, seed=seed)
        if name == "divfl":
            selector.inform(np.arange(4), gradient=np.ones((4, 2)))
        if name == "gpfl":
            play(selector, range(4), projection=np.full(4, 0.5), global_accuracy=0.1, global_loss=2.3)
        counts[int(selector.select(np.arange(4))[0])] += 1
    assert len(counts) == 4
    assert max(abs(count - 50) for count in counts.values()) < 28


@pytest.mark.parametrize("name", ["active-fl", "divfl", "power-of-choice"])
def test_the_utility_of_pczfl_is_declared_by_the_object_that_has_it(name: str) -> None:
    """Without the option a state has the keys of former versions, whose checkpoints can thus be loaded."""
    with_it, without = build(name, accuracy_weight=0.5), build(name)
    assert without.needs == type(with_it).needs == type(without).needs
    assert with_it.needs - without.needs == {"accuracy", "energy_score"}
    assert (with_it.requires, without.requires) == ({"energy_score"}, set())
    assert with_it.state_dict().keys() - without.state_dict().keys() == {"accuracy", "energy_score"}
    for one, other in (with_it, without), (without, with_it):
        with pytest.raises(StateError, match="accuracy"):
            one.load_state_dict(other.state_dict())


@pytest.mark.parametrize(("name", "column"), [("active-fl", "loss"), ("rpow-d", "train_loss")])
def test_spares_keep_their_loss_or_get_the_one_that_they_report(name: str, column: str) -> None:
    """Both clients are spares twice: client 0 reports .4, client 1 has not answered; neither has failed."""
    selector = build(name)
    play(selector, [0, 1], **{column: {0: 1.0, 1: 2.0}})
    for _ in range(2):
        selector.select(np.arange(2))
        selector.observe(report([0, 1], {0: 9.0}, late=4.0, spare=[True, True], **{column: {0: 0.4}}))
    assert selector.state_dict()["loss"].tolist() == [0.4, 2.0]
    assert selector.state_dict()["failures"].tolist() == [0, 0]


SCALED = {"bsfl": {"min_latency": 1.0, "alpha": 0.0}, "cs-ucb": {"max_latency": 10.0},
          "cs-ucb-q": {"max_latency": 10.0, "queue_weight": 0.0}}  # fmt: skip


@pytest.mark.parametrize(("name", "slower"), [("bsfl", 0.0), ("cs-ucb", 0.0), ("cs-ucb-q", 4.0)])
def test_the_factor_of_the_confidence_radius_by_hand(name: str, slower: float) -> None:
    """(12) of Ben Ami et al., (18) and (26) of Xia et al.; round 6: client 0 was played four times, client 1 once.

    Client 0 has the better mean, client 1 the larger radius, which decides above a factor x.

    BSFL, min_latency 1: speeds .5 and .25; (m+1) ln(t-1) = 2 ln 5 = 3.2189; radii sqrt(3.2189/4) = .8971 and
        sqrt(3.2189/1) = 1.7941. Client 1 leads if .25 < (1.7941 - .8971) x = .8971 x, so above x = .2787.
    CS-UCB, max_latency 10: rewards .8 and .6; (m+1) ln t = 2 ln 6 = 3.5835; radii .9465 and 1.8930: above .2113.
    CS-UCB-Q: rewards .8 and .6; 2 ln t = 3.5835 too, but cut at 1. At x = 1 both bounds are 1: drawn. At .3: 1.0
        (1.084 cut) and 1.0 (1.168 cut) are drawn too, so rewards are lowered by 4 s: .4 and .2, at .3 .6840 and .7679,
        at .2 .5893 and .5786.
    """

    def choices(factor: float, seconds: float, seeds: int = 1) -> set[int]:
        found = set()
        for seed in range(seeds):
            selector = create(name, clients_per_round=1, seed=seed, exploration=factor, **SCALED[name])
            for client, taken in [(0, 2.0 + seconds)] * 4 + [(1, 4.0 + seconds)]:
                play(selector, [client], taken)
            found |= set(selector.select(np.arange(2)).tolist())
        return found

    assert [choices(factor, slower) for factor in (0.0, 0.2, 0.3)] == [{0}, {0}, {1}]
    assert choices(1.0, 0.0, seeds=20) == ({0, 1} if name == "cs-ucb-q" else {1})
