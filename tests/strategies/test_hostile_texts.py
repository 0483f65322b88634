"""What clients write reaches neither a log line nor a name unchanged; what they evaluate cannot end a run."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common import Code, EvaluateRes, Status
from flwr.common.constant import ErrorCode

from fedsel_flwr.rounds.untrusted import MAX_METRICS
from fedsel_flwr.strategies.wrapping.message_transport import sanitized
from tests.strategies import helpers
from tests.strategies.either_api import Server, base_of, selection
from tests.strategies.helpers import FakeProxy, fleet
from tests.strategies.message.faults import reports
from tests.strategies.message.helpers import FakeNode

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
def test_an_odd_evaluation_does_not_end_the_run_of_the_legacy_api(
    part: str, value: Any, said: str, caplog: Any
) -> None:
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
def test_an_odd_evaluation_does_not_end_the_run_of_the_message_api(fault: str, honest: int, caplog: Any) -> None:
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


def _raises(answer: Any, timeout: float | None) -> None:
    raise RuntimeError(NASTY)


def _refuses(answer: Any, timeout: float | None) -> None:
    answer.status = Status(Code.FIT_NOT_IMPLEMENTED, NASTY)


def _claims(answer: Any, timeout: float | None) -> None:
    answer.metrics |= {"client_id": NASTY, "latency_s": NASTY, "energy_j": NASTY}


@pytest.mark.parametrize("fault", [_raises, _refuses, _claims], ids=["raises", "refuses", "claims"])
def test_no_text_forges_a_line_of_the_legacy_api(fault: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(helpers.FAULTS, "nasty", fault)
    strategy = selection("legacy", 3)
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"):
        Server("legacy", strategy, [*fleet(2, prefix="h"), FakeProxy("n", NASTY, number=5, fault="nasty")]).play(2)
    assert strategy.roster.ids == ["h0", "h1", "n"]  # an id that cannot be printed is none
    assert strategy.history.clients[-1].problem
    assert _harmless([*caplog.messages, *[row.problem for row in strategy.history.clients]])


@pytest.mark.parametrize("traceback", [False, True])
def test_no_text_forges_a_line_of_the_message_api(traceback: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Flower's own strategies write the reasons of errors into the log."""
    reason = ("Traceback (most recent call last):\n" if traceback else "") + NASTY
    error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
    server = Server("message", selection("message", 3), fleet(2, prefix="h"))
    server.connect(FakeProxy("x", NASTY, number=7), fault=lambda node, message, content: error)
    *_, node = server.grid.nodes
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"), caplog.at_level(logging.INFO, logger="flwr"):
        server.play(1)
    lines = [line for line in caplog.messages if "cron.d" in line]
    assert sum("Received error in reply from node" in line for line in lines) == 1
    assert _harmless([line.lstrip("\t") for line in lines])
    problems = {row.client_id: row.problem for row in server.strategy.history.clients}
    assert problems.pop(str(node)).startswith("exception:")  # an id that cannot be printed is none
    assert problems == {"h0": "", "h1": ""}


def test_an_error_of_plain_text_stays_the_message_it_is() -> None:
    message: Any = Message.__new__(Message)
    message.__dict__.update(_error=Error(3, "the battery is empty"), _content=None)
    assert sanitized(message) is message
