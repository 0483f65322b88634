"""Power-of-Choice against rounds by hand, plain sorting, and the chances of its candidates by enumeration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._draws import draw
from fedsel_flwr.selectors.power_of_choice import PowerOfChoice
from tests.selectors.oracle_draws import drawn_one_by_one, frequencies, p_value


def build(**parameters: Any) -> PowerOfChoice:
    return PowerOfChoice(**{"clients_per_round": 2, "candidates": 3, "seed": 0} | parameters)


def answer(selector: PowerOfChoice, available: list[int], losses: dict[int, float]) -> list[int]:
    """Ask and answer; returns the candidates."""
    question = selector.probe(np.array(available))
    assert question is not None
    assert question.columns == ("loss",)
    selector.inform(question.clients, loss=np.array([losses[k] for k in question.clients.tolist()]))
    return question.clients.tolist()


def largest(losses: dict[int, float], candidates: list[int], m: int) -> list[int]:
    """The definition, by sorting."""
    return sorted(sorted(candidates, key=lambda k: -losses[k])[:m])


def test_a_round_by_hand() -> None:
    """Five clients, d = 4, m = 2; client 3 has no examples (p_3 = 0), so the candidates are 0, 1, 2, 4.

    Losses .4, 2.0, 1.1, 9.9, 1.3: the two largest among the candidates are 2.0 and 1.3                -> 1, 4
    Client 1 does not answer the next time (NaN): 1.3 and 1.1                                          -> 2, 4
    """
    for seed in range(10):
        selector = build(candidates=4, seed=seed)
        selector.inform(np.arange(5), num_examples=np.array([5.0, 5.0, 5.0, 0.0, 5.0]))
        losses = {0: 0.4, 1: 2.0, 2: 1.1, 3: 9.9, 4: 1.3}
        assert answer(selector, [0, 1, 2, 3, 4], losses) == [0, 1, 2, 4]
        assert selector.select(np.arange(5)).tolist() == [1, 4]
        assert answer(selector, [0, 1, 2, 3, 4], losses | {1: np.nan}) == [0, 1, 2, 4]
        assert selector.select(np.arange(5)).tolist() == [2, 4]


@pytest.mark.parametrize("candidates", [12, 30])
def test_with_d_equal_to_k_the_largest_losses_are_chosen(candidates: int) -> None:
    """200 rounds, 12 clients, d = K or more: exactly the three largest losses of that round."""
    rng = np.random.default_rng(1)
    selector = build(clients_per_round=3, candidates=candidates)
    selector.inform(np.arange(12), num_examples=rng.integers(1, 100, 12).astype(float))
    for _ in range(200):
        losses = dict(enumerate(rng.exponential(size=12).tolist()))
        assert answer(selector, list(range(12)), losses) == list(range(12))
        assert selector.select(np.arange(12)).tolist() == largest(losses, list(range(12)), 3)


def test_candidates_are_clients_and_not_positions_where_d_is_less_than_k() -> None:
    """A public code takes the places of the losses among the d candidates for the clients' numbers."""
    rng = np.random.default_rng(2)
    selector = build(clients_per_round=2, candidates=4)
    available = [3, 5, 8, 13, 21, 34, 55]
    for _ in range(200):
        losses = {k: float(rng.exponential()) for k in available}
        candidates = answer(selector, available, losses)
        assert len(candidates) == 4
        assert set(candidates) < set(available)
        assert selector.select(np.array(available)).tolist() == largest(losses, candidates, 2)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_candidates_follow_the_sizes(d: int) -> None:
    """Sets of d of 5 clients with 10 to 160 examples: each as often as draws one by one in proportion to p_k."""
    sizes = {0: 10.0, 1: 20.0, 2: 40.0, 3: 80.0, 4: 160.0}
    selector = build(clients_per_round=1, candidates=d, seed=d)
    selector.inform(np.arange(5), num_examples=np.array(list(sizes.values())))

    def candidates() -> list[int]:
        question = selector.probe(np.arange(5))
        assert question is not None
        return question.clients.tolist()

    counts = frequencies(candidates, 4000)
    assert p_value(counts, drawn_one_by_one(sizes, d)) > 1e-3
    assert p_value(counts, drawn_one_by_one(dict.fromkeys(sizes, 1.0), d)) < 1e-9  # the test can tell


def test_the_oracle_of_the_draws_by_hand() -> None:
    """Weights 1, 2, 1, two of three: {0, 1} has 1/4 * 2/3 + 2/4 * 1/2 = 5/12, {0, 2} has 2 * 1/4 * 1/3 = 1/6."""
    chances = drawn_one_by_one({0: 1.0, 1: 2.0, 2: 1.0}, 2)
    assert chances[frozenset({0, 1})] == pytest.approx(5 / 12)
    assert chances[frozenset({0, 2})] == pytest.approx(1 / 6)
    assert sum(chances.values()) == pytest.approx(1.0)


def test_clients_of_weight_zero_are_drawn_last_and_in_any_order() -> None:
    generator = np.random.default_rng(3)
    with np.errstate(divide="ignore"):
        weight = np.log(np.array([0.0, 1.0, 0.0, 0.0]))
    drawn = [draw(generator, np.array([4, 5, 6, 7]), weight, 2).tolist() for _ in range(600)]
    assert {first for first, _ in drawn} == {5}
    second = [other for _, other in drawn]
    assert all(abs(second.count(k) - 200) < 4.5 * np.sqrt(600 * 2 / 9) for k in (4, 6, 7))


def test_who_is_asked_again_before_the_choice_is_drawn_again() -> None:
    """Only the last question's candidates count; the losses of the first one's stay as they were told."""
    selector = build(clients_per_round=1, candidates=1)
    first = selector.probe(np.array([0]))
    second = selector.probe(np.array([1]))
    assert first is not None
    assert second is not None
    selector.inform(np.array([0, 1]), loss=np.array([5.0, 1.0]))
    assert selector.select(np.arange(2)).tolist() == [1]


def test_candidates_that_left_are_replaced() -> None:
    """d = 3 of 0..9 were asked, and only clients that were not are there: m of them are chosen all the same."""
    selector = build()
    candidates = answer(selector, list(range(10)), dict.fromkeys(range(10), 1.0))
    others = np.setdiff1d(np.arange(10), candidates)
    assert selector.select(others).size == 2
    half = build()
    stayed = answer(half, list(range(10)), dict.fromkeys(range(10), 1.0))[0]
    assert stayed in half.select(np.append(np.setdiff1d(np.arange(10), candidates), stayed))


def test_without_answers_the_choice_is_at_random() -> None:
    """Nobody answered: no index is favoured among the candidates."""
    chosen = [int(build(clients_per_round=1, seed=seed).select(np.arange(3))[0]) for seed in range(600)]
    assert all(abs(chosen.count(k) - 200) < 4.5 * np.sqrt(600 * 2 / 9) for k in range(3))


def test_fewer_candidates_than_clients_a_round_are_refused() -> None:
    with pytest.raises(ParameterError, match="candidates must be at least clients_per_round, got 3 for 4 clients"):
        build(clients_per_round=4)
