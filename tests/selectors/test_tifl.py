"""TiFL (Chai et al., 2020) against rounds worked by hand and the chances of its cohorts by enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors.tifl import TiFL
from tests.selectors import rounds
from tests.selectors.oracle_draws import Chances, drawn_one_by_one, frequencies, frozen, p_value, then_uniformly


def cohorts(tiers: Sequence[Sequence[int]], chances: Sequence[float], credits: Sequence[int] | None, m: int) -> Chances:
    """Chance of each cohort: a tier with credits, then m of its clients uniformly, filled up with the others."""
    allowed = [chance if credits is None or credits[t] > 0 else 0.0 for t, chance in enumerate(chances)]
    everybody = [client for tier in tiers for client in tier]
    found: Chances = {}
    for tier, chance in zip(tiers, allowed, strict=True):
        of_tier = drawn_one_by_one(dict.fromkeys(tier, 1.0), m)
        for cohort, share in then_uniformly(of_tier, everybody, m).items():
            found[cohort] = found.get(cohort, 0.0) + chance / sum(allowed) * share
    return found


build = partial(TiFL, clients_per_round=2, tiers=3, seed=0)


def play(
    selector: TiFL, available: Sequence[int], seconds: dict[int, float], accuracy: dict[int, float] | None = None
) -> tuple[list[int], list[int]]:
    """Answer the probe, choose, report; a client without seconds fails. Returns the choice and who was asked."""
    asked = rounds.answer(selector, available, accuracy or {})
    return rounds.play(selector, available, seconds), asked


def profiled(seconds: dict[int, float], **parameters: Any) -> TiFL:
    """Everybody has had the profiling round."""
    selector = build(**parameters)
    for _ in range(-(-len(seconds) // selector.clients_per_round)):
        play(selector, sorted(seconds), seconds)
    return selector


SECONDS = {0: 3.0, 1: 1.0, 2: 9.0, 3: 2.0, 4: 5.0, 5: 4.0}
TIERS = [[1, 3], [0, 5], [4, 2]]  # 1 and 2 s, 3 and 4 s, 5 and 9 s


@pytest.mark.parametrize(
    ("m", "available"), [(2, range(6)), (3, range(6)), (2, [1, 3, 4, 2])], ids=["tiers", "filled up", "one tier away"]
)
def test_the_tiers_by_hand(m: int, available: Sequence[int]) -> None:
    """Latencies 3, 1, 9, 2, 5, 4 s in three tiers: {1, 3}, {0, 5}, {2, 4}; each equally often, if somebody is there.

    With m = 3 the third client comes from the other tiers, uniformly.
    """
    selector = profiled(SECONDS)
    selector.clients_per_round = m
    here = [tier for tier in TIERS if set(tier) <= set(available)]
    expected = cohorts(here, [1 / len(here)] * len(here), None, m)
    assert p_value(frequencies(frozen(selector, available), 500), expected) > 1e-3


def test_chances_and_credits_by_hand() -> None:
    """Three tiers of two, I = 4, three profiling rounds; the probes are before rounds 1, 5, 9, ...

    Round 1: accuracy .1 everywhere. Round 4: a tier is drawn, each with 1/3, and spends a credit of its (2, 1, 1).
    Before round 5 the tiers have A = (.9, .5, .4), so the current tier has risen: chances stay 1/3.
    Before round 9 they have (.9, .5, .4) again: the current tier has not risen: 1 - A = (.1, .5, .6), of 1.2:
    chances 1/12, 5/12, 6/12 among the tiers with credits. After rounds 4 to 7 every credit is spent (2 + 1 + 1 = 4);
    round 8 renews all of them and spends one.
    """
    better = {1: 0.8, 3: 1.0, 0: 0.5, 5: 0.5, 4: 0.3, 2: 0.5}
    answers = {1: dict.fromkeys(range(6), 0.1), 5: better, 9: better}
    drawn_in_eight: Counter[int] = Counter()
    for seed in range(40):
        selector = build(interval=4, credits=(2, 1, 1), seed=seed)
        drawn: list[int] = []
        for number in range(1, 9):
            chosen, asked = play(selector, range(6), SECONDS, answers.get(number))
            assert asked == (list(range(6)) if number in answers else [])
            if number > 3:
                assert sorted(chosen) in [sorted(tier) for tier in TIERS]
                drawn.append(next(t for t, tier in enumerate(TIERS) if chosen[0] in tier))
            np.testing.assert_array_equal(selector.state_dict()["weight"], np.ones(3))
        assert sorted(drawn[:4]) == [0, 0, 1, 2]
        credits = [2, 1, 1]
        credits[drawn[4]] -= 1
        assert selector.state_dict()["credits"].tolist() == credits
        play(selector, range(6), SECONDS, answers[9])
        np.testing.assert_allclose(selector.state_dict()["weight"], [0.1, 0.5, 0.6])
        drawn_in_eight[drawn[4]] += 1
    assert all(drawn_in_eight[tier] > 5 for tier in range(3))


@pytest.mark.parametrize("credits", [None, (3, 1, 1), (1, 2, 1)])
def test_the_cohorts_follow_chances_and_credits(credits: tuple[int, ...] | None) -> None:
    """After the change of chances; where a tier's credits are spent, the others share its chance.

    Mean accuracies .875, .375 and .25: chances in proportion to .125, .625 and .75, as 1, 5 and 6.
    """
    accuracy = {1: 0.75, 3: 1.0, 0: 0.5, 5: 0.25, 4: 0.0, 2: 0.5}
    selector = profiled(SECONDS, interval=4, credits=credits)
    play(selector, range(6), SECONDS)
    for _ in range(5, 10):
        play(selector, range(6), SECONDS, accuracy)  # the same before rounds 5 and 9: no tier has risen
    left = None if credits is None else selector.state_dict()["credits"].tolist()
    left = list(credits) if credits is not None and not any(left or []) else left
    expected = cohorts(TIERS, [1 / 12, 5 / 12, 6 / 12], left, 2)
    assert p_value(frequencies(frozen(selector, range(6)), 500), expected) > 1e-3


def test_who_fails_five_times_is_in_no_tier_until_it_answers() -> None:
    """Client 6 is in every cohort of untried clients until it answers or has failed five times."""
    everybody = range(7)
    selector = profiled(SECONDS, clients_per_round=3, tiers=2)
    for _ in range(5):
        assert 6 in play(selector, everybody, SECONDS)[0]
    assert not any(6 in members for members in frequencies(frozen(selector, everybody), 200))
    selector.clients_per_round = 7
    play(selector, everybody, SECONDS | {6: 0.5})
    selector.clients_per_round = 3
    sets = frequencies(frozen(selector, everybody), 200)
    assert any(6 in members for members in sets)
    assert any(6 not in members for members in sets)


def test_spares_are_profiled_or_raise_their_profile() -> None:
    """Of four spares 0 answered after 7 s; 1, 2, 3 have not within 4 s. Client 1 had 1 s, client 2 9 s, 3 nothing."""
    selector = build(clients_per_round=4)
    play(selector, [1, 2], {1: 1.0, 2: 9.0})
    selector.select(np.arange(4))
    selector.observe(rounds.report(range(4), {0: 7.0}, late=4.0, spare=[True] * 4))
    assert selector.state_dict()["profile"].tolist() == [7.0, 4.0, 9.0, 4.0]
    assert selector.state_dict()["attempts"].tolist() == [0] * 4


def test_a_newcomer_is_profiled_first_and_the_tiers_are_cut_anew() -> None:
    """Client 6, 1.5 s, comes after the profiling: {1, 6, 3}, {0, 5}, {4, 2}."""
    selector = profiled(SECONDS)
    chosen, _ = play(selector, range(7), SECONDS | {6: 1.5})
    assert 6 in chosen
    sets = frequencies(frozen(selector, range(7)), 300)
    assert set(sets) == {frozenset(pair) for pair in ((1, 6), (1, 3), (3, 6), (0, 5), (2, 4))}


def test_when_the_chances_stay() -> None:
    """No answers; accuracies that rise from probe to probe; all accuracies 1, where 1 - A is 0 everywhere."""
    rising = [{k: 0.1 * step + 0.05 * k for k in range(6)} for step in range(1, 6)]
    for answers in [None] * 10, rising + [dict.fromkeys(range(6), 1.0)] * 2:
        selector = profiled(SECONDS, interval=1)
        for accuracy in answers:
            play(selector, range(6), SECONDS, accuracy)
            np.testing.assert_array_equal(selector.state_dict()["weight"], np.ones(3))


def test_asked_twice_before_a_round_the_former_accuracies_stay() -> None:
    selector = profiled(SECONDS, interval=4)
    play(selector, range(6), SECONDS)
    accuracy = np.full(6, 0.4)
    for _ in range(2):
        assert selector.probe(np.arange(6)) is not None
        selector.inform(np.arange(6), local_accuracy=accuracy)
    np.testing.assert_array_equal(selector.state_dict()["before"], np.full(6, -1.0))
    np.testing.assert_array_equal(selector.state_dict()["accuracy"], accuracy)
