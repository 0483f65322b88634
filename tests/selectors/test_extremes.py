"""Numbers at the ends of what a column may hold leave every selector's state finite, and its choices right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundReport, names
from fedsel_flwr.selectors.columns import COLUMNS, FLAGS, SCALARS, VECTORS
from fedsel_flwr.testing.random_rounds import nonfinite_key
from tests.golden.make_traces import selector_under_trace

CLIENTS, TINY = 7, 5e-324


def _values(name: str, count: int, turn: int) -> Any:
    """The ends of a column's range, the smallest numbers there are, and both zeros, in turn."""
    row = COLUMNS[name]
    ends = [max(row.low, -1e100), min(row.high, 1e100), TINY, -0.0, 0.0, 1.0]  # of endless ranges: what updates hold
    numbers = np.array([ends[(k + turn) % len(ends)] for k in range(4 * count)])
    return numbers.reshape(count, 4) if name in VECTORS else numbers[:count]


def _report(selector: Any, chosen: Any, turn: int) -> RoundReport:
    columns: dict[str, Any] = {}
    for name in sorted(selector.needs - {"latency"}):
        if name in SCALARS:
            columns[name] = [1.0, TINY, -0.0, 1.0][turn % 4] if name == "global_accuracy" else [1e6, TINY][turn % 2]
        elif name in FLAGS:
            columns[name] = np.arange(len(chosen)) % 2 == turn % 2
        else:
            columns[name] = _values(name, len(chosen), turn)
    return RoundReport(
        clients=chosen, completed=np.ones(len(chosen), dtype=bool), latency=_values("latency", len(chosen), turn),
        **columns,
    )  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_numbers_at_the_ends_of_their_ranges_leave_the_state_finite(name: str) -> None:
    selector, everybody = selector_under_trace(name), np.arange(CLIENTS)
    selector.inform(everybody, **{key: _values(key, CLIENTS, 0) for key in ("num_examples", "energy_score")})
    for turn in range(30):
        request = selector.probe(everybody)
        if request is not None and len(request.clients):
            asked = {key: _values(key, len(request.clients), turn) for key in request.columns}
            selector.inform(request.clients, **asked)
        chosen = selector.select(everybody)
        assert 0 < len(chosen) <= CLIENTS
        selector.observe(_report(selector, chosen, turn))
        assert not nonfinite_key(selector), (turn, nonfinite_key(selector))


@pytest.mark.parametrize("name", sorted(key for key, row in COLUMNS.items() if row.informed))
def test_numbers_beyond_their_range_are_refused_before_anybody_learns_of_them(name: str) -> None:
    from fedsel_flwr.errors import ParameterError

    value = np.full((1, 2) if name in VECTORS else 1, 1e300)
    with pytest.raises(ParameterError, match=f"^{name} must lie in"):
        selector_under_trace("random").inform(np.array([0]), **{name: value})
