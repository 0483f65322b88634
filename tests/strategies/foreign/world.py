"""Strategies of strangers, played alone and wrapped, and all that came of it in one comparable form.

:func:`play` runs a base through either API. Alone, it runs as Flower runs it. Wrapped, the selector chooses. What the
nodes received, what the base returned, its attributes, its files and its lines in the log are an :class:`Outcome`.
"""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_manager import SimpleClientManager
from flwr.server.strategy import Strategy as LegacyBase
from flwr.serverapp.strategy import Strategy as MessageBase

from fedsel_flwr.selectors import RoundRobin
from tests.strategies.either_api import make
from tests.strategies.helpers import OK, Arrays, FakeProxy, model, parameters_to_ndarrays, update
from tests.strategies.message.helpers import FakeGrid, FakeNode, arrays_of, named

CLIENTS = 5
FEW = 2
ROUNDS = 6
ACCURACY = (0.1, 0.3, 0.5, 0.4, 0.35, 0.6, 0.2)
"""Accuracy of the global model before round 1 and after each round: the best of the first rounds is that of round 2."""
LOG = logging.getLogger("somebody.else")
"""Log of the strangers' strategies."""

MessageClient = Callable[[int, RecordDict], RecordDict]
"""Number of the client and content of a TRAIN message -> content of the reply."""
LegacyClient = Callable[[int, Arrays, dict[str, Any], int], tuple[list[Any], int, dict[str, Any]]]
"""Number of the client, model, config and round -> arrays, number of examples and metrics."""


def node_id(number: int) -> int:
    """Node ids in the order of the clients, so that on both clocks the order of the ids is that of the clients."""
    return 7_919_000_013 * (number + 3)


@dataclass(frozen=True)
class Case:
    """A stranger's strategy and its clients.

    Args:
        base: Builds the strategy, which may write into the folder.
        client: Builds what trains for one fleet, because clients may have a state.
        proxies: Builds a client of the legacy API whose parameters are no arrays, from its number.
        arrays: The initial model, in the Message API perhaps as the record that is sent.
        start: Further arguments of ``start`` (Message API), from the folder.
        positional: Arguments of ``start`` after grid and arrays, by position, in place of the number of rounds.
        evaluation: What a node answers to an evaluation (Message API).
        evaluates_centrally: Whether ``start`` gets an ``evaluate_fn``.
        problems: Problems that the history counts although the base learns from every reply.
        skips: Whether the base leaves out rounds, which Flower counts; else each round trains.
        options: Options of the wrapper.
    """

    base: Callable[[Path], Any]
    client: Callable[[], Any] | None = None
    proxies: Callable[[int], FakeProxy] | None = None
    arrays: Callable[[], Any] = model
    start: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    positional: tuple[Any, ...] = ()
    evaluation: MessageClient | None = None
    evaluates_centrally: bool = True
    problems: tuple[str, ...] = ()
    skips: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a run. Its parts can be compared with those of another run."""

    returned: Any = None
    raised: str = ""
    evaluated: list[Any] = field(default_factory=list)
    trained: dict[int, list[Any]] = field(default_factory=dict)
    tested: dict[int, list[Any]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)


@dataclass
class Played:
    """A finished run: its outcome, the base, the wrapper if there was one, and who trained in each batch."""

    outcome: Outcome
    base: Any
    strategy: Any
    cohorts: list[list[int]]


def play(
    api: str, case: Case, folder: Path, wrap: bool, clock: str = "virtual", clients: int = CLIENTS,
    cohort: int | None = None, schedule: Sequence[list[int]] | None = None, rounds: int = ROUNDS, selector: Any = None,
) -> Played:  # fmt: skip
    """Play a case.

    Args:
        api: "legacy" or "message".
        case: The strategy and its clients.
        folder: An existing folder, for the files of the base.
        wrap: Whether a selector chooses.
        clock: The wrapper's clock. Alone, it only says whether clients report a latency.
        clients: Number of connected clients.
        cohort: Clients that the selector chooses in a round; None chooses all.
        schedule: Clients that the base sees while it configures each batch of trainings; for a base that runs alone.
        rounds: Number of rounds.
        selector: The selector, if it is not to choose the clients in turn.
    """
    base = case.base(folder)
    strategy = base
    if wrap:
        options = {"clock": clock, "wait_timeout": 2.0, **case.options}
        strategy = make(api, selector or RoundRobin(clients_per_round=cohort or clients), base, **options)
    outcome = Outcome()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the noise of Flower's wrappers comes from it)
    run = _play_messages if api == "message" else _play_legacy
    with _logged(outcome.log):
        cohorts = run(strategy, case, folder, outcome, clock, clients, schedule, rounds)
    outcome.state = state_of(base)
    outcome.files = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.*"))}
    return Played(outcome, base, strategy if wrap else None, cohorts)


@contextmanager
def _logged(lines: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)


def state_of(base: Any) -> dict[str, Any]:
    """All attributes of a strategy, those in slots too, without functions."""
    slots = [name for cls in type(base).__mro__ for name in getattr(cls, "__slots__", ()) if name != "__dict__"]
    own = {name: getattr(base, name) for name in slots if hasattr(base, name)} | vars(base)
    return {name: plain(value) for name, value in own.items() if not callable(value)}


class StopTraining(Exception):
    """Ends a run, because its strategy says so."""


def plain(value: Any) -> Any:
    """A value as numbers, texts and bytes."""
    if isinstance(value, MessageBase | LegacyBase):
        return state_of(value)
    if isinstance(value, ArrayRecord):
        return {name: (array.dtype, tuple(array.shape), array.data) for name, array in value.items()}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Parameters):
        arrays = parameters_to_ndarrays(value) if value.tensor_type == "numpy.ndarray" else value.tensors
        return [plain(array) for array in arrays]
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    return value.name if isinstance(value, Path) else value


def content_of(record: RecordDict) -> dict[str, Any]:
    """All records of a message."""
    return {name: plain(record[name]) for name in record}


def reply(number: int, arrays: ArrayRecord | None, **metrics: float) -> RecordDict:
    """The records of an honest reply, with the latency."""
    numbers = {"num-examples": 10 + 3 * number, "train_loss": 0.25 + 0.125 * number, "latency_s": 0.5 + 0.125 * number}
    records: dict[str, Any] = {} if arrays is None else {"arrays": arrays}
    return RecordDict({**records, "metrics": MetricRecord({**numbers, **metrics})})


def asked(content: RecordDict) -> tuple[ArrayRecord, ConfigRecord]:
    """The first arrays and the first config of a message."""
    return next(iter(content.array_records.values())), next(iter(content.config_records.values()))


def trained(number: int, content: RecordDict) -> Arrays:
    """The arrays of a message after the client's training."""
    arrays, config = asked(content)
    return update(number, arrays.to_numpy_ndarrays(), int(config.get("server-round", 0)))


def honest(number: int, content: RecordDict) -> RecordDict:
    """Trains, and replies as Flower's quickstarts do."""
    return reply(number, named(trained(number, content), tuple(asked(content)[0])))


class Node(FakeNode):
    """A node whose training is a function of its number and of the message's content.

    It reports its latency on the virtual clock only. What it reported would not agree with what the server measures.
    """

    def __init__(self, number: int, train: MessageClient, evaluate: MessageClient, clock: str) -> None:
        super().__init__(FakeProxy(str(node_id(number)), number, number=number))
        self.train, self.evaluation, self.clock = train, evaluate, clock

    def _train(self, message: Message) -> RecordDict:
        content = self.train(self.proxy.number, message.content)
        for record in content.metric_records.values():
            if self.clock == "server":
                record.pop("latency_s", None)
        return content

    def _evaluate(self, message: Message) -> RecordDict:
        return self.evaluation(self.proxy.number, message.content)


def tested(number: int, content: RecordDict) -> RecordDict:
    """The loss of the model that a message carries."""
    loss = _loss(asked(content)[0].to_numpy_ndarrays())
    return RecordDict({"metrics": MetricRecord({"num-examples": 5 + number, "eval_loss": loss})})


def _loss(arrays: Arrays) -> float:
    return float(sum(np.abs(array).astype(np.float64).sum() for array in arrays))


class ForeignGrid(FakeGrid):
    """Answers and replies come in the order of the clients, and the cohorts that train are recorded.

    ``shown`` are the numbers of the clients that are listed as connected; None: all.
    """

    def __init__(self, nodes: dict[int, Any]) -> None:
        super().__init__(nodes, seed=None)
        self.shown: list[int] | None = None
        self.cohorts: list[list[int]] = []

    def get_node_ids(self) -> Iterable[int]:
        here = None if self.shown is None else {node_id(number) for number in self.shown}
        return [node for node in super().get_node_ids() if here is None or node in here]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        batch = list(messages)
        if batch and batch[0].metadata.message_type == "train":
            self.cohorts.append(sorted(self.nodes[one.metadata.dst_node_id].proxy.number for one in batch))
        return super().push_messages(batch)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        arrived = super().pull_messages(message_ids)
        return sorted(arrived, key=lambda one: self.nodes[one.metadata.src_node_id].proxy.number)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = sorted(messages, key=lambda message: self.nodes[message.metadata.dst_node_id].proxy.number)
        replies = super().send_and_receive(asked, timeout=timeout)
        return sorted(replies, key=lambda one: self.nodes[one.metadata.src_node_id].proxy.number)


def _show(base: Any, method: str, world: Any, schedule: Sequence[list[int]]) -> None:
    """Let a base see only the clients of a schedule while it configures a round."""
    configure = getattr(base, method)

    def configured(*args: Any, **kwargs: Any) -> Any:
        world.shown = schedule[len(world.cohorts)] if len(world.cohorts) < len(schedule) else []
        try:
            return configure(*args, **kwargs)
        finally:
            world.shown = None

    setattr(base, method, configured)


def _play_messages(
    strategy: Any, case: Case, folder: Path, outcome: Outcome, clock: str, clients: int,
    schedule: Sequence[list[int]] | None, rounds: int,
) -> list[list[int]]:  # fmt: skip
    train = (case.client or (lambda: honest))()
    nodes: dict[int, Any] = {node_id(k): Node(k, train, case.evaluation or tested, clock) for k in range(clients)}
    grid = ForeignGrid(nodes)
    if schedule is not None:
        _show(strategy, "configure_train", grid, schedule)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        outcome.evaluated.append((server_round, plain(arrays)))
        return MetricRecord({"accuracy": ACCURACY[server_round], "loss": _loss(arrays.to_numpy_ndarrays())})

    arrays = case.arrays()
    if not isinstance(arrays, ArrayRecord):
        arrays = arrays_of() if len(arrays) == 2 else named(arrays, [f"layer-{i}" for i in range(len(arrays))])
    named_too: dict[str, Any] = {"evaluate_fn": evaluate_fn} if case.evaluates_centrally else {}
    named_too |= case.start(folder)
    if case.positional:
        result = strategy.start(grid, arrays, *case.positional, **named_too)
    else:
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, **named_too)
    outcome.returned = plain(result)
    for node, one in nodes.items():
        outcome.trained[node] = [content_of(message.content) for message in one.messages("train")]
        questions = [message.content for message in one.messages("evaluate")]
        outcome.tested[node] = [content_of(one) for one in questions if not any("probe" in c for c in one.values())]
    return grid.cohorts


def legacy_metrics(number: int) -> dict[str, Any]:
    """The metrics of an honest reply, with the latency."""
    return {"train_loss": 0.25 + 0.125 * number, "latency_s": 0.5 + 0.125 * number}


def legacy_honest(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
    """Trains, and replies as Flower's quickstarts do."""
    return update(number, arrays, server_round), 10 + 3 * number, legacy_metrics(number)


class Proxy(FakeProxy):
    """A client whose training is a function."""

    def __init__(self, number: int, train: LegacyClient, clock: str) -> None:
        super().__init__(f"node-{number}", number, number=number)
        self.train, self.clock = train, clock
        self.received: list[Any] = []
        self.questions: list[Any] = []

    def trained(self, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
        self.received.append((plain(arrays), config))
        new, examples, metrics = self.train(self.number, arrays, config, server_round)
        if self.clock == "server":
            metrics.pop("latency_s", None)
        return new, examples, metrics

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        arrays = parameters_to_ndarrays(ins.parameters)
        if "probe" not in ins.config:
            self.questions.append((plain(arrays), dict(ins.config)))
        return EvaluateRes(OK, _loss(arrays), 5 + self.number, {})


class Manager(SimpleClientManager):
    """Flower's manager; ``shown`` are the numbers of the clients that it lists, None: all."""

    def __init__(self, proxies: Iterable[FakeProxy]) -> None:
        self.shown: list[int] | None = None
        self.cohorts: list[list[int]] = []
        super().__init__()
        for proxy in proxies:
            self.register(proxy)

    @property
    def clients(self) -> dict[str, Any]:
        return {cid: one for cid, one in self._all.items() if self.shown is None or one.number in self.shown}

    @clients.setter
    def clients(self, clients: dict[str, Any]) -> None:
        self._all = clients

    def register(self, client: Any) -> bool:
        self._all[client.cid] = client
        return True


def _play_legacy(
    strategy: Any, case: Case, folder: Path, outcome: Outcome, clock: str, clients: int,
    schedule: Sequence[list[int]] | None, rounds: int,
) -> list[list[int]]:  # fmt: skip
    """Play as Flower's server does, clients one after the other."""
    train = (case.client or (lambda: legacy_honest))()
    proxies = [Proxy(k, train, clock) if case.proxies is None else case.proxies(k) for k in range(clients)]
    manager = Manager(proxies)
    if schedule is not None:
        _show(strategy, "configure_fit", manager, schedule)
    try:
        outcome.returned = _legacy_rounds(strategy, manager, outcome, rounds)
    except StopTraining as error:
        outcome.raised = f"{type(error).__name__}: {error}"
    for proxy in proxies:
        if isinstance(proxy, Proxy):
            outcome.trained[proxy.number], outcome.tested[proxy.number] = proxy.received, proxy.questions
    return manager.cohorts


def _legacy_rounds(strategy: Any, manager: Manager, outcome: Outcome, rounds: int) -> Any:
    parameters = strategy.initialize_parameters(manager)
    strategy.evaluate(0, parameters)
    metrics = []
    for server_round in range(1, rounds + 1):
        given = {"server_round": server_round, "parameters": parameters, "client_manager": manager}
        if instructions := strategy.configure_fit(**given):
            manager.cohorts.append(sorted(int(client.cid.split("-")[1]) for client, _ in instructions))
            new, aggregated = strategy.aggregate_fit(server_round, *_answers(instructions, "fit", server_round))
            metrics.append(aggregated)
            parameters = new or parameters
        outcome.models.append(plain(parameters))
        outcome.evaluated.append(strategy.evaluate(server_round, parameters))
        given["parameters"] = parameters
        if instructions := strategy.configure_evaluate(**given):
            answers = _answers(instructions, "evaluate", server_round)
            metrics.append(strategy.aggregate_evaluate(server_round, *answers))
    return plain(parameters), metrics


def _answers(instructions: Any, call: str, server_round: int) -> tuple[list[Any], list[Any]]:
    results, failures = [], []
    for client, ins in sorted(instructions, key=lambda pair: int(pair[0].cid.split("-")[1])):
        try:
            results.append((client, getattr(client, call)(ins, None, server_round)))
        except TypeError as error:
            failures.append(error)
    return results, failures


# ---- boosted trees as Flower's bagging expects them: XGBoost's JSON, of which only counts and trees are read ---------


def booster(number: int, server_round: int) -> bytes:
    """The one tree that client ``number`` adds in a round."""
    tree = {"id": 0, "base_weights": [0.5 * number, -0.25 * server_round]}
    model = {
        "gbtree_model_param": {"num_trees": "1", "num_parallel_tree": "1"},
        "iteration_indptr": [0, 1],
        "tree_info": [0],
        "trees": [tree],
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def grown_in(outcome: Outcome) -> list[list[float]]:
    """The weights of the trees of a run's last model, in order."""
    if outcome.models:
        model = outcome.models[-1][0]
    else:
        model = np.load(io.BytesIO(outcome.returned["arrays"]["0"][2])).tobytes()
    trees = json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]
    return [tree["base_weights"] for tree in trees]


class TreeProxy(FakeProxy):
    """Adds a tree a round."""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        self.fits.append(ins)
        metrics: dict[str, Any] = {"latency_s": 0.5 + 0.125 * self.number, **self.extra}
        return FitRes(OK, Parameters([booster(self.number, group_id)], ""), self.num_examples, metrics)


def as_record(model: bytes) -> ArrayRecord:
    """A model's bytes as Flower's quickstart sends them."""
    return ArrayRecord({"0": Array(np.frombuffer(model, dtype=np.uint8))})
