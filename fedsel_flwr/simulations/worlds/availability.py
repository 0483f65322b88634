"""Availability of clients in each round: all always, each with a probability, or by a trace."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, real
from fedsel_flwr.clients.streams import first_uniforms
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.csv_files import read_csv
from fedsel_flwr.rounds.roster import whole_numbers
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.image_files import find_file

UNITS = ("round", "second")
STATES = {"up": True, "down": False}


@dataclass(frozen=True)
class BernoulliAvailability:
    """Availability by probability: the same for all clients and rounds, with independent draws.

    Args:
        probability: Probability that a client is available, in (0, 1].
        seed: Seed of the run. A client's draw depends only on seed, client and round.

    Raises:
        ParameterError: Raised by calls, if a client's id is not a partition id, that is, a whole number below 2**32.
    """

    probability: float
    seed: int

    def __call__(self, client_id: str, round: int, simulated_s: float) -> bool:
        """Return whether a client is available; its id must be its partition id."""
        return bool(self.at([client_id], round, simulated_s)[0])

    def at(self, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
        """Return whether each client is available, shape (len(ids),)."""
        numbers = whole_numbers(ids, digits=10) if ids else np.empty(0, dtype=np.int64)
        if numbers is None or (numbers >= 2**32).any():
            wrong = next(one for one in ids if whole_numbers([one], digits=10) is None or int(one) >= 2**32)
            raise ParameterError(
                "availability by probability needs the partition id, a whole number below 2**32, but a client "
                f"reports client_id = {wrong!r}. Report the partition id, or use a trace."
            )
        return np.asarray(first_uniforms(self.seed, "availability", numbers, round) < self.probability)


class TraceAvailability:
    """Availability by a trace: a CSV file with the times at which clients appear and disappear.

    The file has a header and one row for each change, in any order: ``round,client,state`` or
    ``second,client,state``. Rounds count from 1. A second is a time on the simulated clock, and affects rounds that
    begin then or later. ``client`` is a client id, and ``state`` is ``up`` or ``down`` from that time. A client is up
    before its first row. A client that the file does not name is always up::

        round,client,state
        1,0,down
        10,0,up

    After its last row, a client's state does not change. To set every state explicitly, a trace can name every client
    at second 0 (or round 1), as in the scenario ``phones-704``.

    Args:
        path: Path of the file.
        seconds_per_round: Round t takes place at second (t - 1) x seconds_per_round of the trace. The simulated length
            of the rounds then does not matter, so short rounds can cover a trace of days. If None, the simulated clock
            is used.

    Raises:
        ParameterError: The file cannot be read, or a row is wrong (the message names the line). Also raised if
            ``seconds_per_round`` is not above 0, or is set for a file that counts in rounds.
    """

    def __init__(self, path: str | Path, *, seconds_per_round: float | None = None) -> None:
        if seconds_per_round is not None:
            real("seconds_per_round", seconds_per_round, above=0.0)
        self._seconds_per_round = seconds_per_round
        self._name = f"availability trace {str(path)!r}"
        file = read_csv(path, self._name)
        if file.columns not in [(unit, "client", "state") for unit in UNITS]:
            raise ParameterError(
                f"{self._name}: the first line must be 'round,client,state' or "
                f"'second,client,state', got {file.heading}. Name the three columns."
            )
        self.unit = file.columns[0]
        if self.unit == "round" and seconds_per_round is not None:
            raise ParameterError(
                f"{self._name} counts in rounds. Leave out seconds_per_round, or give a trace "
                "whose first line is 'second,client,state'."
            )
        changes: dict[str, list[tuple[float, bool]]] = {}
        for line in file.lines:
            if not (client := line.cells["client"]):
                raise line.error("client", "a client id", "Write the id that the client reports.")
            if line.cells["state"] not in STATES:
                raise line.error("state", "'up' or 'down'", "Correct the cell.")
            when, state = line.real(self.unit, at_least=0.0), STATES[line.cells["state"]]
            changes.setdefault(client, []).append((when, state))
        # A stable sort by time only: if two rows have the same time, the later line of the file counts.
        self._changes = {client: sorted(rows, key=lambda change: change[0]) for client, rows in changes.items()}

    def __call__(self, client_id: str, round: int, simulated_s: float) -> bool:
        """Return whether a client is available."""
        changes = self._changes.get(client_id, [])
        last = bisect.bisect_right(changes, self._now(round, simulated_s), key=lambda change: change[0]) - 1
        return True if last < 0 else changes[last][1]

    def at(self, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
        """Return whether each client is available, shape (len(ids),)."""
        # Clients that the file does not name are always up. Without calls for them, 100,000 clients stay fast.
        named = self._changes
        there = (client_id not in named or self(client_id, round, simulated_s) for client_id in ids)
        return np.fromiter(there, dtype=np.bool_, count=len(ids))

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the clients that the file names, which a run compares with its own (``rounds.eligibility``)."""
        return frozenset(self._changes)

    def check(self, num_clients: int, rounds: int, longest_round_s: float) -> None:
        """Refuse a trace that has no effect on a simulated run, or an effect on clients that do not exist.

        Args:
            num_clients: Number of clients of the run, with the ids 0 to ``num_clients`` - 1.
            rounds: Number of rounds of the run.
            longest_round_s: Upper limit of a round's simulated time, s.

        Raises:
            ParameterError: The trace names a client that the run does not have, or none of its clients. Or its first
                row comes after the end of the run.
        """
        unknown = self.ids.difference(map(str, range(num_clients)))
        if unknown or not self.ids:
            got = f"{len(unknown)} other ids, such as {shown(min(unknown))}" if unknown else "no row"
            raise ParameterError(
                f"{self._name} must name the clients of the run, 0 to {num_clients - 1}, got {got}. Number the clients "
                "from 0 as whole numbers, or change num_clients."
            )
        first = min(changes[0][0] for changes in self._changes.values())
        last = self._now(rounds, rounds * longest_round_s)
        if first > last:
            raise ParameterError(
                f"{self._name} must cover the run, which ends at {self.unit} {last:g} or before, but its first row is "
                f"at {self.unit} {first:g}. Count its times from the start of the run."
            )

    def _now(self, round: int, simulated_s: float) -> float:
        """Return the time of a round in the trace's unit."""
        if self.unit == "round":
            return round
        return simulated_s if self._seconds_per_round is None else (round - 1) * self._seconds_per_round


MEDIANS = ("seconds_per_example", "download_bytes_per_s", "upload_bytes_per_s")
"""Columns that the file must have. It may have a fourth column, ``client`` or ``share``."""


def devices_of(scenario: Scenario) -> FloatArray | None:
    """Read the devices of a scenario from its CSV file.

    The first line of the file names the columns :data:`MEDIANS`, in any order. One more column decides what a row
    means:

    * ``client``: each row is the device of the client with this partition id. Every client must have one row.
    * ``share``: each row is a kind of device. The seed draws a kind for each client, with probabilities in proportion
      to ``share``.
    * Neither of the two: each row is a kind of device, and all kinds have the same probability.

    Args:
        scenario: The scenario. Its key ``system.devices`` is the path of the file, relative to the working directory or
            to the data folder.

    Returns:
        Seconds per example, and downlink and uplink in bytes/s, of each client, shape (num_clients, 3). None if the
        scenario has no file.

    Raises:
        ParameterError: The file cannot be found or read, lacks a column, or has a value that is not above 0. Also
            raised if it does not have exactly one row for each client, or if the system is not ``kind = "phones"``.
    """
    if not scenario.system.devices:
        return None
    if scenario.system.kind != "phones":
        raise ParameterError(
            f"system.devices is for phones, but system.kind is {scenario.system.kind!r}. Set system.kind to 'phones'."
        )
    path = find_file(scenario.system.devices, key="system.devices", data_dir=scenario.data.data_dir or None)
    file = read_csv(path, f"system.devices {str(path)!r}")
    columns, lines = set(file.columns), list(file.lines)
    known = columns <= {*MEDIANS, "client", "share", "name"} and columns.issuperset(MEDIANS)
    if not known or columns.issuperset({"client", "share"}) or not lines:
        raise ParameterError(
            f"system.devices {str(path)!r} must have a line for each device under the columns {', '.join(MEDIANS)}, "
            f"and at most one of client and share, got {file.heading}. Add or rename columns; a column called name is "
            "for you."
        )
    medians = np.array([[line.real(name, above=0.0) for name in MEDIANS] for line in lines])
    if "client" in columns:
        rows = _rows_of_clients([line.cells["client"] for line in lines], scenario.num_clients, str(path))
    else:
        shares = np.array([line.real("share", above=0.0) if "share" in columns else 1.0 for line in lines])
        draws = first_uniforms(scenario.seed, "device-kind", range(scenario.num_clients))
        # By rounding, the last end may be below 1.
        ends = np.cumsum(shares) / shares.sum()
        rows = np.minimum(np.searchsorted(ends, draws, side="right"), len(ends) - 1)
    return np.asarray(medians[rows])


def _rows_of_clients(clients: Sequence[str], num_clients: int, path: str) -> IntArray:
    """Return the row of each client."""
    rows = {client: row for row, client in enumerate(clients)}
    wanted = list(map(str, range(num_clients)))
    missing = [client for client in wanted if client not in rows]
    if missing or len(clients) != num_clients:
        more = f"; the first client without a row is {missing[0]}" if missing else ""
        raise ParameterError(
            f"system.devices {path!r} must have one row for each of the clients 0 to {num_clients - 1}, got "
            f"{len(clients)} rows{more}. Set num_clients to the number of rows, or leave out the column client to draw "
            "devices from the rows."
        )
    return np.array([rows[client] for client in wanted], dtype=np.int64)
