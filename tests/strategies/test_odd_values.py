"""What Flower cannot average, clip or print, in both APIs, and metrics that only some clients report."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import Code, EvaluateRes, Status
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import QFedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords, validate_message_reply_consistency
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st

from fedsel_flwr.rounds.untrusted import MAX_METRICS
from fedsel_flwr.strategies import MetricKeys
from fedsel_flwr.strategies.wrapping.message_records import common_metrics, with_common_metrics
from fedsel_flwr.strategies.wrapping.message_transport import sanitized
from fedsel_flwr.testing.in_process import play_round
from tests.strategies import helpers
from tests.strategies.either_api import RECORDING, Server, base_of, close, mean_of, private, selection
from tests.strategies.helpers import OK, FakeProxy, fleet, model
from tests.strategies.message.helpers import FakeNode, RecordingBase, reports

NASTY = "../../etc/cron.d/x\x1b[2J\n\x1b[32mINFO\x1b[0m :      round 9, all clients: fine\r\u2028\x00\u202e"
NOT_FINITE = (math.nan, math.inf, -math.inf)
EVALUATIONS: list[tuple[str, Any, str]] = [
    ("num_examples", 0, "num_examples"),
    ("num_examples", -16, "num_examples"),
    ("num_examples", NASTY, "num_examples"),
    ("metrics", dict.fromkeys(range(MAX_METRICS + 1), 0), "metrics"),
    *[("loss", value, f"loss: expected finite numbers, got {value}") for value in NOT_FINITE],
    *[("metrics", {"acc": value}, f"acc: expected finite numbers, got {value}") for value in NOT_FINITE],
]
"""Part of an evaluation, its value, and what is said of it."""


def _harmless(lines: list[str]) -> bool:
    return all(part.isprintable() and (i == 0 or part.startswith("    "))
               for line in lines for i, part in enumerate(line.split("\n")))  # fmt: skip


@pytest.mark.parametrize(("part", "value", "said"), EVALUATIONS, ids=range(len(EVALUATIONS)))
def test_an_odd_evaluation_does_not_end_a_run_of_the_legacy_api(part: str, value: Any, said: str, caplog: Any) -> None:
    """Left in, no examples at all end it by a division by zero, and minus sixteen take another's vote."""

    class Odd(FakeProxy):
        def evaluate(self, *args: Any, **kwargs: Any) -> EvaluateRes:
            result = super().evaluate(*args, **kwargs)
            result.metrics = {"acc": 0.5}
            if self.cid == "b":
                setattr(result, part, value)
            return result

    def mean(metrics: list[Any]) -> dict[str, Any]:
        return {"acc": sum(own["acc"] for _, own in metrics) / len(metrics)}

    odd = Odd("b", "b", number=2)
    strategy = selection("legacy", 2, base_of("legacy", fraction_evaluate=1.0, evaluate_metrics_aggregation_fn=mean))
    federation = Server("legacy", strategy, [Odd("a", "a", number=2), odd]).play(1).federation
    result = federation.server.evaluate_round(server_round=1, timeout=None)
    assert result is not None
    assert (result[0], result[1]) == (pytest.approx(0.3), {"acc": 0.5})  # the other's
    assert strategy.aggregate_evaluate(1, [(odd, odd.evaluate(None, None, 1))], []) == (None, {})
    lines = [line for line in caplog.messages if line.startswith(f"round 1, client b: evaluation: {said}")]
    assert len(lines) == 3
    assert _harmless(lines)


def _again(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
    return RecordDict({"metrics": content["metrics"], "again": MetricRecord({"num-examples": 1, "loss": 1.0})})


MESSAGE_EVALUATIONS: dict[str, tuple[Any, str]] = {
    "extra": (reports({"x": 1.0}), "counts"),
    "ours": (reports({"f1": 0.5, "latency_s": 1.0}), "counts"),
    "lacks": (reports({}, "loss"), "nan"),
    "list": (reports({"loss": [1.0]}), "nan"),
    "weight": (reports({"num-examples": [1, 2]}), "left out"),
    "no weight": (reports({}, "num-examples", "loss"), "left out"),
    "two": (_again, "left out"),
    "none": (lambda node, message, content: RecordDict({}), "left out"),
    "error": (lambda node, message, content: Error(0, "I break"), "left out"),
    **{f"{key} {value}": (reports({key: value}), "left out") for key in ("loss", "acc") for value in NOT_FINITE},
}


@pytest.mark.parametrize("honest", [1, 3])
@pytest.mark.parametrize("fault", MESSAGE_EVALUATIONS)
def test_an_odd_evaluation_does_not_end_a_run_of_the_message_api(fault: str, honest: int, caplog: Any) -> None:
    change, becomes = MESSAGE_EVALUATIONS[fault]
    strategy = selection("message", 2, base_of("message", fraction_evaluate=1.0), min_available=honest + 1)
    server = Server("message", strategy, fleet(honest))
    server.connect(FakeProxy("odd", honest, number=honest), evaluate_fault=change)
    server.play(2)
    key, _, value = fault.partition(" ")
    told = f"client {honest}: evaluation: {key}: expected finite numbers, got {value}"
    assert (told in caplog.text) == (value in map(str, NOT_FINITE))
    counted = range(honest + (becomes == "counts"))
    mean = sum((10 + 3 * k) * 0.1 * (k + 1) for k in counted) / sum(10 + 3 * k for k in counted)
    for server_round in (1, 2):
        found = server.result.evaluate_metrics_clientapp[server_round]
        if honest == 1 and becomes == "nan":
            assert math.isnan(found.get("loss", math.nan))
        else:
            assert found == {"loss": pytest.approx(math.nan if becomes == "nan" else mean, nan_ok=True)}


@pytest.mark.parametrize("way", ["raises", "refuses", "claims"])
def test_no_text_forges_a_line_of_the_legacy_api(way: str, aloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nasty(answer: Any, timeout: float | None) -> None:
        if way == "raises":
            raise RuntimeError(NASTY)
        if way == "refuses":
            answer.status = Status(Code.FIT_NOT_IMPLEMENTED, NASTY)
        else:
            answer.metrics |= {"client_id": NASTY, "latency_s": NASTY, "energy_j": NASTY}

    monkeypatch.setitem(helpers.FAULTS, "nasty", nasty)
    strategy = selection("legacy", 3)
    Server("legacy", strategy, [*fleet(2, prefix="h"), FakeProxy("n", NASTY, number=5, fault="nasty")]).play(2)
    assert strategy.roster.ids == ["h0", "h1", "n"]  # an id that cannot be printed is none
    assert strategy.history.clients[-1].problem
    assert _harmless([*aloud.messages, *[row.problem for row in strategy.history.clients]])


@pytest.mark.parametrize("traceback", [False, True])
def test_no_text_forges_a_line_of_the_message_api(traceback: bool, aloud: pytest.LogCaptureFixture) -> None:
    """Flower's own strategies write the reasons of errors into the log."""
    reason = ("Traceback (most recent call last):\n" if traceback else "") + NASTY
    error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
    server = Server("message", selection("message", 3), fleet(2, prefix="h"))
    server.connect(FakeProxy("x", NASTY, number=7), fault=lambda node, message, content: error)
    *_, node = server.grid.nodes
    with aloud.at_level(logging.INFO, logger="flwr"):
        server.play(1)
    lines = [line for line in aloud.messages if "cron.d" in line]
    assert sum("Received error in reply from node" in line for line in lines) == 1
    assert _harmless([line.lstrip("\t") for line in lines])
    problems = {row.client_id: row.problem for row in server.strategy.history.clients}
    assert problems.pop(str(node)).startswith("exception:")  # an id that cannot be printed is none
    assert problems == {"h0": "", "h1": ""}


def test_an_error_of_plain_text_stays_the_message_it_is() -> None:
    message: Any = Message.__new__(Message)
    message.__dict__.update(_error=Error(3, "the battery is empty"), _content=None)
    assert sanitized(message) is message


# ---- what cannot be averaged or clipped ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ServerSideFixed", "ServerSideAdaptive"])
@pytest.mark.parametrize("size", [0.0, 1e-30])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_update_without_a_norm_is_clipped_to_itself(api: str, kind: str, size: float, dtype: Any) -> None:
    """In float32 the square of 1e-30 is 0 too. Clipping divides by the norm."""
    steps = [size, 0.25, 0.5]
    model = [np.zeros(2, dtype), np.full((2, 2), 0.75, dtype)]
    clients = [
        lambda arrays, config, step=step: ([(a + dtype(step)).astype(dtype) for a in arrays], 10, {"latency_s": 0.5})
        for step in steps
    ]
    norm = {"clipping_norm": 9.0} if "Fixed" in kind else {"initial_clipping_norm": 9.0}
    strategy = selection(api, 3, private(api, base_of(api), kind, **norm))
    after = play_round(strategy, clients, model)
    assert [row.completed for row in strategy.history.clients] == [True] * 3
    for array, before in zip(after, model, strict=True):
        np.testing.assert_allclose(array - before, np.full(before.shape, 0.25, dtype), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("examples", "counts"), [([0, 0, 0], (3, 0)), ([7, 7, 0], (2, 1)), ([0, 0, 7], (3, 0))])
def test_an_evaluation_without_a_weight_passes_if_the_base_reads_none(api: str, examples: Any, counts: Any) -> None:
    evaluated: list[tuple[int, int]] = []

    class Evaluator(FakeProxy):
        def evaluate(self, *args: Any) -> EvaluateRes:
            return EvaluateRes(OK, 0.25, examples[self.number], {"acc": 0.5})

    class Evaluating(RECORDING[api]):  # type: ignore[misc]
        def aggregate_evaluate(self, server_round: int, results: Any, failures: Any = ()) -> Any:
            usable = [one for one in results if api == "legacy" or one.has_content()]
            evaluated.append((len(usable), len(failures) + len(results) - len(usable)))
            return (0.25, {}) if api == "legacy" else MetricRecord({"loss": 0.25})

    clients = [Evaluator(f"n{k}", k, number=k) for k in range(3)]
    Server(api, selection(api, 3, Evaluating(fraction_evaluate=1.0)), clients).play(1)
    assert evaluated == [counts]


def test_an_evaluation_may_have_any_records_if_most_have_them() -> None:
    """None, two, and arrays, which the base gets."""

    def records(names: Sequence[str], arrays: bool = False) -> Any:
        def fault(node: Any, message: Message, content: RecordDict) -> RecordDict:
            own = {name: MetricRecord({"acc": 0.5}) for name in names}
            more = {"confusion": ArrayRecord({"0": Array(np.ones(2))})} if arrays else {}
            return RecordDict({**own, **more, "note": ConfigRecord({"hash": "a"})})

        return fault

    seen: list[list[str]] = []

    class Reads(RecordingBase):
        def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
            seen.extend(sorted(one.content) for one in replies if one.has_content())
            return MetricRecord({})

    for names, arrays in (((), False), (("a", "b"), True), (("a",), True)):
        seen.clear()
        server = Server("message", selection("message", 4, Reads(fraction_evaluate=1.0)))
        for k in range(4):
            fault = records(names if k else ("z", "y", "x"), arrays)
            server.connect(FakeProxy(f"{k}", k, number=k), evaluate_fault=fault)
        server.play(1)
        assert seen == [sorted([*names, *(["confusion"] if arrays else []), "note"])] * 3
    # Flower's own evaluation reads one record, with a weight.
    server = Server("message", selection("message", 4, base_of("message", fraction_evaluate=1.0)))
    for k in range(4):
        server.connect(FakeProxy(f"{k}", k, number=k), **({"evaluate_fault": records(("a", "b"))} if k else {}))
    assert server.play(1).result.evaluate_metrics_clientapp[1] == {"loss": pytest.approx(0.1)}


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_metric_without_a_finite_number_is_left_out_for_all_clients(api: str, value: float, caplog: Any) -> None:
    """In this round only, and said with client and key; the update is used."""
    strategy, proxies = selection(api, 3, RECORDING[api]()), fleet(3, extra={"acc": 0.5, "auc": 0.5, "f1": 0.25})
    server = Server(api, strategy, proxies)
    for bad in (value, 0.75):
        proxies[1].extra = {"acc": bad, "auc": bad, "f1": 0.25}
        server.play(1)
    first, second = ([metrics for _, metrics in results] for results, _ in server.given())
    assert [({"acc", "auc"} & one.keys(), one["f1"]) for one in first] == [(set(), 0.25)] * 3
    assert sorted(one["acc"] for one in second) == [0.5, 0.5, 0.75]
    told = [f"metrics: {key!r} is {value!r}, so no client's value counts in this round" for key in ("acc", "auc")]
    assert [text for text in caplog.messages if "metrics: " in text] == [f"round 1, client 1: {one}" for one in told]
    assert [(row.round, row.problem) for row in strategy.history.clients if row.problem] == [(1, "; ".join(told))]
    assert all(row.completed for row in strategy.history.clients)


def test_a_list_with_nan_is_left_out_too(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("message", selection("message", 2, RecordingBase()), fleet(2), extra={"per_class": [0.5, math.nan]})
    ((results, _),) = server.play(1).given()
    assert not any("per_class" in metrics for _, metrics in results)
    assert len([text for text in caplog.messages if "'per_class' is [0.5, nan]" in text]) == 2


# ---- metrics that only some clients report: which of them a base sees, and which clients it cannot do without --------

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
    server, _ = _played(extras, base=QFedAvg(client_learning_rate=0.1, q=0.1, fraction_evaluate=0.0), rounds=2)
    assert _failed(server) == ["2", "2"]
    assert server.strategy.history.problem_counts()["metrics"] == 2
    assert [row.train_loss for row in server.strategy.history.clients[:2]] == [0.5] * 2  # what the base reads stays
    assert "train_loss" in server.strategy.history.clients[2].problem
    assert all(np.isfinite(array).all() for arrays in server.models for array in arrays)


def test_a_loss_that_nobody_reads_costs_nobody_his_model() -> None:
    server, given = _played([{"train_loss": float("nan")}, {"train_loss": 0.5}, {"train_loss": 0.25}])
    assert _failed(server) == []
    assert ["train_loss" in metrics for metrics in given] == [False] * 3


KEYS = st.sampled_from(["acc", "f1", "latency_s", "per_class"])
NUMBERS = st.integers(-5, 5) | st.floats()
VALUES = NUMBERS | st.lists(st.floats(-9, 9), max_size=3) | st.lists(st.integers(0, 9), max_size=3)
RECORDS = st.lists(st.dictionaries(KEYS, VALUES), min_size=1, max_size=6)


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
