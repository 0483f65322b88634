"""Availability of clients by round: all always, each with a probability, or by a trace."""

from __future__ import annotations

import bisect
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsel_flwr.checks import BoolArray, real
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.image_files import find_file

UNITS = ("round", "second")
STATES = {"up": True, "down": False}


@dataclass(frozen=True)
class BernoulliAvailability:
    """Availability by probability: each client is available in each round with the same one, independently.

    Args:
        probability: In (0, 1].
        seed: Seed of the run; a client's draw depends on seed, client and round only.

    Raises:
        ParameterError: When called for a client whose id is no partition id, a whole number below 2**32.
    """

    probability: float
    seed: int

    def __call__(self, client_id: str, round: int, simulated_s: float) -> bool:
        """Return whether the client is available; its id must be its partition id."""
        partition_id = int(client_id) if re.fullmatch("[0-9]{1,10}", client_id) else -1
        if not 0 <= partition_id < 2**32:
            raise ParameterError(
                "availability by probability needs the partition id, a whole number below 2**32, but a client "
                f"reports client_id = {client_id!r}. Report the partition id, or use a trace."
            )
        return bool(stream(self.seed, "availability", partition_id, round).random() < self.probability)

    def at(self, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
        """Return whether each of the clients is available, shape (len(ids),), as single calls do."""
        return np.array([self(client_id, round, simulated_s) for client_id in ids], dtype=np.bool_)


class TraceAvailability:
    """Availability by a trace: a CSV file with the times at which clients appear and disappear.

    The file has a header and one row for each change, in any order: ``round,client,state`` or
    ``second,client,state``. ``round`` is a 1-based round, ``second`` a time on the simulated clock at which rounds
    begin, ``client`` a client id, ``state`` is ``up`` or ``down`` from then on. A client is up before its first row. A
    client that the file does not name is always up::

        round,client,state
        1,0,down
        10,0,up

    After its last row a client's state does not change. A trace can name every client at second 0 (or round 1), so that
    no state is left to these rules; that of the scenario ``phones-704`` does.

    Args:
        path: The file.
        seconds_per_round: Round t takes place at second (t - 1) x seconds_per_round of the trace, whatever the length
            of the rounds before it: rounds of seconds can thus cover a trace of days. None: on the simulated clock.

    Raises:
        ParameterError: The file cannot be read, or a row is wrong (the message names the line). Or
            ``seconds_per_round`` is not above 0, or is given for a file that counts in rounds.
    """

    def __init__(self, path: str | Path, *, seconds_per_round: float | None = None) -> None:
        if seconds_per_round is not None:
            real("seconds_per_round", seconds_per_round, above=0.0)
        self._seconds_per_round = seconds_per_round
        # utf-8-sig: spreadsheets begin a CSV file with a byte order mark, which would become part of the first header.
        try:
            with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ParameterError(f"cannot read availability trace {str(path)!r}: {error}") from error
        header = [cell.strip() for cell in rows[0]] if rows else []
        if len(header) != 3 or header[0] not in UNITS or header[1:] != ["client", "state"]:
            raise ParameterError(
                f"availability trace {str(path)!r}: the first line must be 'round,client,state' or "
                f"'second,client,state', got {','.join(header)!r}"
            )
        self.unit = header[0]
        if self.unit == "round" and seconds_per_round is not None:
            raise ParameterError(
                f"availability trace {str(path)!r} counts in rounds. Leave out seconds_per_round, or give a trace "
                "whose first line is 'second,client,state'."
            )
        changes: dict[str, list[tuple[float, bool]]] = {}
        for number, row in enumerate(rows[1:], start=2):
            if row:
                when, client, state = self._read_change(path, number, row)
                changes.setdefault(client, []).append((when, state))
        # Sorted by time only, and stably: of two rows with the same time the later line of the file counts.
        self._changes = {client: sorted(rows, key=lambda change: change[0]) for client, rows in changes.items()}

    def __call__(self, client_id: str, round: int, simulated_s: float) -> bool:
        """Return whether the client is available."""
        changes = self._changes.get(client_id, [])
        now = self._now(round, simulated_s)
        last = bisect.bisect_right(changes, now, key=lambda change: change[0]) - 1
        return True if last < 0 else changes[last][1]

    def at(self, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
        """Return whether each of the clients is available, shape (len(ids),)."""
        # Clients that the file does not name are always up: no call for each of a hundred thousand.
        named = self._changes
        there = (client_id not in named or self(client_id, round, simulated_s) for client_id in ids)
        return np.fromiter(there, dtype=np.bool_, count=len(ids))

    def _now(self, round: int, simulated_s: float) -> float:
        """Return the time of a round in the trace's unit."""
        if self.unit == "round":
            return round
        return simulated_s if self._seconds_per_round is None else (round - 1) * self._seconds_per_round

    @staticmethod
    def _read_change(path: str | Path, number: int, row: list[str]) -> tuple[float, str, bool]:
        """Return time, client id and state of a row."""
        cells = [cell.strip() for cell in row]
        try:
            when = float(cells[0])
            if len(cells) == 3 and cells[1] and cells[2] in STATES and 0 <= when < float("inf"):
                return when, cells[1], STATES[cells[2]]
        except ValueError:
            pass
        raise ParameterError(
            f"availability trace {str(path)!r}, line {number}: expected a number of at least 0, a client id and "
            f"'up' or 'down', got {','.join(row)!r}"
        )


def find_trace(trace: str, data_dir: str | None) -> Path:
    """Find a trace: an absolute path, one relative to the working directory, or one in the data folder.

    Args:
        trace: The path.
        data_dir: The data folder; None: that of FEDSEL_DATA.

    Returns:
        The path of the file.

    Raises:
        ParameterError: There is no such file in either place, or the named data folder does not exist.
    """
    if not trace:
        raise ParameterError(
            "availability.kind = 'trace' needs availability.trace, the path of a CSV file 'second,client,state' or "
            "'round,client,state'"
        )
    return find_file(trace, key="availability.trace", data_dir=data_dir)
