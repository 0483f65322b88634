"""Rows of finished runs in a CSV file, so that a repeated command simulates only what is missing.

Each row has a fingerprint of everything that its run depends on. A command computes the fingerprint of every run that
it needs, and simulates a run only if no row has this fingerprint. The CSV file is part of the repository. A command in
a fresh clone therefore continues with the missing runs.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedsel_flwr.rounds.csv_files import parse_csv
from fedsel_flwr.rounds.storage import MOST_BYTES, open_file

FINGERPRINT = "fingerprint"
"""Name of the column that identifies what a row was computed from."""
DIGITS = 7
"""Significant digits of the numbers in the file."""


def fingerprint(**parts: object) -> str:
    """Return a short digest of everything that a run depends on.

    Args:
        **parts: Values that JSON can hold. The order of the keys does not matter.

    >>> fingerprint(seed=1, selector="random")
    'bac931638a5e'
    """
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Rows:
    """The rows of a CSV file. Several processes may add rows at the same time.

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
            with self._locked() as file:
                self._load(file)
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
        by_fingerprint: dict[str, dict[str, str]] = {}
        for row in self._rows:
            by_fingerprint.setdefault(row[FINGERPRINT], row)
        return [by_fingerprint[one] for one in fingerprints if one in by_fingerprint]

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row to the file at once.

        Args:
            row: Column -> value. Floats are written with seven significant digits.

        Raises:
            ValueError: The row has too few or too many columns, or a value contains a line break.
        """
        if set(row) != set(self.columns):
            differing = ", ".join(sorted(set(row) ^ set(self.columns)))
            raise ValueError(f"a row must have the columns of the file; these differ: {differing}. Give every column.")
        text = {name: _text(row[name]) for name in self.columns}
        if any("\n" in value or "\r" in value for value in text.values()):
            raise ValueError("a value contains a line break, but a row must be one line. Remove the line break.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as file:
            whole = file.seek(0, io.SEEK_END)
            if not whole:
                file.write(_line(self.columns))
            file.write(_line(text.values()))
        self._rows.append(text)
        self._fingerprints.add(text[FINGERPRINT])

    def sort(self) -> None:
        """Sort the file by the key. If several rows have the same key, only the last one stays."""
        with self._locked() as file:
            self._load(file)
            latest = {tuple(row[name] for name in self.key): row for row in self._rows}
            self._rows = sorted(latest.values(), key=lambda row: [_order(row[name]) for name in self.key])
            self._fingerprints = {row[FINGERPRINT] for row in self._rows}
            self._replace(file)

    def _load(self, file: BinaryIO) -> None:
        """Read the rows, and remove an incomplete last line."""
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
        read = parse_csv(content[:whole].decode("utf-8"), str(self.path))
        present = read.columns
        if unknown := set(present) - set(self.columns):
            raise ValueError(
                f"{self.path} has the unknown columns {', '.join(sorted(unknown))}. Delete the file, or add them."
            )
        self._rows = [{name: line.cells.get(name, "") for name in self.columns} for line in read.lines]
        if present and present != self.columns:
            self._replace(file)

    def _replace(self, file: BinaryIO) -> None:
        """Write all rows again."""
        lines = [_line(self.columns), *(_line(row.values()) for row in self._rows)]
        file.seek(0)
        file.truncate()
        file.write(b"".join(lines))

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open the file, and let no other process write to it."""
        with open_file(self.path, MOST_BYTES, append=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()


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


def _line(values: Iterable[str]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue().encode()
