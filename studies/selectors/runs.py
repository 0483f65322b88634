"""Figures of one run: a row of the CSV file, from which the page is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.report.summary import RunSummary, moving_average, summarize
from fedsel_flwr.rounds.history import History
from fedsel_flwr.simulations import Scenario
from fedsel_flwr.simulations.on_flower.building import make_availability

KEY = ("world", "selector", "seed")
CURVE_POINTS = 30
"""Largest number of points of a stored curve."""


@dataclass(frozen=True, kw_only=True)
class RunRow(RunSummary):
    """Figures of one run.

    Attributes:
        world: Name of the world.
        fingerprint: Digest of everything that the run depends on.
        rounds: Number of rounds.
        probe_s: Seconds of all probes before selections, of the whole run.
        probe_j: Joules of all probes of the whole run.
        available: Mean number of available clients in a round.
        median_plays: Median number of selections of the clients that were available in at least one round.
        server_ms: Milliseconds of processor time per round for the selection, replies, measurements and learning.
        run_s: Seconds of processor time of the whole simulation.
        curve_s: Simulated seconds at the points of the curve.
        curve_j: Joules at the points of the curve.
        curve_accuracy: Mean accuracy of the last evaluated rounds at these points, as many rounds as for the target.
    """

    world: str
    fingerprint: str
    rounds: int
    probe_s: float
    probe_j: float
    available: float
    median_plays: float
    server_ms: float
    run_s: float
    curve_s: tuple[float, ...]
    curve_j: tuple[float, ...]
    curve_accuracy: tuple[float, ...]


COLUMNS = (*KEY, "fingerprint", *(f.name for f in fields(RunRow) if f.name not in (*KEY, "fingerprint")))
"""Columns of the CSV file."""
_TYPES = {f.name: str(f.type) for f in fields(RunRow)}


def run_row(
    scenario: Scenario,
    history: History,
    *,
    label: str,
    fingerprint: str,
    model_bytes: int,
    client_accuracies: FloatArray,
    server_s: float,
    run_s: float,
) -> RunRow:
    """Compute the row of a finished run.

    Args:
        scenario: Scenario of the run.
        history: Its history.
        label: Label of the selector.
        fingerprint: Digest of everything that the run depends on.
        model_bytes: Size of the model.
        client_accuracies: Accuracy of the final model for each client, shape (num_clients,).
        server_s: Seconds of processor time of the server's part of all rounds.
        run_s: Seconds of processor time of the whole simulation.
    """
    s, rounds = scenario, history.rounds
    summary = summarize(
        history,
        selector=label,
        seed=s.seed,
        num_clients=s.num_clients,
        target_accuracy=s.target_accuracy,
        target_rounds=s.target_rounds,
        model_bytes=s.model_bytes(model_bytes),
        client_accuracies=client_accuracies,
    )
    measured = [record for record in rounds if math.isfinite(record.accuracy)]
    means = moving_average([record.accuracy for record in measured], s.target_rounds)
    places = np.unique(np.linspace(0, len(measured) - 1, min(CURVE_POINTS, len(measured))).round().astype(int))
    counts = history.selection_counts(s.num_clients)
    return RunRow(
        **asdict(summary),
        world=s.name,
        fingerprint=fingerprint,
        rounds=len(rounds),
        probe_s=float(sum(record.probe_s for record in rounds)),
        probe_j=float(np.nansum([record.probe_j for record in rounds])),
        available=float(np.mean([record.num_available for record in rounds])),
        median_plays=float(np.median(counts[_ever_available(s, history)])),
        server_ms=1000 * server_s / max(1, len(rounds)),
        run_s=run_s,
        curve_s=tuple(measured[i].simulated_s for i in places),
        curve_j=tuple(measured[i].total_energy_j for i in places),
        curve_accuracy=tuple(float(means[i]) for i in places),
    )


def row_values(row: RunRow) -> dict[str, Any]:
    """Return the columns of a row, as :class:`rows.Rows` takes them."""
    values = asdict(row)
    # Four digits of an accuracy and of a time are enough for a picture.
    return values | {name: tuple(float(f"{x:.4g}") for x in values[name]) for name in values if name[:6] == "curve_"}


def parse_row(row: Mapping[str, str]) -> RunRow:
    """Return the row of a line of the CSV file."""
    return RunRow(**{name: _parsed(name, row[name]) for name in _TYPES})


def _parsed(name: str, text: str) -> Any:
    kind = _TYPES[name]
    if kind.startswith("tuple"):
        return tuple(map(float, text.split()))
    if kind == "str":
        return text
    return int(text) if kind == "int" else float(text or "nan")


def _ever_available(scenario: Scenario, history: History) -> Sequence[bool]:
    """Return whether each client was available in at least one round."""
    ids = [str(k) for k in range(scenario.num_clients)]
    availability = make_availability(scenario)
    found = np.full(len(ids), availability is None)
    for record in history.rounds if availability is not None else ():
        found |= availability.at(ids, record.round, record.simulated_s - record.round_s)
    return found
