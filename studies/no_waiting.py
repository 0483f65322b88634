"""Rounds that wait for clients against rounds that do not: phones, four selectors, equal simulated time.

    python studies/no_waiting.py --workers 2    # the missing runs, then page and picture: about one core-hour
    python studies/no_waiting.py --page-only    # page and picture from the stored rows

Each run ends at the first round after HORIZON_S simulated seconds, and counts until then. All methods evaluate the
model after as many updates, so that the target, the mean of 15 measurements, covers equally many updates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

# Set before NumPy and torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from fedsel_flwr.report.paired import PairedEffect, collect, paired_effects
from fedsel_flwr.report.summary import RunSummary, summarize
from fedsel_flwr.report.verdict import verdict
from fedsel_flwr.rounds.fingerprints import fingerprint
from fedsel_flwr.rounds.history import History
from fedsel_flwr.simulations import Scenario, load_scenario, simulate
from fedsel_flwr.simulations.reproductions.rows import Rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
SELECTORS = ("random", "bsfl", "oort", "pisces")
METHODS: dict[str, dict[str, Any]] = {
    "synchronous, 10": {},
    "synchronous, 20": {"clients_per_round": 20},
    "over-selection": {"aggregation.over_selection": 0.3},
    "deadline": {"aggregation.round_deadline_s": 20.0},
    "buffered, B = 10": {"aggregation.concurrency": 20},
    "buffered, B = 5": {"aggregation.concurrency": 20, "clients_per_round": 5, "evaluation_every": 2},
}
EVEN = 0.9
"""Jain's index from which shares count as even."""
WAITING = ("synchronous, 10", "buffered, B = 10", "buffered, B = 5")
TARGET = 0.9
REFERENCE = "random, synchronous, 10"
SEEDS = range(101, 121)
HORIZON_S = 5000.0
REVISION = 1
"""Raise it when a change of the code changes the results."""


@dataclass(frozen=True, kw_only=True)
class Row(RunSummary):
    """Figures of one run until the horizon.

    Attributes:
        fingerprint: Digest of everything that the run depends on.
        method: Key of METHODS.
        steps: Rounds or steps until the horizon.
        updates: Usable updates until then.
        staleness: Their mean staleness, in steps.
        stale: Share of them with a staleness above 0.
    """

    fingerprint: str
    method: str
    steps: int
    updates: int
    staleness: float
    stale: float


PAGE = """# Rounds that do not wait

How much time do buffered rounds save, with which selector, and what do they cost?

![Seconds and joules to {target}](no-waiting.png)

{sentences}

Written by `python studies/no_waiting.py`; every number comes from [no-waiting.csv](no-waiting.csv).

## All rows

{head}
{rows}

- **Setting**: the scenario `phones`, 200 phones on Wi-Fi that learn handwritten digits, seeds {first} to {last}, which
  nothing was chosen on. `oort` and `pisces` have their defaults, `bsfl` the scenario's parameters.
- **Rounds**: *synchronous, m* asks m clients and waits for all of them, for at most 60 s. *Over-selection* asks 13 and
  waits for 10. *Deadline* asks 10 and waits for at most 20 s. *Buffered* has C = 20 clients at work, and a step after B
  arrivals ([how](../simulations.md#buffered-rounds)).
- **Equal time**: each run counts for {horizon} simulated seconds. *Seconds* is the geometric mean of the time until the
  mean of 15 measurements reaches {target}. The model is measured after every 10 updates, with *synchronous, 20* after
  every 20.
- **Ratios** are to random selection in *synchronous, 10*, with 95 % intervals, and *own ratio* is to the same selector
  in *synchronous, 10*. The verdicts are those of [comparing](../comparing.md#the-verdict), with Holm's correction over
  all rows.
- *Joules* and *MB* (both directions, ratio of means) count until the target. Clients at work at that moment are not
  counted: at most 20, of more than 800 updates. *Accuracy* is the mean of the last ten measurements. *Staleness* is the
  mean of the usable updates, *failures* are clients a run without a usable update in time.
- {runs} runs, about 0.6 core-hours of an x86-64 server that other programs shared, Python 3.11.

## FedBuff in public codes

The paper's step is w + η / B · Σ s(τ) Δ. Each code got the same four arrivals in two steps, one of them stale. The last
two columns are the largest differences from the paper's model after each step. The paper's step is made by: {exact};
and ours, with `weighting = "uniform"` (`tests/rounds/test_flights.py`).

| code | place | its step | step 1 | step 2 |
| --- | --- | --- | ---: | ---: |
{codes}
"""
COLUMNS = ("method", "selector", "seed", *(f.name for f in fields(Row) if f.name not in ("method", "selector", "seed")))


@dataclass(frozen=True)
class Cell:
    """One run: a method, a selector and a seed."""

    methods: ClassVar[Mapping[str, Mapping[str, Any]]] = METHODS
    method: str
    selector: str
    seed: int

    def scenario(self, rounds: int) -> Scenario:
        """Return the run's scenario with this number of rounds."""
        own = {"selector": self.selector, "seed": self.seed, "rounds": rounds}
        return load_scenario("phones", {**self.methods[self.method], **own})

    @property
    def fingerprint(self) -> str:
        """Digest of everything that the run depends on."""
        own = self.scenario(1).model_dump(exclude_defaults=True)
        own = {key: own[key] for key in own if key not in ("description", "engine", "rounds", "selectors")}
        table = self.scenario(1).selectors.get(self.selector, {})
        return fingerprint(scenario=own, table=table, horizon=HORIZON_S, revision=REVISION)

    def run(self) -> Row:
        """Simulate until the horizon."""
        rounds = 3000 // self.methods[self.method].get("clients_per_round", 10)
        rounds *= 2 if "buffered" in self.method else 1
        while True:
            scenario = self.scenario(rounds)
            result = simulate(scenario, engine="vectorized", quiet=True)
            if result.history.rounds[-1].simulated_s >= HORIZON_S:
                break
            rounds *= 2
        records = [record for record in result.history.rounds if record.simulated_s <= HORIZON_S]
        clients = [one for one in result.history.clients if one.round <= len(records)]
        history = History.from_records(records, clients)
        summary = summarize(
            history,
            selector=self.selector,
            seed=self.seed,
            num_clients=scenario.num_clients,
            target_accuracy=scenario.target_accuracy,
            target_rounds=scenario.target_rounds,
            model_bytes=scenario.model_bytes(sum(array.nbytes for array in result.arrays)),
        )
        ages = np.array([one.staleness for one in clients if one.completed])
        own = {
            "fingerprint": self.fingerprint, "method": self.method, "steps": len(records), "updates": len(ages),
            "staleness": float(ages.mean()), "stale": float((ages > 0).mean()),
        }  # fmt: skip
        return self.row(**asdict(summary) | own | self.further(history))

    def further(self, history: History) -> dict[str, Any]:
        """Return further figures of a run until the horizon."""
        return {}

    def row(self, **figures: Any) -> Row:
        """Return a row."""
        return Row(**figures)


def main() -> None:
    """Simulate what is missing, then write page and picture."""
    effects = study("no-waiting.csv", COLUMNS, [Cell(*one) for one in product(METHODS, SELECTORS, SEEDS)], Row, __doc__)
    draw(effects, RESULTS / "no-waiting.png", METHODS, SELECTORS)
    codes = json.loads((ROOT / "tests" / "rounds" / "fedbuff_public_codes.json").read_text(encoding="utf-8"))
    (RESULTS / "no-waiting.md").write_text(page(effects, codes), encoding="utf-8")


def study(csv: str, columns: Sequence[str], cells: Sequence[Cell], kind: type[Row], description: str | None) -> Effects:
    """Read the command line, simulate the runs that are missing, and return the effects of all.

    Args:
        csv: The file of the rows.
        columns: Its columns.
        cells: The runs.
        kind: Class of a row.
        description: What ``--help`` says.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help=f"number of seeds (default: {len(SEEDS)})")
    parser.add_argument("--page-only", action="store_true", help="simulate nothing")
    args = parser.parse_args()
    rows = Rows(RESULTS / csv, columns, ("method", "selector", "seed"))
    cells = [one for one in cells if one.seed in SEEDS[: args.seeds]]
    missing = sorted((one for one in cells if not rows.done(one.fingerprint)), key=lambda one: one.seed)
    if missing and not args.page_only:
        play(missing, rows, args.workers)
    if any(not rows.done(one.fingerprint) for one in cells):
        sys.exit("runs are missing: run the command again without --page-only")
    rows.sort()
    found = [parsed(row, kind) for row in rows.select(one.fingerprint for one in cells)]
    return Effects([replace(row, selector=f"{row.selector}, {row.method}") for row in found])


def play(missing: Sequence[Cell], rows: Rows, workers: int) -> None:
    """Simulate runs, and add their rows as they come."""
    start = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done, future in enumerate(as_completed([pool.submit(one.run) for one in missing]), 1):
            row = future.result()
            rows.add(asdict(row))
            print(f"{done} of {len(missing)} runs, {time.monotonic() - start:.0f} s", flush=True)


class Effects:
    """Ratios to random selection in synchronous rounds, and to the selector's own synchronous rounds.

    Args:
        runs: The runs, with "selector, method" as the selector.
    """

    def __init__(self, runs: Sequence[Row]) -> None:
        self.runs: dict[str, list[Row]] = {}
        for run in runs:
            self.runs.setdefault(run.selector, []).append(run)
        self.verdicts = {one.selector: one for one in verdict(runs, REFERENCE, TARGET).selectors}

    def against(self, label: str, other: str, figure: str = "time_to_target_s") -> PairedEffect:
        """Compare two labels in a figure."""
        ends = {"time_to_target_s": "simulated_s", "energy_to_target_j": "energy_j"}
        rows = [*self.runs[label], *self.runs[other]]
        (effect,) = paired_effects(collect(rows, figure), other, figure, ends=collect(rows, ends[figure]))
        return effect

    def mean(self, label: str, figure: str) -> float:
        """Return the mean of a figure over the seeds."""
        return float(np.mean([getattr(run, figure) for run in self.runs[label]]))

    @property
    def best(self) -> list[str]:
        """The labels by their ratio of times, the lowest first."""
        return sorted(self.verdicts, key=lambda label: self.verdicts[label].time.estimate)


def draw(effects: Effects, path: Path, methods: Collection[str], selectors: Sequence[str]) -> None:
    """Draw the ratios of seconds and joules into a PNG file."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 5.5), sharey=True, layout="constrained")
    for axis, name, title in zip(axes, ("time", "energy"), ("seconds", "joules"), strict=True):
        axis.axvline(1, color="#333333", linewidth=0.8)
        for place, method in enumerate(methods):
            for i, selector in enumerate(selectors):
                if (label := f"{selector}, {method}") == REFERENCE:
                    continue
                effect, y = getattr(effects.verdicts[label], name), place + 0.17 * (i - 1.5)
                axis.plot([effect.low, effect.high], [y, y], color=f"C{i}", linewidth=1.6)
                axis.plot(effect.estimate, y, "o", color=f"C{i}", markersize=4, label=selector if not place else None)
        axis.set_xscale("log")
        axis.set_xticks([0.2, 0.5, 1, 2])
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel(f"{title} to {100 * TARGET:g} %")
        axis.grid(axis="x", color="#eeeeee")
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(methods)), list(methods))
    axes[0].invert_yaxis()
    handles = [Line2D([], [], color=f"C{i}", marker="o", label=name) for i, name in enumerate(selectors)]
    axes[1].legend(handles=handles, fontsize=8, frameon=False)
    figure.suptitle("Ratio to random selection in synchronous rounds of 10, with 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def page(effects: Effects, codes: Mapping[str, Any]) -> str:
    """Return the page in Markdown; every number comes from the rows."""
    lines = [
        f"| {label.partition(', ')[0]} | {label.partition(', ')[2]} | {_cells(effects, label)} |"
        for selector, method in product(SELECTORS, METHODS)
        for label in [f"{selector}, {method}"]
    ]
    seeds, heads = len(effects.runs[REFERENCE]), (
        "selector", "rounds", "seconds", "ratio", "verdict", "own ratio", "joules", "MB", "accuracy, %", "staleness",
        "Jain's index", "failures",
    )  # fmt: skip
    return PAGE.format(
        seeds=seeds,
        first=SEEDS[0],
        last=SEEDS[seeds - 1],
        target=f"{100 * TARGET:g} %",
        horizon=f"{HORIZON_S:,.0f}",
        sentences=_sentences(effects),
        head=f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * (len(heads) - 2)}",
        rows="\n".join(lines),
        codes="\n".join(map(_code, codes["codes"])),
        exact="; ".join(one["name"] for one in codes["codes"] if not any(one["difference"])),
        runs=sum(map(len, effects.runs.values())),
    )


def _cells(effects: Effects, label: str) -> str:
    selector, _, method = label.partition(", ")
    seconds = float(np.exp(np.mean([np.log(run.time_to_target_s) for run in effects.runs[label]])))
    own, word, ratio = "1", "reference", "1"
    joules = sent = "1"
    if method != "synchronous, 10":
        own = interval(effects.against(label, f"{selector}, synchronous, 10"))
    if label != REFERENCE:
        found = effects.verdicts[label]
        word, ratio, joules = found.word, interval(found.time), interval(found.energy)
        moved = [effects.mean(one, "megabytes_down") + effects.mean(one, "megabytes_up") for one in (label, REFERENCE)]
        sent = f"{moved[0] / moved[1]:.2f}"
    figures = (
        f"{seconds:,.0f}", ratio, word, own, joules, sent, f"{100 * effects.mean(label, 'accuracy_last10'):.1f}",
        f"{effects.mean(label, 'staleness'):.2f}", f"{effects.mean(label, 'jain'):.2f}",
        f"{effects.mean(label, 'failed_clients'):.0f}",
    )  # fmt: skip
    return " | ".join(figures)


def _sentences(effects: Effects) -> str:
    first = effects.best[0]
    others = [one for one in effects.best[1:] if effects.against(first, one).high < 1]
    # The best of several rows is chosen after a look, so the comparison with the next ones is an orientation.
    even = next(one for one in effects.best if effects.mean(one, "jain") >= EVEN)
    told = [
        f"**`{first}` is the fastest**: {_ratios(effects, first)} of random selection in synchronous rounds. Its "
        f"interval against {len(others)} of the {len(effects.best) - 1} other rows ends below 1. It was chosen among "
        "all rows, and these intervals are not corrected for that.",
        f"**With even shares** (Jain's index of {EVEN} or more) it is `{even}`: {_ratios(effects, even)}.",
    ]
    for method in ("buffered, B = 5", "buffered, B = 10", "over-selection", "deadline"):
        own = {name: effects.against(f"{name}, {method}", f"{name}, synchronous, 10") for name in SELECTORS}
        cost = {
            name: effects.against(f"{name}, {method}", f"{name}, synchronous, 10", "energy_to_target_j")
            for name in SELECTORS
        }
        told.append(
            f"**{method[:1].upper()}{method[1:]}** takes {range_of(own)} times the seconds and {range_of(cost)} times "
            "the joules of the same selector in synchronous rounds of 10."
        )
    gains = {method: effects.against(f"bsfl, {method}", f"random, {method}") for method in METHODS if method in WAITING}
    told.append(
        "**BSFL shortens synchronous rounds, but not buffered ones**, which wait for nobody. "
        "Compared with random selection in the same "
        f"rounds, it takes {interval(gains['synchronous, 10'])} times the seconds in synchronous rounds, and "
        f"{interval(gains['buffered, B = 10'])} and {interval(gains['buffered, B = 5'])} times in buffered ones."
    )
    return "\n".join(f"- {one}" for one in told)


def _ratios(effects: Effects, label: str) -> str:
    found = effects.verdicts[label]
    return f"{interval(found.time)} times the seconds and {interval(found.energy)} times the joules"


def range_of(effects: Mapping[str, PairedEffect]) -> str:
    """Return the smallest and the largest estimate."""
    low, high = (pick(one.estimate for one in effects.values()) for pick in (min, max))
    return f"{low:.2f} to {high:.2f}"


def interval(effect: PairedEffect) -> str:
    """Return an estimate with its interval."""
    return f"{effect.estimate:.2f} ({effect.low:.2f} to {effect.high:.2f})"


def _code(one: Mapping[str, Any]) -> str:
    place = f"{one['repository']}, {one['file'].split(', ')[0]} at {one['commit'][:7]}, {one['licence']}"
    return f"| {one['name']} | {place} | {one['step']} | {one['difference'][0]:.2f} | {one['difference'][1]:.2f} |"


def parsed(row: Mapping[str, str], kind: type[Row] = Row) -> Row:
    """Return a stored row."""
    kinds = {f.name: str(f.type) for f in fields(kind)}
    own = {"str": str, "int": int, "float": lambda text: float(text or "nan")}
    return kind(**{name: own[kinds[name]](row[name]) for name in kinds})


if __name__ == "__main__":
    main()
