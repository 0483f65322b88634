"""Variance components: how much clients differ persistently, and how much one client varies from round to round.

The model is the one-way random-effects model of the logs. Client i needs y_ij log seconds in its j-th round:

    y_ij = mu + a_i + e_ij,    Var(a_i) = sigma_a²,    Var(e_ij) = sigma_i².

The standard deviation sigma_a is the *spread* between clients. The *noise* within a client is sigma_e, and sigma_e² is
the mean of the sigma_i². Both are estimated by moments. Let client i have n_i rows with the mean y_i and the sum of
squares S_i about it, and let k clients have a row:

    sigma_e² = sum of S_i / sum of (n_i - 1),    mu = mean of y_i,
    sigma_a² = sum of (y_i - mu)² / (k - 1) - sigma_e² · mean of 1 / n_i    (at least 0).

Each client counts once in mu and in sigma_a², so a bandit that selects fast clients more often does not bias them much.
The intervals come from a bootstrap over the clients. With 20 to 200 clients they held the true value in about 9 of 10
drawn cases, and in 8 of 10 if a tenth of the rows was cut off.

Speeds drift, and slow phases last. Let D_i be the difference between the means of the first and the second half of a
client's rows. The *drift* is the mean of D_i² less its part by chance, S_i / (n_i - 1) times the sum of 1 / n over both
halves. The difference between a history and the rounds that follow is taken to have twice this variance, as for a
random walk (for noise that forgets half, and for a straight line four times).

A row that is cut off at c is a bound: it has the mean and the variance of a normal latency above c, given its client's
mean. Fit and rows are computed in turn until both are stable. A client whose rows are all cut off is then slightly
slower than c, however slow it is, so the spread is too small if there are many such clients.

References: S. R. Searle, G. Casella and C. E. McCulloch, "Variance Components", Wiley 1992.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.latencies import Latencies
from fedsel_flwr.report.run_folder import load_optional

SAMPLES = 200
"""Number of bootstrap samples of the clients."""
STEPS = 50
"""Largest number of steps until the rows that are cut off are stable."""
SMALLEST = 1e-3
"""Smallest spread and noise, in log seconds: a tenth of a percent."""
WIDEST = 6.0
"""Largest half-width of an interval, in the log of a square: a factor of 20 of a standard deviation."""
QUANTILES = 513
"""Number of quantiles of the noise."""
FEW_ROWS = 300
"""Number of rows below which the noise counts as normal, because its quantiles are uncertain."""
FEW_EACH = 5.0
"""Mean number of rows of a client below which the noise counts as normal, because the residuals contain its effect."""
WALK = 2.0
"""Variance of the drift from a history to the rounds that follow, divided by that between the halves of the history."""
FEW_OWN = 5
"""Number of rows of a client below which its own noise is not estimated."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        estimate: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class VarianceComponents:
    """The fitted model.

    Attributes:
        median_s: Median seconds of a client without a persistent difference, exp(mu).
        spread: sigma_a, the standard deviation of the clients' mean log seconds.
        noise: sigma_e, the standard deviation of one client's log seconds.
        drift: Variance of the difference between the halves of a client's rows, less chance, at least 0.
        shape: Quantiles of the noise divided by its standard deviation, ascending, shape (quantiles,).
        count: Number of rows of each client, shape (clients,).
        mean: Mean log seconds of each client's rows, shape (clients,).
        own_noise: Estimate of each client's sigma_i, shape (clients,).
        samples: Rows of (mu, sigma_a, sigma_e), one for each bootstrap sample, shape (samples, 3).
    """

    median_s: float
    spread: Interval
    noise: Interval
    drift: float
    shape: FloatArray
    count: IntArray
    mean: FloatArray
    own_noise: FloatArray
    samples: FloatArray

    def draw_fleet(
        self, clients: IntArray, num_clients: int, generator: np.random.Generator
    ) -> tuple[FloatArray, FloatArray]:
        """Draw the mean log seconds and the noise of a fleet's clients, given the rows.

        One bootstrap sample is drawn first. Given its values, the effects are normal. With w_i = sigma_e² / n_i, the
        effect of client i has the mean b (y_i - mu) with b = sigma_a² / (sigma_a² + w_i), and the variance b w_i. To
        this variance comes that of the drift until the rounds that follow.

        Args:
            clients: Numbers of the fleet's clients in the history, shape (n,).
            num_clients: Number of clients of the fleet. A client without a row is drawn from those with rows.
            generator: Generator of the draws.

        Returns:
            Each client's mean log seconds, and the standard deviation of its noise, shape (num_clients,) each. The
            first n clients are ``clients``.
        """
        mu, spread, noise = generator.choice(self.samples)
        error = noise**2 / np.maximum(self.count, 1)
        share = spread**2 / (spread**2 + error)
        means = generator.normal(mu + share * (self.mean - mu), np.sqrt(share * error + WALK * self.drift))
        like = generator.choice(np.flatnonzero(self.count), size=num_clients)
        like[: len(clients)] = np.where(self.count[clients] > 0, clients, like[: len(clients)])
        return means[like], self.own_noise[like] * noise / max(self.noise.estimate, SMALLEST)


def fit_components(latencies: Latencies) -> VarianceComponents:
    """Estimate spread and noise by moments.

    Args:
        latencies: The rows of a history.

    Returns:
        The estimates with their intervals.

    Raises:
        ParameterError: The rows cannot separate the spread from the noise.
        RunError: SciPy is not installed.

    Examples:
        >>> history = Latencies(
        ...     client=np.array([0, 0, 1, 1]), seconds=np.exp([0.0, 2.0, 6.0, 8.0]), censored=np.zeros(4, dtype=bool),
        ...     fleet=np.zeros(2, dtype=int), num_clients=2, clients_per_round=1, num_examples=np.ones(2),
        ... )
        >>> found = fit_components(history)  # sigma_e² = 2 and sigma_a² = 18 - 2 / 2
        >>> round(found.spread.estimate, 2), round(found.noise.estimate, 2)
        (4.12, 1.41)
    """
    _check(latencies)
    client, cut = latencies.client, latencies.censored
    logs, normal = np.log(latencies.seconds), load_optional("scipy.stats").norm
    limit, added = logs[cut], np.zeros(len(logs))
    count = np.bincount(client, minlength=len(latencies.fleet))
    once = np.ones((1, len(count)))
    for _ in range(STEPS):
        mean, squares = _client_sums(client, logs, added, count)
        mu, spread, noise = _moments(once, count, mean, squares)[0].tolist()
        share = spread**2 / (spread**2 + noise**2 / np.maximum(count, 1))
        location = (mu + share * (mean - mu))[client[cut]]
        z = (limit - location) / noise
        hazard = np.exp(normal.logpdf(z) - normal.logsf(z))
        before, logs[cut] = logs[cut], location + noise * hazard
        added[cut] = noise**2 * (1 + z * hazard - hazard**2)
        if not np.any(np.abs(logs[cut] - before) > SMALLEST):
            break
    weights = np.random.default_rng(0).multinomial(len(count), np.full(len(count), 1 / len(count)), size=SAMPLES)
    samples = _moments(weights, count, mean, squares)
    own, between_within = _own_noises(count, squares, noise), _intervals(samples, spread, noise, count)
    return VarianceComponents(
        median_s=math.exp(mu), spread=between_within[0], noise=between_within[1],
        drift=_drift(client, logs, count, squares), shape=_shape(logs - mean[client], client, count, own),
        count=count, mean=mean, own_noise=own, samples=samples,
    )  # fmt: skip


def _client_sums(
    client: IntArray, logs: FloatArray, added: FloatArray, count: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return each client's mean, and its sum of squares with the variances that bounds add, shape (clients,) each."""
    n = len(count)
    mean: FloatArray = np.bincount(client, logs, n) / np.maximum(count, 1)
    squares: FloatArray = np.bincount(client, (logs - mean[client]) ** 2 + added, n).astype(np.float64)
    return mean, squares


def _moments(weights: IntArray | FloatArray, count: IntArray, mean: FloatArray, squares: FloatArray) -> FloatArray:
    """Return mu, sigma_a and sigma_e, shape (samples, 3).

    Args:
        weights: Number of times that a sample contains each client, shape (samples, clients).
        count: Number of rows of each client, shape (clients,).
        mean: Mean of each client's rows, shape (clients,).
        squares: Sum of squares of each client's rows about their mean, shape (clients,).
    """
    weights = weights * (count > 0)
    # A sample without two different clients, or without two rows of one client, has a spread or a noise near 0.
    number = np.maximum(weights.sum(axis=1), 2)
    noise = weights @ squares / np.maximum(weights @ np.maximum(count - 1, 0), 1)
    mu = weights @ mean / number
    between = (weights * (mean - mu[:, None]) ** 2).sum(axis=1) / (number - 1)
    spread = between - noise * (weights @ (1 / np.maximum(count, 1))) / number
    return np.column_stack([mu, np.sqrt(np.maximum(spread, SMALLEST**2)), np.sqrt(np.maximum(noise, SMALLEST**2))])


def _own_noises(count: IntArray, squares: FloatArray, noise: float) -> FloatArray:
    """Return each client's noise: its own estimate, shrunk towards that of all as far as they differ by chance.

    With f = n_i - 1 degrees of freedom, the log of S_i / f has the mean log sigma_i² + digamma(f / 2) - log(f / 2) and
    the variance trigamma(f / 2).
    """
    special = load_optional("scipy.special")
    own, logs = np.full(len(count), noise), np.full(len(count), 2 * math.log(noise))
    many = (count >= FEW_OWN) & (squares > 0)
    if many.sum() > 1:
        half = (count[many] - 1) / 2
        found = np.log(squares[many] / (2 * half)) - special.digamma(half) + np.log(half)
        chance = special.polygamma(1, half)
        differ = max(0.0, float(found.var(ddof=1) - chance.mean()))
        logs[many] = found.mean() + differ / (differ + chance) * (found - found.mean())
        own = np.exp(logs / 2)
        own *= noise / math.sqrt(np.average(own**2, weights=np.maximum(count, 1)))
    return own


def _drift(client: IntArray, logs: FloatArray, count: IntArray, squares: FloatArray) -> float:
    """Return the variance of the difference between the halves of a client's rows, less chance."""
    order = np.argsort(client, kind="stable")
    place = np.empty(len(client), dtype=np.int64)
    place[order] = np.arange(len(client)) - (np.cumsum(count) - count)[client[order]]
    many = count >= FEW_OWN
    if not many.any():
        return 0.0
    first = count // 2
    last = count - first
    weights = np.where(place < first[client], -1 / np.maximum(first, 1)[client], 1 / last[client])
    differences = np.bincount(client, weights * logs, len(count))[many]
    chance = squares[many] / (count[many] - 1) * (1 / first[many] + 1 / last[many])
    return max(0.0, float((differences**2 - chance).mean()))


def _shape(residuals: FloatArray, client: IntArray, count: IntArray, own: FloatArray) -> FloatArray:
    """Return quantiles of the noise with the variance 1: those of the rows, or of the normal distribution."""
    share = np.linspace(0.0, 1.0, QUANTILES)
    if len(residuals) < FEW_ROWS or count[count > 0].mean() < FEW_EACH:
        return np.asarray(load_optional("scipy.special").ndtri(share.clip(1e-6, 1 - 1e-6)), dtype=np.float64)
    several = count[client] > 1
    value = (residuals / own[client])[several]
    shape = np.quantile(value, share)
    return np.asarray((shape - value.mean()) / max(value.std(), SMALLEST), dtype=np.float64)


def _intervals(samples: FloatArray, spread: float, noise: float, count: IntArray) -> tuple[Interval, Interval]:
    """Return the intervals of the spread and of the noise, from the standard deviation of logs in the bootstrap.

    The mean square between clients, sigma_a² + sigma_e² · mean of 1 / n_i, has a log even if the spread is 0.
    """
    part = float((1 / count[count > 0]).mean())
    quantile = float(load_optional("scipy.stats").t.ppf(0.975, max((count > 0).sum() - 1, 1)))

    def ends(square: float, samples: FloatArray) -> tuple[float, float]:
        half = min(quantile * float(np.log(samples).std()), WIDEST)
        return square * math.exp(-half), square * math.exp(half)

    within = ends(noise**2, samples[:, 2] ** 2)
    between = ends(spread**2 + noise**2 * part, samples[:, 1] ** 2 + samples[:, 2] ** 2 * part)
    around = [math.sqrt(max(end - noise**2 * part, 0.0)) for end in between]
    return _interval(spread, *around), _interval(noise, *map(math.sqrt, within))


def _interval(estimate: float, low: float, high: float) -> Interval:
    """Return an interval in which the smallest value counts as 0."""
    low, estimate = (0.0 if value <= SMALLEST else value for value in (low, estimate))
    return Interval(estimate=estimate, low=low, high=high)


def _check(latencies: Latencies) -> None:
    """Refuse rows that cannot separate the spread from the noise."""
    count = np.bincount(latencies.client[~latencies.censored], minlength=latencies.num_clients)
    if latencies.num_clients < 2:
        raise ParameterError(
            "there is one client, so there is nothing to select. Give a history with at least two clients."
        )
    if not count.any():
        raise ParameterError(
            f"no latency was measured: all {len(latencies.seconds)} rows are cut off or failed. Give a history with a "
            "larger max_latency."
        )
    if (repeated := int((count > 1).sum())) < 2:
        raise ParameterError(
            "cannot tell the spread between clients from the noise within a client: at least two clients need two "
            f"measured rows each, got {repeated}. Give a longer history."
        )
