"""Your own devices: a CSV file with the speeds and links of each client, or of kinds of devices."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.streams import first_uniforms
from fedsel_flwr.errors import ParameterError
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
    try:
        table = pd.read_csv(path, skipinitialspace=True, encoding="utf-8-sig")
    except (OSError, ValueError, csv.Error) as error:  # pandas' own errors are ValueErrors
        raise ParameterError(f"cannot read system.devices {str(path)!r}: {error}") from error
    missing = [name for name in MEDIANS if name not in table]
    unknown = sorted(set(table) - {*MEDIANS, "client", "share", "name"})
    if missing or unknown or {"client", "share"} <= set(table) or not len(table):
        raise ParameterError(
            f"system.devices {str(path)!r} must have a line for each device under the columns {', '.join(MEDIANS)}, "
            f"and at most one of client and share, got {', '.join(map(str, table)) or 'nothing'}. Add or rename "
            "columns; a column called name is for you."
        )
    numbers = [name for name in table if name not in ("client", "name")]
    values = table[numbers].apply(pd.to_numeric, errors="coerce")
    bad = ~(np.isfinite(values) & (values > 0)).all(axis=1)
    if bad.any():
        line = int(np.flatnonzero(bad)[0])
        raise ParameterError(
            f"system.devices {str(path)!r}, line {line + 2}: expected numbers above 0 for {', '.join(numbers)}, got "
            f"{', '.join(map(str, table[numbers].iloc[line]))}. Correct the line."
        )
    medians: FloatArray = values[list(MEDIANS)].to_numpy(dtype=np.float64)
    if "client" in table:
        rows = _rows_of_clients(table["client"], scenario.num_clients, str(path))
    else:
        rows = _drawn_rows(values["share"].to_numpy() if "share" in table else np.ones(len(table)), scenario)
    return np.asarray(medians[rows])


def _drawn_rows(shares: FloatArray, scenario: Scenario) -> IntArray:
    """Return the row that each client draws."""
    ends = np.cumsum(shares) / shares.sum()
    draws = first_uniforms(scenario.seed, "device-kind", range(scenario.num_clients))
    # By rounding, the last end may be below 1.
    return np.minimum(np.searchsorted(ends, draws, side="right"), len(ends) - 1)


def _rows_of_clients(clients: pd.Series, num_clients: int, path: str) -> IntArray:
    """Return the row of each client."""
    rows = {str(client).strip(): row for row, client in enumerate(clients)}
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
