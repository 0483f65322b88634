"""CSV files: the one reader of the package. Histories of latencies, traces, devices and rows of finished runs use it.

A file has commas between cells, decimal points in numbers, and unique names of columns in its first line. Every other
line has as many cells. Everything else is an error that names the file, the line and the cell. A decimal comma or a
thousands separator would otherwise shift the columns, or turn 1,053.99 into 1.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.storage import read_file
from fedsel_flwr.rounds.untrusted import shown

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
PLAIN_NUMBERS = "Write numbers with a decimal point and without thousands separators, such as 1053.99."


@dataclass(frozen=True)
class Line:
    """A line of a CSV file.

    Attributes:
        file: The file, for messages.
        number: Number of the line, from 1.
        cells: Column -> cell, without spaces around it.
    """

    file: str
    number: int
    cells: dict[str, str]

    def real(
        self, column: str, *, above: float = -math.inf, at_least: float = -math.inf, most: float = 1e300, cure: str = ""
    ) -> float:
        """Return the number in a cell.

        Args:
            column: The column.
            above: The number must be above this limit.
            at_least: The number must be at least this limit.
            most: The number must be at most this limit.
            cure: Further cure, for the message.

        Raises:
            ParameterError: The cell holds something else, such as a number with a decimal comma.
        """
        cell = self.cells[column]
        value = float(cell) if NUMBER.fullmatch(cell) else math.nan
        if above < value <= most and value >= at_least:
            return value
        limits = [f" above {above:g}"] * (above > -math.inf) + [f" of at least {at_least:g}"] * (at_least > -math.inf)
        limits += [f" of at most {most:g}"] * (value > most)
        cures = "Correct the cell." if math.isfinite(value) else PLAIN_NUMBERS
        raise self.error(column, f"a number{' and'.join(limits)}", f"{cures} {cure}".strip())

    def error(self, column: str, expected: str, cure: str) -> ParameterError:
        """Return the error of a cell that holds something else than it should."""
        return ParameterError(
            f"{self.file}, line {self.number}, column {column!r}: expected {expected}, got "
            f"{shown(self.cells[column])}. {cure}"
        )


@dataclass(frozen=True)
class CsvFile:
    """A CSV file whose first line has been read.

    Attributes:
        columns: Names of the columns; empty if the file is empty.
        lines: The other lines, which are read and checked one by one. Empty lines are left out.
    """

    columns: tuple[str, ...]
    lines: Iterator[Line]

    @property
    def heading(self) -> str:
        """The first line, for messages."""
        return shown(",".join(self.columns)) if self.columns else "an empty file"


def read_csv(path: str | Path, name: str = "") -> CsvFile:
    """Read a CSV file in UTF-8.

    Args:
        path: The file. A byte order mark, as spreadsheets write it, is left out.
        name: The file's name in messages; empty for its path.

    Raises:
        ParameterError: The file cannot be read, its first line does not name every column once, or its cells are not
            separated by commas. Reading :attr:`CsvFile.lines` raises it for a line with surplus or missing cells.
    """
    name = name or str(path)
    try:
        text = read_file(Path(path).expanduser(), follow=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"cannot read {name}: {error}. Give a CSV file in UTF-8.") from error
    return parse_csv(text, name)


def parse_csv(text: str, name: str) -> CsvFile:
    r"""Read the text of a CSV file.

    >>> file = parse_csv("client,seconds\na, 2.5\n", "history.csv")
    >>> file.columns, [line.real("seconds") for line in file.lines]
    (('client', 'seconds'), [2.5])
    >>> list(parse_csv("client,seconds\na,2,5\n", "history.csv").lines)
    Traceback (most recent call last):
    ...
    fedsel_flwr.errors.ParameterError: history.csv, line 2: expected 2 cells, got 3, with the surplus cell '5'. Write...
    """
    rows = _rows(text, name)
    _, header = next(rows, (1, []))
    if len(header) == 1 and (other := re.search("[;\t|]", header[0])):
        raise ParameterError(
            f"{name}, line 1: the cells are separated by {other[0]!r}, not by commas, in {shown(header[0])}. Save the "
            f"file with commas between cells. {PLAIN_NUMBERS}"
        )
    if doubled := [column for place, column in enumerate(header) if column in header[:place]]:
        raise ParameterError(f"{name}, line 1: two columns are called {shown(doubled[0])}. Remove or rename one.")
    return CsvFile(tuple(header), _lines(rows, header, name))


def _lines(rows: Iterator[tuple[int, list[str]]], header: Sequence[str], name: str) -> Iterator[Line]:
    """Yield the lines after the first one."""
    for number, cells in rows:
        if (found := len(cells)) != (wanted := len(header)):
            cell = f"with the surplus cell {shown(cells[wanted])}" if found > wanted else ""
            raise ParameterError(
                f"{name}, line {number}: expected {wanted} cells, got {found}, "
                f"{cell or f'without a cell for {shown(header[found])}'}. {PLAIN_NUMBERS} Put texts with commas into "
                "quotes."
            )
        yield Line(name, number, dict(zip(header, cells, strict=True)))


def _rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line that is not empty, and its cells without spaces around them."""
    # Strict, because otherwise an open quote would take in the rest of the file.
    reader, number = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True), 1
    try:
        for row in reader:
            if row:
                yield number, [cell.strip() for cell in row]
            # A quoted cell may contain line breaks.
            number = reader.line_num + 1
    except csv.Error as error:
        raise ParameterError(f"cannot read {name}, line {number}: {error}. Correct the line.") from error
