"""Bases whose models are boosted trees: what counts as usable, and that a run that learns nothing says so."""

from __future__ import annotations

import json
import logging
from typing import Any

import flwr.server.strategy as legacy
import flwr.serverapp.strategy as message
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from fedsel_flwr.strategies.wrapping import bases
from tests.strategies.both_ways import Course, play_legacy, play_messages
from tests.strategies.helpers import OK, FakeProxy
from tests.strategies.message.helpers import FakeNode, node_id
from tests.strategies.scripted import Spy, two_examples
from tests.strategies.trees import TreeNode, TreeProxy, as_record, booster, grown

pytestmark = pytest.mark.timeout(30)
APIS = pytest.mark.parametrize("api", ["legacy", "message"])


class EmptyProxy(TreeProxy):
    """Answers with no trees at all."""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return FitRes(OK, Parameters([], ""), 10, {"latency_s": 1.0})


def _other_name(node: FakeNode, sent: Message, content: RecordDict) -> RecordDict:
    content["arrays"] = ArrayRecord({"trees": Array(np.zeros(3, dtype=np.uint8))})
    return content


def _garbage(node: FakeNode, sent: Message, content: RecordDict) -> RecordDict:
    content["arrays"] = ArrayRecord({"0": Array(dtype="uint8", shape=(3,), stype="numpy.ndarray", data=b"garbage")})
    return content


def _legacy(empty: int, rounds: int = 3, selector: Selector | None = None, **options: Any) -> tuple[Any, Course]:
    """Three clients, of whom the last ``empty`` answer with nothing."""
    base = legacy.FedXgbBagging(initial_parameters=Parameters([], ""), fraction_evaluate=0.0)
    strategy = LegacyStrategy(selector or Random(clients_per_round=3, seed=0), base, max_latency=9.0, **options)
    proxies = [(EmptyProxy if k >= 3 - empty else TreeProxy)(f"node-{k}", k, number=k) for k in range(3)]
    return strategy, play_legacy(strategy, proxies, Course(), rounds)


def _messages(
    broken: int, rounds: int = 3, selector: Selector | None = None, fault: Any = _other_name, **options: Any
) -> tuple[Any, Course]:
    """Three nodes, of whom the last ``broken`` answer with an array of another name."""
    base = message.FedXgbBagging(fraction_evaluate=0.0)
    strategy = MessageStrategy(selector or Random(clients_per_round=3, seed=0), base, max_latency=9.0, **options)
    nodes: dict[int, FakeNode] = {
        node_id(k): TreeNode(FakeProxy(str(k), k, number=k), extra={}, fault=fault if k >= 3 - broken else None)
        for k in range(3)
    }
    return strategy, play_messages(strategy, nodes, Course(), as_record(b""), rounds)


def test_an_answer_without_trees_is_a_failure_and_the_others_are_bagged() -> None:
    strategy, course = _legacy(1)
    assert grown(course.models[-1][0]) == [[0.5 * k, -0.25 * n] for n in (1, 2, 3) for k in (0, 1)]
    assert [row.problem for row in strategy.history.clients] == ["", "", "arrays: none in the reply"] * 3


@pytest.mark.parametrize(
    ("fault", "said"), [(_other_name, "arrays: expected the names ['0'], got ['trees']"), (_garbage, "arrays: cannot")]
)
def test_an_answer_that_cannot_be_bagged_is_a_failure_and_the_others_are_bagged(fault: Any, said: str) -> None:
    """Left in, either of them ends the run."""
    strategy, course = _messages(1, fault=fault)
    assert grown(course.models[-1][0]) == [[0.5 * k, -0.25 * n] for n in (1, 2, 3) for k in (0, 1)]
    problems = [row.problem for row in strategy.history.clients]
    assert problems[:2] == ["", ""]
    assert problems[2].startswith(said)


def _changed(**changes: Any) -> bytes:
    """A booster with parts of its model replaced."""
    document = json.loads(booster(2, 1))
    document["learner"]["gradient_booster"]["model"] |= changes
    return json.dumps(document).encode()


HOSTILE = {
    "empty": b"", "garbage": b"\xff\x00", "text": b'"x"', "nothing": b"{}",
    "no number": _changed(gbtree_model_param={"num_trees": "many", "num_parallel_tree": "1"}),
    "too many": _changed(gbtree_model_param={"num_trees": "1", "num_parallel_tree": "9"}),
    "none": _changed(trees=[]), "no list": _changed(trees={}), "no tree": _changed(trees=[5]),
    "no pointer": _changed(iteration_indptr=[]), "text for pointers": _changed(iteration_indptr=["x"]),
    "no info": _changed(tree_info=None),
}  # fmt: skip


class HostileProxy(TreeProxy):
    """Sends what bagging cannot read."""

    sent = b""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return FitRes(OK, Parameters([self.sent], ""), 10, {"latency_s": 1.0})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", sorted(HOSTILE))
@APIS
def test_trees_that_cannot_be_bagged_are_a_failure_and_do_not_end_the_run(api: str, kind: str, first: bool) -> None:
    """Whether they would become the model itself, or be added to one."""
    bad = 0 if first else 2
    options: dict[str, Any] = {"max_latency": 9.0}
    if api == "legacy":
        HostileProxy.sent = HOSTILE[kind]
        start = legacy.FedXgbBagging(initial_parameters=Parameters([], ""), fraction_evaluate=0.0)
        strategy: Any = LegacyStrategy(Random(clients_per_round=3, seed=0), start, **options)
        proxies = [(HostileProxy if k == bad else TreeProxy)(f"node-{k}", k, number=k) for k in range(3)]
        course = play_legacy(strategy, proxies, Course(), 2)
    else:

        def sends(node: FakeNode, sent: Message, content: RecordDict) -> RecordDict:
            content["arrays"] = as_record(HOSTILE[kind])
            return content

        base = message.FedXgbBagging(fraction_evaluate=0.0)
        strategy = MessageStrategy(Random(clients_per_round=3, seed=0), base, **options)
        nodes: dict[int, FakeNode] = {
            node_id(k): TreeNode(FakeProxy(str(k), k, number=k), extra={}, fault=sends if k == bad else None)
            for k in range(3)
        }
        course = play_messages(strategy, nodes, Course(), as_record(b""), 2)
    assert grown(course.models[-1][0]) == [[0.5 * k, -0.25 * n] for n in (1, 2) for k in range(3) if k != bad]
    assert strategy.history.problem_counts() == {"trees": 2}


@APIS
def test_several_rounds_in_which_nobody_was_usable_are_an_error_in_the_log(
    api: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = _legacy if api == "legacy" else _messages
    with caplog.at_level(logging.ERROR, logger="fedsel_flwr"):
        run(3, rounds=2)
        assert not caplog.records
        run(3, rounds=4)
        run(2, rounds=4)
    why = "arrays: none in the reply" if api == "legacy" else "arrays: expected the names ['0'], got ['trees']"
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(",")[0] for text in said] == [
        f"no update could be used in rounds {n} to {n + 2}" for n in (1, 2)
    ]
    assert all(text.endswith(f"the model does not change; most often: {why}") for text in said)


@APIS
@pytest.mark.parametrize("reads", ["update", "accuracy", ""])
def test_what_works_on_the_numbers_of_a_model_is_refused(api: str, reads: str) -> None:
    """Whether a selector reads them or, without one that does, the averaging scheme mixes them."""
    run = _legacy if api == "legacy" else _messages
    nothing = two_examples(lambda arrays, inputs: np.zeros((len(inputs), 2)))
    options: Any = {"averaging": "fedpdp"}
    if reads:
        options = {"selector": Spy(reads), "validation": nothing, "min_available": 3}
    with pytest.raises(RunError, match="the global model cannot be decoded into NumPy arrays"):
        run(0, rounds=1, **options)


@APIS
def test_bases_whose_models_grow_are_known_inside_their_wrappers_too(api: str) -> None:
    module: Any = legacy if api == "legacy" else message
    start = {"initial_parameters": Parameters([], "")} if api == "legacy" else {}
    trees = module.FedXgbBagging(**start)
    assert not bases.compares_models(trees)
    assert not bases.compares_models(module.DifferentialPrivacyServerSideFixedClipping(trees, 0.0, 1.0, 3))
    assert bases.compares_models(module.FedAvg(**start))
