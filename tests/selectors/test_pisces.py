"""Pisces against rounds worked by hand and a plain recount of all reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundReport
from fedsel_flwr.selectors.pisces import Pisces
from tests.selectors import rounds
from tests.selectors.oracle_draws import frequencies, p_value
from tests.selectors.oracle_pisces import PiscesOracle
from tests.selectors.oracles import World, follow
from tests.selectors.rounds import frozen


def build(**parameters: Any) -> Pisces:
    return Pisces(**{"clients_per_round": 2, "seed": 0} | parameters)


def greedy(**parameters: Any) -> Pisces:
    """A selector that explores only clients that it must."""
    return build(**{"exploration": 0.0, "exploration_min": 0.0} | parameters)


def play(
    selector: Pisces, available: Iterable[int], losses: dict[int, float], late: dict[int, float] | None = None
) -> list[int]:
    """Choose and report; a client without a loss fails, and one without a staleness has 0."""
    staleness = dict.fromkeys(losses, 0.0) | (late or {})
    return rounds.play(selector, available, dict.fromkeys(losses, 1.0), rms_loss=losses, staleness=staleness)


def test_the_defaults_are_those_of_the_authors_experiments() -> None:
    """experiments/exp_config_examples of github.com/SamuelGong/Pisces at 4ba4db8, by its own names."""
    theirs = {
        "explore_factor": 0.9, "exploration_decaying_factor": 0.98, "min_explore_factor": 0.3,
        "staleness_penalty_factor": 0.5,
    }  # fmt: skip
    selector = build()
    ours = ("exploration", "exploration_decay", "exploration_min", "staleness_penalty")
    assert [getattr(selector, name) for name in ours] == list(theirs.values())


@pytest.mark.parametrize(
    ("beta", "chosen"),
    [(0.0, [0, 1]), (0.5, [0, 2]), (1.0, [2, 3])],
)
def test_utilities_by_hand(beta: float, chosen: list[int]) -> None:
    """Sizes (10, 4, 2, 2), losses (2, 4, 5, 4): 20, 16, 10, 8 with beta = 0.

    Staleness (3, 8, 0, 0): 1 + tau = (4, 9, 1, 1). beta = .5: 20/2, 16/3, 10, 8 = (10, 5.33, 10, 8) -> 0, 2.
    beta = 1: (5, 1.78, 10, 8) -> 2, 3.
    """
    selector = greedy(staleness_penalty=beta, clients_per_round=4)
    selector.inform(np.arange(4), num_examples=np.array([10.0, 4.0, 2.0, 2.0]))
    play(selector, range(4), {0: 2.0, 1: 4.0, 2: 5.0, 3: 4.0}, {0: 3.0, 1: 8.0})
    selector.clients_per_round = 2
    assert selector.select(np.arange(4)).tolist() == chosen


def test_the_expected_staleness_is_the_mean_of_the_last_five() -> None:
    """Client 0 has the loss 4, client 1 the loss 2.1; beta = 1. Client 0 is stale by 9, 1, 0, 0, 0, 0, 0 steps.

    1 + tau: 10, 6, 4.33, 3.5, 3; then the 9 is the sixth last: 1 + 1/5 = 1.2; then the 1 is too: 1.
    4 / (1 + tau): .4, .67, .92, 1.14, 1.33, 3.33, 4. Only the last two are above 2.1.
    """
    selector = greedy(clients_per_round=1, staleness_penalty=1.0)
    play(selector, [1], {1: 2.1})
    seen = []
    for late in (9.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        assert play(selector, [0], {0: 4.0}, {0: late}) == [0]
        seen.append(frozen(selector, range(2))())
    assert seen == [[1]] * 5 + [[0]] * 2
    utility = selector._utility(np.arange(2))
    np.testing.assert_allclose(utility, [4.0, 2.1])


def test_a_report_without_staleness_has_zeros_and_speed_does_not_count() -> None:
    told = rounds.report([0, 1], {0: 1.0, 1: 50.0}, rms_loss={0: 1.0, 1: 2.0})
    assert told.staleness is not None
    assert (told.staleness.dtype, told.staleness.tolist()) == (np.float64, [0.0, 0.0])
    selector = greedy()
    selector.select(np.arange(2))
    selector.observe(told)
    selector.clients_per_round = 1
    assert selector.select(np.arange(2)).tolist() == [1]
    with pytest.raises(ValueError, match="staleness must lie in"):
        rounds.report([0], staleness=[-1.0])


def test_exploration_by_hand() -> None:
    """m = 4, epsilon = 1, .5, .25, .25, ...

    Round 1: clients 0 to 3 are all that is there.
    Round 2, client 4 comes: a binomial number of four places is for it, and it is at least 1 with the chance 1 - .5^4.
    """
    selector = build(clients_per_round=4, exploration=1.0, exploration_decay=0.5, exploration_min=0.25)
    play(selector, range(4), {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0})
    counts = frequencies(frozen(selector, range(5)), 800)
    expected = {frozenset({0, 1, 2, 3}): 0.5**4, frozenset({0, 1, 2, 4}): 1 - 0.5**4}
    assert p_value(counts, expected) > 1e-3
    shares = []
    for _ in range(3):
        shares.append(selector._exploration_share())
        selector.select(np.arange(0))  # a round without clients is a round
    assert shares == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("available", [range(8), [0, 3, 4, 5, 6, 7], [0, 1, 5, 7]], ids=["all", "few tried", "last"])
def test_sets_have_the_chances_of_an_enumeration(epsilon: float, available: Iterable[int]) -> None:
    """Clients 0 to 3 are explored, 4 to 6 are not, and 7 has failed twice in a row."""
    selector = greedy(clients_per_round=3, exploration=epsilon, exploration_decay=1.0)
    oracle = PiscesOracle(3, [1.0] * 8)
    selector.inform(np.arange(8), num_examples=np.ones(8))
    stories: list[tuple[list[int], dict[int, float]]] = [([0, 1, 2], {0: 1.0, 1: 3.0, 2: 2.0}), ([3], {3: 0.5})]
    for here, losses in [*stories, ([7], {}), ([7], {})]:
        chosen = selector.select(np.array(here))
        told = rounds.report(chosen, dict.fromkeys(losses, 1.0), rms_loss=losses, staleness={1: 3.0, 0: 0, 2: 1, 3: 0})
        oracle.t += 1
        oracle.observe(told)
        selector.observe(told)
    chances = oracle.chances(list(available), epsilon)
    assert p_value(frequencies(frozen(selector, available), 600), chances) > 1e-3


def test_failures_by_hand() -> None:
    """Clients 0, 1, 2 have losses 9, 2, 1; one is chosen.

    Rounds 2 and 3: 0 fails once and keeps its utility, so it is chosen again; it fails a second time in a row: last for
    2^2 = 4 rounds, 3 + 4 = 7 included. Rounds 4 to 7: 1. Round 8: 0 again; it fails: last for 8 rounds, 16 included.
    Round 9: 0 alone is there, is chosen and reports 5, which ends its failures. Round 10: 0.
    """
    for seed in range(5):
        selector = greedy(clients_per_round=3, seed=seed)
        play(selector, range(3), {0: 9.0, 1: 2.0, 2: 1.0})
        selector.clients_per_round = 1
        others = {1: 2.0, 2: 1.0}
        story = [play(selector, range(3), others) for _ in range(7)]
        assert story == [[0], [0], [1], [1], [1], [1], [0]]
        assert play(selector, [0], {0: 5.0}) == [0]
        assert selector.state_dict()["failures"].tolist() == [0, 0, 0]
        assert play(selector, range(3), {0: 5.0}) == [0]


def test_an_unexplored_client_that_never_answers_is_not_explored_for_ever() -> None:
    """epsilon = 1, and client 1 is dead: chosen in rounds 2, 3, 3 + 4 + 1 = 8, 8 + 8 + 1 = 17 and 17 + 16 + 1 = 34."""
    selector = build(clients_per_round=1, exploration=1.0, exploration_decay=1.0)
    play(selector, [0], {0: 1.0})
    asked = [number for number in range(2, 40) if play(selector, range(2), {0: 1.0}) == [1]]
    assert asked == [2, 3, 8, 17, 34]
    for _ in range(200):  # even if it is all that there is
        assert play(selector, [1], {}) == [1]
    assert selector.state_dict()["last_until"][1] <= 2**30 + selector.round


def test_a_spare_s_loss_counts_and_its_staleness_does_not() -> None:
    """Client 2 is a spare that told a loss, client 3 one that did not answer: it is neither explored nor failed."""
    selector = greedy(clients_per_round=4)
    selector.select(np.arange(4))
    seconds, spare = dict.fromkeys(range(3), 1.0), [False, False, True, True]
    losses, late = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 4.0, 1: 0.0, 2: 7.0}
    selector.observe(rounds.report(range(4), seconds, spare=spare, rms_loss=losses, staleness=late))
    state = selector.state_dict()
    assert state["rms_loss"].tolist() == [1.0, 2.0, 3.0, -1.0]
    assert state["staleness"][:, 0].tolist() == [4.0, 0.0, -1.0, -1.0]
    assert state["failures"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_choices_are_those_of_a_recount(seed: int, epsilon: float) -> None:
    """200 rounds with failures, spares, absences, newcomers, clients that are forgotten, and unobserved rounds."""
    sizes = [float(5 + 7 * k % 40) for k in range(12)]
    selector = build(clients_per_round=3, exploration=epsilon, exploration_min=epsilon, seed=seed)
    oracle = PiscesOracle(3, sizes)
    world = World(num_clients=12, newcomers={0: 20, 5: 60}, failure=0.3)
    assert follow(selector, oracle, RoundReport, world=world, rounds=200, seed=seed, forget_every=25) == []
    assert oracle.decided > 100
    assert oracle.lasts > 20


def test_the_decay_begins_after_a_common_warm_up() -> None:
    selector = build(clients_per_round=1, exploration=0.8, exploration_decay=0.5, exploration_min=0.0)
    selector.plan_rounds(warmup_rounds=2)
    losses = {0: 1.0, 1: 2.0, 2: 3.0}
    assert [play(selector, range(3), losses) for _ in range(2)] == [[0, 1, 2]] * 2
    for number in range(3):
        assert play(selector, range(3), losses) == [2]  # all were explored in the warm-up
        assert selector._exploration_share() == 0.8 * 0.5**number
