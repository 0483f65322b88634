"""Report of a round, probe before a selection, and failures in a row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, column, indices, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.columns import FLAGS, REPORTED, SCALARS, column_values, with_fields


@with_fields("FloatArray | None", dict.fromkeys(sorted(REPORTED)))
@dataclass(frozen=True, kw_only=True, eq=False)
class RoundReport:
    """Outcome of a round: a row for each selected client, failed ones included.

    Every report has ``clients``, ``completed``, ``latency``, ``spare``, ``first`` and ``staleness``.
    :attr:`Selector.needs` names the optional columns that a selector reads. A missing value is NaN, as in the rows of
    failed clients. A completed client may lack a column that clients report (source "reply" in
    :mod:`~fedsel_flwr.selectors.columns`). If the selector names that column in :attr:`Selector.requires`, such a
    client counts as failed. Reported numbers are within the ranges of the table. Arrays are copied and read-only. A new
    column of the table is also a field of this class.

    With over-selection a round asks more clients than it needs. The clients that it did not need are spares. A selector
    that does not name "spare" in its ``needs`` sees them as failed. If a spare answered, its row is ``completed`` and
    has the client's latency. Otherwise ``latency`` is the time that the server waited. The server measures nothing on
    spares, so any optional column may be NaN.

    Args:
        clients: Indices of the selected clients, shape (n,), unique.
        completed: Whether the client's update arrived in time and could be used, shape (n,).
        latency: Seconds from sending the model to holding the update, shape (n,); ``max_latency`` for failed clients.
        spare: Whether the client was asked as a spare and was not needed, shape (n,); None if no client was.
        first: Whether ``latency`` replaces the first time that the server measured for the client, shape (n,); None if
            no row does. The first time contains the start of the client's process.
        staleness: Steps of the global model between sending it to the client and using the client's update, shape (n,);
            None if no update was stale. In synchronous rounds none is.
        energy: Joules spent by the client, shape (n,).
        energy_score: The client's energy score in [0, 1] (PCZFL), shape (n,).
        num_examples: Training examples behind the update, shape (n,).
        loss: Loss of the received model on the client's training data, before training, shape (n,).
        train_loss: Mean loss over the steps of the local training (rpow-d), shape (n,).
        rms_loss: Root mean square of the per-sample losses (Oort), shape (n,).
        local_accuracy: Accuracy of the received model on the client's test data, shape (n,).
        gradient: Flattened full-batch gradient at the received model (DivFL), shape (n, parameters).
        sketch: Hash of the client's data (LSH, NCCB), shape (n, d).
        accuracy: Accuracy of the client's new model on the server's validation set, shape (n,).
        projection: Projection of the client's update on the server's direction (GPFL), shape (n,).
        update: Flattened update, shape (n, parameters).
        kept: Whether FedCA's filter kept the client's model, shape (n,); False for failed clients.
        global_accuracy: Accuracy of the new global model on the server's validation set.
        global_loss: Loss of the new global model on the server's validation set.

    Raises:
        ParameterError: A column has the wrong shape or an impossible value (a NaN latency, an accuracy of 2).
    """

    clients: IntArray
    completed: BoolArray
    latency: FloatArray
    spare: BoolArray | None = None
    first: BoolArray | None = None
    staleness: FloatArray | None = None
    energy: FloatArray | None = None
    energy_score: FloatArray | None = None
    num_examples: FloatArray | None = None
    loss: FloatArray | None = None
    train_loss: FloatArray | None = None
    rms_loss: FloatArray | None = None
    local_accuracy: FloatArray | None = None
    gradient: FloatArray | None = None
    sketch: FloatArray | None = None
    accuracy: FloatArray | None = None
    projection: FloatArray | None = None
    update: FloatArray | None = None
    kept: BoolArray | None = None
    global_accuracy: float | None = None
    global_loss: float | None = None

    def __post_init__(self) -> None:
        """Check and freeze every column."""
        clients = indices("clients", self.clients)
        columns: dict[str, object] = {"clients": clients}
        latency = column("latency", self.latency, len(clients))
        if not np.isfinite(latency).all():
            raise ParameterError(
                f"latency must be finite and at least 0 s in every row, got {latency}. Give failed clients max_latency"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("spare", "first", "staleness") and value is None:
                value = np.zeros(len(clients), dtype=np.bool_ if field.name in FLAGS else np.float64)
            if field.name == "clients" or value is None:
                continue
            if field.name in SCALARS:
                # The server measures scalars, so only NaN and infinities can be wrong.
                columns[field.name] = real(field.name, value)
            elif field.name == "completed" or field.name in FLAGS:
                columns[field.name] = _flags(field.name, value, len(clients))
            else:
                columns[field.name] = column_values(field.name, value, len(clients))
        if self.kept is not None and np.any(np.asarray(columns["kept"]) & ~np.asarray(columns["completed"])):
            raise ParameterError("kept is True in the row of a failed client. Set it to False where completed is")
        for name, value in columns.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(self, name, value)

    @property
    def used(self) -> BoolArray:
        """Whether each client completed and was needed, shape (n,)."""
        return np.asarray(self.completed & ~np.asarray(self.spare))

    @property
    def failed(self) -> BoolArray:
        """Whether each client failed: it neither completed nor was a spare, shape (n,)."""
        return np.asarray(~(self.completed | np.asarray(self.spare)))


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Request for columns before a selection; :meth:`Selector.inform` receives the clients' replies.

    Args:
        clients: Clients to ask, shape (n,).
        columns: Columns of :meth:`Selector.inform` to ask for, at the current global model.
    """

    clients: IntArray
    columns: tuple[str, ...]


FAILURES_THAT_COUNT = 2
"""Number of failures in a row from which they count; a single failure may be chance."""


def repeated_failures(in_a_row: IntArray, report: RoundReport) -> BoolArray:
    """Count failures in a row, and return the clients that failed repeatedly.

    Args:
        in_a_row: Failures in a row by client index, shape (K,); updated in place. A completed round resets the number
            of a client to 0. A spare without an answer keeps its number.
        report: The report of a round.

    Returns:
        Whether each client of the report failed for at least the second time in a row, shape (n,).

    >>> import numpy as np
    >>> in_a_row = np.zeros(2, dtype=np.int64)
    >>> report = RoundReport(clients=[0, 1], completed=[True, False], latency=[1.0, 9.0])
    >>> [repeated_failures(in_a_row, report).tolist() for _ in range(2)]
    [[False, False], [False, True]]
    """
    k = report.clients
    in_a_row[k] += report.failed
    in_a_row[k[report.completed]] = 0
    return report.failed & (in_a_row[k] >= FAILURES_THAT_COUNT)


MOST_DOUBLINGS = 30
"""Number of failures in a row from which the rounds of :func:`put_last` grow no more. A billion are enough."""


def put_last(until: IntArray, in_a_row: IntArray, report: RoundReport, round: int) -> None:
    """Let clients that failed repeatedly come last for 2^n rounds, n being their failures in a row.

    Args:
        until: Last round in which a client comes last, by client index, shape (K,); updated in place. A completed round
            sets it to 0.
        in_a_row: As in :func:`repeated_failures`; updated in place.
        report: The report of a round.
        round: The round.
    """
    k = report.clients
    until[k[report.completed]] = 0
    again = k[repeated_failures(in_a_row, report)]
    until[again] = round + 2 ** np.minimum(in_a_row[again], MOST_DOUBLINGS)


def _flags(name: str, value: object, num_rows: int) -> BoolArray:
    array = np.array(value)
    # An empty list becomes an array of floats.
    if array.size == 0:
        array = array.astype(np.bool_)
    if array.dtype != np.bool_ or array.shape != (num_rows,):
        raise ParameterError(
            f"{name} must be {num_rows} booleans, one per client, got {array.dtype} of shape {array.shape}. Use a "
            "list or an array of booleans"
        )
    return array
