"""Facts of the selectors' gallery, from their only homes: classes, the table of columns, benchmarks, cards, results."""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scenario_keys import Key, of_parameter

from fedsel_flwr.selectors import Selector, create, names
from fedsel_flwr.selectors.columns import COLUMNS, ON_VALIDATION, PER_UPDATE, Column
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.scenario_files import own_parameters

ROOT = Path(__file__).resolve().parents[2]
COSTS = ROOT / "benchmarks" / "selection.csv"
COSTS_PAGE = ROOT / "benchmarks" / "selection.md"
CARDS = ROOT / "docs" / "papers"
RESULTS = ROOT / "docs" / "results" / "selectors.md"
OF = re.compile(r"^<!-- card of ([\w, -]+) -->$", re.MULTILINE)
MARKER = "<!-- equations of "
MARKED = re.compile(rf"^{MARKER}([\w, -]+) -->\n\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
"""An equation of a card that pages of the gallery show, with the selectors of these pages."""
COHORT = "100"
"""Clients a round in the table of costs: the largest cohort that was measured with every number of clients."""


def ours() -> list[str]:
    """Names of this package's selectors; installed packages may add others, which have no page."""
    return [name for name in names() if selector_class(name).__module__.startswith("fedsel_flwr.")]


def options(name: str) -> list[Key]:
    """The keys of a selector in a scenario, as the scenario reference shows them."""
    parameters = inspect.signature(selector_class(name)).parameters
    return [of_parameter(name, parameters[own]) for own in own_parameters(selector_class(name))]


# ---- what it reads, and what leaves the client -----------------------------------------------------------------------
@dataclass(frozen=True)
class Reads:
    """Columns that a selector reads, as its class declares them.

    Attributes:
        needs: Columns of the reports.
        asks: Columns of the probes.
        remembers: Columns of earlier messages.
        requires: Columns without which a client counts as failed.
    """

    needs: frozenset[str]
    asks: frozenset[str]
    remembers: frozenset[str]
    requires: frozenset[str]

    @classmethod
    def of(cls, selector: type[Selector] | Selector) -> Reads:
        """What a class reads, or an instance whose options change what it reads."""
        return cls(
            frozenset(selector.needs), frozenset(selector.asks), frozenset(selector.remembers),
            frozenset(selector.requires),
        )  # fmt: skip

    @property
    def columns(self) -> list[Column]:
        """The columns, in the order of the table."""
        return [row for name, row in COLUMNS.items() if name in self.needs | self.asks | self.remembers]

    @property
    def of_updates(self) -> list[str]:
        """Columns that the server computes from each client's update: strategies refuse them if updates are hidden."""
        return [row.name for row in self.columns if row.name in self.needs & PER_UPDATE]

    @property
    def sent(self) -> list[str]:
        """Columns that clients send."""
        return [row.name for row in self.columns if row.source == "reply"]

    @property
    def vectors_sent(self) -> list[str]:
        """Vectors that clients send, apart from the update."""
        return [name for name in self.sent if COLUMNS[name].shape == "vector"]

    @property
    def validated(self) -> bool:
        """Whether the server needs a validation set."""
        return bool(self.needs & ON_VALIDATION)

    def measured_by(self, column: Column) -> str:
        """Who measures a column."""
        if column.shape == "scalar":
            return "the server, on the new global model"
        return {
            "clock": "the server's clock",
            "reply": "the client",
            "server": "the server, on the client's update",
            "filter": "the server's filter, on the client's update",
        }[column.source]

    def leaves(self, column: Column) -> str:
        """What leaves the client because of a column."""
        if column.source == "clock":
            return "nothing"
        if column.source != "reply":
            return "nothing" if column.shape == "scalar" else "the update, which the server must be able to read alone"
        what = "a vector" if column.shape == "vector" else "one number"
        when = []
        if column.name in self.asks:
            when.append("in reply to a probe")
        elif column.name in self.remembers:
            when.append("when the client connects")
        if column.name in self.needs:
            when.append("with each update")
        return f"{what}, {' and '.join(when)}"


def option_reads(name: str) -> dict[str, Reads]:
    """What a selector reads with an option that changes it: option -> columns."""
    cls = selector_class(name)
    if "accuracy_weight" not in inspect.signature(cls).parameters:
        return {}
    with_option = Reads.of(create(name, clients_per_round=1, accuracy_weight=0.5))
    return {"accuracy_weight": with_option} if with_option != Reads.of(cls) else {}


def secure_aggregation(reads: Reads) -> tuple[str, str]:
    """Whether a selector works under secure aggregation: one word for the table, and the reason.

    The refusal is that of the strategies: both follow ``PER_UPDATE`` of the table of columns.
    """
    if reads.of_updates:
        return "no", (
            f"The server computes {_listed(reads.of_updates)} from each client's update. Under secure aggregation, the "
            "server sees only the sum of the updates, so the strategy stops with an error."
        )
    clear = (
        f" The clients send {_listed(reads.sent)} in the clear, outside the encryption of the updates."
        if reads.sent else ""
    )  # fmt: skip
    timed = (
        " The server cannot time clients under secure aggregation, so the clients must report their latency."
        if "latency" in reads.needs else ""
    )  # fmt: skip
    if reads.vectors_sent:
        return (
            "not advised",
            f"The selector needs no client's update, so it runs.{clear}{timed} See `When not to use it`_.",
        )
    return "yes", f"The selector needs no client's update.{clear}{timed}"


def differential_privacy(reads: Reads) -> tuple[str, str]:
    """What the guarantee of Flower's wrappers for differential privacy covers: a word for the table, and the reason.

    The warning is that of the strategies: both follow ``PER_UPDATE`` of the table of columns.
    """
    without_noise = f" The clients send {_listed(reads.sent)} without noise." if reads.sent else ""
    if reads.of_updates:
        return "not covered", (
            f"The server computes {_listed(reads.of_updates)} before noise is added. The guarantee does not cover the "
            f"choices, and the strategy logs a warning.{without_noise}"
        )
    if reads.sent:
        return "model only", (f"The guarantee covers the model alone.{without_noise}")
    return "yes", "The selector reads nothing that the clients send, so the guarantee is that of the wrapper."


def _listed(columns: Sequence[str]) -> str:
    quoted = [f"``{name}``" for name in columns]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


# ---- benchmarks, cards and results -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cost:
    """What a choice costs.

    Attributes:
        measured: The selector that was measured: the selector itself, or one that shares its code.
        seconds: Number of clients -> seconds of a choice.
        state_bytes: Bytes that the server stores per client, with the largest number of clients.
    """

    measured: str
    seconds: dict[int, float]
    state_bytes: float


def cost(name: str) -> Cost | None:
    """What a choice costs on the server; None if neither the selector nor one that shares its code was measured."""
    with COSTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["cohort"], row["fleet"]) == (COHORT, "seen")]
    measured = {row["selector"] for row in rows}
    if (stand_in := name if name in measured else _relative(name, measured)) is None:
        return None
    own = sorted((row for row in rows if row["selector"] == stand_in), key=lambda row: int(row["clients"]))
    return Cost(stand_in, {int(row["clients"]): float(row["selector_s"]) for row in own}, float(own[-1]["state_bytes"]))


def _relative(name: str, measured: set[str]) -> str | None:
    """The measured selector that shares this selector's nearest base class."""
    base = selector_class(name).__mro__[1]
    if base is Selector:
        return None
    near = [one for one in ours() if one in measured and issubclass(selector_class(one), base)]
    return near[0] if near else None


def newer_costs(name: str) -> list[list[str]]:
    """Later measurements of a selector that became faster: work, clients, m, seconds; empty for most selectors."""
    found = []
    for cells in _markdown_rows(COSTS_PAGE.read_text("utf-8")):
        if cells[0].startswith(f"`{name}`: "):
            work, clients, cohort, _, after, *_ = cells
            found.append([work.removeprefix(f"`{name}`: "), clients, cohort, after])
    return found


def card(name: str) -> str:
    """Name of the paper's card that explains a selector; empty if there is none."""
    return next((card for card, names in cards().items() if name in names), "")


def cards() -> dict[str, list[str]]:
    """The cards of ``docs/papers``, each with the selectors that its line ``<!-- card of NAME, NAME -->`` lists."""
    found = {}
    for file in sorted(CARDS.glob("*.md")):
        if match := OF.search(file.read_text("utf-8")):
            found[file.stem] = match[1].split(", ")
    return found


def equations() -> tuple[dict[str, list[str]], list[str]]:
    """The equations that the cards mark, in LaTeX, by selector.

    Returns:
        Selector -> its equations; and the faults of marks that name an unknown selector, or that no equation follows.
    """
    found: dict[str, list[str]] = {name: [] for name in names()}
    faults = []
    for file in sorted(CARDS.glob("*.md")):
        text = file.read_text("utf-8")
        marked = MARKED.findall(text)
        if len(marked) != text.count(MARKER):
            faults.append(f"{file.name} has a line {MARKER!r}... without an equation. Write a $$ block below it")
        for selectors, tex in marked:
            for name in selectors.split(", "):
                if name in found:
                    found[name].append(tex)
                else:
                    faults.append(f"{file.name} has equations of {name!r}, which is no selector. Write its name")
    return found, faults


def results(name: str) -> tuple[str, list[tuple[str, str]]]:
    """The world and the row of a selector in the first table of ``docs/results/selectors.md`` that has it.

    Returns:
        The heading of the world, and pairs of column and cell; both empty if no table has the selector.
    """
    for part in re.split(r"^## ", RESULTS.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        rows = list(_markdown_rows(part))
        head = next((cells for cells in rows if cells[0] == "selector" and "verdict" in cells), None)
        if head is None:
            continue
        for cells in rows[rows.index(head) :]:
            if cells[0] == f"`{name}`" and len(cells) == len(head):
                return part.splitlines()[0], list(zip(head, cells, strict=True))
    return "", []


def _markdown_rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
