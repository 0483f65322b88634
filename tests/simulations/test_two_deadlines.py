"""What the two deadlines do: the table of docs/simulations.md, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import load_scenario, simulate

PAGE = Path(__file__).parents[2] / "docs" / "simulations.md"
KEYS = {"clients_per_round": 10, "rounds": 30, "seed": 1, "engine": "vectorized", "evaluation_every": 30}
ROWS: dict[str, dict[str, Any]] = {
    "neither": {},
    "`wireless.max_latency_s = 20`": {"wireless.max_latency_s": 20.0},
    "`aggregation.round_deadline_s = 20`": {"aggregation.round_deadline_s": 20.0},
    "`max_latency_s = 20`, five channels": {"wireless.max_latency_s": 20.0, "wireless.channels": 5},
    "`round_deadline_s = 20`, five channels": {"aggregation.round_deadline_s": 20.0, "wireless.channels": 5},
}


class Watching(Random):
    """At random; it keeps what it learns of clients that failed."""

    needs = frozenset({"energy"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: set[float] = set()

    def _observe(self, report: Any) -> None:
        self.seen |= set(report.latency[~report.completed].tolist())


@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_measured(name: str) -> None:
    selector = Watching(clients_per_round=10, seed=1)
    history = simulate(load_scenario("phones", KEYS | ROWS[name]), selector=selector).history
    failed = sum(not row.completed for row in history.clients)
    (learned,) = selector.seen
    last, joules = history.rounds[-1], np.nansum([row.energy_j for row in history.clients])
    assert last.total_energy_j == pytest.approx(joules)
    row = f"| {name} | {failed} of 300 | {last.simulated_s:,.0f} | {last.total_energy_j:,.0f} | {learned:.0f} s |"
    assert row in PAGE.read_text("utf-8").splitlines()
