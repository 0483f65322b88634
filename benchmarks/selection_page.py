"""The page of ``benchmarks/selection.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
BANDITS = ("bsfl", "cs-ucb", "cs-ucb-q", "fedcm-ts", "fedcm-ucb", "gpfl")
LIMIT_S, LIMIT_BYTES, LIMIT_BALLS_S = 0.25, 100, 1.0
SECTION = "## FedCor and DivFL: before and after"
"""The page's last section, which ``benchmarks/fedcor_divfl.py`` writes."""

HEAD = """# Selection at scale

Written by `python benchmarks/selection.py`; every figure stands in [selection.csv](selection.csv), with the smallest
and the largest of its rounds. Machine: {machine}.

Medians in milliseconds. "selector" is probe, select, observe and inform; "round" is choose, collect and finish of
`fedsel_flwr.rounds` with the selector in it, without training, averaging and the clients' work. "new": nobody was seen
before; "seen": everybody was, as after thousands of rounds. Models of 650 numbers, a validation set of two examples
and a filter that costs nothing: what is measured on models does not grow with the fleet. GPFL's first round, which asks
everybody, is played beforehand. PCZFL has one ball where the fleet is new and 500 where it is seen, and chooses at most
m.
"""


def page(rows: Rows, roll_calls: Mapping[int, float], machine: str) -> str:
    """The page's text.

    Args:
        rows: The rows of the CSV file.
        roll_calls: Clients -> seconds of the first roll call.
        machine: Where it was measured.
    """
    fleets, cohorts = (sorted({row[key] for row in rows}) for key in ("clients", "cohort"))
    parts = [HEAD.format(machine=machine)]
    largest = fleets[-1]
    cohort = max(m for m in cohorts if m < largest)
    parts.append(f"\n## {largest:,} clients, {cohort:,} a round\n\n")
    parts.append(table(("selector", "bytes a client", "selector, new", "seen", "round, new", "seen"), [
        (name, _cell(rows, name, largest, cohort, "seen", "state_bytes", 1),
         *(_cell(rows, name, largest, cohort, f, key) for key in ("selector_s", "round_s") for f in ("new", "seen")))
        for name in _names(rows)
    ]))  # fmt: skip
    parts.append(f"\n## A round by fleet: {cohorts[-1]:,} a round (or the most that the fleet allows), seen\n\n")
    parts.append(table(("selector", *(f"K = {k:,}" for k in fleets)), [
        (name, *(_cell(rows, name, k, max(m for m in cohorts if m < k), "seen", "round_s") for k in fleets))
        for name in _names(rows)
    ]))  # fmt: skip
    parts.append(f"\n## A round by cohort: {largest:,} clients, seen\n\n")
    parts.append(table(("selector", *(f"m = {m:,}" for m in cohorts)), [
        (name, *(_cell(rows, name, largest, m, "seen", "round_s") for m in cohorts)) for name in _names(rows)
    ]))  # fmt: skip
    parts.append("\n## The first roll call\n\n")
    parts.append("Who everybody is, once in a run (roster, numbers of examples, a first choice):\n\n")
    parts.append(table(("clients", "seconds"), [(f"{k:,}", f"{s:.2f}") for k, s in roll_calls.items()]))
    parts.append("\n## Against the targets\n\n" + _verdict(rows, largest, cohort))
    return "".join(parts)


def _verdict(rows: Rows, largest: int, cohort: int) -> str:
    """What was aimed at, and what came."""
    bandits = [
        row for row in rows if row["selector"] in BANDITS and (row["clients"], row["cohort"]) == (largest, cohort)
    ]
    lines = []
    if bandits:
        worst = max(bandits, key=lambda row: float(row["round_s"]))
        whole, own = float(worst["round_s"]), float(worst["selector_s"])
        slowest = f"{worst['selector']} ({worst['fleet']}) at {whole:.3f} s, {own:.3f} s of them its own"
        lines.append(f"Every bandit within {LIMIT_S} s a round: the slowest is {slowest}.")
    fullest = max(rows, key=lambda row: float(row["state_bytes"]) if row["clients"] == largest else 0.0)
    lines.append(
        f"State within {LIMIT_BYTES} bytes a client: at most {fullest['state_bytes']} ({fullest['selector']})."
    )
    balls = [row for row in rows if (row["selector"], row["clients"], row["fleet"]) == ("pczfl", 100_000, "seen")]
    if balls:
        longest = max(float(row["selector_s"]) for row in balls)
        lines.append(f"PCZFL with 100,000 clients and 500 balls within {LIMIT_BALLS_S:g} s: {longest:.3f} s.")
    return "".join(f"- {line}\n" for line in lines)


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["selector"] for row in rows))


def _cell(rows: Rows, name: str, clients: int, cohort: int, fleet: str, key: str, scale: float = 1000.0) -> str:
    """A figure, in milliseconds unless told otherwise; empty where there is none."""
    wanted = (name, clients, cohort, fleet)
    found = [row[key] for row in rows if tuple(row[k] for k in ("selector", "clients", "cohort", "fleet")) == wanted]
    return f"{scale * float(found[0]):.1f}" if found else ""


def kept_section(path: Path) -> str:
    """The last section of a page that is about to be written again, with a line before it; empty if there is none."""
    _, head, rest = path.read_text(encoding="utf-8").partition(SECTION) if path.exists() else ("", "", "")
    return f"\n{head}{rest}" if head else ""


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rows = [head, ["---", *("---:" for _ in head[1:])], *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
