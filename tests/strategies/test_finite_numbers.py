"""What Flower cannot average or clip, in both APIs: no finite number or norm, no weight; evaluations of any records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import EvaluateIns, EvaluateRes

from fedsel_flwr.testing.in_process import play_round
from tests.strategies.either_api import BOTH, RECORDING, Server, base_of, private, selection
from tests.strategies.helpers import OK, FakeProxy, fleet
from tests.strategies.message.helpers import RecordingBase


@BOTH
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


class Evaluator(FakeProxy):
    """A client whose evaluation has a given number of examples."""

    examples = 0

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        return EvaluateRes(OK, 0.25, self.examples, {"acc": 0.5})


def _evaluating(api: str, cls: Any) -> Any:
    """A base of this class whose clients evaluate, and that keeps the number of the replies."""

    class Evaluating(cls):  # type: ignore[misc]
        evaluated: ClassVar[list[tuple[int, int]]] = []

        def aggregate_evaluate(self, server_round: int, results: Any, failures: Any = ()) -> Any:
            usable = [one for one in results if api == "legacy" or one.has_content()]
            self.evaluated.append((len(usable), len(failures) + len(results) - len(usable)))
            return (0.25, {}) if api == "legacy" else MetricRecord({"loss": 0.25})

    base = Evaluating()
    base.fraction_evaluate = 1.0
    base.evaluated.clear()
    return base


@BOTH
@pytest.mark.parametrize(("examples", "counts"), [([0, 0, 0], (3, 0)), ([7, 7, 0], (2, 1)), ([0, 0, 7], (3, 0))])
def test_an_evaluation_without_a_weight_passes_under_a_base_that_does_not_read_it(
    api: str, examples: list[int], counts: tuple[int, int]
) -> None:
    base, clients = _evaluating(api, RECORDING[api]), [Evaluator(f"n{k}", k, number=k) for k in range(3)]
    for one, number in zip(clients, examples, strict=True):
        one.examples = number
    Server(api, selection(api, 3, base), clients).play(1)
    assert base.evaluated == [counts]


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
            server.connect(
                FakeProxy(f"{k}", k, number=k), evaluate_fault=records(names if k else ("z", "y", "x"), arrays)
            )
        server.play(1)
        assert seen == [sorted([*names, *(["confusion"] if arrays else []), "note"])] * 3
    # Flower's own evaluation reads one record, with a weight.
    server = Server("message", selection("message", 4, base_of("message", fraction_evaluate=1.0)))
    for k in range(4):
        server.connect(FakeProxy(f"{k}", k, number=k), **({"evaluate_fault": records(("a", "b"))} if k else {}))
    assert server.play(1).result.evaluate_metrics_clientapp[1] == {"loss": pytest.approx(0.1)}


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_without_a_finite_number_is_left_out_for_all_clients(api: str, value: float, caplog: Any) -> None:
    """In this round only, and said with client and key; the update is used."""
    base = RECORDING[api]()
    strategy = selection(api, 3, base)
    proxies = fleet(3)
    for proxy in proxies:
        proxy.extra = {"acc": 0.5, "auc": 0.5, "f1": 0.25}
    server = Server(api, strategy, proxies)
    for bad in (value, 0.75):
        proxies[1].extra |= {"acc": bad, "auc": bad}
        server.play(1)
    first, second = ([metrics for _, metrics in results] for results, _ in server.given())
    assert [({"acc", "auc"} & one.keys(), one["f1"]) for one in first] == [(set(), 0.25)] * 3
    assert sorted(one["acc"] for one in second) == [0.5, 0.5, 0.75]
    told = [f"metrics: {key!r} is {value!r}, so no client's value counts in this round" for key in ("acc", "auc")]
    assert [text for text in caplog.messages if "metrics: " in text] == [f"round 1, client 1: {one}" for one in told]
    assert [(row.round, row.problem) for row in strategy.history.clients if row.problem] == [(1, "; ".join(told))]
    assert all(row.completed for row in strategy.history.clients)


def test_a_list_with_nan_is_left_out_too(caplog: pytest.LogCaptureFixture) -> None:
    proxies = fleet(2)
    server = Server(
        "message", selection("message", 2, RECORDING["message"]()), extra={"per_class": [0.5, float("nan")]}
    )
    for proxy in proxies:
        server.connect(proxy)
    server.play(1)
    ((results, _),) = server.given()
    assert not any("per_class" in metrics for _, metrics in results)
    assert len([text for text in caplog.messages if "'per_class' is [0.5, nan]" in text]) == 2
