"""Variance components: how much clients differ persistently, and how much one client varies from round to round.

The model is the one-way random-effects model of the logs. Client i needs y_ij log seconds in its j-th round:

    y_ij = mu + a_i + e_ij,    a_i ~ N(0, sigma_a²),    e_ij ~ N(0, sigma_e²).

The standard deviation sigma_a is the *spread* between clients, and sigma_e is the *noise* within a client. Both are
estimated by maximum likelihood. Let client i have n_i measured rows with the mean y_i and the sum of squares S_i about
it, and let v_i = sigma_e² + n_i sigma_a². The measured rows of client i have the log likelihood

    -(n_i - 1) log sigma_e - log(v_i) / 2 - S_i / (2 sigma_e²) - n_i (y_i - mu)² / (2 v_i)    (+ a constant),

and given these rows a_i is normal with the mean n_i sigma_a² (y_i - mu) / v_i and the variance sigma_a² sigma_e² / v_i.
A censored row at c seconds contributes the probability 1 - Phi((log c - mu - a_i) / sigma_e). The product of these
probabilities is averaged over a_i by Gauss-Legendre quadrature.

A bandit selects fast clients more often, and it decides from the rows that it has seen. The likelihood of the rows is
the same as without such decisions, so the estimate stays valid for unbalanced histories.

The intervals contain the values that reduce the profile log likelihood by less than 1.92 (95 %).

References: S. R. Searle, G. Casella and C. E. McCulloch, "Variance Components", Wiley 1992. D. B. Rubin, "Inference and
Missing Data", Biometrika 63, 1976.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.latencies import Latencies
from fedsel_flwr.report.run_folder import load_optional

NODES = 32
"""Number of nodes of the quadrature."""
FAR = 8.0
"""Number of standard deviations of an effect beyond which its density is negligible."""
BELOW, ABOVE = 6.0, 7.0
"""Distances from a limit, in standard deviations of the noise, at which a censored row has the probability 0 or 1."""
DROP = 1.9207
"""Half of the 95 % quantile of chi-squared with one degree of freedom."""
LARGEST_DROP = 6.0
"""Decrease of the log likelihood at the ends of the profile."""
POINTS = 21
"""Number of points of a profile."""
SMALLEST = 1e-3
"""Smallest noise, in log seconds: a tenth of a percent."""
QUANTILES = 513
"""Number of quantiles of the noise."""
FEW_ROWS = 300
"""Number of measured rows below which the noise counts as normal, because its quantiles are uncertain."""
FEW_EACH = 5.0
"""Mean number of rows of a client below which the noise counts as normal, because the residuals contain its effect."""
MANY_CUT_OFF = 0.05
"""Share of censored rows above which the noise counts as normal, because its upper tail is unknown."""
STEPS = 161
"""Number of points of the distribution from which the effects of censored clients are drawn."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval.

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
        profile: Rows of (sigma_a, mu, sigma_e, weight), shape (points, 4). The weights are the profile likelihood of
            sigma_a, and add up to 1.
        shape: Quantiles of the noise divided by sigma_e, ascending, shape (quantiles,).
        rows: The rows behind the fit.
    """

    median_s: float
    spread: Interval
    noise: Interval
    profile: FloatArray
    shape: FloatArray
    rows: _Rows

    def draw_fleet(
        self, clients: IntArray, num_clients: int, generator: np.random.Generator
    ) -> tuple[FloatArray, float]:
        """Draw the mean log seconds of a fleet's clients, given the rows.

        sigma_a is drawn from its profile likelihood first, so that the draws differ more if the history is short.

        Args:
            clients: Numbers of the fleet's clients in the history, shape (n,).
            num_clients: Number of clients of the fleet. Clients without a row are drawn from the whole population.
            generator: Generator of the draws.

        Returns:
            Each client's mean log seconds, shape (num_clients,), and sigma_e. The first n clients are ``clients``.
        """
        spread, mean, noise, _ = self.profile[generator.choice(len(self.profile), p=self.profile[:, 3])].tolist()
        others = generator.normal(0.0, spread, size=num_clients - len(clients))
        known = self.rows.draw_effects(mean, spread, noise, generator)[clients]
        return mean + np.concatenate([known, others]), noise


def fit_components(latencies: Latencies) -> VarianceComponents:
    """Estimate spread and noise by maximum likelihood.

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
        >>> found = fit_components(history)  # sigma_e² = 2 and sigma_a² + sigma_e² / 2 = 9
        >>> round(found.spread.estimate, 2), round(found.noise.estimate, 2)
        (2.83, 1.41)
    """
    rows = _Rows(latencies)
    _check(latencies, rows)
    start = rows.moments()
    best, (mean, spread, noise) = rows.maximize(start, {})
    spreads = _profile(rows, "spread", spread, (mean, spread, noise), best)
    # A point of the profile may be better than the end of the search.
    top = int(spreads[:, 3].argmax())
    best, spread, mean, noise = float(spreads[top, 3]), *map(float, spreads[top, :3])
    noises = _profile(rows, "noise", noise, (mean, spread, noise), best)
    weight = np.exp(spreads[:, 3] - best)
    # The points are not evenly spaced, so each stands for the distance to its neighbours.
    weight *= np.gradient(spreads[:, 0]) if len(spreads) > 1 else 1.0
    return VarianceComponents(
        median_s=math.exp(mean),
        spread=_interval(spreads[:, 0], spreads[:, 3], spread, best),
        noise=_interval(noises[:, 2], noises[:, 3], noise, best),
        profile=np.column_stack([spreads[:, :3], weight / weight.sum()]),
        shape=_shape(latencies, rows, mean, spread, noise),
        rows=rows,
    )


class _Rows:
    """Sums of the rows of each client, and their likelihood."""

    def __init__(self, latencies: Latencies) -> None:
        client, logs, censored = latencies.client, np.log(latencies.seconds), latencies.censored
        self.num_clients = len(latencies.fleet)
        seen, value = client[~censored], logs[~censored]
        self.count = np.bincount(seen, minlength=self.num_clients)
        total = np.bincount(seen, weights=value, minlength=self.num_clients)
        self.mean = total / np.maximum(self.count, 1)
        self.squares = float(((value - self.mean[seen]) ** 2).sum())
        # A client's rows that are censored at the same time are one pair, with their number.
        pairs = np.column_stack([client[censored], logs[censored]])
        unique, number = np.unique(pairs, axis=0, return_counts=True) if len(pairs) else (pairs, np.zeros(0))
        self.limit, self.number = unique[:, 1], number.astype(np.float64)
        self.limited, self.place = np.unique(unique[:, 0].astype(np.int64), return_inverse=True)
        # The first and the last limit of each client; the pairs are sorted by client and limit.
        ends = np.searchsorted(self.place, np.arange(len(self.limited) + 1))
        self.first, self.last = self.limit[ends[:-1]], self.limit[ends[1:] - 1]

    def moments(self) -> tuple[float, float, float]:
        """Return mu, sigma_a and sigma_e from sums of squares, to start the search."""
        many = int((self.count - 1).clip(0).sum())
        noise = math.sqrt(self.squares / many) if many else 0.5
        known = self.count > 0
        means, counts = self.mean[known], self.count[known]
        between = float(means.var()) - noise**2 * float((1 / counts).mean())
        return float(means.mean()), math.sqrt(max(between, 1e-4)), max(noise, SMALLEST)

    def posterior(self, mean: float, spread: float, noise: float) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of each client's effect, given its measured rows."""
        total = noise**2 + self.count * spread**2
        return (
            self.count * spread**2 * (self.mean - mean) / total,
            np.asarray(spread * noise / np.sqrt(total), dtype=np.float64),
        )

    def log_likelihood(self, mean: float, spread: float, noise: float) -> float:
        """Return the log likelihood, without its constant."""
        n = self.count
        total = noise**2 + n * spread**2
        centre = n * (self.mean - mean) ** 2 / total
        measured = np.where(n > 0, -(n - 1) * math.log(noise) - 0.5 * np.log(total) - 0.5 * centre, 0.0)
        value = float(measured.sum()) - self.squares / (2 * noise**2)
        if not self.limited.size:
            return value
        centre, width = (each[self.limited] for each in self.posterior(mean, spread, noise))
        low, high = self._transition(mean + centre, width, noise)
        nodes, weights = self._quadrature
        x = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * nodes
        later = self._log_later(mean + centre[:, None] + width[:, None] * x, noise)
        terms = later - x**2 / 2 + np.log(weights * (high - low)[:, None] / (2 * math.sqrt(2 * math.pi)))
        # Beyond the transition, the probability of the censored rows is 1.
        terms = np.column_stack([terms, load_optional("scipy.special").log_ndtr(-high)])
        # The largest term is taken out, because a product of many small probabilities underflows.
        largest = terms.max(axis=1)
        return value + float((largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))).sum())

    def draw_effects(self, mean: float, spread: float, noise: float, generator: np.random.Generator) -> FloatArray:
        """Draw each client's effect from its distribution given all its rows, shape (clients,)."""
        effect = generator.normal(*self.posterior(mean, spread, noise))
        if self.limited.size:
            points, step, chances = self._later_effects(mean, spread, noise)
            sums = chances.cumsum(axis=1)
            place = (sums < generator.uniform(size=(len(sums), 1)) * sums[:, -1:]).sum(axis=1)
            effect[self.limited] = points[np.arange(len(sums)), place]
            effect[self.limited] += step * generator.uniform(-0.5, 0.5, size=len(sums))
        return effect

    def mean_effects(self, mean: float, spread: float, noise: float) -> FloatArray:
        """Return the mean of each client's effect given all its rows, shape (clients,)."""
        effect = self.posterior(mean, spread, noise)[0]
        if self.limited.size:
            points, _, chances = self._later_effects(mean, spread, noise)
            effect[self.limited] = (points * chances).sum(axis=1) / chances.sum(axis=1)
        return effect

    def _later_effects(self, mean: float, spread: float, noise: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return points of the effects of the limited clients, given all rows.

        Returns:
            Effects, shape (limited, STEPS), their distance for each client, and their relative probabilities.
        """
        centre, width = (each[self.limited] for each in self.posterior(mean, spread, noise))
        low, high = self._transition(mean + centre, width, noise)
        step = (np.maximum(high, 0.0) + FAR - low) / STEPS
        x = low[:, None] + step[:, None] * np.arange(STEPS)
        points = centre[:, None] + width[:, None] * x
        density = self._log_later(mean + points, noise) - x**2 / 2
        return points, width * step, np.exp(density - density.max(axis=1, keepdims=True))

    def maximize(
        self, start: tuple[float, float, float], fixed: dict[str, float]
    ) -> tuple[float, tuple[float, float, float]]:
        """Maximize the log likelihood over the parameters that are not fixed.

        Args:
            start: mu, sigma_a and sigma_e.
            fixed: "spread" or "noise" -> its value.

        Returns:
            The largest log likelihood, and mu, sigma_a and sigma_e there.
        """
        free = [name for name in ("spread", "noise") if name not in fixed]

        def read(x: FloatArray) -> tuple[float, float, float]:
            values = fixed | {name: math.exp(value) for name, value in zip(free, x[1:].tolist(), strict=True)}
            return float(x[0]), values["spread"], values["noise"]

        named = {"spread": start[1], "noise": start[2]}
        x = np.array([start[0], *(math.log(max(named[name], SMALLEST)) for name in free)])
        bounds = [(x[0] - 20.0, x[0] + 20.0), *((math.log(SMALLEST), 4.0) for _ in free)]
        found = load_optional("scipy.optimize").minimize(
            lambda one: -self.log_likelihood(*read(one)), x, method="L-BFGS-B", bounds=bounds
        )
        return -float(found.fun), read(found.x)

    def _transition(self, location: FloatArray, width: FloatArray, noise: float) -> tuple[FloatArray, FloatArray]:
        """Return the range of the standardized effect in which the probability of the censored rows rises to 1.

        Args:
            location: mu plus the mean effect of each limited client, shape (limited,).
            width: Standard deviation of its effect, shape (limited,).
            noise: sigma_e.
        """
        low = (self.first - BELOW * noise - location) / width
        high = (self.last + ABOVE * noise - location) / width
        low = np.maximum(low, -FAR)
        # The range is never empty, so that its length has a logarithm.
        return low, np.maximum(np.minimum(high, np.maximum(low, 0.0) + FAR), low + 1e-9)

    def _log_later(self, location: FloatArray, noise: float) -> FloatArray:
        """Return the log probability of the censored rows of each limited client at locations (limited, nodes)."""
        one = load_optional("scipy.special").log_ndtr((location[self.place] - self.limit[:, None]) / noise)
        out = np.zeros_like(location)
        np.add.at(out, self.place, one * self.number[:, None])
        return out

    @cached_property
    def _quadrature(self) -> tuple[FloatArray, FloatArray]:
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        return nodes, weights


def _shape(latencies: Latencies, rows: _Rows, mean: float, spread: float, noise: float) -> FloatArray:
    """Return quantiles of the noise divided by sigma_e: those of the rows, or of the normal distribution.

    A residual is a row less mu and the mean effect of its client, given all its rows. Each residual is divided
    by its own standard deviation. The distribution of the rows is the Kaplan-Meier estimate, because some rows are
    censored. The normal distribution is better in short or strongly censored histories, because the effects then blur
    the residuals.
    """
    share = np.linspace(0.0, 1.0, QUANTILES)
    selections = latencies.selections
    per_client, cut_off = float(selections[selections > 0].mean()), float(latencies.censored.mean())
    if rows.count.sum() < FEW_ROWS or per_client < FEW_EACH or cut_off > MANY_CUT_OFF:
        return np.asarray(load_optional("scipy.special").ndtri(share.clip(1e-6, 1 - 1e-6)), dtype=np.float64)
    effect = rows.mean_effects(mean, spread, noise)
    # A residual contains (1 - b) a_i and e_ij - b times the mean of the client's e_ij, with the shrinkage b.
    b = selections * spread**2 / (noise**2 + selections * spread**2)
    variance = noise**2 * (1 - (2 * b - b**2) / np.maximum(selections, 1)) + (1 - b) ** 2 * spread**2
    value = (np.log(latencies.seconds) - mean - effect[latencies.client]) / np.sqrt(variance)[latencies.client]
    order = np.argsort(value, kind="stable")
    value, measured = value[order], ~latencies.censored[order]
    # Every client has the same weight, although a bandit selects some clients more often.
    weight = 1.0 / selections[latencies.client[order]]
    at_risk = weight[::-1].cumsum()[::-1]
    below = 1.0 - np.cumprod(1.0 - measured * weight / at_risk)
    return np.asarray(np.interp(share, below[measured], value[measured]), dtype=np.float64)


def _check(latencies: Latencies, rows: _Rows) -> None:
    """Refuse rows that cannot separate the spread from the noise."""
    clients, repeated = int((rows.count > 0).sum()), int((rows.count > 1).sum())
    if latencies.num_clients < 2:
        raise ParameterError(
            "there is one client, so there is nothing to select. Give a history with at least two clients."
        )
    if not clients:
        raise ParameterError(
            f"no latency was measured: all {len(latencies.seconds)} rows are cut off or failed. Give a history with a "
            "larger max_latency."
        )
    if clients < 2 or repeated < 2:
        raise ParameterError(
            "cannot tell the spread between clients from the noise within a client: at least two clients need two "
            f"measured rows each, got {repeated}. Give a longer history."
        )


def _profile(rows: _Rows, name: str, centre: float, start: tuple[float, float, float], best: float) -> FloatArray:
    """Return the profile of a parameter, rows of (sigma_a, mu, sigma_e, log likelihood)."""

    def at(value: float, near: tuple[float, float, float]) -> tuple[float, tuple[float, float, float]]:
        return rows.maximize(near, {name: value})

    def end(direction: int) -> float:
        # The distance from the centre doubles until the likelihood is low enough, and is then bisected (both in logs).
        near, inside, step, outside = start, 0.0, 0.05, math.inf
        for _ in range(16):
            value = max(centre * math.exp(direction * step), SMALLEST)
            likelihood, near = at(value, near)
            drop = best - likelihood
            if drop > 2 * LARGEST_DROP:
                outside, near = step, start
            elif drop > LARGEST_DROP or value == SMALLEST:
                return value
            else:
                inside = step
            step = 2 * step if math.isinf(outside) else (inside + outside) / 2
        return value

    found = []
    near = start
    for value in np.unique(np.append(np.linspace(end(-1), end(1), POINTS), centre)):
        likelihood, near = at(float(value), near)
        found.append((near[1], near[0], near[2], likelihood))
    return np.array(found)


def _interval(values: FloatArray, likelihood: FloatArray, estimate: float, best: float) -> Interval:
    """Return the values at which the profile is lower by :data:`DROP`; the smallest value counts as 0."""
    depth = likelihood - (best - DROP)
    inside = np.flatnonzero(depth >= 0)
    # The two points at each end between which the profile crosses the level, unless the profile ends before.
    first, last = slice(max(inside[0] - 1, 0), inside[0] + 1), slice(inside[-1], inside[-1] + 2)
    low, high = float(np.interp(0, depth[first], values[first])), float(np.interp(0, -depth[last], values[last]))
    smallest = low <= 2 * SMALLEST
    return Interval(estimate=0.0 if estimate <= 2 * SMALLEST else estimate, low=0.0 if smallest else low, high=high)
