"""How often the intervals of a comparison hold the truth, and how often a comparison settles a difference.

    python benchmarks/intervals.py                     # the tables of docs/comparing.md, 20,000 experiments a cell

An experiment draws the logs of the paired time ratios of several selectors to one reference, on several seeds. They are
normal; the selectors share the reference's part, as in a comparison. The first table has the share of the experiments
in which each selector's 95 % interval holds its true ratio, with the selectors' own spreads (Student) and with spreads
moderated towards each other (limma). The second has the share in which one selector with an effect is called sooner or
without difference, beside selectors without any effect. A last line has what adding seeds until a word comes does.

Reference: G. K. Smyth, "Linear Models and Empirical Bayes Methods for Assessing Differential Expression in Microarray
Experiments", Statistical Applications in Genetics and Molecular Biology 3(1), 2004.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from fedsel_flwr.report.verdict import LEVEL, MARGIN

FloatArray = NDArray[np.float64]
SEEDS = (3, 5, 10, 20)
SELECTORS = (2, 4, 19)
"""Selectors compared with the reference: the demo's, a usual study's, all of this package's."""
RATIOS = (0.77, 0.85, 0.95, 1.0)
SPREADS = (0.1, 0.2, 0.3)
"""Standard deviations of the log ratios; the demo's are .07 to .13."""
SHARED = 0.5
"""Part of a difference's variance that is the reference's, and so the same for all selectors."""


@dataclass(frozen=True)
class Moderated:
    """Variances moderated towards each other.

    Attributes:
        prior_df: Degrees of freedom of the prior, shape (experiments,); infinite if the variances differ no more than
            chance explains.
        prior: Variance of the prior, shape (experiments,).
        variances: Moderated variances, shape (experiments, selectors).
        df: Their degrees of freedom, shape (experiments, 1).
    """

    prior_df: FloatArray
    prior: FloatArray
    variances: FloatArray
    df: FloatArray


def moderate(variances: FloatArray, df: int) -> Moderated:
    """Moderate sample variances towards each other, as limma's ``eBayes`` does.

    Args:
        variances: Shape (experiments, selectors), at least two selectors.
        df: Degrees of freedom of each.
    """
    count = variances.shape[1]
    e = np.log(variances) - special.digamma(df / 2) + math.log(df / 2)  # Smyth, section 6.2
    mean = e.mean(axis=1)
    excess = e.var(axis=1, ddof=1) - special.polygamma(1, df / 2)
    varied = excess > 0
    prior_df = np.full(len(variances), np.inf)
    # With equal variances limma takes their plain mean.
    prior = variances.mean(axis=1)
    prior_df[varied] = half = 2 * _inverse_trigamma(excess[varied])
    prior[varied] = np.exp(mean[varied] + special.digamma(half / 2) - np.log(half / 2))
    d0 = np.where(varied, prior_df, 1.0)[:, np.newaxis]
    mixed = (d0 * prior[:, np.newaxis] + df * variances) / (d0 + df)
    moderated = np.where(varied[:, np.newaxis], mixed, prior[:, np.newaxis])
    total = np.minimum(prior_df + df, count * df)[:, np.newaxis]
    return Moderated(prior_df, prior, moderated, total)


def _inverse_trigamma(x: FloatArray) -> FloatArray:
    """Solve trigamma(y) = x by Newton's method on 1 / trigamma, which is nearly linear (Smyth, appendix)."""
    y = 0.5 + 1 / x
    for _ in range(50):
        trigamma = special.polygamma(1, y)
        step = trigamma * (1 - trigamma / x) / special.polygamma(2, y)
        y = y + step
        if not y.size or np.max(-step / y) < 1e-10:
            break
    return np.asarray(y)


def draw(
    rng: np.random.Generator, experiments: int, seeds: int, spreads: FloatArray, logs: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Draw experiments; return means and variances of the log ratios, shape (experiments, selectors)."""
    shared = min(SHARED * float(spreads.min()) ** 2, float(spreads.min()) ** 2)
    common = math.sqrt(shared) * rng.standard_normal((experiments, 1, seeds))
    own = np.sqrt(spreads**2 - shared)[:, np.newaxis] * rng.standard_normal((experiments, len(spreads), seeds))
    d = logs[:, np.newaxis] + own - common
    return d.mean(axis=2), d.var(axis=2, ddof=1)


def coverage_table(rng: np.random.Generator, experiments: int) -> list[str]:
    """Return the first table as lines of Markdown."""
    lines = [
        "| selectors | seeds | spreads | own spread: first | others | moderated: first | others | width |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for selectors in SELECTORS:
        for seeds in SEEDS:
            for factor in (1.0, 2.5):
                spreads = np.ones(selectors)
                spreads[0] = factor
                means, variances = draw(rng, experiments, seeds, spreads, np.zeros(selectors))
                found = moderate(variances, seeds - 1)
                own_half = stats.t.ppf(0.975, seeds - 1) * np.sqrt(variances / seeds)
                half = stats.t.ppf(0.975, found.df) * np.sqrt(found.variances / seeds)
                own, moderated = ((np.abs(means) <= h).mean(axis=0) for h in (own_half, half))
                cells = [f"{own[0]:.3f}", _range(own[1:]), f"{moderated[0]:.3f}", _range(moderated[1:])]
                kind = "equal" if factor == 1 else f"first {factor:g} times"
                width = f"{half.mean() / own_half.mean():.2f}"
                lines.append(f"| {selectors} | {seeds} | {kind} | {' | '.join(cells)} | {width} |")
    return lines


def power_table(rng: np.random.Generator, experiments: int) -> list[str]:
    """Return the second table as lines of Markdown: the first selector has the true ratio, the others have 1."""
    lines = [
        "| selectors | spread of the log ratio | seeds | "
        + " | ".join(f"ratio {ratio:.2f}" for ratio in RATIOS)
        + " |",
        "|---:|---:|---:|" + "---:|" * len(RATIOS),
    ]
    for selectors in (2, 19):
        for spread in SPREADS:
            for seeds in (5, 10, 20):
                cells = []
                for ratio in RATIOS:
                    logs = np.zeros(selectors)
                    logs[0] = math.log(ratio)
                    means, variances = draw(rng, experiments, seeds, np.full(selectors, spread), logs)
                    cells.append(_settled(means, variances, seeds))
                lines.append(f"| {selectors} | {spread:g} | {seeds} | {' | '.join(cells)} |")
    return lines


def stopping_rate(rng: np.random.Generator, experiments: int, spread: float = 0.2) -> float:
    """Return how often five more seeds at a time, from 5 to 60, make a selector without effect sooner or later."""
    d = spread * rng.standard_normal((experiments, 60))
    undecided, wrong = np.ones(experiments, dtype=np.bool_), np.zeros(experiments, dtype=np.bool_)
    for seeds in range(5, 61, 5):
        means, error = d[:, :seeds].mean(axis=1), d[:, :seeds].std(axis=1, ddof=1) / math.sqrt(seeds)
        same = np.abs(means) + stats.t.ppf(0.975, seeds - 1) * error <= math.log(MARGIN)
        told = ~same & (2 * stats.t.sf(np.abs(means) / error, seeds - 1) <= LEVEL)
        wrong |= undecided & told
        undecided &= ~(same | told)
    return float(wrong.mean())


def _settled(means: FloatArray, variances: FloatArray, seeds: int) -> str:
    """Return how often the first selector is sooner, without difference and later, in percent."""
    error = np.sqrt(variances / seeds)
    half = stats.t.ppf(0.975, seeds - 1) * error
    same = (np.abs(means) + half <= math.log(MARGIN))[:, 0]
    p = 2 * stats.t.sf(np.abs(means) / error, seeds - 1)
    # Holm's: the place among the ascending p-values says what the first is multiplied by, at least as the one before.
    order = np.argsort(p, axis=1)
    stepped = np.take_along_axis(p, order, axis=1) * np.arange(p.shape[1], 0, -1)
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, np.maximum.accumulate(stepped, axis=1), axis=1)
    told = (corrected[:, 0] <= LEVEL) & ~same
    sooner, later = told & (means[:, 0] < 0), told & (means[:, 0] > 0)
    return " / ".join(f"{100 * share.mean():.0f}" for share in (sooner, same, later))


def _range(values: FloatArray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.3f}" if len(values) == 1 else f"{low:.3f} to {high:.3f}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=28)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    print("\n".join([*coverage_table(rng, given.experiments), "", *power_table(rng, given.experiments)]))
    rate = stopping_rate(rng, given.experiments)
    print(f"\nFive more seeds until a word comes, from 5 to 60: {100 * rate:.0f} % of selectors without effect differ.")


if __name__ == "__main__":
    main()
