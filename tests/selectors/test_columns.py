"""The table of columns against what reads it: reports, `inform` and the declarations of selectors."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random, RoundReport, columns, names
from fedsel_flwr.selectors.columns import COLUMNS, INFORMED, REPORTED, column_values
from fedsel_flwr.testing.random_rounds import nonfinite_key
from tests.golden.make_traces import selector_under_trace

RANGED = sorted(name for name in REPORTED | INFORMED if COLUMNS[name].shape == "number" and COLUMNS[name].high < np.inf)


def report(**optional: Any) -> RoundReport:
    """Two clients, the second one failed."""
    return RoundReport(clients=[0, 1], completed=[True, False], **{"latency": [1.0, 5.0]} | optional)


def test_a_report_has_a_field_for_each_reported_column() -> None:
    assert {field.name for field in fields(RoundReport)} == REPORTED | {"clients", "completed"}


@pytest.mark.parametrize("name", RANGED)
def test_a_number_out_of_its_range_is_refused_by_report_and_inform(name: str) -> None:
    """Below the lower end, above the upper one; a failed row is looked at too; NaN and the ends pass."""
    low, high = COLUMNS[name].low, COLUMNS[name].high
    for bad in (1.5 * low - 0.5, 1.5 * high):
        said = rf"^{name} must lie in .*, got {re.escape(f'{bad:g}')}"
        for row in ([bad, 1.0], [1.0, bad]) * (name in REPORTED):
            with pytest.raises(ParameterError, match=said):
                report(**{name: row})
        if name in INFORMED:
            with pytest.raises(ParameterError, match=said):
                Random(clients_per_round=1).inform(np.array([0]), **{name: np.array([bad])})
    for good in ([low, high], [1.0, np.nan] if name != "latency" else [1.0, 1.0]) * (name in REPORTED):
        np.testing.assert_array_equal(getattr(report(**{name: good}), name), good)


@pytest.mark.parametrize("value", [np.inf, np.nan, "1", True])
def test_latencies_and_a_rounds_numbers_are_finite(value: Any) -> None:
    """The range of a round's number is not looked at: the server measures it itself."""
    with pytest.raises(ParameterError, match="global_accuracy must be a finite number"):
        report(global_accuracy=value)
    assert report(global_loss=-3.0, global_accuracy=2.0).global_loss == -3.0
    if isinstance(value, float):
        with pytest.raises(ParameterError, match="latency must be finite"):
            report(latency=[1.0, value])


def test_values_are_copied_and_rounding_is_no_offence() -> None:
    given = np.array([np.nextafter(1.0, 2.0), -1e-17])
    before, held = given.tolist(), column_values("accuracy", given, 2)
    given[:] = 0.0
    assert held.tolist() == before
    with pytest.raises(ParameterError, match=r"accuracy must lie in \[0, 1\], got 1.00001"):
        column_values("accuracy", [1.0, 1.00001], 2)


@pytest.mark.parametrize("name", sorted(columns.VECTORS))
def test_vectors_have_a_row_for_each_client(name: str) -> None:
    held = getattr(report(**{name: [[1.0, 2.0, 3.0], [np.nan] * 3]}), name)
    assert held.shape == (2, 3)
    assert not held.flags.writeable
    for wrong in ([1.0, 2.0], [[1.0, 2.0]]):
        with pytest.raises(ParameterError, match=f"{name} must have one row per client"):
            report(**{name: wrong})
    for wrong, said in ((np.ones(2), "one row per client"), (np.full((2, 2), 1e300), "lie in")) * (name in INFORMED):
        with pytest.raises(ParameterError, match=f"^{name} must (have )?{said}"):
            Random(clients_per_round=1).inform(np.arange(2), **{name: wrong})


TINY = 5e-324


def _ends(name: str, count: int, turn: int) -> Any:
    """The ends of a column's range (1e100 for endless ones), the smallest numbers and both zeros, in turn."""
    row = COLUMNS[name]
    ends = [max(row.low, -1e100), min(row.high, 1e100), TINY, -0.0, 0.0, 1.0]
    numbers = np.array([ends[(k + turn) % len(ends)] for k in range(4 * count)])
    return numbers.reshape(count, 4) if name in columns.VECTORS else numbers[:count]


@pytest.mark.parametrize("name", names())
def test_numbers_at_the_ends_of_their_ranges_leave_the_state_finite(name: str) -> None:
    """The same rounds show what the probes ask for."""
    selector, everybody, columns_asked = selector_under_trace(name), np.arange(7), set[str]()
    selector.inform(everybody, **{key: _ends(key, 7, 0) for key in ("num_examples", "energy_score")})
    for turn in range(30):
        if (request := selector.probe(everybody)) is not None:
            columns_asked |= set(request.columns)
            selector.inform(request.clients, **{key: _ends(key, len(request.clients), turn) for key in request.columns})
        chosen = selector.select(everybody)
        assert 0 < len(chosen) <= 7
        told: dict[str, Any] = {key: _ends(key, len(chosen), turn) for key in selector.needs | {"latency"}}
        told |= {key: np.arange(len(chosen)) % 2 == turn % 2 for key in selector.needs & columns.FLAGS}
        scalars = {"global_accuracy": [1.0, TINY, -0.0, 1.0][turn % 4], "global_loss": [1e6, TINY][turn % 2]}
        told |= {key: value for key, value in scalars.items() if key in selector.needs}
        selector.observe(RoundReport(clients=chosen, completed=np.ones(len(chosen), dtype=bool), **told))
        assert not nonfinite_key(selector), (turn, nonfinite_key(selector))
    assert columns_asked == selector.asks, f"declare asks = frozenset({sorted(columns_asked)})"
