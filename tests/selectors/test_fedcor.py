"""FedCor against a dense Gaussian process, finite differences, brute-force greedy and rounds by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors._low_rank import Evidence, Posterior, fit
from tests.selectors import oracle_fedcor as dense


def build(**parameters: Any) -> Any:
    return create("fedcor", **{"clients_per_round": 2, "warmup_rounds": 1, "interval": 100, "seed": 0} | parameters)


def known(embeddings: Any, rounds: int = 5, **parameters: Any) -> Any:
    """A selector after the warm-up with these embeddings, a row a client; the other 15 - d numbers are 0."""
    selector, rows = build(**parameters), np.asarray(embeddings, dtype=np.float64)
    selector.inform(np.arange(len(rows)), num_examples=np.full(len(rows), 10.0))
    state = selector.state_dict()
    state["embedding"][:, : rows.shape[1]] = rows
    selector.load_state_dict(state | {"round": rounds})
    return selector


def test_a_round_by_hand() -> None:
    """X = (2, 0), (1, 1), (0, 1), equal shares 1/3, m = 2; the noise 1e-4 changes no digit that is shown.

    S = (4 2 0; 2 2 1; 0 1 1). First: (4+2+0)/3/2 = 1, (2+2+1)/3/1.414 = 1.179, (0+1+1)/3/1 = .667        -> 1
    Given 1: S_00 = 4 - 4/2 = 2, S_02 = 0 - 2/2 = -1, S_22 = 1 - 1/2 = .5:
    0: (2-1)/3/1.414 = .236; 2: (-1+.5)/3/.707 = -.236                                                     -> 0
    The next round, 0 and 1 discounted by .8: 1 * .8 = .8, 1.179 * .8 = .943, .667                          -> 1
    Given 1: .236 * .8 = .189, -.236                                                                        -> 0
    Then .64: .64, .754, .667 -> 1, 0; then .512: .512, .603, .667                                          -> 2
    Given 2: S_00 = 4, S_01 = 2, S_11 = 1: 0: .512 * (4+2)/3/2 = .512; 1: .512 * (2+1)/3/1 = .512: equal but for noise.
    """
    selector = known([[2, 0], [1, 1], [0, 1]], beta=0.8)
    everybody = np.arange(3)
    assert [selector.select(everybody).tolist() for _ in range(3)] == [[0, 1]] * 3
    assert 2 in selector.select(everybody)
    assert selector.state_dict()["discount"][2] == 0.8


def test_shares_and_absent_clients_count_in_the_sum() -> None:
    """X = (1, 0), (0, 1), (0, 1): client 0's share is 98/100: (.98, .02, .02) -> 0. Equal shares: 1 or 2 (.667).

    2 is away: 1 still pulls it along, .667 against .333.
    """
    selector = known([[1, 0], [0, 1], [0, 1]], clients_per_round=1)
    assert selector.select(np.array([0, 1])).tolist() == [1]
    selector = known([[1, 0], [0, 1], [0, 1]], clients_per_round=1)
    selector.inform(np.arange(3), num_examples=np.array([98.0, 1.0, 1.0]))
    assert selector.select(np.array([0, 1])).tolist() == [0]


def test_samples_by_hand() -> None:
    """Warm-up of two rounds, interval 3, one chosen: rounds 1, 2, 5, 8 are random; losses before 1-3, 5, 6, 8, 9.

    Client 1 is away before round 2, client 2 has no answer before round 6.
    """
    selector, asked = build(clients_per_round=1, warmup_rounds=2, interval=3, gamma=0.5), []
    losses = {1: [4.0, 4.0, 4.0], 2: [3.5, np.nan, 3.0], 3: [3.0, 3.2, 2.0], 5: [2.0, 2.0, 2.0], 6: [1.9, 1.7, np.nan]}
    for number in range(1, 10):
        available = np.array([0, 2]) if number == 2 else np.arange(3)
        probe = selector.probe(available)
        if probe is not None:
            asked.append(number)
            assert probe.columns == ("loss",)
            assert probe.clients.tolist() == available.tolist()
            answers = np.array(losses.get(number, [1.0, 1.0, 1.0]))[available]
            selector.inform(available, loss=answers)
        selector.select(available)
        if number == 6:
            state = selector.state_dict()
            expected = [[-0.5, np.nan, -1.0], [-0.5, np.nan, -1.0], [-0.1, -0.3, np.nan]]
            np.testing.assert_allclose(state["changes"][:, -3:].T, expected, atol=1e-12)
            assert np.isnan(state["changes"][:, :-3]).all()
            assert state["sampled"].tolist() == [1, 2, 5]
    assert asked == [1, 2, 3, 5, 6, 8, 9]


def test_the_likelihood_and_its_gradient_equal_the_dense_ones() -> None:
    """Seven clients in three dimensions and two in five; some changes missing, a client in no sample at all."""
    rng = np.random.default_rng(0)
    for size, count, noise in ((3, 7, 0.3), (5, 2, 0.1), (15, 6, 0.05)):
        x, samples = rng.normal(size=(size, count)), rng.normal(size=(4, count))
        samples[1, 0] = samples[2, 1] = samples[3, 1] = np.nan
        weights = np.array([1.0, 0.5, 0.25, 0.1])
        value, gradient = Evidence(samples, weights, noise).cost(x)
        assert value == pytest.approx(dense.cost(x, samples, weights.tolist(), noise), rel=1e-9)
        slope = dense.slope(x, samples, weights.tolist(), noise)
        np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-4 * np.abs(slope).max())


def test_the_fit_is_adam_on_the_dense_likelihood() -> None:
    rng = np.random.default_rng(1)
    x, samples = rng.normal(size=(3, 5)), 0.3 * rng.normal(size=(3, 5))
    samples[1, 2] = np.nan
    weights, before = np.array([1.0, 0.8, 0.64]), x.copy()
    fitted = fit(x, samples, weights, 0.2, steps=40, rate=0.05)
    np.testing.assert_allclose(fitted, dense.adam(x, samples, weights.tolist(), 0.2, 40, 0.05), atol=1e-4)
    assert (x == before).all()
    costs = [dense.cost(one, samples, weights.tolist(), 0.2) for one in (x, fitted)]
    assert costs[1] < costs[0] - 1


def test_the_posterior_equals_the_dense_gaussian_process() -> None:
    """Variances and weighted sums after each condition, of one client after the other, to 1e-9."""
    rng = np.random.default_rng(2)
    x, share, seen = rng.normal(size=(4, 9)), rng.random(9), list[int]()
    sigma, low = dense.covariance(x, 0.1), Posterior(x, 0.1)
    for client in (3, 7, 0, 8, 1):
        left = [k for k in range(9) if k not in seen]
        expected = dense.posterior(sigma, seen, left)
        np.testing.assert_allclose(low.variance(np.array(left)), np.diag(expected), rtol=1e-7)
        weights = np.array([share[k] if k in left else 0.0 for k in range(9)])
        np.testing.assert_allclose(low.toward(np.array(left), weights), expected @ share[left], rtol=1e-7, atol=1e-9)
        low.condition(client)
        seen.append(client)


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_after_the_warm_up_is_the_brute_force_greedy_one(seed: int) -> None:
    """Losses that fall by groups, random availability, clients that do not answer; 60 rounds."""
    rng = np.random.default_rng(seed)
    selector = build(clients_per_round=3, warmup_rounds=6, interval=7, beta=0.7, gamma=0.9, seed=seed)
    sizes, losses, discount = rng.integers(5, 50, 9).astype(float), rng.uniform(1, 3, 9), np.ones(9)
    selector.inform(np.arange(9), num_examples=sizes)
    decided = 0
    for number in range(1, 61):
        available = np.flatnonzero(rng.random(9) < 0.8)
        probe = selector.probe(available)
        if probe is not None:
            answers = losses[available].copy()
            answers[rng.random(available.size) < 0.15] = np.nan
            selector.inform(available, loss=answers)
        chosen = selector.select(available)
        if number <= 6 or (number - 6) % 7 == 0:
            discount[:] = 1.0
        else:
            sigma = dense.covariance(selector.state_dict()["embedding"].T, 0.01)
            expected = dense.greedy(
                sigma, sizes / sizes.sum(), discount.tolist(), available.tolist(), min(3, available.size)
            )
            assert chosen.tolist() == sorted(expected)
            discount[expected] *= 0.7
            decided += available.size > 3
        np.testing.assert_allclose(selector.state_dict()["discount"], discount)
        losses *= 1 - rng.uniform(0, 0.1, 3)[np.arange(9) % 3]
    assert decided > 30


def test_clients_that_improve_together_are_found() -> None:
    """Two groups of five whose losses fall in other rounds: after the warm-up the choice of two has one of each.

    Correlations come out above .9 within a group, and between them as the 20 samples have them, to .1.
    """
    for seed in range(3):
        selector, rng = build(warmup_rounds=20, gamma=0.99, seed=seed), np.random.default_rng(seed)
        everybody, losses, falls = np.arange(10), np.full(10, 3.0), list[Any]()
        for _ in range(21):
            selector.inform(everybody, loss=losses.copy())
            chosen = selector.select(everybody)
            falls.append(rng.normal(0, 0.1, 2))
            losses -= np.repeat(falls[-1], 5) + rng.normal(0, 0.005, 10)
        sigma = dense.covariance(selector.state_dict()["embedding"].T, 0.01)
        scale = np.sqrt(np.diag(sigma))
        correlation = sigma / scale[:, None] / scale
        assert correlation[:5, :5].min() > 0.9
        assert correlation[5:, 5:].min() > 0.9
        one, other = np.array(falls[:20]).T
        between = float(one @ other / np.sqrt((one @ one) * (other @ other)))
        np.testing.assert_allclose(correlation[:5, 5:], between, atol=0.1)
        assert sorted(k // 5 for k in chosen) == [0, 1]


@pytest.mark.parametrize(("rate", "same"), [(1e-3, True), (1e-2, False)])
def test_a_rounding_of_the_losses_changes_no_choice(rate: float, same: bool) -> None:
    """Losses that differ by a part in 10^9, over 40 rounds: the same choices at 1e-3, and at the authors' 1e-2 not."""
    choices: list[list[Any]] = [[], []]
    for found, error in zip(choices, (0.0, 1e-9), strict=True):
        selector = build(clients_per_round=3, warmup_rounds=10, interval=5, gamma=0.8, learning_rate=rate)
        rng, rounding, losses = np.random.default_rng(1), np.random.default_rng(2), np.linspace(1.0, 2.5, 8)
        for _ in range(40):
            selector.inform(np.arange(8), loss=losses * (1 + error * rounding.normal(size=8)))
            found.append(selector.select(np.arange(8)).tolist())
            losses = losses - 0.05 * rng.normal(0.5, 1, 3)[np.arange(8) % 3] - 0.01 * rng.normal(size=8)
    assert (choices[0] == choices[1]) is same


def test_random_rounds_are_uniform_and_reset_the_discounts() -> None:
    """The first round, m = 1 of 4: each 100 times in 400 seeds (4.5 sd = 39)."""
    counts = Counter(int(build(clients_per_round=1, seed=s).select(np.arange(4))[0]) for s in range(400))
    assert max(abs(counts[k] - 100) for k in range(4)) < 39
    selector = known([[2, 0], [1, 1], [0, 1]], rounds=1, interval=3)
    selector.select(np.arange(3))
    assert selector.state_dict()["discount"].min() == 0.9
    for _ in range(2):
        selector.select(np.arange(3))
    assert selector.state_dict()["discount"].tolist() == [1.0, 1.0, 1.0]


def test_ten_thousand_clients_take_no_square_matrix() -> None:
    """The state holds fewer than 100 numbers a client; a covariance would hold 10,000."""
    selector, everybody, rng = build(clients_per_round=10), np.arange(10_000), np.random.default_rng(0)
    for _ in range(2):
        selector.inform(everybody, loss=rng.random(10_000))
        chosen = selector.select(everybody)
    assert chosen.size == 10
    assert sum(np.size(value) for value in selector.state_dict().values()) < 100 * 10_000


def test_more_than_max_clients_are_refused() -> None:
    selector = build(max_clients=5)
    with pytest.raises(ParameterError, match="fedcor takes at most max_clients = 5 clients, got 6; raise max_clients"):
        selector.select(np.arange(6))
    assert selector.num_clients == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("warmup_rounds", 0),
        ("interval", 0),
        ("gamma", 0.0),
        ("gamma", 1.5),
        ("beta", 0.0),
        ("learning_rate", 0.0),
        ("max_clients", 0),
    ],
)
def test_wrong_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        build(**{name: value})


def test_a_state_with_too_many_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="state 'sampled' must name at most 32 rounds, got 33"):
        build().load_state_dict(build().state_dict() | {"sampled": np.arange(33)})
