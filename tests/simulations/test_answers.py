"""What a selector needs of the clients, from the scenario's clients to the selector and the history, in both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.selectors import Probe, RoundReport, Selector
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import in_process

OVERRIDES = {"data.local_test_fraction": 0.25, "partition.kind": "dirichlet", "rounds": 2, "wireless.channels": 1}
COLUMNS = ("loss", "rms_loss", "local_accuracy", "gradient")


class Curious(Selector):
    """Reads everything that clients can answer, and keeps the reports."""

    name = "curious"
    needs = frozenset(COLUMNS)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reports: list[RoundReport] = []

    def _select(self, available: IntArray) -> IntArray:
        return available[: self.clients_per_round]

    def _observe(self, report: RoundReport) -> None:
        self.reports.append(report)


def reports_of(api: str) -> tuple[list[RoundReport], Any]:
    selector = Curious(clients_per_round=3, seed=1)
    result = simulate(load_scenario("smoke", OVERRIDES | {"api": api}), selector=selector)
    return selector.reports, result


def test_the_selector_reads_what_the_clients_answered_and_it_was_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)
    (first, second), result = reports_of("legacy")
    scenario = load_scenario("smoke", OVERRIDES)
    world = World(scenario)
    set_arrays(world.model, list(world.initial_arrays()))
    for row in range(3):  # of the first round, at the first model
        client = world.client(row)
        said = answer(world.model, COLUMNS, client._train, client._test)
        for column in COLUMNS[:3]:
            assert getattr(first, column)[row] == said[column]
        assert first.gradient is not None
        np.testing.assert_array_equal(first.gradient[row], np.frombuffer(said["gradient"], dtype=np.float32))
        assert np.isfinite(first.gradient[row]).all()
        assert client._train[1].size > client._test[1].size > 0
    assert not np.array_equal(first.loss, second.loss)
    for record in result.history.clients:  # four passes, a third of training each; a gradient beside the update
        delays = world.system.draw(int(record.client_id), record.round)
        assert record.compute_s == pytest.approx(delays.compute_s * (1 + 4 / 3), rel=1e-12)
        assert record.upload_s == 2 * delays.upload_s
        assert (record.completed, record.problem) == (True, "")
    others, other = reports_of("message")
    for ours, theirs in zip((first, second), others, strict=True):
        for column in COLUMNS:
            np.testing.assert_allclose(getattr(ours, column), getattr(theirs, column), rtol=1e-5, atol=1e-7)
    assert [(r.client_id, r.latency_s, r.energy_j) for r in other.history.clients] == [
        (r.client_id, r.latency_s, r.energy_j) for r in result.history.clients
    ]


class Asking(Selector):
    """Asks the first two clients about everything before it chooses, and keeps the answers."""

    name = "asking"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers: list[dict[str, Any]] = []

    def _probe(self, available: IntArray) -> Probe:
        return Probe(clients=available[:2], columns=COLUMNS)

    def _select(self, available: IntArray) -> IntArray:
        return available[-1:]

    def _inform(self, clients: IntArray, columns: Mapping[str, Any]) -> None:
        if "gradient" in columns:
            assert clients.tolist() == [0, 1]
            self.answers.append({name: np.array(values) for name, values in columns.items()})


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_a_probe_brings_every_column_and_is_charged(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)
    scenario = load_scenario("smoke", OVERRIDES | {"api": api})
    selector = Asking(clients_per_round=1, seed=1)
    result = simulate(scenario, selector=selector)
    assert len(selector.answers) == 2
    world = World(scenario)
    set_arrays(world.model, list(world.initial_arrays()))
    for row in range(2):
        client = world.client(row)
        said = answer(world.model, COLUMNS, client._train, client._test)
        for column in COLUMNS[:3]:
            assert selector.answers[0][column][row] == said[column]
        np.testing.assert_array_equal(
            selector.answers[0]["gradient"][row], np.frombuffer(said["gradient"], dtype=np.float32)
        )
    for record in result.history.rounds:  # one channel: the two answer one after the other, each by four thirds
        draws = [world.system.draw(k, record.round) for k in range(2)]
        seconds = [d.download_s + d.compute_s * 4 / 3 + d.upload_s for d in draws]
        joules = [world.system.energy_j(d, d.compute_s * 4 / 3) for d in draws]
        assert record.probe_s == pytest.approx(sum(seconds), rel=1e-9)
        assert record.probe_j == pytest.approx(sum(joules), rel=1e-9)
