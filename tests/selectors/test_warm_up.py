"""What a selector makes of a warm-up that all selectors share, and where its own opening begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import Selector, create, names
from fedsel_flwr.selectors.registry import example
from fedsel_flwr.testing import check_stateful, play
from tests.selectors.rounds import report

FLEET, WARMUP = 6, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "bsfl": {"alpha": 0.0}, "cs-ucb": {"max_latency": 10.0}, "cs-ucb-q": {"max_latency": 10.0, "fairness": [0.2] * 10},
    "gpfl": {"total_rounds": 20}, "fedcor": {"warmup_rounds": 2, "interval": 3},
    "fedcs": {"deadline": 3.0, "clients_per_round": None}, "power-of-choice": {"candidates": 3},
    "cpow-d": {"candidates": 3}, "rpow-d": {"candidates": 3}, "tifl": {"tiers": 2, "interval": 4, "credits": 2},
}  # fmt: skip
"""Values of the rounds that are worked out by hand below."""


def warm(name: str, rounds: int = WARMUP, **parameters: Any) -> Selector:
    selector = create(name, **{"clients_per_round": 2, "seed": 0} | example(name) | OPTIONS.get(name, {}) | parameters)
    selector.plan_rounds(warmup_rounds=rounds)
    return selector


def step(selector: Selector, columns: dict[str, Any] | None = None) -> list[int]:
    """A round in which client k takes k + 1 s; probes are answered with 0, 1, 2, ..."""
    everybody = np.arange(FLEET)
    if (question := selector.probe(everybody)) is not None:
        selector.inform(question.clients, **{name: question.clients / FLEET for name in question.columns})
    chosen = selector.select(everybody)
    told = {name: np.asarray(values)[chosen] for name, values in (columns or {}).items()}
    scalars = {"global_accuracy": 0.5, "global_loss": 1.0} if "global_loss" in selector.needs else {}
    selector.observe(report(chosen, chosen + 1.0, **told, **scalars))
    return [int(k) for k in chosen]


def test_cs_ucb_has_had_its_opening() -> None:
    """Without the warm-up rounds 1 to 3 are the opening, at random once all were played; here bounds decide."""
    cohorts = set()
    for seed in range(20):
        selector = warm("cs-ucb", rounds=1, seed=seed)
        assert step(selector) == list(range(FLEET))
        assert selector.state_dict()["plays"].tolist() == [1] * FLEET
        cohorts.add(tuple(step(selector)))
    assert cohorts == {(0, 1)}  # means .9 and .8 with one play each: the same radius (18)
    newcomers = warm("cs-ucb", rounds=1)
    newcomers.observe(report(newcomers.select(np.arange(4))))
    assert newcomers.select(np.arange(6)).tolist() == [4, 5]


def test_cs_ucb_q_counts_everybody_as_served() -> None:
    """D + c - b = 0 + .2 - 1 < 0 after each round of the warm-up; then .2 more in each round without service."""
    selector = warm("cs-ucb-q")
    for _ in range(WARMUP):
        step(selector)
    first = step(selector)
    assert selector.state_dict()["queue"].tolist() == [0.0] * FLEET
    step(selector)
    np.testing.assert_allclose(
        selector.state_dict()["queue"], [0.0 if k in first else 0.2 for k in range(FLEET)]
    )  # (27)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("bsfl", [[0, 1]]),  # equal plays, speeds .1 and .05
        ("fedcs", [[0, 1, 2]]),  # those of at most 3 s
        ("round-robin", [[0, 1], [2, 3]]),  # its first cycle begins
    ],
)
def test_rounds_after_it(name: str, after: list[list[int]]) -> None:
    selector = warm(name)
    assert [step(selector) for _ in range(WARMUP + len(after))] == [list(range(FLEET))] * WARMUP + after


def test_gpfl_counts_it_as_its_initialization() -> None:
    """The model moves in round 1, every client has its c_k, and t goes on: alpha = 2 / 20 in round 2."""
    selector = warm("gpfl", rounds=1, clients_per_round=1, rho=0.0)
    projection = [0.0, 0.0, 0.0, 2.0, 0.0, 0.0]
    assert step(selector, {"projection": projection}) == list(range(FLEET))
    assert not selector.keeps_model
    state = selector.state_dict()
    assert state["observed"].all()
    powers = np.exp(projection)
    np.testing.assert_allclose(state["reward_sum"], powers / powers.sum())  # (5), without a factor
    assert step(selector, {"projection": projection}) == [3]
    assert not selector.keeps_model
    alone = create("gpfl", clients_per_round=1, total_rounds=20, seed=0)
    alone.select(np.arange(FLEET))
    assert alone.keeps_model


def test_tifl_profiles_by_its_first_round_and_spends_credits_after_it() -> None:
    selector = warm("tifl")
    for number in range(1, WARMUP + 2):
        chosen = selector.select(np.arange(FLEET))
        selector.observe(report(chosen, chosen + number))
        spent = number - WARMUP
        assert spent <= 0 or len(set(chosen // 3)) == 1  # of one tier
        assert spent < 0 or sorted(selector.state_dict()["credits"].tolist()) == [2 - spent, 2]
    assert selector.state_dict()["profile"].tolist() == [1, 2, 3, 4, 5, 6]


def test_oort_s_epsilon_and_pacer_begin_after_it() -> None:
    """W = 2 rounds of the pacer; utilities are 1 in every round: flat, so T rises; without the warm-up's zeros."""
    keys = {"pacer_step": 2, "pacer_delta": 7.0, "exploration": 0.8, "exploration_decay": 0.5, "exploration_min": 0.0}
    selector, alone = warm("oort", rounds=5, **keys), warm("oort", rounds=0, **keys)
    columns = {"rms_loss": [1.0] * FLEET}
    for number in range(1, 6):
        assert step(selector, columns) == list(range(FLEET))
        assert (selector.state_dict()["gain"], selector.state_dict()["gains"].tolist()) == (0.0, [])
        assert selector.state_dict()["last_round"].tolist() == [number] * FLEET
    for number in range(1, 6):
        selector.select(np.arange(FLEET))
        alone.select(np.arange(FLEET))
        assert selector._exploration_share() == alone._exploration_share() == 0.8 * 0.5 ** (number - 1)
        selector.observe(report([0, 1], rms_loss=[1.0] * 2))
        assert selector.state_dict()["percentile"] == (17.0 if number == 5 else 10.0)


@pytest.mark.parametrize(("own", "common"), [(0, 4), (4, 4), (2, 4), (4, 2)])
def test_pczfl_s_own_warm_up_is_the_same(own: int, common: int) -> None:
    """Both begin with round 1, and the longer holds; its balls learn in either."""
    alone = create("pczfl", warmup_rounds=4, seed=0)
    selector = warm("pczfl", rounds=common, clients_per_round=None, warmup_rounds=own)
    assert play(selector, range(40)) == play(alone, range(40))
    for key, value in alone.state_dict().items():
        np.testing.assert_array_equal(value, selector.state_dict()[key])
    assert len(alone.state_dict()["radius"]) > 4


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("power-of-choice", 3, range(4, 13)), ("cpow-d", 3, range(4, 13)), ("local-accuracy", FLEET, range(4, 13)),
        ("rpow-d", 0, []), ("active-fl", 0, []), ("divfl", 0, []), ("lsh", FLEET, [4]), ("nccb", FLEET, [4]),
        # two random rounds of its own, then every third: rounds 4, 5, 8 and 11 are samples, asked before and after
        ("fedcor", FLEET, [4, 5, 6, 8, 9, 11, 12]),
        ("tifl", FLEET, [4, 8, 12]),  # intervals of four rounds, which begin with round 1
    ],
)  # fmt: skip
def test_who_is_asked_after_it(name: str, count: int, expected: Iterable[int]) -> None:
    """Losses and accuracies serve the choice; losses and gradients come with updates; hashes are wanted once."""
    selector = warm(name)
    probe, asked = selector.probe, []

    def noted(available: Any) -> Any:
        if (question := probe(available)) is not None:
            asked.append((selector.round + 1, question.clients.size))
        return question

    vars(selector)["probe"] = noted
    play(selector, range(12), num_clients=FLEET, availability=1.0, completing=1.0)
    assert asked == [(number, count) for number in expected]
    assert name != "fedcor" or selector.state_dict()["sampled"].tolist() == [4, 5, 8, 11]


def test_rounds_with_nobody_are_counted() -> None:
    selector = warm("cs-ucb")
    assert selector.select(np.arange(0)).size == 0
    assert selector.warming_up
    assert [len(step(selector)) for _ in range(3)] == [FLEET, FLEET, 2]
    assert not selector.warming_up


@pytest.mark.parametrize("name", names())
def test_every_order_of_calls_in_and_after_it(name: str) -> None:
    """Forgotten clients, newcomers, saved and loaded states, choices that nobody reports."""
    check_stateful(lambda seed=None: warm(name, 2, clients_per_round=3, seed=seed), sequences=6)
