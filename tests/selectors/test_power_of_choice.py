"""Power-of-Choice and its variants against rounds by hand, plain sorting, and enumerated chances of the candidates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import create
from tests.selectors import rounds
from tests.selectors.oracle_draws import drawn_one_by_one, frequencies, p_value


def build(name: str = "power-of-choice", **parameters: Any) -> Any:
    return create(name, **{"clients_per_round": 2, "candidates": 30, "seed": 0} | parameters)


def play(selector: Any, available: list[int], losses: dict[int, float], failed: tuple[int, ...] = ()) -> list[int]:
    """Choose; then those chosen report their training's loss, but for those who fail."""
    told = {k: loss for k, loss in losses.items() if k not in failed}
    return rounds.play(selector, available, failed=failed, train_loss=told)


@pytest.mark.parametrize(("name", "column"), [("power-of-choice", "loss"), ("cpow-d", "batch_loss")])
def test_a_round_by_hand(name: str, column: str) -> None:
    """Five clients, d = 4, m = 2; client 3 has no examples (p_3 = 0), so the candidates are 0, 1, 2, 4.

    Losses .4, 2.0, 1.1, 9.9, 1.3: the two largest among the candidates are 2.0 and 1.3                -> 1, 4
    Client 1 does not answer the next time (NaN): 1.3 and 1.1                                          -> 2, 4
    Of cpow-d these are losses of mini-batches; those of all examples do not count.
    """
    for seed in range(10):
        selector = build(name, candidates=4, seed=seed)
        selector.inform(np.arange(5), num_examples=np.array([5.0, 5.0, 5.0, 0.0, 5.0]))
        assert selector.probe(np.arange(5)).columns == (column,)
        losses = {0: 0.4, 1: 2.0, 2: 1.1, 3: 9.9, 4: 1.3}
        for told, expected in (losses, [1, 4]), (losses | {1: np.nan}, [2, 4]):
            assert rounds.answer(selector, range(5), told) == [0, 1, 2, 4]
            if column == "batch_loss":
                selector.inform(np.arange(5), loss=np.array([9.0, 0.0, 8.0, 0.0, 0.0]))
            assert selector.select(np.arange(5)).tolist() == expected


@pytest.mark.parametrize("name", ["power-of-choice", "rpow-d"])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_candidates_follow_the_sizes(d: int, name: str) -> None:
    """Sets of d of 5 clients with 10 to 160 examples: each as often as draws one by one in proportion to p_k.

    The candidates of rpow-d are its choice if m = d.
    """
    sizes = {0: 10.0, 1: 20.0, 2: 40.0, 3: 80.0, 4: 160.0}
    selector = build(name, clients_per_round=d, candidates=d, seed=d)
    selector.inform(np.arange(5), num_examples=np.array(list(sizes.values())))

    def candidates() -> list[int]:
        question = selector.probe(np.arange(5))
        return list((selector.select(np.arange(5)) if question is None else question.clients).tolist())

    counts = frequencies(candidates, 2000)
    assert p_value(counts, drawn_one_by_one(sizes, d)) > 1e-3
    assert p_value(counts, drawn_one_by_one(dict.fromkeys(sizes, 1.0), d)) < 1e-9  # the test can tell


def test_who_is_asked_again_before_the_choice_is_drawn_again() -> None:
    """Only the last question's candidates count; the losses of the first one's stay as they were told."""
    selector = build(clients_per_round=1, candidates=1)
    for client in (0, 1):
        assert selector.probe(np.array([client])) is not None
    selector.inform(np.array([0, 1]), loss=np.array([5.0, 1.0]))
    assert selector.select(np.arange(2)).tolist() == [1]


def test_candidates_that_left_are_replaced() -> None:
    """d = 3 of 0..9 were asked, and only clients that were not are there, or one that was: m are chosen."""
    for stayed in (0, 1):
        selector = build(candidates=3)
        candidates = rounds.answer(selector, range(10), dict.fromkeys(range(10), 1.0))
        here = np.append(np.setdiff1d(np.arange(10), candidates), candidates[:stayed]).astype(np.int64)
        chosen = selector.select(here)
        assert chosen.size == 2
        assert set(candidates[:stayed]) <= set(chosen.tolist())


def test_rounds_with_the_utility_by_hand() -> None:
    """Five clients, d = 4, m = 2; client 3 has no examples, so the candidates are 0, 1, 2, 4. Weight .5.

    Initial accuracy .1, energy scores .5, .9, .6, 1, .8: utilities .3, .5, .35, .55, .45               -> 1, 4
    They report accuracies .3 and .7, scores as before: .6 and .75; 0 and 2 keep .3 and .35             -> 1, 4
    1 fails and keeps .6; 4 reports .1 and a score of .2: .15                                           -> 1, 2
    Losses do not count, and no client is asked for one.
    """
    for seed in range(10):
        selector = build(candidates=4, seed=seed, accuracy_weight=0.5)
        assert selector.needs == {"accuracy", "energy_score"}
        everybody, scores = np.arange(5), np.array([0.5, 0.9, 0.6, 1.0, 0.8])
        selector.inform(everybody, num_examples=np.array([5.0, 5.0, 5.0, 0.0, 5.0]), energy_score=scores)
        selector.inform(everybody, accuracy=np.full(5, 0.1), loss=np.array([9.0, 0.0, 9.0, 9.0, 0.0]))
        assert selector.probe(everybody) is None
        story: list[tuple[dict[int, float], dict[int, float]]] = [
            ({1: 0.3, 4: 0.7}, {1: 0.9, 4: 0.8}), ({4: 0.1}, {4: 0.2}),
        ]  # fmt: skip
        for accuracy, score in story:
            failed = [k for k in (1, 4) if k not in accuracy]
            assert rounds.play(selector, range(5), failed=failed, accuracy=accuracy, energy_score=score) == [1, 4]
        np.testing.assert_allclose(selector._utilities(), [0.3, 0.6, 0.35, 0.55, 0.15])
        assert selector.select(everybody).tolist() == [1, 2]


def test_a_dead_client_keeps_the_largest_utility() -> None:
    """So strategies must exclude it for some rounds; without the utility a client is asked, and does not answer."""
    selector = build(clients_per_round=1, accuracy_weight=0.5)
    selector.inform(np.arange(3), energy_score=np.array([0.5, 0.9, 0.6]))
    absent = {"accuracy": np.full(1, np.nan), "energy_score": np.full(1, np.nan)}
    assert [rounds.play(selector, range(3), failed=[1], **absent) for _ in range(20)] == [[1]] * 20
    assert selector.asks_failed_for_ever
    assert not build().asks_failed_for_ever


def test_rounds_of_rpow_d_by_hand() -> None:
    """Four clients, m = 2, all are candidates; rounds 1 and 2 are forced by availability.

    Round 1, {0, 1}: losses .9 and .2.  Round 2, {2, 3}: 2 tells 1.4, 3 fails: it stays infinite.
    Round 3: .9, .2, 1.4, inf -> {2, 3}. 2 tells .5; 3 fails again, the second time in a row: last for 2^2 = 4 rounds,
        3 + 4 = 7 included.
    Round 4: .9, .2, .5, last -> {0, 2}. 0 tells .1, 2 fails for the first time: it keeps .5.
    Round 5: .1, .2, .5, last -> {1, 2}. 1 tells .3, 2 tells .4.
    Round 6: .1, .3, .4, last -> {1, 2}, unchanged.  Round 7: the same.
    Round 8: .1, .3, .4, inf -> {2, 3}: 3 fails a third time, last for 8 rounds, 16 included.
    Round 9: {1, 2}. Round 10: 3 alone is there, is asked, and tells .35, which ends its failures in a row.
    Round 11: .1, .3, .4, .35 -> {2, 3}; one more failure keeps the .35.
    """
    for seed in range(10):
        selector = build("rpow-d", seed=seed)
        everybody = [0, 1, 2, 3]
        assert play(selector, [0, 1], {0: 0.9, 1: 0.2}) == [0, 1]
        assert play(selector, [2, 3], {2: 1.4}, failed=(3,)) == [2, 3]
        assert play(selector, everybody, {2: 0.5}, failed=(3,)) == [2, 3]
        assert play(selector, everybody, {0: 0.1}, failed=(2,)) == [0, 2]
        assert play(selector, everybody, {1: 0.3, 2: 0.4}) == [1, 2]
        for _ in range(2):
            assert play(selector, everybody, {1: 0.3, 2: 0.4}) == [1, 2]
        assert play(selector, everybody, {2: 0.4}, failed=(3,)) == [2, 3]
        assert play(selector, everybody, {1: 0.3, 2: 0.4}) == [1, 2]
        assert play(selector, [3], {3: 0.35}) == [3]
        assert selector.state_dict()["failures"].tolist() == [0, 0, 0, 0]
        assert selector.state_dict()["loss"].tolist() == [0.1, 0.3, 0.4, 0.35]
        assert play(selector, everybody, {2: 0.4}, failed=(3,)) == [2, 3]
        assert selector.state_dict()["loss"].tolist() == [0.1, 0.3, 0.4, 0.35]


@pytest.mark.parametrize("seed", range(3))
def test_every_choice_of_rpow_d_has_the_largest_losses(seed: int) -> None:
    """150 rounds with availability, failures and newcomers; every client is a candidate.

    The oracle keeps the plays alone, and reads off them what each client is worth.
    """
    rng = np.random.default_rng(seed)
    selector, plays, decided = build("rpow-d", clients_per_round=3, candidates=12, seed=seed), [], 0

    def worth(k: int, number: int) -> float:
        mine = [(t, loss) for t, who, loss in plays if who == k]
        told = [t for t, loss in mine if not math.isnan(loss)]
        since = [t for t, _ in mine if t > max(told, default=0)]  # the failures in a row
        if len(since) >= 2 and number <= since[-1] + 2 ** len(since):
            return -math.inf
        return next((loss for t, loss in mine if t == max(told)), math.inf) if told else math.inf

    for number in range(1, 151):
        available = np.flatnonzero(rng.random(8 if number < 50 else 12) < 0.7)
        chosen = selector.select(available)
        worths = {k: worth(k, number) for k in available.tolist()}
        inside, outside = ([worths[k] for k in part] for part in (chosen, np.setdiff1d(available, chosen)))
        assert chosen.size == min(3, available.size)
        assert not inside or not outside or min(inside) >= max(outside)
        decided += len(set(worths.values())) > 3
        losses = np.where(rng.random(chosen.size) < 0.3, np.nan, rng.exponential(size=chosen.size))
        plays += [(number, k, loss) for k, loss in zip(chosen.tolist(), losses.tolist(), strict=True)]
        selector.observe(rounds.report(chosen, failed=chosen[np.isnan(losses)], train_loss=losses))
    assert decided > 100


def test_failures_beyond_counting_stay_numbers() -> None:
    """A single client that is all there is, and dead: 200 failures in a row."""
    selector = build("rpow-d", clients_per_round=1)
    for _ in range(200):
        assert play(selector, [0], {}, failed=(0,)) == [0]
    assert selector.state_dict()["failures"].tolist() == [200]
    assert 2**30 <= selector.state_dict()["last_until"][0] <= 2**30 + 200
