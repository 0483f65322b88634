"""How often a comparison or a figure of a paper is judged wrongly, and how often a true difference is found.

    python benchmarks/intervals.py             # writes intervals.csv and intervals.md beside this file, in minutes

An experiment draws the logs of paired ratios, and judges them with the functions of the package. Every table has a seed
of its own. The data are normal, Student's t with three degrees of freedom, tied (two values), gamma (mostly slightly
faster, rarely much slower), or rare delays (one run of 20 takes three times as long). All have mean 0 but for the
effect that a table names. In a comparison of 19, half of the variance of a difference is the reference's, and so the
same for all selectors, unless the reference is constant.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsel_flwr.report.paired import paired_interval, paired_p
from fedsel_flwr.report.verdict import LEAST_PAIRS, LEVEL, MARGIN

FloatArray = NDArray[np.float64]
Row = dict[str, str | int | float]
HERE = Path(__file__).parent
EXPERIMENTS = 20_000
COLUMNS = ("table", "data", "arms", "seeds", "spread", "effect", "rule", "share")


def _tied(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return rng.choice([-1.0, 1.0], shape)


def _delays(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return math.log(3) * ((rng.random(shape) < 0.05) - 0.05) + 0.05 * rng.standard_normal(shape)


DATA: dict[str, Callable[[np.random.Generator, tuple[int, ...]], FloatArray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t, 3 degrees": lambda rng, shape: rng.standard_t(3, shape),
    "tied": _tied,
    "gamma, shape 1": lambda rng, shape: rng.gamma(1.0, 1.0, shape) - 1.0,
    "gamma, shape 0.5": lambda rng, shape: rng.gamma(0.5, 1.0, shape) - 0.5,
    "gamma, shape 0.2": lambda rng, shape: rng.gamma(0.2, 1.0, shape) - 0.2,
    "rare delays": _delays,
}


def corrected(p: FloatArray) -> FloatArray:
    """Return Holm's corrected p-values along the last axis."""
    order = np.argsort(p, axis=-1)
    stepped = np.take_along_axis(p, order, axis=-1) * np.arange(p.shape[-1], 0, -1)
    found = np.empty_like(p)
    np.put_along_axis(found, order, np.maximum.accumulate(stepped, axis=-1), axis=-1)
    return found


def false_verdicts(rng: np.random.Generator) -> Iterator[Row]:
    """Yield how often a selector without an effect is called sooner or later, among others without one."""
    for name, draw in DATA.items():
        for arms, constant in ((1, True), (19, False), (19, True)):
            for seeds in (2, 3, LEAST_PAIRS, 10, 20) if arms == 1 else (LEAST_PAIRS, 10, 20):
                d = draw(rng, (EXPERIMENTS if arms == 1 else EXPERIMENTS // 4, arms, seeds))
                if not constant:
                    d = (d - draw(rng, (len(d), 1, seeds))) / math.sqrt(2)
                data = name if arms == 1 or not constant else f"{name}, constant reference"
                for rule, p in (("Student", paired_p(d, skewed=False)), ("ours", paired_p(d))):
                    told = (corrected(p) <= LEVEL).any(axis=-1)
                    share = 0.0 if rule == "ours" and seeds < LEAST_PAIRS else float(told.mean())
                    yield {"data": data, "arms": arms, "seeds": seeds, "rule": rule, "share": share}


def found_differences(rng: np.random.Generator) -> Iterator[Row]:
    """Yield how often one selector with an effect is called sooner."""
    for arms in (2, 19):
        for spread in (0.1, 0.2, 0.3):
            for seeds in (LEAST_PAIRS, 10, 20):
                for ratio in (0.77, 0.85, 0.95):
                    normal = rng.standard_normal((EXPERIMENTS, arms, seeds))
                    d = spread * (normal - rng.standard_normal((EXPERIMENTS, 1, seeds))) / math.sqrt(2)
                    d[:, 0] += math.log(ratio)
                    base: Row = {"arms": arms, "seeds": seeds, "spread": spread, "effect": ratio}
                    for rule, skewed in (("Student", False), ("ours", True)):
                        p = corrected(paired_p(d, skewed=skewed))[:, 0]
                        told = (p <= LEVEL) & (d[:, 0].mean(axis=-1) < 0)
                        yield base | {"rule": f"{rule}: sooner", "share": float(told.mean())}


def small_differences(rng: np.random.Generator) -> Iterator[Row]:
    """Yield how often a selector that needs 1.056 or 1.116 times the time is called equal within 5 %."""
    for name in ("normal", "gamma, shape 1", "rare delays"):
        for seeds in (LEAST_PAIRS, 10, 20):
            for ratio in (1.056, 1.116):
                scale = 1.0 if name == "rare delays" else 0.1
                low, high = paired_interval(scale * DATA[name](rng, (EXPERIMENTS, seeds)) + math.log(ratio))
                share = float(((low >= -math.log(MARGIN)) & (high <= math.log(MARGIN))).mean())
                yield {"data": name, "seeds": seeds, "effect": ratio, "rule": "no difference", "share": share}


def skewed_figures(rng: np.random.Generator) -> Iterator[Row]:
    """Yield how often one check without an effect is shown."""
    for name, draw in DATA.items():
        for seeds in (3, LEAST_PAIRS, 10, 20):
            d = draw(rng, (EXPERIMENTS, seeds))
            for rule, p in (("Student", paired_p(d, skewed=False)), ("ours", paired_p(d))):
                for side, toward in (("above", d.mean(axis=-1) > 0), ("below", d.mean(axis=-1) < 0)):
                    base: Row = {"data": name, "seeds": seeds, "rule": f"{rule}: {side}"}
                    yield base | {"share": float((toward & (p <= LEVEL)).mean())}


def added_seeds(rng: np.random.Generator) -> Iterator[Row]:
    """Yield how often five more seeds at a time, up to 60, make a selector without an effect sooner or later."""
    d = 0.2 * rng.standard_normal((EXPERIMENTS, 60))
    open_, wrong = np.ones(EXPERIMENTS, dtype=np.bool_), np.zeros(EXPERIMENTS, dtype=np.bool_)
    for seeds in range(10, 61, 5):
        low, high = paired_interval(d[:, :seeds])
        same = (low >= -math.log(MARGIN)) & (high <= math.log(MARGIN))
        told = ~same & ((low > 0) | (high < 0))
        wrong |= open_ & told
        open_ &= ~(same | told)
    yield {"data": "normal", "arms": 1, "spread": 0.2, "rule": "ours", "share": float(wrong.mean())}


def figures(rng: np.random.Generator) -> Iterator[Row]:
    """Yield how often a figure of twelve checks is shown or excluded; effects are in standard deviations.

    Per check, the rules of :mod:`fedsel_flwr.simulations.reproductions.claims`: "shown" needs every check, without or
    with Holm's correction. "not seen" needs one check that is contrary, or inside a margin of .25 standard deviations.
    """
    checks = 12
    for seeds in (LEAST_PAIRS, 10, 20):
        for effect, wrong_checks in ((2.0, 0), (1.0, 0), (2.0, 1), (0.0, checks)):
            d = rng.standard_normal((EXPERIMENTS // 4, checks, seeds)) + effect
            d[:, :wrong_checks] -= effect
            toward, p = d.mean(axis=-1) > 0, paired_p(d)
            # As in claims: the p-value of the interval inside the margin is the larger one at its ends.
            upper, lower = (paired_p(d - end) for end in (0.25, -0.25))
            inside = np.maximum(np.where(d.mean(-1) < 0.25, upper, 1.0), np.where(d.mean(-1) > -0.25, lower, 1.0))
            against = np.concatenate([np.where(toward, 1.0, p), inside], axis=-1)
            shown = {"uncorrected": p, "Holm": corrected(p)}
            excluded = {"uncorrected": against, "Holm": corrected(against)}
            base: Row = {
                "arms": checks,
                "seeds": seeds,
                "effect": effect,
                "data": f"{wrong_checks} of {checks} without",
            }
            for rule, one in shown.items():
                yield base | {"rule": f"shown, {rule}", "share": float((toward & (one <= LEVEL)).all(axis=-1).mean())}
            for rule, one in excluded.items():
                yield base | {"rule": f"not seen, {rule}", "share": float((one <= LEVEL).any(axis=-1).mean())}


TABLES: dict[str, tuple[Callable[[np.random.Generator], Iterator[Row]], str]] = {
    "false verdicts": (
        false_verdicts,
        "A selector without an effect is called sooner or later. With 19 selectors: at least one of them. Below "
        f"{LEAST_PAIRS} seeds we give no verdict. At most 5 % is promised for normal, t and tied data, and from 10 "
        "seeds on for one selector with gamma data of shape 1. If many selectors with skewed times are compared with "
        "a reference that hardly varies, one of them is wrong more often. For rarer and larger delays the shares are "
        "only printed. With 19 selectors, a cell has a quarter of the experiments.",
    ),
    "found differences": (
        found_differences,
        "One selector has the time ratio *effect*, the others 1. The spread is the standard deviation of the logs.",
    ),
    "small differences": (
        small_differences,
        "A selector takes more than 1.05 times the time, and is called equal within 5 %. The spread is .1, but for "
        "rare delays. At most 2.5 % is promised for normal data.",
    ),
    "one check": (
        skewed_figures,
        "A check of a figure without any effect is shown to be above or below. At most 2.5 % on each side is promised "
        "for normal, t and tied data.",
    ),
    "added seeds": (
        added_seeds,
        "Five more seeds at a time, from 10 to 60, until there is a word: why not to do this.",
    ),
    "figures": (
        figures,
        "A figure's claim of twelve checks, with effects in standard deviations. A check without an effect makes the "
        "claim wrong. Our rules are *shown, uncorrected* and *not seen, Holm*.",
    ),
}
"""Name of a table -> its rows, and what it has."""


def write(rows: list[Row]) -> None:
    """Write the CSV file and the page."""
    with (HERE / "intervals.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(row | {"share": f"{row['share']:.4f}"} for row in rows)
    lines = [
        "# How often a verdict is wrong, and how often a difference is found",
        "",
        f"`python benchmarks/intervals.py`, {EXPERIMENTS:,} experiments a cell (figures: {EXPERIMENTS // 4:,}), seeds "
        f"0 to {len(TABLES) - 1}. All numbers are shares of experiments, in percent: [intervals.csv](intervals.csv).",
    ]
    for table, (_, said) in TABLES.items():
        own = [row for row in rows if row["table"] == table]
        keys = [key for key in COLUMNS[1:-2] if any(key in row for row in own)]
        rules = list(dict.fromkeys(str(row["rule"]) for row in own))
        cells: dict[tuple[str, ...], dict[str, float]] = {}
        for row in own:
            cells.setdefault(tuple(str(row.get(key, "")) for key in keys), {})[str(row["rule"])] = float(row["share"])
        lines += ["", f"## {table.capitalize()}", "", said, "", f"| {' | '.join([*keys, *rules])} |"]
        lines += [f"|{' --- |' * len(keys)}{' ---: |' * len(rules)}"]
        for case, found in cells.items():
            lines.append(f"| {' | '.join([*case, *(f'{100 * found[rule]:.1f}' for rule in rules)])} |")
    (HERE / "intervals.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Draw and write everything."""
    rows: list[Row] = []
    for seed, (table, (make, _)) in enumerate(TABLES.items()):
        rows += [{"table": table, **row} for row in make(np.random.default_rng(seed))]
        print(table, flush=True)
    write(rows)


if __name__ == "__main__":
    main()
