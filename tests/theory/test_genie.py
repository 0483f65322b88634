"""Both genies against all sets, and the three regrets against sums written out."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.theory import bsfl_genie, bsfl_regret, fair_regret, sorted_groups, xia_genie, xia_regret


def instances(count: int) -> list[tuple[np.ndarray, np.ndarray, int, float]]:
    """Random means, g, m and alpha; every third with means on a grid, so that they tie."""
    generator = np.random.default_rng(4)
    cases = []
    for case in range(count):
        num_clients = int(generator.integers(1, 9))
        means = generator.random(num_clients)
        means = np.round(means * 4) / 4 if case % 3 == 0 else means
        m = int(generator.integers(1, num_clients + 1))
        g, alpha = generator.uniform(-0.5, 0.5, num_clients), float(generator.choice([0.0, 0.3, 1.0, 10]))
        cases.append((means, g, m, alpha))
    return cases


def test_the_genies_are_the_best_of_all_sets() -> None:
    for mean, g, m, alpha in instances(300):
        sets = [list(s) for s in combinations(range(mean.size), m)]
        chosen, value = xia_genie(mean, m)
        assert chosen.size == m
        assert (np.diff(chosen) > 0).all()
        assert value == mean[chosen].min() == max(mean[s].min() for s in sets)
        assert mean[chosen].sum() == pytest.approx(max(mean[s].sum() for s in sets))
        assert bsfl_genie(mean, g, m, 0.0)[1] == pytest.approx(value, abs=1e-15)
        chosen, value = bsfl_genie(mean, g, m, alpha)
        assert value == pytest.approx(max(mean[s].min() + alpha / m * g[s].sum() for s in sets), abs=1e-12)
        assert value == pytest.approx(mean[chosen].min() + alpha / m * g[chosen].sum(), abs=1e-12)


def all_groups(clients: tuple[int, ...], m: int) -> list[list[tuple[int, ...]]]:
    """Every way to deal clients out in groups of m and one of the rest; the first client's group goes first."""
    if len(clients) <= m:
        return [[clients]] if clients else [[]]
    sizes = {m, len(clients) % m or m}
    return [
        [(clients[0], *others), *rest]
        for size in sizes
        for others in combinations(clients[1:], size - 1)
        for rest in all_groups(tuple(k for k in clients[1:] if k not in others), m)
        if sum(len(group) < m for group in [(clients[0], *others), *rest]) <= 1
    ]


def test_sorted_groups_wait_least_of_all_groups() -> None:
    for mean, _, m, _ in instances(60):
        ways = all_groups(tuple(range(mean.size)), m)
        groups = sorted_groups(mean, m)
        assert sorted(np.concatenate(groups).tolist()) == list(range(mean.size))
        assert len(groups) == -(-mean.size // m)
        least = min(sum(mean[list(group)].max() for group in way) for way in ways)
        assert sum(mean[group].max() for group in groups) == pytest.approx(least)


def test_a_genie_with_more_places_than_clients_takes_everyone() -> None:
    assert xia_genie([0.5, 0.2], 5)[0].tolist() == [0, 1]
    chosen, value = bsfl_genie([0.5, 0.2], [0.3, 0.1], 4, 2.0)
    assert chosen.tolist() == [0, 1]
    assert value == pytest.approx(0.2 + 2 / 4 * 0.4)


@pytest.mark.parametrize(
    ("mean", "g", "m", "alpha", "named"),
    [
        ([], [], 1, 1.0, "mean_"), ([0.1, np.nan], [0.3, 0.1], 1, 1.0, "mean_"), (0.5, 0.3, 1, 1.0, "mean"),
        ([0.1], [0.3], 0, 1.0, "clients_per_round"), ([0.1, 0.2], [0.3], 1, 1.0, "generalization"),
        ([0.1, 0.2], [0.3, 0.1], 1, -1.0, "alpha"),
    ],
)  # fmt: skip
def test_genies_refuse_by_name(mean: Any, g: Any, m: int, alpha: float, named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        bsfl_genie(mean, g, m, alpha)
    if named not in ("generalization", "alpha"):
        with pytest.raises(ParameterError, match=named):
            xia_genie(mean, m)


def test_xia_regret_by_hand() -> None:
    """The genie takes 0 and 2 for .7. Round 2 loses .7 - .5; round 3 chose 0 alone and gains .2; round 4 nobody."""
    assert xia_regret([0.9, 0.5, 0.7], [], 2).shape == (0,)
    choices = [[0, 2], [1, 2], [0], []]
    expected = [0.0, 0.2, 0.0, 0.7]
    assert xia_regret([0.9, 0.5, 0.7], choices, 2) == pytest.approx(expected)
    matrix = np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=bool)
    assert xia_regret([0.9, 0.5, 0.7], matrix, 2) == pytest.approx(expected)


def test_fair_regret_can_be_negative() -> None:
    """(25) with r* = .52: the fast pair gains .18 a round, the slow client's company loses .12."""
    assert fair_regret([0.4, 0.7, 0.9], [[1, 2], [0, 1]], 0.52) == pytest.approx([-0.18, -0.06])


def test_bsfl_regret_by_hand() -> None:
    """K = 3, m = 2, alpha = 3 (alpha/m = 1.5), targets 2/3, means (.9, .5, .1).

    Round 1: every g is 2/3, every set gains 1.5 x 4/3 = 2; genie {0, 1}: 2.5. Chosen {0, 1}: lost 0.
    Round 2: g = 2/3 - 1/2 = 1/6 for clients 0, 1 and 2/3 for 2. {0, 1}: .5 + 1.5 x 1/3 = 1.
        {0, 2}: .1 + 1.5 x 5/6 = 1.35, the best. Chosen {0, 1}: lost .35.
    Round 3: g = 2/3 - 2/3 = 0, 0 and 2/3. {0, 1}: .5. With 2: .1 + 1 = 1.1. Chosen {1, 2}: lost 0.
    """
    assert bsfl_regret([0.9, 0.5, 0.1], [[0, 1], [0, 1], [1, 2]], 2, 3.0) == pytest.approx([0.0, 0.35, 0.35])


def test_bsfl_regret_equals_all_sets_with_weights_and_exponent() -> None:
    """(3)-(7) written out again, over every set, with data weights and beta = 2."""
    generator = np.random.default_rng(8)
    mean, weights, m, alpha, beta = generator.random(6), generator.uniform(1, 5, 6), 3, 4.0, 2
    choices = [sorted(generator.choice(6, m, replace=False).tolist()) for _ in range(60)]
    plays, total, expected = np.zeros(6), 0.0, []
    for t, chosen in enumerate(choices, start=1):
        x = m * weights / weights.sum() - plays / t
        g = np.abs(x) ** beta * np.sign(x)
        rewards = {s: mean[list(s)].min() + alpha * g[list(s)].mean() for s in combinations(range(6), m)}
        total += max(rewards.values()) - rewards[tuple(chosen)]
        expected.append(total)
        plays[chosen] += 1
    assert bsfl_regret(mean, choices, m, alpha, beta, weights) == pytest.approx(expected, abs=1e-12)
    assert bsfl_regret(mean, choices, m, alpha, beta, 7 * weights) == pytest.approx(expected, abs=1e-12)


def test_bsfl_regret_of_quantized_rewards_by_hand() -> None:
    """The rewards of `test_bsfl_regret_by_hand`: chosen 2.5, 1 and 1.1, the best 2.5, 1.35 and 1.1. In steps of .299:

    Down: 8, 3 and 3 against 8, 4 and 3. Nearest: 8, 3 and 4 against 8, 5 (1.35 / .299 = 4.52) and 4.
    """
    choices = [[0, 1], [0, 1], [1, 2]]
    lost = {how: bsfl_regret([0.9, 0.5, 0.1], choices, 2, 3.0, quantized=(0.299, how)) for how in ("down", "nearest")}
    assert lost["down"] == pytest.approx([0.0, 0.299, 0.299])
    assert lost["nearest"] == pytest.approx([0.0, 2 * 0.299, 2 * 0.299])
    with pytest.raises(ParameterError, match="step"):
        bsfl_regret([0.9, 0.5, 0.1], choices, 2, 3.0, quantized=(0.0, "down"))


@pytest.mark.parametrize("choices", [[[0, 3]], [[0, 1, 2]], [[0, 0]], np.ones((4, 2), dtype=bool)])
def test_regrets_refuse_choices_that_cannot_be(choices: Any) -> None:
    """A client that is not there, one too many, one twice, and a matrix of another width."""
    for regret, alpha in ((xia_regret, ()), (bsfl_regret, (1.0,))):
        with pytest.raises(ParameterError, match=r"below 3|m = 2|once|\(rounds, 3\)"):
            regret([0.9, 0.5, 0.7], choices, 2, *alpha)


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0]])
def test_bsfl_regret_refuses_weights(weights: list[float]) -> None:
    with pytest.raises(ParameterError, match="data_weights"):
        bsfl_regret([0.9, 0.5, 0.7], [[0, 1]], 2, 1.0, 1, weights)
