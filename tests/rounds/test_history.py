"""The virtual clock, the joules and what a run's history holds, with numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.server.strategy import FedAvg

from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import CSUCB, RoundRecord, SelectionStrategy
from tests.strategies.helpers import FakeProxy, Federation, chosen, fedavg, fleet, initial, run_rounds

pytestmark = pytest.mark.timeout(20)
LATENCIES = [1.0, 3.0, 2.0, 0.5, 4.0]  # of the clients 0..4, all trained each round
ENERGIES = [0.5, 0.25, 1.0, 2.0, 0.125]


def _all(proxies: list[FakeProxy], rounds: int = 3, **kwargs: Any) -> SelectionStrategy:
    kwargs = {"base": fedavg(), "max_latency": 10.0, **kwargs}
    strategy = SelectionStrategy(Random(clients_per_round=len(proxies), seed=0), **kwargs)
    Federation(strategy, proxies).play(rounds)
    return strategy


def _five() -> list[FakeProxy]:
    return [FakeProxy(f"n{9 - k}", k, number=k, latency=LATENCIES[k], energy=ENERGIES[k]) for k in (3, 1, 4, 0, 2)]


def test_seconds_and_joules_accumulate() -> None:
    rounds = _all(_five()).history.rounds
    assert [r.round_s for r in rounds] == [4.0, 4.0, 4.0]
    assert [r.simulated_s for r in rounds] == [4.0, 8.0, 12.0]
    assert [r.energy_j for r in rounds] == [3.875] * 3
    assert [r.total_energy_j for r in rounds] == [3.875, 7.75, 11.625]
    assert [(r.num_available, r.num_selected, r.num_completed) for r in rounds] == [(5, 5, 5)] * 3
    assert all(math.isnan(r.accuracy) and math.isnan(r.loss) for r in rounds)


@pytest.mark.parametrize(
    ("channels", "seconds"),
    [(1, 10.5), (2, 3.0 + 2.0 + 4.0), (3, 3.0 + 4.0), (4, 3.0 + 4.0), (5, 4.0), (50, 4.0), (None, 4.0)],
)
def test_a_cohort_larger_than_the_channels_goes_in_waves(channels: int | None, seconds: float) -> None:
    assert [r.round_s for r in _all(_five(), 2, channels=channels).history.rounds] == [seconds] * 2


def test_the_round_time_is_capped_and_a_failed_client_takes_the_whole_time() -> None:
    proxies = [*fleet(2, prefix="a", latency=1.0), FakeProxy("late", "z", latency=99.0)]
    history = _all(proxies, 2).history
    assert [r.round_s for r in history.rounds] == [10.0, 10.0]
    assert history.rounds[-1].simulated_s == 20.0
    raising = [*fleet(2, prefix="a", latency=1.0), FakeProxy("x", "z", fault="raises")]
    assert _all(raising, 1).history.rounds[0].round_s == 10.0


def test_channels_default_to_the_cohort_asked_for() -> None:
    strategy = SelectionStrategy(Random(clients_per_round=2, seed=0), fedavg(), max_latency=10.0)
    assert strategy.core.settings.channels == 2


def test_client_records_hold_what_the_clients_said() -> None:
    parts = {"download_s": 0.125, "compute_s": 0.5, "upload_s": 0.375, "train_loss": -1.5}
    strategy = _all(
        [
            FakeProxy("n", 7, number=2, latency=1.0, energy=0.75, extra=parts),
            FakeProxy("m", 8, number=3, latency=2.0),
        ],
        2,
    )
    first, second, *later = strategy.history.clients
    assert math.isnan(first.energy_score)
    assert replace(first, energy_score=0.0) == ClientRecord(
        energy_score=0.0, round=1, client_id="7", client=0, completed=True, problem="", latency_s=1.0, energy_j=0.75,
        download_s=0.125, compute_s=0.5, upload_s=0.375, train_loss=-1.5, num_examples=16,
    )  # fmt: skip
    assert math.isnan(second.download_s)
    assert math.isnan(second.compute_s)
    assert math.isnan(second.upload_s)
    assert math.isnan(second.train_loss)
    assert [r.round for r in later] == [2, 2]


def test_a_failed_client_leaves_nan_where_nothing_is_known() -> None:
    rows = _all([FakeProxy("n", "n"), FakeProxy("x", "x", fault="raises")], 1).history.clients
    failed = rows[1]
    assert (failed.client_id, failed.completed, failed.latency_s, failed.num_examples) == ("x", False, 10.0, 0)
    assert failed.problem.startswith("exception: TypeError: the battery")
    for name in ("energy_j", "download_s", "compute_s", "upload_s", "train_loss"):
        assert math.isnan(getattr(failed, name))


def test_cooldown_leaves_a_failed_client_out_for_two_to_the_n_rounds() -> None:
    proxies = [FakeProxy(f"n{k}", k, fault="raises") for k in range(2)]
    strategy = SelectionStrategy(
        Random(clients_per_round=2, seed=0), fedavg(), max_latency=10.0, min_available=1, cooldown=True
    )
    seen: list[RoundRecord] = []
    strategy._on_round = seen.append
    federation = Federation(strategy, proxies).play(18)
    tries = [1, 4, 9, 18]  # out for 2, then 4, then 8 rounds
    rounds = strategy.history.rounds
    assert [r.num_selected for r in rounds] == [2 * (r in tries) for r in range(1, 19)]
    assert [r.num_available for r in rounds] == [r.num_selected for r in rounds]
    assert [r.round_s for r in rounds] == [10.0 * (r in tries) for r in range(1, 19)]
    assert rounds[-1].simulated_s == 40.0
    assert strategy.selector.round == 18
    assert [r.round for r in seen] == list(range(1, 19))
    assert federation.models == [initial().tensors] * 18


def test_a_success_ends_the_series_of_failures() -> None:
    proxy = FakeProxy("n", 0, fault="raises")
    strategy = SelectionStrategy(
        Random(clients_per_round=1, seed=0), fedavg(), max_latency=10.0, min_available=1, cooldown=True
    )
    federation = Federation(strategy, [proxy]).play(3)  # fails in round 1, is out in 2 and 3
    proxy.fault = None
    federation.play(2)
    proxy.fault = "raises"
    federation.play(4)  # fails in 6: one in a row, so out in 7 and 8 only
    assert [r.num_selected for r in strategy.history.rounds] == [1, 0, 0, 1, 1, 1, 0, 0, 1]


def test_without_cooldown_a_failed_client_stays_in() -> None:
    strategy = _all([FakeProxy(f"n{k}", k, fault="raises") for k in range(2)], 5)
    assert [r.num_selected for r in strategy.history.rounds] == [2] * 5


# ---- central evaluation -----------------------------------------------------------------------------------------


def _evaluated(server_round: int, arrays: Any, config: Any) -> Any:
    return 10.0 - server_round, {"accuracy": 0.1 * server_round, "other": "x"}


def test_evaluate_puts_loss_and_accuracy_into_the_history() -> None:
    strategy = CSUCB(clients_per_round=3, max_latency=10.0, seed=0, base=fedavg(evaluate_fn=_evaluated))
    _, flower = run_rounds(strategy, fleet(5), 4)
    assert [(r.loss, r.accuracy) for r in strategy.history.rounds] == [(10.0 - r, 0.1 * r) for r in (1, 2, 3, 4)]
    assert flower.losses_centralized == [(r, 10.0 - r) for r in range(5)]  # Flower's own history is complete
    assert flower.metrics_centralized["other"] == [(r, "x") for r in range(5)]


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        ("good", math.nan),
        (True, math.nan),
        (10**400, math.nan),
    ],
)
def test_any_kind_of_number_serves_as_accuracy(accuracy: Any, expected: float) -> None:
    base = fedavg(evaluate_fn=lambda r, arrays, config: (np.float32(0.25), {"accuracy": accuracy}))
    strategy = CSUCB(clients_per_round=2, max_latency=10.0, seed=0, base=base)
    run_rounds(strategy, fleet(2), 1)
    record = strategy.history.rounds[0]
    assert record.loss == 0.25
    assert record.accuracy == expected or (math.isnan(record.accuracy) and math.isnan(expected))


def test_a_base_without_accuracy_leaves_it_unknown() -> None:
    base = fedavg(evaluate_fn=lambda r, arrays, config: (0.5, {}) if r == 2 else None)
    strategy = CSUCB(clients_per_round=2, max_latency=10.0, seed=0, base=base)
    run_rounds(strategy, fleet(2), 3)
    losses = [r.loss for r in strategy.history.rounds]
    assert losses[1] == 0.5
    assert math.isnan(losses[0])
    assert math.isnan(losses[2])
    assert all(math.isnan(r.accuracy) for r in strategy.history.rounds)


@pytest.mark.parametrize("evaluate_fn", [None, _evaluated])
def test_on_round_is_called_once_a_round_after_the_evaluation(evaluate_fn: Any) -> None:
    seen: list[RoundRecord] = []
    strategy = CSUCB(
        clients_per_round=3, max_latency=10.0, seed=0, base=fedavg(evaluate_fn=evaluate_fn), on_round=seen.append
    )
    run_rounds(strategy, fleet(5), 4)
    assert [r.round for r in seen] == [1, 2, 3, 4]
    if evaluate_fn is not None:
        assert [r.loss for r in seen] == [9.0, 8.0, 7.0, 6.0]
        assert seen == strategy.history.rounds


def test_federated_evaluation_goes_through_the_base() -> None:
    base = FedAvg(initial_parameters=initial(), fraction_evaluate=1.0)
    strategy = CSUCB(clients_per_round=2, max_latency=10.0, seed=0, base=base)
    proxies = fleet(4)
    _, flower = run_rounds(strategy, proxies, 2)
    weights = [10 + 3 * k for k in range(4)]
    mean = sum(w * 0.1 * (k + 1) for k, w in enumerate(weights)) / sum(weights)
    assert [loss for _, loss in flower.losses_distributed] == pytest.approx([mean, mean])
    assert all(proxy.evaluations == [1, 2] for proxy in proxies)


def test_counts_by_row_and_by_kind() -> None:
    strategy = _all([*fleet(2), FakeProxy("x", 2, fault="latency-text"), FakeProxy("y", 3, fault="nan")], 3)
    counts = strategy.history.selection_counts(6)
    assert counts.tolist() == [3, 3, 3, 3, 0, 0]
    assert counts.dtype == np.int64
    assert dict(strategy.history.problem_counts()) == {"latency": 3, "arrays": 3}
    assert chosen(strategy) == [["0", "1", "2", "3"]] * 3


def test_an_empty_history() -> None:
    history = History()
    assert history.selection_counts(3).tolist() == [0, 0, 0]
    assert history.problem_counts() == {}
    assert (history.rounds, history.clients) == ([], [])


# ---- joules ----------------------------------------------------------------------------------------------------------


def _record(energy_j: float, **more: Any) -> ClientRecord:
    values = {
        "round": 1, "client_id": "0", "client": 0, "completed": True, "problem": "", "latency_s": 1.0,
        "download_s": 0.0, "compute_s": 0.0, "upload_s": 0.0, "train_loss": 0.0, "num_examples": 1, **more,
    }  # fmt: skip
    return ClientRecord(energy_j=energy_j, **values)


NaN = float("nan")


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
def test_the_joules_of_a_probe_count_where_somebody_measured_them(probe: float, energy: float) -> None:
    history = History()
    history.append(round=1, num_available=1, round_s=1.0, clients=[_record(2.0)], probe_s=0.25, probe_j=probe)
    assert history.rounds[0].energy_j == energy
    assert history.rounds[0].round_s == 1.25


def test_a_history_is_saved_and_loaded_in_full() -> None:
    history = History()
    history.append(round=1, num_available=2, round_s=1.0, clients=[_record(2.0), _record(NaN, kept=False)])
    loaded = History()
    loaded.load_state_dict(history.state_dict())
    assert repr(loaded) == repr(history)
    assert (loaded.rounds[0].num_completed, loaded.rounds[0].num_kept) == (2, 1)
