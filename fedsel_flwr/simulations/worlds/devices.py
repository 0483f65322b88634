"""Your own devices: a CSV file with the speeds and links of each client, or of kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.streams import first_uniforms
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.csv_files import read_csv
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.image_files import find_file

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
        shares = [line.real("share", above=0.0) if "share" in columns else 1.0 for line in lines]
        rows = _drawn_rows(np.array(shares), scenario)
    return np.asarray(medians[rows])


def _drawn_rows(shares: FloatArray, scenario: Scenario) -> IntArray:
    """Return the row that each client draws."""
    ends = np.cumsum(shares) / shares.sum()
    draws = first_uniforms(scenario.seed, "device-kind", range(scenario.num_clients))
    # By rounding, the last end may be below 1.
    return np.minimum(np.searchsorted(ends, draws, side="right"), len(ends) - 1)


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
