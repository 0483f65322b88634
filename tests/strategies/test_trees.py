"""Bases whose models are boosted trees: what counts as usable, and that a run that learns nothing says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common import FitIns, FitRes, Parameters

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import Filter
from fedsel_flwr.strategies.wrapping import bases
from tests.strategies.either_api import bagging, base_of, private
from tests.strategies.foreign import world
from tests.strategies.foreign.world import Case, TreeProxy, as_record, asked, booster, grown_in, play, reply
from tests.strategies.helpers import OK, FakeProxy
from tests.strategies.scripted import Spy, two_examples

OTHER_NAME = ArrayRecord({"trees": Array(np.zeros(3, dtype=np.uint8))})
GARBAGE = ArrayRecord({"0": Array(dtype="uint8", shape=(3,), stype="numpy.ndarray", data=b"garbage")})


class Sends(TreeProxy):
    """Sends given bytes, or no trees at all."""

    sent: bytes | None = None

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return FitRes(OK, Parameters([] if self.sent is None else [self.sent], ""), 10, {"latency_s": 1.0})


def _play(
    folder: Path, api: str, bad: Any = (), rounds: int = 3, selector: Any = None, sent: Any = None, **options: Any
) -> Any:
    """Three clients, of whom the bad ones send something else: nothing, or an array of another name, if not given."""

    def proxy(k: int) -> FakeProxy:
        made = (Sends if k in bad else TreeProxy)(f"node-{k}", k, number=k)
        vars(made)["sent"] = sent
        return made

    def train(k: int, content: RecordDict) -> RecordDict:
        if k not in bad:
            return reply(k, as_record(booster(k, int(asked(content)[1]["server-round"]))))
        return reply(k, OTHER_NAME if sent is None else as_record(sent) if isinstance(sent, bytes) else sent)

    case = Case(lambda folder: bagging(api), lambda: train, proxy, lambda: as_record(b""), options=options)
    return play(api, case, folder, True, clients=3, rounds=rounds, selector=selector)


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
ANSWERS = [
    ("legacy", None, "arrays: none in the reply"),
    ("message", None, "arrays: expected the names ['0'], got ['trees']"),
    ("message", GARBAGE, "arrays: cannot"),
    *((api, sent, "trees: ") for api in ("legacy", "message") for sent in HOSTILE.values()),
]


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize(("api", "sent", "said"), ANSWERS, ids=range(len(ANSWERS)))
def test_what_cannot_be_bagged_fails_and_the_rest_is(api: str, sent: Any, said: str, bad: int, tmp_path: Path) -> None:
    """Whether it would become the model itself, or be added to one: left in, it ends the run."""
    played = _play(tmp_path, api, {bad}, 2, sent=sent)
    assert grown_in(played.outcome) == [[0.5 * k, -0.25 * n] for n in (1, 2) for k in range(3) if k != bad]
    problems = [(row.client, row.problem) for row in played.strategy.history.clients if row.problem]
    assert [client for client, _ in problems] == [bad] * 2
    assert all(problem.startswith(said) for _, problem in problems)


def test_several_rounds_without_a_usable_update_are_an_error_in_the_log(api: str, caplog: Any, tmp_path: Path) -> None:
    with caplog.at_level(logging.ERROR, logger="fedsel_flwr"):
        _play(tmp_path, api, range(3), 2)
        assert not caplog.records
        _play(tmp_path, api, range(3), 4)
        _play(tmp_path, api, (1, 2), 4)
    why = "arrays: none in the reply" if api == "legacy" else "arrays: expected the names ['0'], got ['trees']"
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(",")[0] for text in said] == [f"no update was usable in rounds {n} to {n + 2}" for n in (1, 2)]
    assert all(text.endswith(f"the model did not change. Most frequent reason: {why}") for text in said)


def test_a_model_without_numbers_is_not_probed(api: str, aloud: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Boosted trees have none before round 1, which is said once. Who is asked later has not been asked before."""
    evaluated: list[Any] = []
    monkeypatch.setattr(FakeProxy, "evaluate", lambda *given: evaluated.append(given))
    monkeypatch.setattr(world, "tested", lambda *given: evaluated.append(given))
    selector = create("active-fl", clients_per_round=2, seed=0)
    played = _play(tmp_path, api, rounds=1, selector=selector, missing_columns="random")
    assert evaluated == []
    assert [r.num_probed for r in played.strategy.history.rounds] == [0]
    said = [text for text in aloud.messages if "no numbers" in text]
    assert said == ["the global model has no numbers yet, so no client is probed"]
    assert selector.probe(np.arange(3)) is not None


@pytest.mark.parametrize("reads", ["update", "accuracy", "filter", ""])
def test_what_works_on_the_numbers_of_a_model_is_refused(api: str, reads: str, tmp_path: Path) -> None:
    """Whether a selector reads them, FedCA's filter does, or without them the averaging scheme mixes them."""
    nothing = two_examples(lambda arrays, inputs: np.zeros((len(inputs), 2)))
    options: dict[str, Any] = {"validation": nothing, "min_available": 3, "selector": Spy(reads)}
    if reads in ("filter", ""):
        options = {"validation": nothing, "filter": Filter()} if reads else {"averaging": "fedpdp"}
    with pytest.raises(RunError, match="the global model cannot be decoded into NumPy arrays"):
        _play(tmp_path, api, rounds=1, **options)


def test_bases_whose_models_grow_are_known_inside_their_wrappers_too(api: str) -> None:
    assert [bases.payload(one) for one in (bagging(api), private(api, bagging(api)))] == ["trees"] * 2
    assert bases.payload(base_of(api)) == "model"
