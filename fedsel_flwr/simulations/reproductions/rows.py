"""Rows of finished runs in a CSV file, so that a repeated command simulates only what is missing.

Each row has a fingerprint of everything that its run depends on. A command computes the fingerprint of every run that
it needs, and simulates a run only if no row has this fingerprint. The CSV file is part of the repository. A command in
a fresh clone therefore continues with the missing runs. Figures that need the same run share its row.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import refusing_faults
from fedsel_flwr.rounds.csv_files import parse_csv
from fedsel_flwr.rounds.fingerprints import fingerprint
from fedsel_flwr.rounds.storage import open_file, read_file, write_atomically
from fedsel_flwr.simulations.reproductions.paper_figure import REGRET, ROUNDS_TO, PaperFigure, Runner
from fedsel_flwr.simulations.scenario import Scenario

FINGERPRINT = "fingerprint"
"""Name of the column that identifies what a row was computed from."""
DIGITS, OUTCOME_DIGITS = 7, 5
"""Significant digits of the numbers in the file, and of outcomes and curves."""
REVISIONS: Mapping[Runner, int] = {"choices": 1, "training": 1, "solvers": 1}
"""Runner -> revision. Raise it when a change of the code changes its results."""
KEY = ("run", "selector", "seed", FINGERPRINT)
"""Columns that order the file. The fingerprint is one of them, because two figures may define another regret."""
COLUMNS = (FINGERPRINT, "run", "selector", "seed", "cpu_s", "outcomes", "curves")
"""Columns of a file. ``outcomes`` and ``curves`` are JSON."""


class Rows:
    """The rows of a CSV file, to which one process adds rows.

    A row is added as one whole line. If a process was killed while it wrote a line, the incomplete line is removed.

    Args:
        path: The CSV file. Its folder is created, and the file is created with the first row.
        columns: Names of the columns, including "fingerprint". If the file has fewer columns, the new ones are added to
            it, with empty values in the old rows.
        key: Columns that name a run, such as world, selector and seed. The file is sorted by them, numbers as numbers.

    Raises:
        ValueError: The file has a column that is not in ``columns``, or a required column is missing.
    """

    def __init__(self, path: str | Path, columns: Sequence[str], key: Sequence[str]) -> None:
        self.path, self.columns, self.key = Path(path), tuple(columns), tuple(key)
        if lacking := {FINGERPRINT, *key} - set(columns):
            raise ValueError(f"columns must include {', '.join(sorted(lacking))}. Add them to columns.")
        self._rows: list[dict[str, str]] = []
        if self.path.exists():
            self._load(read_file(self.path))
        self._fingerprints = {row[FINGERPRINT] for row in self._rows}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self._rows)

    def done(self, fingerprint: str) -> bool:
        """Return whether there is a row with this fingerprint."""
        return fingerprint in self._fingerprints

    def select(self, fingerprints: Iterable[str]) -> list[dict[str, str]]:
        """Return one row for each of these fingerprints that has one, in the order of the fingerprints.

        If several rows have the same fingerprint, the first one counts.
        """
        first = {row[FINGERPRINT]: row for row in reversed(self._rows)}
        return [first[one] for one in fingerprints if one in first]

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row to the file at once.

        Args:
            row: Column -> value. Floats are written with seven significant digits.

        Raises:
            ValueError: The row has too few or too many columns, or a value contains a line break.
        """
        if differing := set(row) ^ set(self.columns):
            raise ValueError(
                f"a row must have the columns of the file; these differ: {', '.join(sorted(differing))}. Give every "
                "column."
            )
        text = {name: _text(row[name]) for name in self.columns}
        if any("\n" in value or "\r" in value for value in text.values()):
            raise ValueError("a value contains a line break, but a row must be one line. Remove the line break.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_file(self.path, append=True) as file:
            file.write(self._lines([text], header=not self._rows))
        self._rows.append(text)
        self._fingerprints.add(text[FINGERPRINT])

    def sort(self) -> None:
        """Sort the file by the key. If several rows have the same key, only the last one stays."""
        latest = {tuple(row[name] for name in self.key): row for row in self._rows}
        self._rows = sorted(latest.values(), key=lambda row: [_order(row[name]) for name in self.key])
        self._fingerprints = {row[FINGERPRINT] for row in self._rows}
        write_atomically(self.path, self._lines(self._rows, header=True))

    def _load(self, content: bytes) -> None:
        """Read the rows, and remove an incomplete last line."""
        whole = content.rfind(b"\n") + 1
        read = parse_csv(content[:whole].decode("utf-8"), str(self.path))
        if unknown := set(read.columns) - set(self.columns):
            raise ValueError(
                f"{self.path} has the unknown columns {', '.join(sorted(unknown))}. Delete the file, or add them."
            )
        self._rows = [{name: line.cells.get(name, "") for name in self.columns} for line in read.lines]
        if whole < len(content) or read.columns != self.columns or not self._rows:
            write_atomically(self.path, self._lines(self._rows, header=bool(self._rows)))

    def _lines(self, rows: Iterable[dict[str, str]], *, header: bool) -> bytes:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return buffer.getvalue().encode()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return " ".join(map(_text, value)) if isinstance(value, tuple | list) else str(value)


def _order(text: str) -> tuple[int, float, str]:
    """Return a sort key: numbers by size, before other texts."""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


@dataclass(frozen=True)
class Cell:
    """Run of a figure: an arm in a cell on a seed.

    Attributes:
        figure: The figure.
        cell: Name of the cell.
        arm: Name of the arm.
        scenario: Scenario of the run.
    """

    figure: PaperFigure
    cell: str
    arm: str
    scenario: Scenario

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the run depends on, without the data folder and values that equal the defaults."""
        own = self.scenario.model_dump(mode="json", exclude={"data": {"data_dir"}}, exclude_defaults=True)
        for key in ("description", "engine", "name"):
            own.pop(key, None)
        tables = self.scenario.selectors
        own["selectors"] = {name: table for name, table in tables.items() if name == self.scenario.selector}
        found: dict[str, Any] = {"scenario": own, "revision": REVISIONS[self.figure.runner]}
        if self.figure.runner == "choices":
            # Data and model have no effect on choices. Training sets the times of phones only.
            unused = ("data", "model", "target_accuracy", "target_rounds")
            for key in unused if self.scenario.system.kind == "phones" else (*unused, "training"):
                own.pop(key, None)
            found["regret"] = self.figure.regret_in(self.arm, self.cell).model_dump(mode="json", exclude_none=True)
        if self.figure.runner == "solvers":
            used = ("seed", "num_clients", "clients_per_round", "selectors")
            found["scenario"] = {key: own[key] for key in used if key in own}
            found["search"] = self.figure.search_in(self.arm, self.cell).model_dump(mode="json")
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Digest of :attr:`settings`."""
        return fingerprint(runner=self.figure.runner, **self.settings)

    @property
    def run(self) -> str:
        """Description of the run for readers of the file: scenario and changed keys, those of the regret included."""
        keys = dict(self.figure.set) | self.figure.cells[self.cell] | self.figure.arms[self.arm].set
        if self.figure.runner == "choices":
            regret = self.figure.regret_in(self.arm, self.cell).model_dump(exclude_defaults=True)
            keys |= {REGRET + key: value for key, value in regret.items()}
        return " ".join([self.figure.scenario, *(f"{key}={_short(value)}" for key, value in sorted(keys.items()))])

    def simulate(self) -> dict[str, Any]:
        """Simulate the run and return its row."""
        start = time.process_time()
        outcomes, curves = simulate_run(self)
        seconds, known = time.process_time() - start, {key: one for key, one in outcomes.items() if not math.isnan(one)}
        return {
            FINGERPRINT: self.fingerprint, "run": self.run, "selector": _selector_text(self.scenario),
            "seed": self.scenario.seed, "cpu_s": round(seconds, 2), "outcomes": _encode(known),
            "curves": _encode(curves),
        }  # fmt: skip


def simulate_run(cell: Cell) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Simulate a run; return its outcomes and curves."""
    figure = cell.figure
    if figure.runner == "choices":
        from fedsel_flwr.simulations.reproductions.choice_runs import run_choices

        return run_choices(cell.scenario, figure.regret_in(cell.arm, cell.cell))
    if figure.runner == "solvers":
        from fedsel_flwr.simulations.reproductions.solver_runs import run_solvers

        return run_solvers(cell.scenario, figure.search_in(cell.arm, cell.cell))
    from fedsel_flwr.simulations.reproductions.training_runs import run_training

    return run_training(cell.scenario)


def cells_of(figure: PaperFigure, seeds: int | None = None, data_dir: str = "") -> list[Cell]:
    """Return all runs of a figure, seed by seed."""
    # The scenario of an arm in a cell is read once, because seeds differ in nothing else.
    first = {(cell, arm): figure.scenario_of(arm, cell, 1, data_dir) for cell, arm, _ in figure.runs(1)}
    return [
        Cell(figure, cell, arm, first[cell, arm].model_copy(update={"seed": seed}))
        for cell, arm, seed in figure.runs(seeds)
    ]


def open_rows(folder: Path, figure: PaperFigure) -> Rows:
    """Open the file with the runs of a figure."""
    path = folder / f"{figure.paper}-{figure.runner}.csv"
    with refusing_faults(f"{str(path)!r} cannot be used. Delete it, or restore it from a copy"):
        return Rows(path, COLUMNS, KEY)


class Results:
    """Outcomes of the finished runs of a figure.

    Args:
        cells: The runs of the figure.
        rows: The file.

    Attributes:
        missing: The runs without a row.
        seconds: Fingerprint of each finished run -> its processor seconds.
    """

    def __init__(self, cells: Sequence[Cell], rows: Rows) -> None:
        by_fingerprint = {row[FINGERPRINT]: row for row in rows}
        self._found: dict[tuple[str, str], dict[int, tuple[dict[str, float], dict[str, list[float]]]]] = {}
        self.missing: list[Cell] = []
        self.seconds: dict[str, float] = {}
        for cell in cells:
            row = by_fingerprint.get(cell.fingerprint)
            if row is None:
                self.missing.append(cell)
                continue
            self.seconds[cell.fingerprint] = float(row["cpu_s"])
            own = self._found.setdefault((cell.arm, cell.cell), {})
            own[cell.scenario.seed] = json.loads(row["outcomes"]), json.loads(row["curves"])

    def values(self, outcome: str, arm: str, cell: str) -> dict[int, float]:
        """Return an outcome of an arm in a cell: seed -> value; NaN if the run has no such outcome."""
        if outcome.startswith(ROUNDS_TO):
            targets = self.values("accuracy_last10", outcome.removeprefix(ROUNDS_TO), cell)
            own = self._found.get((arm, cell), {})
            return {seed: _rounds_to(targets.get(seed, math.nan), one[1]) for seed, one in own.items()}
        return {seed: one[0].get(outcome, math.nan) for seed, one in self._found.get((arm, cell), {}).items()}

    def curves(self, name: str, arm: str, cell: str, over: str = "at") -> list[tuple[FloatArray, FloatArray]]:
        """Return a curve of an arm in a cell for each seed: x and y."""
        found = [one[1] for one in self._found.get((arm, cell), {}).values()]
        return [(np.array(one[over]), np.array(one[name])) for one in found if name in one and over in one]


def _rounds_to(target: float, curves: Mapping[str, Sequence[float]]) -> float:
    """Return the first round with this accuracy; infinity if there is none, NaN without a target.

    >>> _rounds_to(0.5, {"at": [1, 50, 100], "record_at": [1, 7, 30], "record": [0.1, 0.6, 0.7]})
    7
    """
    if math.isnan(target) or "record" not in curves:
        return math.nan
    reached = (at for at, value in zip(curves["record_at"], curves["record"], strict=True) if value >= target)
    return next(reached, math.inf)


def results_of(figure: PaperFigure, folder: Path, seeds: int | None = None) -> Results:
    """Return the outcomes of the finished runs of a figure."""
    return Results(cells_of(figure, seeds) if figure.has_runs else [], open_rows(folder, figure))


def _selector_text(scenario: Scenario) -> str:
    """Return the selector and its parameters, for readers of the file."""
    own = scenario.selectors.get(scenario.selector, {})
    return " ".join([scenario.selector, *(f"{key}={_short(value)}" for key, value in sorted(own.items()))])


def _short(value: Any) -> str:
    text = str(value).replace("\n", " ").replace(" ", "")
    return text if len(text) <= 40 else text[:37] + "..."


def _encode(values: Mapping[str, Any]) -> str:
    """Return numbers as JSON with a few digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return [rounded(float(one)) for one in value]
        value = float(f"{value:.{OUTCOME_DIGITS}g}")
        return int(value) if value.is_integer() and abs(value) < 1e15 else value

    return json.dumps({key: rounded(value) for key, value in values.items()}, separators=(",", ":"))
