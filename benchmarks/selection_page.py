"""The page of ``benchmarks/selection.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
SECTION = "## FedCor and DivFL: before and after"
"""The page's last section, which ``benchmarks/fedcor_divfl.py`` writes."""

HEAD = """# Selection at scale

Written by `python benchmarks/selection.py`. Every number is in [selection.csv](selection.csv), with the smallest and
the largest of its rounds. Machine: {machine}.

The tables have medians in milliseconds, for K clients of which m are selected in each round:

- **selector**: the methods of the selector (probe, select, observe, inform).
- **round**: the selector, and the server's work around it (`choose`, `collect` and `finish` of `fedsel_flwr.rounds`).
  Training, the mean of the models, and the clients' work are not included.
- **new**: no client was selected before. **seen**: every client was, as after thousands of rounds.

The models have 650 numbers, the validation set has two examples, and FedCM's filter costs nothing. GPFL's first round
is not measured. PCZFL has one ball with new clients and 500 with seen clients, and selects at most m clients.
[selection.csv](selection.csv) has other fleets and cohorts too.
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
    parts.append("\n## The first roll call\n\n")
    parts.append(
        "In the first round of a run, all clients register (ids, numbers of examples), and the first clients are "
        "selected:\n\n"
    )
    parts.append(table(("clients", "seconds"), [(f"{k:,}", f"{s:.2f}") for k, s in roll_calls.items()]))
    return "".join(parts)


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
