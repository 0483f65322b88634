"""FedCor against a dense Gaussian process, finite differences, long searches, brute-force greedy and rounds by hand."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.fedcor import Evidence, Posterior, adam, closed_form, likeliest
from tests.selectors import oracle_fedcor as dense

build = partial(create, "fedcor", clients_per_round=2, warmup_rounds=1, interval=100, seed=0)


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


def test_samples_by_hand() -> None:
    """Warm-up of two rounds, interval 3, one chosen: rounds 1, 2, 5, 8 are random; losses before 1-3, 5, 6, 8, 9.

    Client 1 is away before round 2, client 2 has no answer before round 6.
    """
    selector, asked = build(clients_per_round=1, warmup_rounds=2, interval=3, gamma=0.5), []
    losses = {1: [4.0, 4.0, 4.0], 2: [3.5, np.nan, 3.0], 3: [3.0, 3.2, 2.0], 5: [2.0, 2.0, 2.0], 6: [1.9, 1.7, np.nan]}
    for number in range(1, 10):
        available = np.array([0, 2]) if number == 2 else np.arange(3)
        if (probe := selector.probe(available)) is not None:
            asked.append(number)
            assert probe.columns == ("loss",)
            assert probe.clients.tolist() == available.tolist()
            selector.inform(available, loss=np.array(losses.get(number, [1.0, 1.0, 1.0]))[available])
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
    fitted = adam(x, samples, weights, 0.2, steps=40, rate=0.05)
    np.testing.assert_allclose(fitted, dense.adam(x, samples, weights.tolist(), 0.2, 40, 0.05), atol=1e-4)
    assert (x == before).all()
    costs = [dense.cost(one, samples, weights.tolist(), 0.2) for one in (x, fitted)]
    assert costs[1] < costs[0] - 1


def loss_changes(seed: int, count: int, gaps: float = 0.0) -> tuple[Any, Any]:
    """Twelve samples of changes with four common causes, some missing, and their weights."""
    rng = np.random.default_rng(seed)
    samples = 0.08 * rng.normal(size=(12, 4)) @ rng.normal(size=(4, count)) - 0.02 + 0.01 * rng.normal(size=(12, count))
    samples[rng.random(samples.shape) < gaps] = np.nan
    return samples, 0.8 ** np.arange(12.0)[::-1]


@pytest.mark.parametrize(("size", "count", "noise"), [(3, 7, 0.01), (15, 6, 0.05), (2, 20, 0.1), (15, 30, 0.01)])
def test_the_closed_form_is_a_minimum(size: int, count: int, noise: float) -> None:
    """X^T X is the weighted second moment, its eigenvalues less s^2 (0 at least), and every step aside costs more."""
    samples, weights = loss_changes(size, count)
    x = closed_form(samples, weights, noise, size)
    values, vectors = np.linalg.eigh((samples.T * weights) @ samples / weights.sum())
    kept = np.maximum(values[::-1][:size] - noise**2, 0.0)
    expected = (vectors[:, ::-1][:, :size] * kept) @ vectors[:, ::-1][:, :size].T
    np.testing.assert_allclose(x.T @ x, expected, atol=1e-12)
    evidence, rng = Evidence(samples, weights, noise), np.random.default_rng(0)
    assert (likeliest(samples, weights, noise, size) == x).all()  # complete samples need no step
    np.testing.assert_allclose(evidence.improved(x), x, atol=1e-8)
    least, gradient = evidence.cost(x)
    assert least == pytest.approx(dense.cost(x, samples, weights.tolist(), noise), rel=1e-9)
    assert np.abs(gradient).max() < 1e-6 / noise
    for scale in (1e-6, 1e-4, 1e-2, 1.0):
        for _ in range(50):
            assert evidence.cost(x + scale * rng.normal(size=x.shape))[0] > least - 1e-9 * abs(least)


@pytest.mark.parametrize("gaps", [0.02, 0.3, 0.6])
def test_no_step_of_expectation_maximization_raises_the_cost_of_samples_with_gaps(gaps: float) -> None:
    """Forty steps from the closed form, by the dense likelihood; ten of them take more than half of the way."""
    samples, weights = loss_changes(3, 20, gaps)
    evidence, costs = Evidence(samples, weights, 0.01), list[float]()
    x = closed_form(samples, weights, 0.01, 15)
    for _ in range(41):
        costs.append(dense.cost(x, samples, weights.tolist(), 0.01))
        x = evidence.improved(x)
    assert all(after <= before + 1e-9 * abs(before) for before, after in pairwise(costs))
    assert evidence.cost(likeliest(samples, weights, 0.01, 15))[0] == pytest.approx(costs[10], rel=1e-6)
    assert costs[0] - costs[10] > 0.5 * (costs[0] - costs[-1])


def test_gaps_equal_a_sample_of_fewer_clients() -> None:
    """One step: z given each sample by the dense posterior, then each client's regression on it."""
    rng = np.random.default_rng(5)
    x, samples, weights = rng.normal(size=(2, 4)), rng.normal(size=(3, 4)), np.array([0.25, 0.5, 1.0])
    samples[0, 1] = samples[1, 2] = samples[2, 2] = np.nan
    mean, square = [], []
    for sample in samples:
        there = ~np.isnan(sample)
        gain = x[:, there] @ np.linalg.inv(dense.covariance(x[:, there], 0.3))  # Cov(z, y) Cov(y, y)^-1
        mean.append(gain @ sample[there])
        square.append(np.eye(2) - gain @ x[:, there].T + np.outer(mean[-1], mean[-1]))
    expected = np.zeros((2, 4))
    for k in range(4):
        told = [t for t in range(3) if not np.isnan(samples[t, k])]
        left = sum(weights[t] * square[t] for t in told)
        expected[:, k] = np.linalg.solve(left, sum(weights[t] * mean[t] * samples[t, k] for t in told))
    np.testing.assert_allclose(Evidence(samples, weights, 0.3).improved(x), expected, rtol=1e-9)


def test_the_posterior_equals_the_dense_gaussian_process() -> None:
    """Variances and weighted sums after each condition, of one client after the other, to 1e-9."""
    rng = np.random.default_rng(2)
    x, share, seen = rng.normal(size=(4, 9)), rng.random(9), list[int]()
    sigma, low = dense.covariance(x, 0.1), Posterior(x, 0.1, share, np.arange(9))
    for client in (3, 7, 0, 8, 1):
        left = [k for k in range(9) if k not in seen]
        expected = dense.posterior(sigma, seen, left)
        np.testing.assert_allclose(low.variance[left], np.diag(expected), rtol=1e-7)
        np.testing.assert_allclose(low.toward[left], expected @ share[left], rtol=1e-7, atol=1e-9)
        low.condition(client)
        seen.append(client)


@pytest.mark.parametrize("seed", range(2))
def test_every_choice_after_the_warm_up_is_the_brute_force_greedy_one(seed: int) -> None:
    """Losses that fall by groups, random availability, clients that do not answer; 60 rounds."""
    rng = np.random.default_rng(seed)
    selector = build(clients_per_round=3, warmup_rounds=6, interval=7, beta=0.7, gamma=0.9, seed=seed)
    sizes, losses, discount = rng.integers(5, 50, 9).astype(float), rng.uniform(1, 3, 9), np.ones(9)
    selector.inform(np.arange(9), num_examples=sizes)
    decided = 0
    for number in range(1, 61):
        available = np.flatnonzero(rng.random(9) < 0.8)
        if selector.probe(available) is not None:
            answers = losses[available].copy()
            answers[rng.random(available.size) < 0.15] = np.nan
            selector.inform(available, loss=answers)
        chosen = selector.select(available)
        if number <= 6 or (number - 6) % 7 == 0:
            discount[:] = 1.0
        else:
            sigma = dense.covariance(selector.state_dict()["embedding"].T, 0.01)
            expected = dense.greedy(sigma, sizes / sizes.sum(), discount, available, min(3, available.size))
            assert chosen.tolist() == sorted(expected)
            discount[expected] *= 0.7
            decided += available.size > 3
        np.testing.assert_allclose(selector.state_dict()["discount"], discount)
        losses *= 1 - rng.uniform(0, 0.1, 3)[np.arange(9) % 3]
    assert decided > 30


def test_the_ordered_choices_are_the_brute_force_greedy_ones() -> None:
    """100 instances: 5 to 17 clients, one to all chosen, discounts, absent clients, clients without a sample."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(5, 18))
        m = (1, count, int(rng.integers(1, count + 1)))[seed % 3]
        selector = known(rng.normal(size=(count, 15)) * 10 ** rng.uniform(-2, 0.5) * (rng.random((count, 1)) > 0.1),
                         clients_per_round=m)  # fmt: skip
        sizes, discount = rng.integers(10, 500, count).astype(float), 0.9 ** rng.integers(0, 3, count)
        selector.inform(np.arange(count), num_examples=sizes)
        selector._discount[:] = discount
        there = rng.permutation(count)[: max(1, count - int(rng.integers(0, 4)))]
        sigma = dense.covariance(selector.state_dict()["embedding"].T, 0.01)
        expected = dense.greedy(sigma, sizes / sizes.sum(), discount.tolist(), there.tolist(), min(m, there.size))
        assert selector._greedy(there).tolist() == expected, seed


def test_a_client_whose_samples_are_all_too_old_is_independent_again() -> None:
    """Client 2 tells its loss before rounds 1 to 3; 32 samples later nothing is kept of it."""
    selector, rng, losses = build(warmup_rounds=40), np.random.default_rng(0), np.full(3, 3.0)
    lengths = []
    for number in range(1, 38):
        selector.inform(np.arange(3), loss=np.where((np.arange(3) < 2) | (number < 4), losses, np.nan))
        selector.select(np.arange(3))
        losses = losses - 0.1 * rng.random(3)
        lengths.append(np.linalg.norm(selector.state_dict()["embedding"], axis=1))
    assert min(lengths[3]) > 0.01
    assert lengths[-1][2] == 0.0
    assert min(lengths[-1][:2]) > 0.01


def test_losses_out_of_all_bounds_with_gaps_leave_the_state_finite() -> None:
    """Losses up to 1e30, half of them missing, and weights that vanish: gamma^age = 0 after a dozen rounds."""
    selector, rng = build(warmup_rounds=30, gamma=1e-30), np.random.default_rng(0)
    for _ in range(40):
        losses = rng.choice([0.0, 1e-30, 1.0, 1e12, 1e30], 12)
        selector.inform(np.arange(12), loss=np.where(rng.random(12) < 0.5, losses, np.nan))
        assert len(selector.select(np.arange(12))) == 2
        assert np.isfinite(selector.state_dict()["embedding"]).all()
