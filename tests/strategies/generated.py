"""Hostile clients that Hypothesis makes up, played with honest ones through Flower's own types of either API.

A reply is put together of generated parts: arrays, a number of examples, metrics, and the way in which it comes. Three
honest clients are there first; then eight hostile ones join, who all train in every round.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import strategy as legacy_bases
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import strategy as message_bases
from hypothesis import strategies as st

from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.message.helpers import FakeGrid
from tests.strategies.message.models import NAMES

SHAPES = ((3, 2), (2,))
HONEST, HOSTILE, ROUNDS, MAX_LATENCY = 3, 8, 10, 5.0
BASES = ("FedAvg", "FedAdam", "FedYogi", "FedAvgM", "FedMedian", "FedTrimmedAvg", "Krum")
EXTREME = st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1.0, 9e17, 1e19, 3e38, 1e300, -1e308, 2.0**53, 2.0**63])
NUMBER = st.one_of(EXTREME, st.floats())
DTYPES = ("f4", "f4", "f8", "f2", "i8", "u1", "?", "c8", "U3", "M8[s]")
TEXT = st.one_of(st.text(max_size=12), st.sampled_from(["../../x", "\x1b[2J\nINFO : fine", "h0", "nan", "\ud800"]))
SCALAR = st.one_of(
    NUMBER, NUMBER, st.integers(-(2**63), 2**63 - 1), st.booleans(), TEXT, st.binary(max_size=12), st.just(10**400),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(
        [getattr(MetricKeys(), key) for key in MetricKeys.__dataclass_fields__]
        + ["loss", "rms_loss", "local_accuracy", "gradient", "sketch", "accuracy", "num-examples", "norm_bit"]
    ),
    TEXT,
)
METRICS = st.dictionaries(KEYS, SCALAR, max_size=8)


class Trap:
    """Unpickled, it raises."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle was read')",))


def _pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _huge() -> bytes:
    """The header of an array of 2^40 numbers, and nothing behind it."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


RAW = st.one_of(st.binary(max_size=40), st.sampled_from([_pickled(), _huge(), b"PK\x03\x04", b""]))
Model = list[Any]
"""Arrays, or bytes in the place of one."""


@st.composite
def models(draw: Any) -> Model:
    """Arrays near a model's form, with a number that is odd here and there."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return draw(st.lists(RAW, max_size=2))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shapes = SHAPES if kind > 1 else draw(st.lists(st.sampled_from([*SHAPES, (), (0,), (2, 3)]), max_size=3))
    value, odd = draw(st.floats(-3, 3)), draw(NUMBER)
    arrays = []
    with np.errstate(all="ignore"):
        for shape in shapes:
            numbers = np.full(shape, value)
            if kind > 4 and numbers.size:
                numbers.flat[-1] = odd
            arrays.append(numbers.astype("i8").astype(dtype) if dtype.kind == "M" else numbers.astype(dtype))
    return arrays


@dataclass(frozen=True)
class Reply:
    """What a hostile client sends after training.

    Attributes:
        model: Arrays or bytes.
        count: The number of examples.
        metrics: What it reports.
        way: 0 to 5: as it should; 6 an error; 7 nothing, or a refusal.
    """

    model: Model
    count: Any
    metrics: Mapping[str, Any]
    way: int


@st.composite
def courses(draw: Any) -> list[list[Reply]]:
    """A reply for each round and each hostile client, of parts that are put together anew."""
    several = {"min_size": 4, "max_size": 6}
    arrays, metrics = draw(st.lists(models(), **several)), draw(st.lists(METRICS, **several))
    counts = draw(st.lists(st.one_of(st.integers(1, 99), SCALAR), **several))
    mixed = np.random.default_rng(draw(st.integers(0, 2**32)))

    def one() -> Reply:
        a, c, m = (int(mixed.integers(len(part))) for part in (arrays, counts, metrics))
        own = dict(metrics[m])
        if mixed.random() < 0.5:  # the rest is more often looked at where the latency is sound
            own["latency_s"] = float(mixed.uniform(0.1, 4.0))
        return Reply(arrays[a], counts[c], own, int(mixed.integers(8)))

    return [[one() for _ in range(HOSTILE)] for _ in range(ROUNDS)]


def validation() -> Validation:
    """Eight examples for the tests' model."""
    inputs = np.random.default_rng(0).normal(size=(8, 3))
    return Validation(lambda arrays, x: x @ arrays[0] + arrays[1], inputs, np.arange(8) % 2)


def honest_model(k: int, round: int) -> list[np.ndarray]:
    """What honest client k sends."""
    generator = np.random.default_rng([k, round])
    return [generator.normal(0.0, 1.0, shape).astype(np.float32) for shape in SHAPES]


def honest_metrics(k: int, round: int) -> dict[str, Any]:
    """What honest client k reports."""
    return {
        "latency_s": 0.5 + 0.25 * k + 0.05 * (round % 3), "energy_j": 1.0 + k, "energy_score": 0.25 * (1 + k),
        "loss": 1.0 + 0.1 * k + 0.01 * round, "rms_loss": 1.5 + 0.1 * k + 0.01 * round, "train_loss": 0.5,
        "local_accuracy": 0.25 * (1 + k), "sketch": np.array([k, 1, 0, 1], "<f4").tobytes(),
        "gradient": np.full(8, k, "<f4").tobytes(),
    }  # fmt: skip


@dataclass
class World:
    """One play: who said what, and how many hostile replies were sent."""

    course: list[list[Reply]]
    said: list[Mapping[str, Any]]
    evaluates: bool = False
    sent: int = 0
    round: int = 0
    models: list[list[np.ndarray]] = field(default_factory=list)

    def reply_of(self, k: int) -> Reply:
        """What hostile client k sends in this round."""
        self.sent += 1
        return self.course[self.round - 2][k]

    def answer_of(self, k: int) -> Reply:
        """What hostile client k answers to a probe or an evaluation."""
        return self.course[max(0, self.round - 2)][(k + 3) % HOSTILE]


class Proxy(ClientProxy):
    """A client of the legacy API; a hostile one from number ``HONEST`` on."""

    def __init__(self, world: World, k: int) -> None:
        super().__init__(f"node-{k}")
        self.world, self.k = world, k

    def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> GetPropertiesRes:
        if self.k < HONEST:
            return GetPropertiesRes(_OK, {"client_id": f"h{self.k}", "num_examples": 10 + self.k})
        return GetPropertiesRes(_OK, dict(self.world.said[self.k - HONEST]))

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> FitRes:
        if self.k < HONEST:
            model, metrics = honest_model(self.k, self.world.round), honest_metrics(self.k, self.world.round)
            return FitRes(_OK, ndarrays_to_parameters(model), 10 + self.k, metrics)
        reply = self.world.reply_of(self.k - HONEST)
        if reply.way == 6:
            raise ValueError(str(reply.metrics))
        status = _OK if reply.way < 7 else Status(Code.FIT_NOT_IMPLEMENTED, str(reply.metrics))
        tensors = [_tensor(one) for one in reply.model]
        return FitRes(status, Parameters(tensors, "numpy.ndarray"), reply.count, dict(reply.metrics))

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> EvaluateRes:
        if self.k < HONEST:
            return EvaluateRes(_OK, 1.0, 10, honest_metrics(self.k, self.world.round))
        reply = self.world.answer_of(self.k - HONEST)
        if reply.way == 6:
            raise ValueError(str(reply.metrics))
        loss: Any = reply.metrics.get("loss", float("nan"))
        return EvaluateRes(_OK if reply.way < 7 else Status(Code.EVALUATE_NOT_IMPLEMENTED, ""), loss, reply.count,
                           dict(reply.metrics))  # fmt: skip

    def get_parameters(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise NotImplementedError

    reconnect = get_parameters


_OK = Status(Code.OK, "")


def _tensor(one: Any) -> bytes:
    if isinstance(one, bytes):
        return one
    buffer = io.BytesIO()
    np.save(buffer, one, allow_pickle=False)
    return buffer.getvalue()


def play_legacy(world: World, selector: Any, base: str, **options: Any) -> Any:
    """Play the course with a server of the legacy API; returns the strategy."""
    start = ndarrays_to_parameters([np.zeros(shape, dtype=np.float32) for shape in SHAPES])
    own: Any = {"initial_parameters": start, "fraction_evaluate": 1.0 if world.evaluates else 0.0}
    made = getattr(legacy_bases, base)(**own, **({"server_momentum": 0.5} if base == "FedAvgM" else {}))
    strategy = LegacyStrategy(selector, made, min_available=1, max_latency=MAX_LATENCY, busy_timeout=0.0, **options)
    manager, parameters = SimpleClientManager(), start
    everybody = [Proxy(world, k) for k in range(HONEST + HOSTILE)]
    for number in range(1, ROUNDS + 2):
        world.round = number
        for proxy in everybody[:HONEST] if number == 1 else everybody[HONEST:] if number == 2 else ():
            manager.register(proxy)
        results, failures = _asked("fit", strategy.configure_fit(number, parameters, manager))
        after, _ = strategy.aggregate_fit(number, results, failures)
        parameters = parameters if after is None else after
        results, failures = _asked("evaluate", strategy.configure_evaluate(number, parameters, manager))
        if results or failures:
            strategy.aggregate_evaluate(number, results, failures)
        strategy.evaluate(number, parameters)
        world.models.append(parameters_to_ndarrays(parameters))
    return strategy


def _asked(what: str, instructions: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Results and failures, as Flower's server parts them."""
    results, failures = list[Any](), list[Any]()
    for client, ins in instructions:
        try:
            res = getattr(client, what)(ins, 5.0, 1)
        except Exception as error:
            failures.append(error)
            continue
        (results if res.status.code == Code.OK else failures).append((client, res))
    return results, failures


class Node:
    """A node of the Message API, for :class:`FakeGrid`."""

    ready = 0.0

    def __init__(self, world: World, k: int) -> None:
        self.world, self.k = world, k
        self.received: list[Message] = []

    def handle(self, message: Message) -> RecordDict | Error | None:
        kind = message.metadata.message_type
        honest = self.k < HONEST
        if kind == MessageType.QUERY:
            facts = {"client_id": f"h{self.k}", "num_examples": 10 + self.k}
            return RecordDict(_records(facts if honest else self.world.said[self.k - HONEST]))
        if honest:
            record = _records({"num-examples": 10 + self.k, **honest_metrics(self.k, self.world.round)})
            if kind == MessageType.TRAIN:
                own = honest_model(self.k, self.world.round)
                record["arrays"] = ArrayRecord({n: Array(a) for n, a in zip(NAMES, own, strict=True)})
            return RecordDict(record)
        train = kind == MessageType.TRAIN
        reply = self.world.reply_of(self.k - HONEST) if train else self.world.answer_of(self.k - HONEST)
        if reply.way >= 6:
            return Error(reply.way, str(reply.metrics)) if reply.way == 6 else None
        record = _records({"num-examples": reply.count, **reply.metrics})
        if train:
            names = [*NAMES, "more"] if reply.way else [*reversed(NAMES), "more"]
            record["model" if reply.way == 1 else "arrays"] = ArrayRecord(
                {name: _array(one) for name, one in zip(names, reply.model, strict=False)}
            )
        if reply.way == 2:
            record["second"] = MetricRecord({"num-examples": 3})
        return RecordDict(record)


class Grid(FakeGrid):
    """A grid that copies nothing: every message of this play is made anew."""

    def _deliver(self, message: Message) -> None:
        answer = self.nodes[message.metadata.dst_node_id].handle(message)
        if answer is not None:
            reply: Message = Message(answer, reply_to=message)  # type: ignore[call-overload]
            self._replies[message.metadata.message_id] = (0.0, reply)


def _array(one: Any) -> Array:
    if isinstance(one, bytes):
        return Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=one)
    return Array(one)


def _records(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said, in the types that Flower's records take: numbers as metrics, the rest as configuration."""
    metrics, config, records = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, value in said.items():
        if key in ("sketch", "gradient") and isinstance(value, bytes) and len(value) % 4 == 0:
            records[key] = ArrayRecord({"0": Array(np.frombuffer(value, "<f4"))})
        elif isinstance(value, bool | str | bytes):
            config[key] = value
            if key != "client_id":  # a metric would stand in its place
                metrics[key] = [float(len(value))] if isinstance(value, str | bytes) else int(value)
        elif isinstance(value, int):
            metrics[key] = value if abs(value) < 2**63 else [2**62, -(2**62)]
        else:
            metrics[key] = value
    return records | {"metrics": MetricRecord(metrics), "config": ConfigRecord(config)}


def play_messages(world: World, selector: Any, base: str, **options: Any) -> Any:
    """Play the course with a server of the Message API; returns the strategy."""
    fraction = 1.0 if world.evaluates else 0.0
    strategy = MessageStrategy(
        selector, getattr(message_bases, base)(fraction_evaluate=fraction), min_available=1, max_latency=MAX_LATENCY,
        busy_timeout=0.0, **options,  # whoever is silent is asked again: many replies are wanted
    )  # fmt: skip
    nodes: Any = {100 + k: Node(world, k) for k in range(HONEST)}
    grid = Grid(nodes, seed=None)

    def next_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        world.round = number + 1
        if number:
            world.models.append(arrays.to_numpy_ndarrays())
        if number == 1:
            grid.nodes |= {200 + k: Node(world, k) for k in range(HONEST, HONEST + HOSTILE)}  # type: ignore[misc]
        return MetricRecord({"loss": 1.0})

    start = ArrayRecord({n: Array(np.zeros(s, dtype=np.float32)) for n, s in zip(NAMES, SHAPES, strict=True)})
    strategy.start(grid, start, ROUNDS + 1, timeout=5.0, evaluate_fn=next_round)
    return strategy


PLAY: dict[str, Callable[..., Any]] = {"legacy": play_legacy, "message": play_messages}
