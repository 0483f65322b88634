"""Which metrics a base strategy sees where clients report different ones, and which clients it cannot do without."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import QFedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords, validate_message_reply_consistency
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st

from fedsel_flwr.strategies import MetricKeys
from fedsel_flwr.strategies.wrapping.message_records import common_metrics, with_common_metrics
from tests.strategies.either_api import Server, close, mean_of, selection
from tests.strategies.helpers import FakeProxy, model
from tests.strategies.message.helpers import RecordingBase

Extra = dict[str, Any]


def _played(
    extras: list[Extra], faults: dict[int, str] | None = None, base: Any = None, rounds: int = 1, **options: Any
) -> tuple[Server, list[Extra]]:
    """Clients that report these metrics, and some with a fault; what the base was given in the last round."""
    server = Server("message", selection("message", len(extras), base or RecordingBase(), **options))
    for k, extra in enumerate(extras):
        server.connect(FakeProxy(f"{k}", k, number=k, extra=extra, fault=(faults or {}).get(k)))
    server.play(rounds)
    usable = server.given()[-1][0] if isinstance(server.strategy.base, RecordingBase) else []
    return server, [metrics for _, metrics in usable]


def _failed(server: Server) -> list[str]:
    return [row.client_id for row in server.strategy.history.clients if not row.completed]


def _averages_of(server: Server, clients: range) -> None:
    """Nobody else's model is lost, after one round."""
    assert _failed(server) == [str(k) for k in range(len(server.proxies)) if k not in clients]
    close(server.models[0], mean_of(clients, model(), 1))


@pytest.mark.parametrize("extras", [[{}, {"f1": 0.5}], [{"f1": 0.5}, {}], [{"acc": 0.5}, {"f1": 0.5}]])
def test_of_two_clients_with_different_metrics_both_are_averaged(extras: list[Extra]) -> None:
    server, given = _played(extras)
    assert server.strategy.history.problem_counts() == {}
    _averages_of(server, range(2))
    assert [sorted(metrics) for metrics in given] == [["client_id", "energy_j", "latency_s", "num-examples"]] * 2


@pytest.mark.parametrize(("new", "stays"), [(4, False), (5, True)])
def test_a_rolling_upgrade_loses_no_model(new: int, stays: bool) -> None:
    """Eight clients, some already of a version that reports one metric more; it stays once more than half have it."""
    server, given = _played([{"acc": 0.5, "f1": 0.25, "per_class": [1.0, 2.0]}] * new + [{"acc": 0.5}] * (8 - new))
    _averages_of(server, range(8))
    assert all(metrics["acc"] == 0.5 for metrics in given)
    assert [metrics.get("f1") == 0.25 for metrics in given] == [stays and k < new for k in range(8)]
    assert all(({"f1", "per_class"} <= metrics.keys()) == stays for metrics in given)
    if stays:
        assert all(math.isnan(metrics["f1"]) and np.isnan(metrics["per_class"]).all() for metrics in given[new:])
        assert [len(metrics["per_class"]) for metrics in given] == [2] * 8


@pytest.mark.parametrize("odd", [[0.1, 0.2, 0.3], [], 0.1])
def test_a_list_of_another_length_is_another_kind(odd: Any) -> None:
    """Flower's average of a list metric adds element by element."""
    server, given = _played([{"acc": [0.1, 0.2]}] * 3 + [{"acc": odd}])
    _averages_of(server, range(4))
    assert [metrics["acc"] for metrics in given[:3]] == [[0.1, 0.2]] * 3
    assert np.isnan(given[3]["acc"]).tolist() == [True, True]


def test_a_users_own_function_may_take_lists_of_any_length() -> None:
    def longest(records: list[Any], weighted_by_key: str) -> MetricRecord:
        return MetricRecord({"longest": max(len(record["metrics"]["acc"]) for record in records)})

    extras: list[Extra] = [{"acc": [0.1] * n} for n in (1, 2, 2)] + [{"acc": 0.5}]
    server, given = _played(extras, base=RecordingBase(train_metrics_aggr_fn=longest))
    assert [len(metrics["acc"]) for metrics in given] == [1, 2, 2, 2]
    assert np.isnan(given[3]["acc"]).all()
    assert dict(server.result.train_metrics_clientapp[1]) == {"longest": 2}


def test_the_unusable_have_no_say() -> None:
    """Most replies lack "acc", but those are unusable: of the usable ones most have it."""
    server, given = _played([{"acc": 0.5}, {"acc": 0.5}, {}, {}, {}], {3: "nan", 4: "nan"})
    assert _failed(server) == ["3", "4"]
    assert [repr(metrics["acc"]) for metrics in given] == ["0.5", "0.5", "nan"]


@pytest.mark.parametrize("fault", ["latency-missing", "latency-text"])
def test_a_key_of_ours_that_one_client_lacks_is_dropped_for_all(fault: str) -> None:
    server, given = _played([{"acc": 0.5}] * 3, {2: fault})
    assert _failed(server) == []
    assert [sorted(metrics) for metrics in given] == [["acc", "client_id", "energy_j", "num-examples"]] * 3


def test_a_metric_called_like_ours_is_ours_only_under_our_names() -> None:
    """Key names are parameters: "latency_s" is then somebody else's, and stays where most report it."""
    keys = MetricKeys(latency="seconds")
    server, given = _played([{"seconds": 1.5}, {"seconds": 1.5}, {}], {2: "latency-missing"}, metric_keys=keys)
    assert [row.latency_s for row in server.strategy.history.clients] == [1.5, 1.5, 9.0]
    assert [repr(metrics["latency_s"]) for metrics in given] == ["0.5", "0.625", "nan"]
    assert not [metrics for metrics in given if "seconds" in metrics]


@pytest.mark.parametrize("fault", ["energy-text", "energy-negative"])
def test_a_weight_of_our_name_is_the_bases(fault: str) -> None:
    """Without it a client has failed, though without joules it would not have."""
    server, given = _played([{}] * 3, {2: fault}, RecordingBase(weighted_by_key="energy_j"))
    assert _failed(server) == ["2"]
    assert [metrics["energy_j"] for metrics in given] == [0.25] * 2
    close(server.models[0], mean_of((0, 1), model(), 1, [1, 1]))


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), -1.0, [0.5]])
def test_a_loss_of_which_qfedavg_would_make_a_model_of_nan_is_a_failure(loss: Any) -> None:
    extras: list[Extra] = [{"train_loss": 0.5}] * 2 + [{} if loss is None else {"train_loss": loss}]
    base = QFedAvg(client_learning_rate=0.1, q=0.1, fraction_evaluate=0.0)
    server, _ = _played(extras, base=base, rounds=2)
    assert _failed(server) == ["2", "2"]
    assert server.strategy.history.problem_counts()["metrics"] == 2
    assert [row.train_loss for row in server.strategy.history.clients[:2]] == [0.5] * 2  # what the base reads stays
    assert "train_loss" in server.strategy.history.clients[2].problem
    assert all(np.isfinite(array).all() for arrays in server.models for array in arrays)


def test_a_loss_that_nobody_reads_costs_nobody_his_model() -> None:
    server, given = _played([{"train_loss": float("nan")}, {"train_loss": 0.5}, {"train_loss": 0.25}])
    assert _failed(server) == []
    assert ["train_loss" in metrics for metrics in given] == [False] * 3


VALUES = st.one_of(
    st.integers(-5, 5),
    st.floats(allow_nan=True),
    st.lists(st.floats(-9, 9), max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
)
RECORDS = st.lists(
    st.dictionaries(st.sampled_from(["acc", "f1", "latency_s", "per_class"]), VALUES), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given_by(records=RECORDS, lengths=st.booleans())
def test_whatever_is_reported_flowers_checks_pass_and_nothing_is_made_up(records: list[Extra], lengths: bool) -> None:
    kept = common_metrics(records, {"latency_s"}, lengths=lengths)
    alike = [with_common_metrics(record, kept, lengths=lengths) for record in records]
    contents = [RecordDict({"metrics": MetricRecord({**dict(one), "num-examples": 3})}) for one in alike]
    validate_message_reply_consistency(contents, "num-examples", check_arrayrecord=False)
    if lengths:
        aggregate_metricrecords(contents, "num-examples")
    for record, one in zip(records, alike, strict=True):
        for key, value in one.items():
            assert repr(value) == repr(record.get(key)) or np.isnan(value).all()
    for key in ("acc", "latency_s"):
        numbers = sum(isinstance(record.get(key), int | float) for record in records)
        if key == "acc" and 2 * numbers > len(records):
            assert [isinstance(one[key], int | float) for one in alike] == [True] * len(records)
        if key == "latency_s" and 0 < numbers < len(records):
            assert key not in kept
