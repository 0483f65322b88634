"""The largest of many scores, as sorting finds them; draws in proportion to weights and to data sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsel_flwr.selectors import RandomBySize
from fedsel_flwr.selectors._draws import draw, top

ROUNDS = 4_000
SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(SPECIAL | st.floats(min_value=-3.0, max_value=3.0), max_size=40),
    st.none() | st.integers(min_value=1, max_value=45),
)
def test_as_sorting_everything(scores: list[float], count: int | None) -> None:
    score = np.array(scores, dtype=np.float64)
    assert top(score, count).tolist() == np.argsort(-score, kind="stable")[:count].tolist()


@pytest.mark.parametrize("values", [2, 7, 100_000])
def test_as_sorting_everything_in_a_large_fleet(values: int) -> None:
    """With many ties, with some, and with next to none; NumPy takes other ways for large arrays."""
    score = np.random.default_rng(values).integers(0, values, 20_000).astype(np.float64)
    for count in (1, 10, 5_000, 19_999, 20_000):
        assert top(score, count).tolist() == np.argsort(-score, kind="stable")[:count].tolist()


def test_clients_of_weight_zero_are_drawn_last_and_in_any_order() -> None:
    generator = np.random.default_rng(3)
    with np.errstate(divide="ignore"):
        weight = np.log(np.array([0.0, 1.0, 0.0, 0.0]))
    drawn = [draw(generator, np.array([4, 5, 6, 7]), weight, 2).tolist() for _ in range(600)]
    assert {first for first, _ in drawn} == {5}
    second = [other for _, other in drawn]
    assert all(abs(second.count(k) - 200) < 4.5 * np.sqrt(600 * 2 / 9) for k in (4, 6, 7))


@pytest.mark.parametrize(
    ("replacement", "available", "expected", "within"),
    [
        # 8,000 draws with p = .1, .2, .3, .4, standard error at most .0055; among clients 1 and 3 p = 2/6, 4/6
        (True, [0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], 0.021),
        (True, [3, 1], [0.0, 1 / 3, 0.0, 2 / 3], 0.021),
        # client 3 is in a pair with .4 + .1 * 4/9 + .2 * 4/8 + .3 * 4/7 = .7159, client 0 with .2345, by the same sum
        (False, [0, 1, 2, 3], [0.1173, 0.2206, 0.3042, 0.3580], 0.017),
    ],
)
def test_shares_of_the_draws(replacement: bool, available: list[int], expected: list[float], within: float) -> None:
    selector = RandomBySize(clients_per_round=2, replacement=replacement, seed=5)
    selector.inform(np.arange(4), num_examples=np.array([1.0, 2.0, 3.0, 4.0]))
    counts = np.zeros(4)
    for _ in range(ROUNDS):
        chosen = selector.select(np.array(available))
        counts[chosen] += selector.draws(chosen)
    assert counts.sum() == 2 * ROUNDS
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=within)
    assert replacement or selector.draws(chosen).tolist() == [1, 1]


def test_a_draw_counts_for_its_round_only() -> None:
    selector = RandomBySize(clients_per_round=3, replacement=True, seed=1)
    selector.select(np.arange(1))
    assert selector.draws(np.array([0])).tolist() == [3]  # one client, drawn three times
    selector.select(np.empty(0, dtype=np.int64))
    assert selector.draws(np.array([0])).tolist() == [0]


def test_clients_without_examples_are_drawn_only_if_nobody_has_any() -> None:
    selector = RandomBySize(clients_per_round=4, replacement=True, seed=2)
    selector.inform(np.arange(3), num_examples=np.array([0.0, 5.0, 0.0]))
    assert all(selector.select(np.arange(3)).tolist() == [1] for _ in range(20))
    assert {int(k) for _ in range(50) for k in selector.select(np.array([0, 2]))} == {0, 2}


@pytest.mark.parametrize("told", [np.nan, np.inf])
def test_a_size_that_is_no_number_is_unknown(told: float) -> None:
    """It never enters the state: unknown stays -1, and a size known before stays."""
    selector = RandomBySize(clients_per_round=1, seed=3)
    selector.inform(np.arange(3), num_examples=np.array([6.0, told, 2.0]))
    assert selector.state_dict()["size"].tolist() == [6.0, -1.0, 2.0]
    selector.inform(np.arange(3), num_examples=np.array([told, 3.0, told]))
    assert selector.state_dict()["size"].tolist() == [6.0, 3.0, 2.0]
