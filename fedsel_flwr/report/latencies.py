"""Latencies: the measured seconds of each client, read from a run's folder, a comparison's folder or a CSV file.

Each row is one of four kinds:

* **Measured**: the client completed, and its seconds are known.
* **Censored**: the client was late, or the server stopped waiting. Only a lower limit of its seconds is known: the end
  of the round, at most ``max_latency``.
* **Failed**: the client failed for another reason, for example with an exception. The row says nothing about speed, but
  a round with a failure lasts ``max_latency``. Failures are counted.
* **Left out**: the client completed, but its time was not measured. A first time on the server's clock (source "first")
  is also left out, because it contains the start of the client's process.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import CLIENTS, JOURNAL, ROUNDS, SCENARIO, read_history
from fedsel_flwr.rounds.csv_files import read_csv
from fedsel_flwr.rounds.history import LATE
from fedsel_flwr.rounds.records import checked
from fedsel_flwr.rounds.storage import check_entries, read_file
from fedsel_flwr.rounds.untrusted import one_line

CLIENT, SECONDS = "client", "seconds"
"""Columns of a CSV file."""
SELECTORS = ("bsfl", "cs-ucb", "cs-ucb-q", "tifl", "fedcs")
"""Selectors that read latencies, and no losses."""
OF_A_RUN = frozenset({"description", "seed", "rounds", "selector", "selectors", "engine", "api"})
"""Keys of a scenario in which the runs of a folder may differ."""
HOUR_S = 3600.0
"""Median latency above which the seconds may be milliseconds."""
TIMEOUTS = "If the client timed out, write the timeout and set --max-latency."
EQUAL_ROWS = 3
"""Number of equal largest values from which they may be a timeout."""
SHORTEST_S, LONGEST_S = 1e-6, 1e9
"""Shortest and longest latency that is advised on, a microsecond and about 30 years."""
MOST_ROUNDS = 1_000
"""Largest number of rounds of a prediction, unless the history or the user has more."""
SHARE = 0.05
"""Share of the clients of a CSV file that a round selects by default."""


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Latencies of the clients of one or several fleets. All fleets come from the same scenario.

    Attributes:
        client: Number of the client in each row, shape (n,). A client of another fleet is another client.
        seconds: Measured seconds of each row, or the lower limit if the row is censored, shape (n,).
        censored: Whether only the lower limit is known, shape (n,).
        fleet: Fleet of each client, shape (clients,). A comparison has one fleet for each seed.
        num_clients: Number of clients of a fleet, at least the number that the rows name.
        clients_per_round: Number of clients that a round selects.
        max_latency: Seconds at which a latency is cut off; infinity if nothing is cut off.
        failed: Number of rows that failed for a reason other than time.
        left_out: Number of completed rows without a measured time.
        rounds: Number of rounds of the run; None if it is unknown.
        num_available: Number of available clients in each round, in order; empty if every client is always available.
        num_examples: Number of examples of each client, shape (clients,); NaN if it is unknown.
        parameters: Selector -> its parameters in the scenario.
        source: The folder or file.
        notes: Values that were chosen by default, as sentences.
    """

    client: IntArray
    seconds: FloatArray
    censored: BoolArray
    fleet: IntArray
    num_clients: int
    clients_per_round: int
    max_latency: float = math.inf
    failed: int = 0
    left_out: int = 0
    rounds: int | None = None
    num_available: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_examples: FloatArray
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def selections(self) -> IntArray:
        """Number of measured and censored rows of each client, shape (clients,)."""
        return np.bincount(self.client, minlength=len(self.fleet))

    @property
    def failure_rate(self) -> float:
        """Share of the rows that failed for a reason other than time."""
        return self.failed / max(1, self.failed + self.left_out + len(self.seconds))


def read_latencies(
    path: str | os.PathLike[str],
    *,
    clients_per_round: int | None = None,
    max_latency: float | None = None,
    num_clients: int | None = None,
) -> Latencies:
    """Read the latencies of a run, a comparison or a deployment, or a CSV file with the columns client and seconds.

    A folder that is still being written can be read. An incomplete last line of its journal is ignored.

    Args:
        path: The folder of a run or of a comparison, a ``checkpoint_dir``, or a CSV file.
        clients_per_round: Number of clients that a round selects. If None: that of the folder, or 5 % of the clients of
            a CSV file.
        max_latency: Seconds at which latencies are cut off. If None: those of the folder; in a CSV file, nothing is cut
            off.
        num_clients: Number of clients of the fleet. If None: that of the folder, or the number of clients with a row in
            a CSV file.

    Returns:
        The latencies.

    Raises:
        ParameterError: There is no history and no CSV file, or the file cannot be used. Or more than ``num_clients``
            clients have a row.
    """
    where = Path(path)
    if clients_per_round is not None:
        clients_per_round = whole("clients_per_round", clients_per_round, 1)
    if max_latency is not None:
        max_latency = real("max_latency", max_latency, above=0.0, at_most=LONGEST_S)
    if num_clients is not None:
        num_clients = whole("num_clients", num_clients, 1)
    if where.is_dir():
        found = _read_folders(where, clients_per_round, max_latency)
        if num_clients is None:
            return found
        _check_number(where, num_clients, max(np.bincount(found.fleet).tolist()))
        return replace(found, num_clients=num_clients)
    if not where.is_file():
        what = "is neither a file nor a folder" if where.exists() else "does not exist"
        raise ParameterError(f"{str(where)!r} {what}. Give the folder of a run, or a CSV file.")
    return _read_csv(where, clients_per_round, max_latency, num_clients)


def _check_number(path: Path, num_clients: int, seen: int) -> None:
    if num_clients < seen:
        raise ParameterError(
            f"{path} has rows of {seen:,} clients, but --clients is {num_clients:,}. Give the number of all clients."
        )


def _read_csv(
    path: Path, clients_per_round: int | None, max_latency: float | None, num_clients: int | None
) -> Latencies:
    limit = math.inf if max_latency is None else max_latency
    number: dict[str, int] = {}
    client, seconds = list[int](), list[float]()
    file = read_csv(path)
    lacking = [name for name in (CLIENT, SECONDS) if name not in file.columns]
    if lacking:
        raise ParameterError(
            f"{path} must have the columns {CLIENT},{SECONDS} in its first line, got {file.heading}. Add "
            f"{' and '.join(lacking)}."
        )
    for line in file.lines:
        if not (name := line.cells[CLIENT]):
            raise line.error(CLIENT, "the id of a client", "Write the same id in all lines of a client.")
        client.append(number.setdefault(name, len(number)))
        seconds.append(line.real(SECONDS, at_least=SHORTEST_S, most=LONGEST_S, cure=TIMEOUTS))
    if not seconds:
        raise ParameterError(f"{path} has no rows. Write one line for each selected client of each round.")
    notes = []
    if num_clients is None:
        num_clients = len(number)
        notes.append(f"Only the {num_clients:,} clients with a row count (set --clients to the number of all clients).")
    _check_number(path, num_clients, len(number))
    if clients_per_round is None:
        clients_per_round = max(1, round(SHARE * num_clients))
        clients = "1 client" if clients_per_round == 1 else f"{clients_per_round} clients"
        notes.append(f"{clients} per round, which is 5 % of the clients (set --clients-per-round).")
    if max_latency is None:
        notes.append("No latency counts as cut off (set --max-latency).")
        if (equal := seconds.count(max(seconds))) >= EQUAL_ROWS and len(set(seconds)) > 1:
            notes.append(
                f"{equal:,} rows have the largest value, {max(seconds):g} s. If this is the server's timeout, set "
                f"--max-latency {max(seconds):g}."
            )
    elif max(seconds) < limit:
        notes.append("No row is cut off. If slow clients timed out, add a row with the timeout for each such client.")
    if float(np.median(seconds)) > HOUR_S:
        notes.append("The median latency is more than an hour. If the values are milliseconds, divide them by 1,000.")
    return Latencies(
        client=np.array(client), seconds=np.minimum(seconds, limit), censored=np.array(seconds) >= limit,
        fleet=np.zeros(len(number), dtype=np.int64), num_clients=num_clients, clients_per_round=clients_per_round,
        max_latency=limit, source=str(path),
        num_examples=np.full(len(number), np.nan), notes=tuple(notes),
    )  # fmt: skip


def _read_folders(folder: Path, clients_per_round: int | None, max_latency: float | None) -> Latencies:
    """Read the run in a folder, or the runs in its folders."""
    check_entries(folder)
    own = [folder] if _has_history(folder) else []
    # The folder of a run has its checkpoints in a folder of their own.
    if not (own and (folder / SCENARIO).is_file()):
        own += sorted(each for each in folder.iterdir() if _has_history(each))
    for each in own:
        check_entries(each)
    runs = [(_scenario(each), history, each) for each in own if (history := read_history(each)).rounds]
    if not runs:
        raise ParameterError(
            f"{str(folder)!r} holds no finished round. Give a folder with {JOURNAL} or {ROUNDS} and {CLIENTS}, or the "
            "folder of a comparison."
        )
    if len(alone := [str(each) for tables, _, each in runs if not tables]) > 1:
        raise ParameterError(
            f"{str(folder)!r} holds {len(alone)} deployments, such as {alone[0]!r} and {alone[1]!r}, whose clients may "
            "have the same ids. Give the folder of one deployment."
        )
    kinds = [{key: value for key, value in one.items() if key not in OF_A_RUN} for one, _, _ in runs]
    if other := next((str(run[2]) for kind, run in zip(kinds, runs, strict=True) if kind != kinds[0]), ""):
        raise ParameterError(
            f"{str(folder)!r} holds runs of different scenarios. Give the folder of one run, or of one comparison, "
            f"instead of {str(runs[0][2])!r} together with {other!r}."
        )
    scenario, histories = runs[0][0], [history for _, history, _ in runs]
    if any(row.buffered for one in histories for row in one.clients):
        raise ParameterError(
            f"{str(folder)!r} holds buffered rounds, which wait for no client, but the advice is for rounds that wait. "
            "Give runs without concurrency, or a CSV file of latencies."
        )
    settings = [_settings(folder, tables) for tables, _, _ in runs]
    limit = settings[0].max_latency_s or max(
        (row.latency_s for one in histories for row in one.clients if row.latency_source == "max_latency"),
        default=math.inf,
    )
    limit = limit if max_latency is None else max_latency
    selected = [one.num_selected for history in histories for one in history.rounds if one.num_selected]
    typical = int(np.median(selected)) if selected else 1
    number: dict[tuple[int, str], int] = {}
    client, seconds, censored = list[int](), list[float](), list[bool]()
    examples, failed, left_out = dict[int, int](), 0, 0
    # With the same seed, a client has the same latency in a round, whatever selector runs. It counts once.
    counted: set[tuple[int, str, int]] = set()
    for seed, history in zip((one.seed for one in settings), histories, strict=True):
        ends = {one.round: one.round_s - one.probe_s for one in history.rounds}
        for row in history.clients:
            if (seed, row.client_id, row.round) in counted:
                continue
            counted.add((seed, row.client_id, row.round))
            k = number.setdefault((seed, row.client_id), len(number))
            if row.num_examples > 0:
                examples[k] = row.num_examples
            late = row.timed_out or LATE in row.problem_kinds
            measured = row.latency_source not in ("first", "max_latency") and SHORTEST_S <= row.latency_s <= LONGEST_S
            if row.completed and measured:
                value = min(row.latency_s, limit)
                censored.append(value >= limit)
            elif late and not row.completed and SHORTEST_S <= (end := min(limit, ends[row.round])) <= LONGEST_S:
                value = end
                censored.append(True)
            else:
                failed, left_out = failed + (not row.completed), left_out + row.completed
                continue
            client.append(k)
            seconds.append(value)
    _, fleet = np.unique(np.array([seed for seed, _ in number], dtype=np.int64), return_inverse=True)
    sizes = np.array([examples.get(k, math.nan) for k in range(len(number))])
    largest = max(one.num_available for history in histories for one in history.rounds)
    # A scenario may plan more rounds than the run has; the prediction takes time for each.
    planned = min(settings[0].rounds, max(MOST_ROUNDS, *(len(one.rounds) for one in histories)))
    return Latencies(
        client=np.array(client, dtype=np.int64), seconds=np.array(seconds, dtype=np.float64),
        censored=np.array(censored, dtype=np.bool_), fleet=fleet,
        num_clients=max(settings[0].num_clients or largest, *np.bincount(fleet, minlength=1).tolist()),
        clients_per_round=clients_per_round or settings[0].clients_per_round or typical,
        max_latency=limit, failed=failed, left_out=left_out, rounds=planned or None,
        num_available=np.array([one.num_available for one in histories[0].rounds]),
        num_examples=sizes, parameters=_parameters(scenario, limit), source=str(folder),
    )  # fmt: skip


def _has_history(folder: Path) -> bool:
    return (folder / JOURNAL).is_file() or all((folder / name).is_file() for name in (ROUNDS, CLIENTS))


def _scenario(folder: Path) -> dict[str, Any]:
    """Return the scenario of a run; empty in the folder of a deployment."""
    path = folder / SCENARIO
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _no_scenario(path, error) from error


def _no_scenario(path: Path, error: Exception) -> ParameterError:
    return ParameterError(f"{path} is not a readable scenario: {one_line(str(error))}. Run the scenario again.")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Settings of a run that the advice reads; 0 or None if the scenario does not have them."""

    seed: int = 0
    rounds: int = 0
    num_clients: int = 0
    clients_per_round: int = 0
    max_latency_s: float = 0.0


def _settings(folder: Path, tables: Mapping[str, Any]) -> _Settings:
    """Return the settings in a scenario's tables."""
    wireless, selectors = (tables.get(name, {}) for name in ("wireless", "selectors"))
    try:
        if not all(isinstance(one, dict) for one in (wireless, selectors, *dict(selectors).values())):
            raise ValueError("wireless, selectors and each selector must be tables")
        named = {one.name: tables[one.name] for one in fields(_Settings) if one.name in tables}
        if "max_latency_s" in wireless:
            named["max_latency_s"] = real("wireless.max_latency_s", wireless["max_latency_s"], above=0.0)
        return checked(_Settings, named)
    except (ValueError, TypeError) as error:
        raise _no_scenario(folder / SCENARIO, error) from error


def _parameters(scenario: Mapping[str, Any], limit: float) -> dict[str, Mapping[str, Any]]:
    """Return the parameters that the scenario sets, as in its runs; empty without a scenario."""
    tables: Mapping[str, Any] = scenario.get("selectors", {})
    return {name: {"max_latency": limit, **tables.get(name, {})} for name in SELECTORS} if scenario else {}
