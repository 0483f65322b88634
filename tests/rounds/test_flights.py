"""Buffered rounds: FedBuff's step by hand, and against a list of events that is sorted again in every step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors import Random, create
from tests.rounds.written import Written, core_of, facts, reply
from tests.strategies.scripted import Spy

NAMES = ["weight", "norm.running_var", "norm.num_batches_tracked"]


class InTurn(Spy):
    """Chooses the lowest free rows, and keeps the reports."""

    def __init__(self, clients_per_round: int, *needs: str) -> None:
        super().__init__(*needs, clients_per_round=clients_per_round)

    def _select(self, available: Any) -> Any:
        return available[: self.clients_per_round]


def model(weight: float, variance: float = 1.0, batches: int = 0) -> list[np.ndarray]:
    return [np.array([weight, -weight]), np.array([variance]), np.array(batches)]


def step(core: SelectionCore, before: list[np.ndarray], answers: dict[str, Reply], nodes: list[str]) -> list[Any]:
    """One step: the mean of the outcome's models by its weights is the new model."""
    chosen = core.choose(nodes, before, Written(facts(*nodes)))
    if core.parts.flights is not None:
        core.parts.flights.names = NAMES[: len(before)]
    outcome = core.collect({node: answers[node] for node in chosen})
    if not outcome.enough:
        core.finish()
        return before
    models, weights = outcome.models.as_list(), outcome.weights
    mean = [
        np.asarray(sum(w * one[i] for w, one in zip(weights, models, strict=True)) / weights.sum(), before[i].dtype)
        for i in range(len(before))
    ]
    core.finish(mean)
    return mean


def rows(core: SelectionCore, number: int) -> list[tuple[str, int, float]]:
    own = [row for row in core.parts.history.clients if row.round == number]
    return [(row.client_id, row.staleness, row.arrived_s) for row in own]


def test_a_step_of_fedbuff_by_hand() -> None:
    """C = 4, B = 2; the clients take 1, 2, 3 and 4 s, and move the first weight.

    Step 1: a and b arrive at 2 s, both fresh: w = (10 x 1 + 30 x 3) / 40 = 2.5. Both are sent 2.5 at 2 s.
    Step 2: a at 3 s, fresh, with 6.5; and c at 3 s, one step late, with 2 from 0: s = 1 / sqrt 2.
        w = (10 x 6.5 + 30 (2.5 + 2 s)) / 40 = 3.5 + 1.5 s. The variance is that which the clients report, 4 and 9,
        weighted (4 x 10 + 9 x 30) / 40 = 7.75, and so is the counter of batches.
    Step 3: b, sent at 2 s, and d, both at 4 s: one step and two steps late, s and s' = 1 / sqrt 3.
    """
    selector, nodes = InTurn(2, "staleness"), ["a", "b", "c", "d"]
    core = core_of(selector, concurrency=4, max_latency=9.0)
    first = {
        "a": reply(1, model(1.0), 10), "b": reply(2, model(3.0), 30), "c": reply(3, model(2.0, 9.0, 9), 30),
        "d": reply(4, model(8.0), 10),
    }  # fmt: skip
    w1 = step(core, model(0.0), first, nodes)
    assert w1[0] == pytest.approx([2.5, -2.5])
    again = {"a": reply(1, model(6.5, 4.0, 5), 10), "b": reply(2, model(4.5), 30)}
    w2 = step(core, w1, again, nodes)
    s, ss = 1 / math.sqrt(2), 1 / math.sqrt(3)
    assert w2[0] == pytest.approx([3.5 + 1.5 * s, -3.5 - 1.5 * s])
    assert w2[1:] == [pytest.approx([7.75]), 8]
    w3 = step(core, w2, {"a": reply(9.0, model(0.0)), "c": reply(9.0, model(0.0))}, nodes)
    delta = (30 * s * (4.5 - 2.5) + 10 * ss * (8.0 - 0.0)) / 40
    assert w3[0] == pytest.approx(w2[0] + np.array([delta, -delta]))
    assert [rows(core, number) for number in (1, 2, 3)] == [
        [("a", 0, 1.0), ("b", 0, 2.0)], [("a", 0, 3.0), ("c", 1, 3.0)], [("b", 1, 4.0), ("d", 2, 4.0)],
    ]  # fmt: skip
    assert [record.simulated_s for record in core.parts.history.rounds] == [2.0, 3.0, 4.0]
    assert [np.asarray(report.staleness).tolist() for report in selector.reports] == [[0, 0], [0, 1], [1, 2]]


def test_uniform_weights_are_those_of_the_paper() -> None:
    core = core_of(InTurn(2), concurrency=2, weighting="uniform")
    new = step(core, model(0.0), {"a": reply(1, model(1.0), 10), "b": reply(2, model(3.0), 30)}, ["a", "b"])
    assert new[0] == pytest.approx([2.0, -2.0])


def test_integers_that_an_average_made_floats_stay_the_clients_own() -> None:
    """After step 1 the global counter of batches is a float; b, one step late, reports 9 as an integer."""
    core, start = core_of(InTurn(1), concurrency=2, max_latency=9.0), model(0.0)
    step(core, start, {"a": reply(1, model(1.0, 1.0, 4)), "b": reply(1.5, model(1.0, 1.0, 9))}, ["a", "b"])
    averaged = [*model(1.0)[:2], np.array(4.0)]
    chosen = core.choose(["a", "b"], averaged, Written(facts("a", "b")))
    ((weight, _, batches),) = core.collect({node: reply(5.0, model(1.0)) for node in chosen}).models.as_list()
    assert float(batches) == 9.0
    assert weight == pytest.approx([1 + 1 / math.sqrt(2), -1 - 1 / math.sqrt(2)])


CODES = json.loads(Path(__file__).with_name("fedbuff_public_codes.json").read_text())


def test_public_codes_that_make_the_papers_step_agree() -> None:
    """flame's and FLSim's code, and the formula, on the same four arrivals; client 3 joins after step 1."""

    def arrays(of: Any) -> list[np.ndarray]:
        return [np.array(of[name], dtype=np.float32) for name in ("weight", "bias")]

    core, w, found = core_of(InTurn(2), concurrency=4, weighting="uniform"), arrays(CODES["w0"]), []
    for nodes in (["0", "1", "2"], ["2", "3"]):
        chosen = core.choose(nodes, w, Written(facts(*nodes)))
        replies = {}
        for node in chosen:
            one = CODES["arrivals"][int(node)]
            trained = [x + delta for x, delta in zip(w, arrays(one["delta"]), strict=True)]
            replies[node] = reply(5.0 if node == "2" else 1.0, trained, one["examples"])
        outcome = core.collect(replies)
        w = [np.mean(layers, axis=0) for layers in zip(*outcome.models.as_list(), strict=True)]
        core.finish(w)
        found.append(w)
    assert [row.staleness for row in core.parts.history.clients] == [0, 0, 1, 0]
    codes = {one["name"]: one for one in CODES["codes"] if max(one["difference"]) == 0.0}
    assert {name.split(",")[0].split()[0] for name in codes} >= {"flame", "FLSim"}
    for own in (CODES["paper"], *codes.values()):
        for ours, theirs in zip(found, (own["step_1"], own["step_2"]), strict=True):
            for mine, other in zip(ours, arrays(theirs), strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_arrivals_are_the_earliest_events(seed: int) -> None:
    """Random times, failures and numbers of clients, also fewer than C: each step takes the B earliest arrivals."""
    generator = np.random.default_rng(seed)
    m, clients = int(generator.integers(1, 4)), int(generator.integers(2, 12))
    concurrency, nodes = m * int(generator.integers(1, 4)), [f"c{k:02}" for k in range(clients)]
    core = core_of(Random(clients_per_round=m, seed=seed), concurrency=concurrency, max_latency=5.0)
    work: list[tuple[float, str, int, float]] = []  # arrival, client, step sent, its update; NaN for a failure
    w, now = 0.0, 0.0
    for number in range(1, 15):
        chosen = core.choose(nodes, [np.array([w])], Written(facts(*nodes)))
        assert len(chosen) == min(clients - len(work), concurrency - len(work)) or (concurrency - len(work)) % m
        assert not set(chosen) & {node for _, node, _, _ in work}
        replies = {}
        for node in chosen:
            seconds, update = float(generator.uniform(0.1, 4.0)), float(generator.normal())
            failed = generator.random() < 0.2
            replies[node] = Reply(error="no") if failed else reply(seconds, [np.array([w + update])])
            work.append((now + (5.0 if failed else seconds), node, number, math.nan if failed else update))
        outcome = core.collect(replies)
        work.sort(key=lambda one: one[:2])
        first, work = work[:m], work[m:]
        now = first[-1][0]
        good = [(node, number - sent, update) for _, node, sent, update in sorted(first, key=lambda one: one[1])
                if not math.isnan(update)]  # fmt: skip
        assert list(outcome.results) == sorted(node for _, node, _, _ in first)
        assert [(node, outcome.staleness[node]) for node in outcome.usable] == [(node, tau) for node, tau, _ in good]
        expected = w + sum(update / math.sqrt(1 + tau) for _, tau, update in good) / max(1, len(good))
        w = float(np.mean([one[0] for one in outcome.models.as_list()])) if good else w
        assert w == pytest.approx(expected, abs=1e-9)
        core.finish([np.array([w])] if good else None)
        assert core.parts.history.rounds[-1].simulated_s == pytest.approx(now)
    assert core.at_work == len(work)


def test_updates_beyond_the_largest_staleness_are_failures() -> None:
    core, nodes = core_of(InTurn(1), concurrency=2, max_staleness=0, max_latency=9.0), ["a", "b"]
    w = step(core, model(0.0), {"a": reply(1, model(1.0)), "b": reply(1.5, model(7.0))}, nodes)
    assert step(core, w, {"a": reply(1, model(2.0))}, nodes)[0] == pytest.approx([1.0, -1.0])
    (row,) = [row for row in core.parts.history.clients if row.round == 2]
    assert (row.client_id, row.completed, row.problem) == (
        "b", False, "stale: 1 steps, more than max_staleness = 0",
    )  # fmt: skip


def test_a_probe_delays_only_those_who_are_selected_after_it() -> None:
    """Each of the two first calls probes a client for .5 s, and it trains for 1 s: both arrive at 1.5 s.

    In the second step another probe is over at 2 s, but the other client has arrived at 1.5 s, which is its end.
    """
    core = core_of(create("power-of-choice", clients_per_round=1, candidates=1, seed=0), concurrency=2, max_latency=9.0)
    nodes = ["a", "b"]
    answers = {node: {"loss": 1.0, "num_examples": 5, "latency_s": 0.5} for node in nodes}
    transport = Written(facts(*nodes, num_examples=5), answers)
    for arrived in (1.5, 1.5):
        chosen = core.choose(nodes, model(0.0), transport)
        core.collect(dict.fromkeys(chosen, reply(1.0, model(1.0))))
        core.finish(model(1.0))
        assert [row.arrived_s for row in core.parts.history.clients][-1] == pytest.approx(arrived)
    assert [(record.round_s, record.probe_s) for record in core.parts.history.rounds] == [(1.5, 1.0), (0.0, 0.5)]


def test_a_saved_core_knows_who_is_at_work() -> None:
    def begun() -> SelectionCore:
        return core_of(InTurn(2), concurrency=4, max_latency=9.0)

    nodes, first = ["a", "b", "c", "d"], {node: reply(k + 1.0, model(k)) for k, node in enumerate("abcd")}
    core, other = begun(), begun()
    w = step(core, model(0.0), first, nodes)
    other.load_state_dict(core.state_dict())
    assert other.round == 1
    assert other.at_work == 2
    flights = other.parts.flights
    assert flights is not None
    (batch,) = flights.lost()
    assert batch.nodes == nodes
    assert batch.model[0].tolist() == [0.0, 0.0]
    flights.receive(batch, first, None)
    again = {"a": reply(9.0, model(5.0)), "b": reply(9.0, model(6.0))}
    one, two = step(core, w, again, nodes), step(other, w, again, nodes)
    assert [array.tobytes() for array in one] == [array.tobytes() for array in two]
    assert rows(core, 2) == rows(other, 2) == [("c", 1, 3.0), ("d", 1, 4.0)]
    state = core.state_dict()
    state["flights"]["batches"][0]["nodes"] = ["a"]
    with pytest.raises(StateError, match="flights: rows must be"):
        begun().load_state_dict(state)
