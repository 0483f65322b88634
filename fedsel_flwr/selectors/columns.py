"""The one table of columns: what a selector may read, where it comes from, and what it may hold.

A column is a word that selectors, reports, probes, strategies and clients share. To add one, add a row to
:data:`COLUMNS`, and if reports carry it a field of the same name to
:class:`~fedsel_flwr.selectors.round_report.RoundReport`. A ``"reply"`` column then travels from the client's metrics,
or from its answer to a probe, to the selector.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedsel_flwr.checks import FloatArray, column
from fedsel_flwr.errors import ParameterError

Source = Literal["clock", "reply", "server", "filter"]
"""Who knows a column: the strategy's clock, the client (in its metrics), the server (measured on the models), or
FedCA's filter."""
Shape = Literal["number", "flag", "vector", "scalar"]
"""A number, a boolean or a vector a client; or one number a round."""
ROUNDING = 1e-9
"""How far outside its range a number may lie: a mean of fractions may come out as 1.0000000000000002."""

LARGEST = 1e30
"""Largest size of a number that a client reports: its products and sums over a run stay finite."""
MOST_EXAMPLES = 2.0**53
"""Largest number of examples: what a float holds exactly."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A row of the table.

    Attributes:
        name: The column's name, everywhere: in ``needs``, reports and ``inform``, and as the client's metric.
        source: Who knows it.
        meaning: What it is, with its unit.
        shape: What it holds for a client, or for the round.
        low: Least value.
        high: Largest value.
        reported: Whether :class:`~fedsel_flwr.selectors.round_report.RoundReport` carries it after a round.
        informed: Whether ``Selector.inform`` takes it before a choice.
        probed: Whether a probe may ask clients for it at the current global model.
        validated: Whether the server needs a validation set to measure it.
        per_update: Whether it is read off the individual clients' updates.
    """

    name: str
    source: Source
    meaning: str
    shape: Shape = "number"
    low: float = -math.inf
    high: float = math.inf
    reported: bool = True
    informed: bool = False
    probed: bool = False
    validated: bool = False
    per_update: bool = False

    def admits(self, values: FloatArray | float) -> bool:
        """Whether every number among ``values`` lies in the column's range, but for rounding.

        NaN (missing) passes, and so does an infinity where only its size is limited: what it means, the reader says.
        """
        low = -math.inf if self.low <= -LARGEST else self.low - ROUNDING
        high = math.inf if self.high >= MOST_EXAMPLES else self.high + ROUNDING
        if isinstance(values, float):  # of one client: NumPy would take longer than everything else that is read of it
            return not (values < low or values > high or (math.isfinite(values) and self._too_large(values)))
        if bool(np.any(np.less(values, low) | np.greater(values, high))):
            return False
        return not (math.isinf(high) and bool(np.any(np.isfinite(values) & self._too_large(values))))

    def _too_large(self, values: Any) -> Any:
        return (values < self.low - ROUNDING) | (values > self.high + ROUNDING)


_ROWS = (
    Column(name="latency", source="clock", low=0.0, high=LARGEST,
           meaning="seconds from sending the model to holding the update"),
    Column(name="spare", source="clock", shape="flag",
           meaning="whether the client was asked as a spare (over-selection) and was not needed"),
    Column(name="first", source="clock", shape="flag",
           meaning="whether the latency stands in place of the first time that the server measured of the client"),
    Column(name="energy", source="reply", low=0.0, high=LARGEST, meaning="joules spent by the client"),
    Column(name="energy_score", source="reply", low=0.0, high=1.0, informed=True, meaning="PCZFL's energy score"),
    Column(name="num_examples", source="reply", low=0.0, high=MOST_EXAMPLES, informed=True,
           meaning="training examples of the client"),
    Column(name="loss", source="reply", low=-LARGEST, high=LARGEST, informed=True, probed=True,
           meaning="loss of the received model on the client's training data, before training, nats"),
    Column(name="batch_loss", source="reply", low=-LARGEST, high=LARGEST, reported=False, informed=True, probed=True,
           meaning="loss of the received model on one mini-batch of the client's training data (cpow-d), nats"),
    Column(name="train_loss", source="reply", low=-LARGEST, high=LARGEST,
           meaning="mean loss over the local training's steps, each before the step (rpow-d), nats"),
    Column(name="rms_loss", source="reply", low=0.0, high=LARGEST, informed=True, probed=True,
           meaning="root mean square of the per-sample losses of the received model (Oort), nats"),
    Column(name="local_accuracy", source="reply", low=0.0, high=1.0, informed=True, probed=True,
           meaning="accuracy of the received model on the client's test data"),
    Column(name="gradient", source="reply", shape="vector", low=-LARGEST, high=LARGEST, informed=True, probed=True,
           meaning="flattened full-batch gradient at the received model (DivFL)"),
    Column(name="sketch", source="reply", shape="vector", low=-LARGEST, high=LARGEST, informed=True, probed=True,
           meaning="hash of the client's data (LSH, NCCB)"),
    Column(name="accuracy", source="server", low=0.0, high=1.0, informed=True, validated=True, per_update=True,
           meaning="accuracy of the client's new model on the server's validation set; informed: the initial model's"),
    Column(name="projection", source="server", per_update=True,
           meaning="projection of the client's gradient on the server's direction (GPFL)"),
    Column(name="update", source="server", shape="vector", per_update=True,
           meaning="flattened update, the client's new model minus the global one"),
    Column(name="kept", source="filter", shape="flag", validated=True, per_update=True,
           meaning="whether FedCA's filter kept the client's model"),
    Column(name="global_accuracy", source="server", shape="scalar", low=0.0, high=1.0, validated=True,
           meaning="accuracy of the new global model on the server's validation set"),
    Column(name="global_loss", source="server", shape="scalar", validated=True,
           meaning="loss of the new global model on the server's validation set, nats"),
)  # fmt: skip

COLUMNS: dict[str, Column] = {row.name: row for row in _ROWS}
"""Name -> column."""


def columns_where(test: Callable[[Column], bool]) -> frozenset[str]:
    """The names of the columns that pass a test.

    >>> sorted(columns_where(lambda column: column.shape == "scalar"))
    ['global_accuracy', 'global_loss']
    """
    return frozenset(name for name, column in COLUMNS.items() if test(column))


REPORTED = columns_where(lambda column: column.reported)
"""What a report carries, and a selector may need."""
INFORMED = columns_where(lambda column: column.informed)
"""What ``inform`` takes."""
PROBED = columns_where(lambda column: column.probed)
"""What a probe may ask for."""
SCALARS = columns_where(lambda column: column.shape == "scalar")
"""One number a round."""
VECTORS = columns_where(lambda column: column.shape == "vector")
"""One vector a client."""
FLAGS = columns_where(lambda column: column.shape == "flag")
"""One boolean a client."""
ON_VALIDATION = columns_where(lambda column: column.validated)
"""What needs a validation set on the server."""
PER_UPDATE = columns_where(lambda column: column.per_update)
"""What is read off individual updates."""
MEASURED = columns_where(lambda column: column.source == "server" and column.shape != "scalar")
"""What the server measures on each usable model."""
ASKED = columns_where(lambda column: column.source == "reply" and column.probed)
"""What clients report only when they are asked: in the train config (``needs``) or by a probe."""


def check_columns(owner: str, what: str, names: object, allowed: frozenset[str]) -> frozenset[str]:
    """Return names of columns as a set, each of them ``allowed``.

    Args:
        owner: Whose they are, for the message.
        what: What they are, such as "needs".
        names: A set, list or tuple of names.
        allowed: The names there are.

    Raises:
        ParameterError: ``names`` is no collection of names, or one of them is not allowed; says the nearest one.

    >>> sorted(check_columns("Mine", "needs", ["loss", "latency"], REPORTED))
    ['latency', 'loss']
    """
    if isinstance(names, str) or not isinstance(names, frozenset | set | tuple | list):
        raise ParameterError(
            f"{owner}.{what} must be a set of column names, such as frozenset({{'latency'}}), got {names!r}"
        )
    for name in names:
        if name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ParameterError(
                f"{owner}.{what} names {name!r}, which is no column{hint}; choose of {', '.join(sorted(allowed))}"
            )
    return frozenset(names)


def column_values(name: str, value: Any, num_rows: int) -> FloatArray:
    """Return what a column holds for clients, checked against the table (a copy).

    Args:
        name: A column of numbers or vectors.
        value: Its values, shape (num_rows,), for vectors (num_rows, d); NaN where missing.
        num_rows: How many clients there are.

    Raises:
        ParameterError: The shape is another, or a number lies outside the column's range.

    >>> column_values("energy_score", [0.5, 2.5], 2)
    Traceback (most recent call last):
    ...
    fedsel_flwr.errors.ParameterError: energy_score must lie in [0, 1], got 2.5
    """
    row = COLUMNS[name]
    array = column(name, value, num_rows, ndim=2 if row.shape == "vector" else 1)
    if not row.admits(array):
        outside = next(value for value in array.flat if not row.admits(value))
        raise ParameterError(f"{name} must lie in [{row.low:g}, {row.high:g}], got {outside:g}")
    return array
