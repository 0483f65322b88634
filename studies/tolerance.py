"""Rounds that end at a deadline: fixed or automatic, late updates dropped or used; phones, two selectors.

    python studies/tolerance.py --workers 2    # the missing runs, then page and picture: about .4 core-hours
    python studies/tolerance.py --page-only    # page and picture from the stored rows

Runs, figures and verdicts are those of ``no_waiting.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, ClassVar

import no_waiting
import numpy as np
from no_waiting import HORIZON_S, RESULTS, SEEDS, TARGET, Effects, Row, draw, interval, range_of, study

from fedsel_flwr.rounds.history import History

SELECTORS = ("random", "bsfl")
FIXED, AUTO = {"aggregation.round_deadline_s": 20.0}, {"aggregation.round_deadline_s": "auto"}
METHODS: dict[str, dict[str, Any]] = {
    "synchronous, 10": {},
    "20 s, dropped": FIXED,
    "20 s, damped": FIXED | {"aggregation.late": "damped"},
    "20 s, used": FIXED | {"aggregation.late": "use"},
    "automatic, dropped": AUTO,
    "automatic, damped": AUTO | {"aggregation.late": "damped"},
    "automatic, used": AUTO | {"aggregation.late": "use"},
}
REFERENCE = "random, synchronous, 10"
PAGE = """# Deadlines, and updates that miss them

What does a round deadline save, and is it better to drop late updates or to use them?

![Seconds and joules to {target}](tolerance.png)

{sentences}

Written by `python studies/tolerance.py`; every number comes from [tolerance.csv](tolerance.csv).

## All rows

{head}
{rows}

- **Rounds** ask 10 of 200 phones. *Synchronous* waits for all of them, for at most 60 s. *20 s* has `round_deadline_s =
  20`, *automatic* has "auto" ([how](../your-flower-project.md#tolerate-a-slow-or-lost-site)).
- **Late updates** are dropped, damped by (1 + τ)^(-1/2), or used with the weights of REFL. Until its update arrives, a
  client is not asked again. With *dropped* it may be asked at once, which flatters these rows: a real client would
  still be training.
- *Wasted* is the share of the joules whose update never counted. *Late* is the number of late updates that counted in
  a run, *deadline* the mean over the rounds that had one.
- Setting, equal time, ratios, verdicts and the other columns are those of [Rounds that do not wait](no-waiting.md),
  with Holm's correction over the rows of this page. Seeds {first} to {last}; nothing was chosen on them.
- {runs} runs of {horizon} simulated seconds, on two cores of an x86-64 server that other programs shared, Python 3.11.
"""


@dataclass(frozen=True, kw_only=True)
class LateRow(Row):
    """Figures of one run until the horizon.

    Attributes:
        wasted: Share of the joules whose update never counted.
        late: Number of late updates that counted.
        deadline_s: Mean deadline of the rounds that had one, seconds; NaN if none had.
    """

    wasted: float
    late: int
    deadline_s: float


COLUMNS = (
    "method", "selector", "seed", *(f.name for f in fields(LateRow) if f.name not in ("method", "selector", "seed")),
)  # fmt: skip


class Cell(no_waiting.Cell):
    """One run: a method, a selector and a seed."""

    methods: ClassVar[Mapping[str, Mapping[str, Any]]] = METHODS

    def further(self, history: History) -> dict[str, Any]:
        """Return what late updates cost and gave."""
        unused = float(np.nansum([one.energy_j for one in history.clients if not one.kept]))
        total = float(np.nansum([one.energy_j for one in history.clients]))
        deadlines = [one.deadline_s for one in history.rounds if one.deadline_s == one.deadline_s]
        return {
            "wasted": (unused - sum(one.late_j for one in history.rounds)) / total,
            "late": sum(one.num_late for one in history.rounds),
            "deadline_s": float(np.mean(deadlines)) if deadlines else float("nan"),
        }

    def row(self, **figures: Any) -> LateRow:
        """Return a row."""
        return LateRow(**figures)


def main() -> None:
    """Simulate what is missing, then write page and picture."""
    cells = [Cell(*one) for one in product(METHODS, SELECTORS, SEEDS)]
    effects = study("tolerance.csv", COLUMNS, cells, LateRow, __doc__)
    draw(effects, RESULTS / "tolerance.png", METHODS, SELECTORS)
    (RESULTS / "tolerance.md").write_text(page(effects), encoding="utf-8")


def page(effects: Effects) -> str:
    """Return the page in Markdown; every number comes from the rows."""
    heads = (
        "selector", "rounds", "seconds", "ratio", "verdict", "own ratio", "joules", "wasted, %", "accuracy, %", "late",
        "deadline, s", "failures",
    )  # fmt: skip
    seeds = len(effects.runs[REFERENCE])
    return PAGE.format(
        first=SEEDS[0],
        last=SEEDS[seeds - 1],
        target=f"{100 * TARGET:g} %",
        horizon=f"{HORIZON_S:,.0f}",
        sentences=_sentences(effects),
        head=f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * (len(heads) - 2)}",
        rows="\n".join(_line(effects, f"{one}, {method}") for one, method in product(SELECTORS, METHODS)),
        runs=sum(map(len, effects.runs.values())),
    )


def _line(effects: Effects, label: str) -> str:
    selector, _, method = label.partition(", ")
    seconds = float(np.exp(np.mean([np.log(run.time_to_target_s) for run in effects.runs[label]])))
    own, word, ratio, joules = "1", "reference", "1", "1"
    if method != "synchronous, 10":
        own = interval(effects.against(label, f"{selector}, synchronous, 10"))
    if label != REFERENCE:
        found = effects.verdicts[label]
        word, ratio, joules = found.word, interval(found.time), interval(found.energy)
    deadline = effects.mean(label, "deadline_s")
    cells = (
        selector, method, f"{seconds:,.0f}", ratio, word, own, joules, f"{100 * effects.mean(label, 'wasted'):.1f}",
        f"{100 * effects.mean(label, 'accuracy_last10'):.1f}", f"{effects.mean(label, 'late'):.0f}",
        f"{deadline:.0f}" if deadline == deadline else "", f"{effects.mean(label, 'failed_clients'):.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _sentences(effects: Effects) -> str:
    told = []
    for method in [one for one in METHODS if one != "synchronous, 10"]:
        against = {name: (f"{name}, {method}", f"{name}, synchronous, 10") for name in SELECTORS}
        seconds = {name: effects.against(*pair) for name, pair in against.items()}
        joules = {name: effects.against(*pair, "energy_to_target_j") for name, pair in against.items()}
        told.append(
            f"**{method[:1].upper()}{method[1:]}** takes {range_of(seconds)} times the seconds and {range_of(joules)} "
            "times the joules of the same selector in synchronous rounds."
        )
    for kind in ("20 s", "automatic"):
        used = {name: effects.against(f"{name}, {kind}, used", f"{name}, {kind}, dropped") for name in SELECTORS}
        told.append(
            f"**Used instead of dropped** ({kind}): "
            + ", ".join(f"{interval(effect)} times the seconds with `{name}`" for name, effect in used.items())
            + "."
        )
    return "\n".join(f"- {one}" for one in told)


if __name__ == "__main__":
    main()
