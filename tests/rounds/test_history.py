"""The virtual clock, the joules and what a run's history holds, with numbers worked out by hand."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy
from tests.strategies.helpers import FakeProxy, Federation, fedavg, fleet

NaN = float("nan")


def _of_all(proxies: list[FakeProxy], rounds: int = 3, **base: Any) -> History:
    """The history of rounds in which everybody trains."""
    selector = Random(clients_per_round=len(proxies), seed=0)
    strategy = SelectionStrategy(selector, fedavg(**base), max_latency=10.0, min_available=1)
    Federation(strategy, proxies).play(rounds)
    return strategy.history


def test_seconds_and_joules_accumulate() -> None:
    costs = {3: (0.5, 2.0), 1: (3.0, 0.25), 4: (4.0, 0.125), 0: (1.0, 0.5), 2: (2.0, 1.0)}
    rounds = _of_all([FakeProxy(f"n{9 - k}", k, number=k, latency=s, energy=j) for k, (s, j) in costs.items()]).rounds
    assert [r.round_s for r in rounds] == [4.0, 4.0, 4.0]
    assert [r.simulated_s for r in rounds] == [4.0, 8.0, 12.0]
    assert [r.energy_j for r in rounds] == [3.875] * 3
    assert [r.total_energy_j for r in rounds] == [3.875, 7.75, 11.625]
    assert [(r.num_available, r.num_selected, r.num_completed) for r in rounds] == [(5, 5, 5)] * 3
    assert all(math.isnan(r.accuracy) and math.isnan(r.loss) for r in rounds)


@pytest.mark.parametrize("lost", [{"latency": 99.0}, {"fault": "raises"}])
def test_the_round_time_is_capped_and_a_failed_client_takes_the_whole_time(lost: dict[str, Any]) -> None:
    history = _of_all([*fleet(2, prefix="a", latency=1.0), FakeProxy("x", "z", **lost)], 2)
    assert [(r.round_s, r.simulated_s) for r in history.rounds] == [(10.0, 10.0), (10.0, 20.0)]


def test_client_records_hold_what_the_clients_said_and_nan_for_the_rest() -> None:
    parts = {"download_s": 0.125, "compute_s": 0.5, "upload_s": 0.375, "train_loss": -1.5}
    told = FakeProxy("n", 7, number=2, latency=1.0, energy=0.75, extra=parts)
    history = _of_all([told, FakeProxy("m", 8, number=3, latency=2.0), FakeProxy("x", 9, fault="raises")], 2)
    first, silent, failed, *later = history.clients
    assert replace(first, energy_score=0.0, first_s=0.0) == ClientRecord(
        energy_score=0.0, first_s=0.0, round=1, client_id="7", client=0, completed=True, problem="", latency_s=1.0,
        energy_j=0.75, **parts, num_examples=16,
    )  # fmt: skip
    assert (failed.client_id, failed.completed, failed.latency_s, failed.num_examples) == ("9", False, 10.0, 0)
    assert failed.problem.startswith("exception: TypeError: the battery")
    unknown = [first.energy_score, failed.energy_j, *(getattr(row, name) for row in (silent, failed) for name in parts)]
    assert np.isnan(unknown).all()
    assert [r.round for r in later] == [2, 2, 2]


def test_a_history_with_nan_is_equal_to_itself_and_to_a_copy() -> None:
    history = _of_all([FakeProxy("n", 7, number=2, latency=1.0), FakeProxy("x", 9, fault="raises")], 1)
    copy = pickle.loads(pickle.dumps(history))
    assert np.isnan(copy.clients[-1].energy_j)
    assert copy.__eq__(copy)
    assert copy == history
    assert copy != _of_all([FakeProxy("n", 7, number=3, latency=1.0)], 1)
    assert copy != 3


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (0.5, 0.5), (1, 1.0), (np.float64(0.5), 0.5), (np.float32(0.5), 0.5), ("good", NaN), (True, NaN),
        (10**400, NaN), (None, NaN),
    ],
)  # fmt: skip
def test_any_kind_of_number_serves_as_accuracy(accuracy: Any, expected: float) -> None:
    """Only round 2 is evaluated; None: there is a loss alone."""
    said = {} if accuracy is None else {"accuracy": accuracy}
    evaluate_fn = lambda r, arrays, config: (np.float32(0.25), said) if r == 2 else None  # noqa: E731
    rounds = _of_all(fleet(5), evaluate_fn=evaluate_fn).rounds
    np.testing.assert_array_equal([r.loss for r in rounds], [NaN, 0.25, NaN])
    np.testing.assert_array_equal([r.accuracy for r in rounds], [NaN, expected, NaN])


def test_counts_by_row_and_by_kind() -> None:
    history = _of_all([*fleet(2), FakeProxy("x", 2, fault="latency-text"), FakeProxy("y", 3, fault="nan")])
    assert history.selection_counts(6).tolist() == [3, 3, 3, 3, 0, 0]
    assert history.selection_counts(6).dtype == np.int64
    assert dict(history.problem_counts()) == {"latency": 3, "arrays": 3}
    empty = History()
    assert (empty.rounds, empty.clients, empty.problem_counts()) == ([], [], {})
    assert empty.selection_counts(3).tolist() == [0, 0, 0]


def _record(energy_j: float, **more: Any) -> ClientRecord:
    values = {
        "round": 1, "client_id": "0", "client": 0, "completed": True, "problem": "", "latency_s": 1.0,
        "download_s": 0.0, "compute_s": 0.0, "upload_s": 0.0, "train_loss": 0.0, "num_examples": 1, **more,
    }  # fmt: skip
    return ClientRecord(energy_j=energy_j, **values)


@pytest.mark.parametrize(
    ("rounds", "energies", "totals"),
    [
        ([[NaN, NaN], [NaN]], [NaN, NaN], [NaN, NaN]),  # nobody measures any
        ([[0.0], [0.0]], [0.0, 0.0], [0.0, 0.0]),  # somebody measured that it was none
        ([[NaN], [2.0, NaN], [NaN], [1.0]], [NaN, 2.0, NaN, 1.0], [NaN, 2.0, 2.0, 3.0]),
        ([[], [NaN], [1.0]], [0.0, NaN, 1.0], [NaN, NaN, 1.0]),  # nobody took part in round 1
    ],
)
def test_joules_that_nobody_measured_are_nan(rounds: Any, energies: list[float], totals: list[float]) -> None:
    history = History()
    for number, joules in enumerate(rounds, start=1):
        history.append(round=number, num_available=3, round_s=1.0, clients=[_record(one) for one in joules])
    np.testing.assert_array_equal([record.energy_j for record in history.rounds], energies)
    np.testing.assert_array_equal([record.total_energy_j for record in history.rounds], totals)


@pytest.mark.parametrize(("probe", "energy"), [(0.5, 2.5), (NaN, 2.0)])
def test_a_probe_costs_seconds_and_the_joules_that_somebody_measured(probe: float, energy: float) -> None:
    history, rows = History(), [_record(2.0), _record(NaN, kept=False)]
    history.append(round=1, num_available=2, round_s=1.0, clients=rows, probe_s=0.25, probe_j=probe)
    (record,) = history.rounds
    assert (record.energy_j, record.round_s, record.num_completed, record.num_kept) == (energy, 1.25, 2, 1)
    loaded = History()
    loaded.load_state_dict(history.state_dict())
    assert repr(loaded) == repr(history)
