"""Replies that are not shaped like the global model: what a base of its own aggregation gets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg as MessageFedAvg

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.testing.in_process import play_round, record_of
from tests.strategies.either_api import RECORDING, Server, bagging, base_of, private, selection
from tests.strategies.helpers import FakeProxy
from tests.strategies.message.helpers import RecordingBase

Arrays = list[np.ndarray]
MODEL = [np.zeros((2, 3), dtype=np.float32), np.zeros(2, dtype=np.float32)]
EXAMPLES = 10
VALIDATION = Validation(lambda arrays, inputs: np.zeros((2, 2)), None, np.array([0, 1]))


class _Own:
    """Keeps what it is given, and moves the model by 1 for each reply, whatever the replies hold."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)  # type: ignore[call-arg]
        self.given: list[list[Arrays]] = []
        self.failures: list[int] = []
        self.metrics: list[list[dict[str, Any]]] = []

    def step(self, replies: list[Arrays], metrics: list[dict[str, Any]], failures: int) -> Arrays:
        self.given.append(replies)
        self.metrics.append(metrics)
        self.failures.append(failures)
        return [np.full_like(array, sum(map(len, self.given))) for array in MODEL]


class LegacyOwn(_Own, LegacyFedAvg):
    """In the legacy API."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        replies = [parameters_to_ndarrays(res.parameters) for _, res in results]
        metrics = [{**res.metrics, "num-examples": res.num_examples} for _, res in results]
        return ndarrays_to_parameters(self.step(replies, metrics, len(failures))), {}


class MessageOwn(_Own, MessageFedAvg):
    """In the Message API."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        messages = list(replies)
        contents = [message.content for message in messages if message.has_content()]
        arrays = [[a.numpy() for record in one.array_records.values() for a in record.values()] for one in contents]
        metrics = [{k: v for record in one.metric_records.values() for k, v in record.items()} for one in contents]
        failures = sum(message.has_error() for message in messages)
        return record_of(self.step(arrays, metrics, failures)), MetricRecord({})


def own(api: str) -> Any:
    """A base that brings its own aggregation."""
    return LegacyOwn() if api == "legacy" else MessageOwn()


CRASHED = Mock(side_effect=RuntimeError("the battery is empty"))
"""A client that fails."""
Layout = Callable[[Arrays], Arrays]
LAYOUTS: dict[str, Layout] = {
    "behind-the-weights": lambda m: [*m, *(np.ones_like(a) for a in m)],
    "kept-at-home": lambda m: m[:1],
    "flat": lambda m: [np.concatenate([a.ravel() for a in m])],
    "packed": lambda m: [np.arange(5, dtype=np.uint8), np.ones(1)],
    "bytes": lambda m: [np.frombuffer(b"packed", np.uint8)],
    "half": lambda m: [a.astype(np.float16) for a in m],
    "quantized": lambda m: [a.astype(np.int8) for a in m],
}


def client(layout: Layout, number: int = 0, examples: Any = EXAMPLES, **metrics: Any) -> Any:
    """A client that sends a layout of the model plus its number."""

    def train(model: Arrays, config: dict[str, Any]) -> Any:
        moved = [array + np.float32(number) for array in model]
        return layout(moved), examples, {"latency_s": 0.5, **metrics}

    return train


def as_sent(model: Arrays) -> Arrays:
    """The structure of the model."""
    return list(model)


def fleet_of(*layouts: Layout, **options: Any) -> list[Any]:
    """A client for each layout."""
    return [client(layout, k, **options) for k, layout in enumerate(layouts)]


def wrapped(api: str, base: Any, clients: int, **options: Any) -> Any:
    """A strategy that selects all clients."""
    return selection(api, create("round-robin", clients_per_round=clients), base, cooldown=False, **options)


def rows(strategy: Any, number: int) -> dict[str, str]:
    """Client -> problem, of the clients that failed in a round."""
    return {r.client_id: r.problem for r in strategy.history.clients if r.round == number and not r.completed}


def same(one: Sequence[Arrays], other: Sequence[Arrays]) -> bool:
    """Whether models are equal bit for bit, in type and shape too."""
    plain = [[[(a.dtype, a.shape, a.tobytes()) for a in arrays] for arrays in models] for models in (one, other)]
    return plain[0] == plain[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_base_gets_what_its_clients_send(api: str, name: str) -> None:
    base, clients = own(api), fleet_of(*[LAYOUTS[name]] * 3)
    strategy, model = wrapped(api, base, 3), MODEL
    for number in (1, 2):
        sent = [one(model, {})[0] for one in clients]
        model = play_round(strategy, clients, model, number)
        assert same(base.given[-1], sent)
    assert [float(array.max()) for array in model] == [6.0, 6.0]
    assert strategy.history.problem_counts() == {}


def test_a_single_deviating_client_fails_by_name_and_is_a_failure_of_the_base(api: str, caplog: Any) -> None:
    base = own(api)
    strategy = wrapped(api, base, 5)
    usual, other = LAYOUTS["behind-the-weights"], LAYOUTS["kept-at-home"]
    for number in (1, 2):
        play_round(strategy, fleet_of(usual, usual, other, usual, usual), MODEL, number)
        assert [*rows(strategy, number)] == ["2"]
        problem = rows(strategy, number)["2"]
        assert problem.startswith("arrays: expected ")
        assert "float32 (2,) as in the first round, got none" in problem
        assert f"round {number}, client 2: {problem}" in caplog.messages
    assert [len(one) for one in base.given] == [4, 4]
    assert base.failures == [1, 1]


FLAT, PACKED, BEHIND, FEWER = (LAYOUTS[name] for name in ("flat", "packed", "behind-the-weights", "kept-at-home"))
COURSES: dict[str, tuple[list[list[Layout | None]], list[str], list[int], str]] = {
    "later rounds are held against the first, even if all clients deviate, or send what they received": (
        [[FLAT] * 3, [as_sent] * 3, [PACKED] * 3, [FLAT] * 3], ["", "012", "012", ""], [3, 3], "as in the first round",
    ),
    "numbers that are not finite are refused in any structure": (
        [[BEHIND, lambda m: [*m, np.full((2, 3), np.inf, np.float32), m[1]], BEHIND, BEHIND]], ["1"], [3],
        "arrays: not finite at 2",
    ),
    "if a reply has what was sent, no other structure is fixed": (
        [[as_sent, BEHIND, BEHIND, BEHIND], [BEHIND] * 4], ["123", "0123"], [1], "arrays: expected 2, got 4",
    ),
    "rounds without any reply, or with fewer than min_completed, fix nothing": (
        [[None] * 4, [PACKED, PACKED, None, None], [FLAT, FLAT, FLAT, PACKED], [PACKED, PACKED, PACKED, FLAT]],
        ["0123", "23", "3", "012"], [3], "as in the first round",
    ),
    "FedAvg's run goes on with one broken client, several that differ in different ways, and all of a later round": (
        [[FEWER, None, None], [FEWER, lambda m: [m[0].T, m[1]], None], [as_sent, FLAT, FLAT], [FLAT] * 3],
        ["012", "012", "12", "012"], [], "arrays: expected 2, got 1",
    ),
}  # fmt: skip
"""What each client sends in each round (None: it crashes), who fails, replies that a base got, and one problem."""


@pytest.mark.parametrize("course", COURSES)
def test_courses_of_structures(api: str, course: str) -> None:
    sent, failed, given, said = COURSES[course]
    base = base_of(api) if course.startswith("FedAvg") else own(api)
    completed = {"min_completed": 3} if "min_completed" in course else {}
    strategy = wrapped(api, base, len(sent[0]), busy_timeout=0.0, **completed)
    problems = []
    for number, layouts in enumerate(sent, start=1):
        clients = [CRASHED if one is None else client(one, k) for k, one in enumerate(layouts)]
        play_round(strategy, clients, MODEL, number)
        problems.append(rows(strategy, number))
    assert ["".join(one) for one in problems] == failed
    assert any(said in problem for one in problems for problem in one.values())
    assert [len(one) for one in getattr(base, "given", [])] == given


def test_a_base_that_only_writes_a_file_is_as_protected_as_flowers_own(api: str) -> None:
    """Faults of the others, the order of arrays and their types: as with FedAvg itself."""
    faults: dict[str, Layout] = {
        "nan": lambda m: [m[0] * np.nan, m[1]],
        "large": lambda m: [m[0] + 1e30, m[1]],
        "shape": lambda m: [m[0].T, m[1]],
        "fewer": lambda m: m[:1],
        "more": lambda m: [*m, m[0]],
        "text": lambda m: [np.full(a.shape, "x") for a in m],
        "double": lambda m: [a.astype(np.float64) for a in m],
        "int": lambda m: [a.astype(np.int64) for a in m],
    }
    for name, fault in faults.items():
        ended = []
        for base in (base_of(api), RECORDING[api]()):
            strategy = wrapped(api, base, 3)
            model = play_round(strategy, fleet_of(as_sent, as_sent, fault), MODEL)
            ended.append((rows(strategy, 1), [(a.dtype, a.tobytes()) for a in model]))
        assert ended[0] == ended[1], name
        assert len(ended[1][0]) == (name not in ("double", "int"))


def test_a_resumed_run_keeps_the_structure(api: str) -> None:
    usual, odd = LAYOUTS["flat"], LAYOUTS["packed"]
    first = wrapped(api, own(api), 3)
    play_round(first, fleet_of(usual, usual, usual), MODEL, 1)
    state = first.state_dict()
    ended = []
    for strategy in (first, wrapped(api, own(api), 3)):
        strategy.load_state_dict(state)
        play_round(strategy, fleet_of(odd, odd, usual), MODEL, 2)
        ended.append(rows(strategy, 2))
    assert ended[0] == ended[1]
    assert [*ended[0]] == ["0", "1"]
    assert repr(first.state_dict()) == repr(strategy.state_dict())


@pytest.mark.parametrize(
    ("base", "options", "cure"),
    [
        ("FedAvg", {}, "If the base aggregates such updates, set compare_models=False"),
        ("own", {"compare_models": True}, "If the base aggregates such updates, set compare_models=False"),
        ("own", {"max_update_norm": 9.0}, "max_update_norm needs"),
        ("private", {}, "the base's differential privacy needs"),
        ("own", {"validation": VALIDATION, "missing_columns": "random"}, "nccb (accuracy) needs"),
    ],
)
def test_a_run_whose_updates_all_differ_alike_ends(api: str, base: str, options: dict[str, Any], cure: str) -> None:
    one = {"FedAvg": base_of(api), "own": own(api), "private": private(api, own(api))}[base]
    name = "nccb" if "validation" in options else "round-robin"
    strategy = selection(api, create(name, clients_per_round=3), one, cooldown=False, **options)
    with pytest.raises(RunError) as raised:
        play_round(strategy, fleet_of(*[LAYOUTS["behind-the-weights"]] * 3), MODEL)
    text = str(raised.value)
    assert text.startswith("round 1: no update has the structure of the global model, all for one reason: ")
    assert "arrays: expected 2, got 4. " in text
    assert cure in text
    if cure.endswith("needs"):
        assert f"{cure} updates like that model. Do without it, and set compare_models=False" in text


@pytest.mark.parametrize("sizes", [[5], [5, 5, 6, 6], [5, 6, 7]], ids=["one", "half", "none"])
def test_a_structure_needs_more_than_half_of_two_replies(api: str, sizes: list[int]) -> None:
    strategy = wrapped(api, own(api), len(sizes), min_available=1)
    clients = [client(lambda m, size=size: [np.zeros(size, dtype=np.uint8)]) for size in sizes]  # type: ignore[misc]
    with pytest.raises(RunError, match="Without compare_models, more than half of at least two updates must be alike"):
        play_round(strategy, clients, MODEL)


def test_the_option_follows_the_base_of_every_layer(api: str) -> None:
    class OwnWrapper(type(own(api))):  # type: ignore[misc]
        """Wraps another strategy, as differential privacy does."""

        def __init__(self, strategy: Any) -> None:
            super().__init__()
            self.strategy = strategy

    class OwnPrivacy(type(private(api, own(api)))):  # type: ignore[misc]
        """Differential privacy with an aggregation of its own."""

        def aggregate_fit(self, *args: Any) -> Any:
            raise NotImplementedError

        aggregate_train = aggregate_fit

    patched = base_of(api)
    patched.aggregate_fit = patched.aggregate_train = lambda *args: None
    privacy = OwnPrivacy(own(api), 0.0, 1.0, 3)
    for base, compared in (
        (base_of(api), True), (own(api), False), (RECORDING[api](), False), (patched, False),
        (private(api, own(api)), True), (privacy, True),
        (OwnWrapper(own(api)), False), (OwnWrapper(base_of(api)), True), (OwnWrapper(private(api, own(api))), True),
    ):  # fmt: skip
        assert selection(api, 3, base).core.settings.compare_models is compared, base
    assert selection(api, 3, own(api), compare_models=True).core.settings.compare_models is True
    assert selection(api, 3, base_of(api), compare_models=False).core.settings.compare_models is False


def test_without_the_comparison_flowers_own_average_gets_what_it_gets_alone(api: str) -> None:
    """The personal layers stay at home, and FedAvg averages the others."""
    strategy = wrapped(api, base_of(api), 3, compare_models=False)
    model = play_round(strategy, fleet_of(*[LAYOUTS["kept-at-home"]] * 3), MODEL)
    assert same([model], [[np.full((2, 3), 1.0, dtype=np.float32)]])


@pytest.mark.parametrize(
    ("options", "reader"),
    [
        ({"selector": "nccb", "validation": VALIDATION}, r"nccb \(accuracy\)"),
        ({"filter": Filter(), "validation": VALIDATION}, "FedCA's filter"),
        ({"max_update_norm": 1.0}, "max_update_norm"),
        ({"averaging": "fedpdp"}, "averaging='fedpdp'"),
        ({"private": True}, "differential privacy"),
    ],
)
def test_what_reads_updates_needs_the_comparison(api: str, options: dict[str, Any], reader: str) -> None:
    options = dict(options)
    selector = create("nccb", clients_per_round=3) if options.pop("selector", None) else 3
    base = private(api, own(api)) if options.pop("private", None) else own(api)
    assert selection(api, selector, base, **options).core.settings.compare_models is True
    with pytest.raises(ParameterError, match=f"compare_models=False .* but .*{reader}.* compares each update"):
        selection(api, selector, base, compare_models=False, **options)


def test_trees_grow_and_cannot_be_compared(api: str) -> None:
    for value in ("auto", False):
        assert selection(api, 3, bagging(api), compare_models=value).core.settings.checks_structure is False
    with pytest.raises(ParameterError, match="compare_models=True and max_update_norm need models of one shape"):
        selection(api, 3, bagging(api), compare_models=True)


class Plain(Random):
    """Its paper averages without weights."""

    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}


def test_a_papers_averaging_replaces_the_weights_where_all_clients_send_one(api: str) -> None:
    """They are no reason to refuse other structures; else the averaging is left to the base."""
    without, flat = client(as_sent, examples=0), fleet_of(*[LAYOUTS["flat"]] * 3)
    for clients, weights in (
        (flat, [1, 1, 1]), ([without] * 3, [0, 0, 0]), ([without, without, client(as_sent)], [0, 0, EXAMPLES]),
    ):  # fmt: skip
        base = own(api)
        strategy = selection(api, Plain(clients_per_round=3, seed=0), base)
        play_round(strategy, clients, MODEL)
        assert [row.completed for row in strategy.history.clients] == [True] * 3
        assert [one["num-examples"] for one in base.metrics[0]] == weights


def test_a_weight_is_required_if_the_base_or_most_clients_use_it(api: str) -> None:
    without = client(as_sent, examples=0)
    for base, clients, failed in (
        (own(api), [without] * 3, []),
        (own(api), [without, without, client(as_sent), client(as_sent)], []),
        (own(api), [without, client(as_sent), client(as_sent)], ["0"]),
        (own(api), [client(as_sent, examples=-5), client(as_sent, examples=-5), client(as_sent)], ["0", "1"]),
        (base_of(api), [without, without, client(as_sent)], ["0", "1"]),
    ):
        strategy = wrapped(api, base, len(clients), busy_timeout=0.0)
        play_round(strategy, clients, MODEL)
        assert [*rows(strategy, 1)] == failed
        assert all(problem.startswith("num_examples: ") for problem in rows(strategy, 1).values())


def _records(change: Callable[[ArrayRecord], dict[str, Any]]) -> Any:
    """A node whose reply has other records."""

    def fault(node: Any, message: Message, content: RecordDict) -> RecordDict:
        return RecordDict(change(content.array_records["arrays"]))

    return fault


def _renamed(arrays: ArrayRecord) -> ArrayRecord:
    return ArrayRecord({f"client.{name}": array for name, array in reversed(list(arrays.items()))})


RECORDS: dict[str, Callable[[ArrayRecord], dict[str, Any]]] = {
    "control-variates": lambda a: {"arrays": a, "gradient": _renamed(a), "metrics": MetricRecord({"num-examples": 5})},
    "renamed": lambda a: {"update": _renamed(a), "metrics": MetricRecord({"num-examples": 5, "acc": 0.5})},
    "two-metrics": lambda a: {"a": MetricRecord({"num-examples": 5}), "arrays": a, "b": MetricRecord({"acc": [0.5]})},
    "no-metrics": lambda a: {"arrays": a, "note": ConfigRecord({"hash": b"abc"})},
    "no-arrays": lambda a: {"packed": ConfigRecord({"update": b"abc"}), "metrics": MetricRecord({"acc": 0.5})},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_base_of_the_message_api_gets_all_records_as_they_came(name: str) -> None:
    got: list[Any] = []

    class Reads(RecordingBase):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            got.extend(one.content for one in replies if one.has_content())
            return None, None

    strategy = wrapped("message", Reads(), 4)
    server = Server("message", strategy)
    for k in range(4):
        change = RECORDS[name] if k < 3 else lambda a: {"arrays": a, "more": a, "metrics": MetricRecord({"x": 1.0})}
        server.connect(FakeProxy(f"{k}", k, number=k), fault=_records(change))
    server.play(2)
    assert len(got) == 6
    for content in got:
        arrays = content.array_records.get("arrays", content.array_records.get("update", ArrayRecord()))
        original = ArrayRecord({key.removeprefix("client."): a for key, a in reversed(list(arrays.items()))})
        expected = RecordDict(RECORDS[name](original if name == "renamed" else arrays))
        assert {key: dict(record) for key, record in content.items()} == {k: dict(v) for k, v in expected.items()}
        assert [*map(list, content.array_records.values())] == [*map(list, expected.array_records.values())]
    assert [[*rows(strategy, number)] for number in (1, 2)] == [["3"], ["3"]]
