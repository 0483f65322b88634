"""Table of columns: the numbers that selectors may read, with their sources and ranges.

Selectors, reports, probes, strategies and clients share a column's name. To add a column, add a row to :data:`COLUMNS`.
A ``"reply"`` column then reaches the selector from the client's metrics, or from its answer to a probe. A recorded
column is also read from every reply and written to the history and its files. The classes that hold columns derive
from the table (:func:`with_fields`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from fedsel_flwr.checks import FloatArray, column, did_you_mean
from fedsel_flwr.errors import ParameterError

Source = Literal["clock", "reply", "server", "filter"]
"""Source of a column: the strategy's clock, the client's reply (its metrics), the server (measured on the models), or
FedCA's filter."""
Shape = Literal["number", "flag", "vector", "scalar"]
"""A number, a boolean or a vector per client, or one number per round."""
ROUNDING = 1e-9
"""Tolerance of a range, because a mean of fractions may be 1.0000000000000002."""
LARGEST = 1e30
"""Largest magnitude of a reported number, so that products and sums over a run stay finite."""
MOST_EXAMPLES = 2.0**53
"""Largest number of examples; above it a float is not exact."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A row of the table.

    Attributes:
        name: Name in ``needs``, reports and ``inform``.
        source: Source of the values.
        meaning: Meaning, with the unit.
        key: Name in the client's metrics and in the history; empty for the column's name.
        shape: Number, boolean or vector per client, or one number per round.
        low: Smallest value.
        high: Largest value.
        reported: Whether :class:`~fedsel_flwr.selectors.round_report.RoundReport` carries it after a round.
        informed: Whether ``Selector.inform`` takes it before a choice.
        probed: Whether a probe may ask clients for it at the current global model.
        validated: Whether the server needs a validation set to measure it.
        per_update: Whether it is computed from the clients' individual updates.
        recorded: Whether it is read from every reply, needed or not, and recorded in the history; only for numbers.
        aliases: Names of the same or a similar quantity in Flower's own apps, the likeliest first, for messages.
    """

    name: str
    source: Source
    meaning: str
    key: str = ""
    shape: Shape = "number"
    low: float = -math.inf
    high: float = math.inf
    reported: bool = True
    informed: bool = False
    probed: bool = False
    validated: bool = False
    per_update: bool = False
    recorded: bool = False
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Set the default of ``key``."""
        # A frozen dataclass refuses plain assignment.
        object.__setattr__(self, "key", self.key or self.name)

    def admits(self, values: FloatArray | float) -> bool:
        """Return whether all ``values`` are in the column's range, up to rounding.

        NaN (missing) passes. An infinity passes if the range limits only the magnitude; the selector decides its
        meaning.
        """
        low = -math.inf if self.low <= -LARGEST else self.low - ROUNDING
        high = math.inf if self.high >= MOST_EXAMPLES else self.high + ROUNDING
        # For the number of one client, NumPy's calls would take longer than the rest of reading a reply.
        if isinstance(values, float):
            return not (values < low or values > high or (math.isfinite(values) and self._too_large(values)))
        if bool(np.any(np.less(values, low) | np.greater(values, high))):
            return False
        return not (math.isinf(high) and bool(np.any(np.isfinite(values) & self._too_large(values))))

    def _too_large(self, values: Any) -> Any:
        return (values < self.low - ROUNDING) | (values > self.high + ROUNDING)


_LOSSES = ("eval_loss", "val_loss", "test_loss", "test_logloss", "train_loss")
_ROWS = (
    Column(name="latency", key="latency_s", source="clock", low=0.0, high=LARGEST, recorded=True,
           aliases=("latency", "train_time", "training_time", "fit_time", "duration"),
           meaning="seconds from sending the model to receiving the update"),
    Column(name="spare", source="clock", shape="flag",
           meaning="whether the client was asked as a spare (over-selection) and was not needed"),
    Column(name="first", source="clock", shape="flag",
           meaning="whether the latency replaces the first time that the server measured for the client"),
    Column(name="staleness", source="clock", low=0.0, high=LARGEST,
           meaning="steps of the global model between sending the model to the client and using its update"),
    Column(name="energy", key="energy_j", source="reply", low=0.0, high=LARGEST, recorded=True,
           meaning="joules spent by the client"),
    Column(name="download", key="download_s", source="reply", low=0.0, high=LARGEST, reported=False, recorded=True,
           meaning="seconds to receive the model"),
    Column(name="compute", key="compute_s", source="reply", low=0.0, high=LARGEST, reported=False, recorded=True,
           meaning="seconds of local training"),
    Column(name="upload", key="upload_s", source="reply", low=0.0, high=LARGEST, reported=False, recorded=True,
           meaning="seconds to send the update"),
    Column(name="num_examples", source="reply", low=0.0, high=MOST_EXAMPLES, informed=True, recorded=True,
           meaning="training examples of the client"),
    Column(name="loss", source="reply", low=-LARGEST, high=LARGEST, informed=True, probed=True, aliases=_LOSSES,
           meaning="loss of the received model on the client's training data, before training, nats"),
    Column(name="batch_loss", source="reply", low=-LARGEST, high=LARGEST, reported=False, informed=True, probed=True,
           aliases=("loss", *_LOSSES),
           meaning="loss of the received model on one mini-batch of the client's training data (cpow-d), nats"),
    Column(name="train_loss", source="reply", low=-LARGEST, high=LARGEST, recorded=True,
           aliases=("training_loss", "avg_loss", "loss"),
           meaning="mean loss over the local training's steps, each before the step (rpow-d), nats"),
    Column(name="energy_score", source="reply", low=0.0, high=1.0, informed=True, recorded=True,
           meaning="PCZFL's energy score"),
    Column(name="rms_loss", source="reply", low=0.0, high=LARGEST, informed=True, probed=True,
           aliases=("loss", *_LOSSES),
           meaning="root mean square of the per-sample losses of the received model (Oort), nats"),
    Column(name="local_accuracy", source="reply", low=0.0, high=1.0, informed=True, probed=True,
           aliases=("accuracy", "eval_acc", "eval_accuracy", "val_acc", "val_accuracy", "test_accuracy", "acc"),
           meaning="accuracy of the received model on the client's test data"),
    Column(name="gradient", source="reply", shape="vector", low=-LARGEST, high=LARGEST, informed=True, probed=True,
           meaning="flattened full-batch gradient at the received model, floating-point parameters only (DivFL)"),
    Column(name="sketch", source="reply", shape="vector", low=-LARGEST, high=LARGEST, informed=True, probed=True,
           meaning="hash of the client's data (LSH, NCCB)"),
    Column(name="accuracy", source="server", low=0.0, high=1.0, informed=True, validated=True, per_update=True,
           meaning="accuracy of the client's new model on the server's validation set; informed: the initial model's"),
    Column(name="projection", source="server", per_update=True,
           meaning="projection of the client's gradient on the server's direction, floating-point arrays only (GPFL)"),
    Column(name="update", source="server", shape="vector", per_update=True,
           meaning="flattened update, the client's new model minus the global one, floating-point arrays only"),
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
    """Return the names of the columns that pass a test.

    >>> sorted(columns_where(lambda column: column.shape == "scalar"))
    ['global_accuracy', 'global_loss']
    """
    return frozenset(name for name, column in COLUMNS.items() if test(column))


REPORTED = columns_where(lambda column: column.reported)
"""Columns of a report, which a selector may name in ``needs``."""
INFORMED = columns_where(lambda column: column.informed)
"""Columns that ``inform`` takes."""
PROBED = columns_where(lambda column: column.probed)
"""Columns that a probe may ask for."""
SCALARS = columns_where(lambda column: column.shape == "scalar")
"""Columns with one number per round."""
VECTORS = columns_where(lambda column: column.shape == "vector")
"""Columns with a vector per client."""
FLAGS = columns_where(lambda column: column.shape == "flag")
"""Columns with a boolean per client."""
ON_VALIDATION = columns_where(lambda column: column.validated)
"""Columns that need a validation set on the server."""
PER_UPDATE = columns_where(lambda column: column.per_update)
"""Columns computed from individual updates."""
MEASURED = columns_where(lambda column: column.source == "server" and column.shape != "scalar")
"""Columns that the server measures on each usable model."""
ASKED = columns_where(lambda column: column.source == "reply" and column.probed)
"""Columns that clients report only on request: in the train config (``needs``) or by a probe."""
RECORDED = columns_where(lambda column: column.recorded)
"""Columns that the history records, under their keys."""
FROM_CLIENTS = columns_where(lambda column: column.source == "reply" or column.recorded)
"""Columns that clients report, each under a key that a deployment may rename."""
HolderType = TypeVar("HolderType", bound=type[Any])


def with_fields(kind: str, defaults: Mapping[str, object]) -> Callable[[HolderType], HolderType]:
    """Return a decorator that adds the missing fields of a table to a frozen dataclass.

    A class can thus declare the present columns with their types, and also has columns that are added to the table
    later.

    Args:
        kind: Type of the added fields, as an annotation.
        defaults: Default values, by name, of all fields that the class must have.

    >>> @with_fields("float", {"energy": 0.0, "battery": 1.0})
    ... @dataclass(frozen=True, kw_only=True)
    ... class Reported:
    ...     energy: float = 0.0
    >>> Reported(energy=2.0)
    Reported(energy=2.0, battery=1.0)
    """

    def decorate(cls: HolderType) -> HolderType:
        written = {one.name for one in fields(cls)}
        lacking = [(name, kind, field(default=value)) for name, value in defaults.items() if name not in written]
        if not lacking:
            return cls
        same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        made: Any = make_dataclass(
            cls.__name__, lacking, bases=(cls,), frozen=True, kw_only=True, eq=cls.__dataclass_params__.eq
        )
        # Keeps the name of the replaced class, because pickle looks it up by name.
        for name, value in same.items():
            setattr(made, name, value)
        return made  # type: ignore[no-any-return]

    return decorate


def check_columns(owner: str, what: str, names: object, allowed: frozenset[str]) -> frozenset[str]:
    """Return names of columns as a set; refuse names that are not in ``allowed``.

    Args:
        owner: Class that declares the names, for the message.
        what: Attribute that declares the names, such as "needs".
        names: A set, list or tuple of names.
        allowed: The known names.

    Raises:
        ParameterError: ``names`` is not a collection of names, or holds an unknown name. The message has the nearest
            known name.

    >>> sorted(check_columns("Mine", "needs", ["loss", "latency"], REPORTED))
    ['latency', 'loss']
    """
    if isinstance(names, str) or not isinstance(names, frozenset | set | tuple | list):
        raise ParameterError(
            f"{owner}.{what} must be a set of column names, got {names!r}. Write frozenset({{'latency'}}), for example"
        )
    for name in names:
        if name not in allowed:
            raise ParameterError(
                f"{owner}.{what} names {name!r}, which is not a column{did_you_mean(str(name), allowed)}. Choose from "
                f"{', '.join(sorted(allowed))}"
            )
    return frozenset(names)


def column_values(name: str, value: Any, num_rows: int) -> FloatArray:
    """Return a copy of a column's values, checked against the table.

    Args:
        name: A column of numbers or vectors.
        value: Values of shape (num_rows,), or (num_rows, d) for vectors; NaN if missing.
        num_rows: Number of clients.

    Raises:
        ParameterError: The shape is wrong, or a number is outside the column's range.

    >>> column_values("energy_score", [0.5, 2.5], 2)
    Traceback (most recent call last):
    ...
    fedsel_flwr.errors.ParameterError: energy_score must lie in [0, 1], got 2.5
    """
    row = COLUMNS[name]
    array = column(name, value, num_rows, ndim=2 if row.shape == "vector" else 1)
    if not row.admits(array):
        # The first number out of range, for the message.
        outside = next(value for value in array.flat if not row.admits(value))
        raise ParameterError(f"{name} must lie in [{row.low:g}, {row.high:g}], got {outside:g}")
    return array
