"""Whatever hostile clients send, in either API: nothing raises, nothing overflows, the honest are judged alone.

Hypothesis makes up the replies: arrays, a number of examples, metrics, and the way in which each comes. Three honest
clients are there first; then eight hostile ones join, who all train in every round.
"""

from __future__ import annotations

import io
import logging
import pickle
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarray_to_bytes,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.testing.random_rounds import nonfinite_key
from tests.strategies.either_api import base_of, selection
from tests.strategies.helpers import OK, SHAPES, FakeProxy, Federation
from tests.strategies.message.helpers import FakeGrid
from tests.strategies.message.models import NAMES, arrays_of

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

    def facts_of(self, k: int) -> Mapping[str, Any]:
        """What client k says of itself; it is hostile from number ``HONEST`` on."""
        return {"client_id": f"h{k}", "num_examples": 10 + k} if k < HONEST else self.said[k - HONEST]

    def reply_of(self, k: int, trained: bool) -> Reply:
        """What client k sends after training, or answers to a probe or an evaluation."""
        if k < HONEST:
            return Reply(honest_model(k, self.round), 10 + k, honest_metrics(k, self.round), 3)
        self.sent += trained
        return self.course[max(0, self.round - 2)][(k - HONEST + (0 if trained else 3)) % HOSTILE]


class Proxy(FakeProxy):
    """A client of the legacy API."""

    def __init__(self, world: World, k: int) -> None:
        super().__init__(f"node-{k}", f"h{k}", number=k)
        self.world = world

    def get_properties(self, ins: Any, timeout: Any, group_id: Any) -> GetPropertiesRes:
        return GetPropertiesRes(OK, dict(self.world.facts_of(self.number)))

    def _reply(self, trained: bool, refusal: Code) -> tuple[Reply, Status]:
        reply = self.world.reply_of(self.number, trained)
        if reply.way == 6:
            raise ValueError(str(reply.metrics))
        return reply, OK if reply.way < 7 else Status(refusal, str(reply.metrics))

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> FitRes:
        reply, status = self._reply(True, Code.FIT_NOT_IMPLEMENTED)
        tensors = [one if isinstance(one, bytes) else ndarray_to_bytes(one) for one in reply.model]
        return FitRes(status, Parameters(tensors, "numpy.ndarray"), reply.count, dict(reply.metrics))

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> EvaluateRes:
        reply, status = self._reply(False, Code.EVALUATE_NOT_IMPLEMENTED)
        loss: Any = reply.metrics.get("loss", float("nan"))
        return EvaluateRes(status, loss, reply.count, dict(reply.metrics))


def play_legacy(world: World, strategy: Any) -> None:
    """Play the course with a server of the legacy API."""
    everybody = [Proxy(world, k) for k in range(HONEST + HOSTILE)]
    federation = Federation(strategy, everybody[:HONEST])
    for world.round in range(1, ROUNDS + 2):
        for proxy in everybody[HONEST:] if world.round == 2 else ():
            federation.manager.register(proxy)
        world.models.append(federation.play(1).arrays())


class Node:
    """A node of the Message API, for :class:`FakeGrid`."""

    ready = 0.0

    def __init__(self, world: World, k: int) -> None:
        self.world, self.k = world, k
        self.received: list[Message] = []

    def handle(self, message: Message) -> RecordDict | Error | None:
        kind = message.metadata.message_type
        if kind == MessageType.QUERY:
            return RecordDict(_records(self.world.facts_of(self.k)))
        reply = self.world.reply_of(self.k, kind == MessageType.TRAIN)
        if reply.way >= 6:
            return Error(reply.way, str(reply.metrics)) if reply.way == 6 else None
        record = _records({"num-examples": reply.count, **reply.metrics})
        if kind == MessageType.TRAIN:
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


def play_messages(world: World, strategy: Any) -> None:
    """Play the course with a server of the Message API."""
    nodes: Any = {100 + k: Node(world, k) for k in range(HONEST)}
    grid = Grid(nodes, seed=None)

    def next_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        world.round = number + 1
        if number:
            world.models.append(arrays.to_numpy_ndarrays())
        if number == 1:
            grid.nodes |= {200 + k: Node(world, k) for k in range(HONEST, HONEST + HOSTILE)}  # type: ignore[misc]
        return MetricRecord({"loss": 1.0})

    strategy.start(grid, arrays_of(), ROUNDS + 1, timeout=5.0, evaluate_fn=next_round)


PLAY: dict[str, Any] = {"legacy": play_legacy, "message": play_messages}


# ---- the tests ------------------------------------------------------------------------------------------------------

EVERYBODY = HONEST + HOSTILE
SELECTORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cs-ucb": ({"max_latency": MAX_LATENCY}, ("plays", "mean")),
    "cs-ucb-q": ({"max_latency": MAX_LATENCY}, ("plays", "mean")),
    "bsfl": ({"min_latency": 0.1}, ("plays", "mean")),
    "oort": ({}, ("rms_loss", "duration", "last_round")),
    "fedcs": ({"deadline": 1e6}, ("latency", "measurements", "measured_in")),
    "tifl": ({"tiers": 2, "interval": 2}, ("profile", "attempts")),
    "active-fl": ({}, ("loss",)),
    "rpow-d": ({}, ("loss", "failures")),
    "lsh": ({}, ("plays", "reward_sum")),
    "nccb": ({"clusters": 3}, ("plays", "reward_sum")),
    "pczfl": ({"warmup_rounds": 9}, ("accuracy", "energy_score")),
    "gpfl": ({"total_rounds": 9}, ("plays",)),
    "fedcm-ts": ({}, ()), "fedcm-ucb": ({}, ()), "divfl": ({}, ()), "power-of-choice": ({}, ()),
    "cpow-d": ({}, ()),
    "fedcor": ({"warmup_rounds": 3, "interval": 2}, ()), "local-accuracy": ({}, ()), "random-by-size": ({}, ()),
}  # fmt: skip
"""Selector -> its parameters, and what it keeps of each client that depends on that client's replies alone."""


def _made(name: str) -> Any:
    return create(name, clients_per_round=None if name == "fedcs" else EVERYBODY, seed=0, **SELECTORS[name][0])


def _twin(name: str, strategy: Any, rows: list[int]) -> Any:
    """A selector that is told what honest clients did, and nothing else."""
    twin, exam = _made(name), validation()
    twin.inform(np.array(rows))
    for entry in strategy.history.rounds:
        twin.select(np.array(rows))
        chosen = {r.client_id: r.client for r in strategy.history.clients if r.round == entry.round}
        mine = [k for k in range(HONEST) if f"h{k}" in chosen]
        said = [honest_metrics(k, entry.round) for k in mine]
        accuracy = [exam.accuracy(exam.logits(honest_model(k, entry.round))) for k in mine]
        columns: dict[str, Any] = {"accuracy": accuracy} | {
            key: [one[key] for one in said] for key in ("energy_score", "loss", "rms_loss", "train_loss")
        }
        twin.observe(
            RoundReport(
                clients=np.array([chosen[f"h{k}"] for k in mine], dtype=np.int64),
                completed=np.ones(len(mine), dtype=bool),
                latency=[one["latency_s"] for one in said],
                projection=np.zeros(len(mine)), global_accuracy=0.5, global_loss=1.0,
                **{key: column for key, column in columns.items() if key in twin.needs},
            )
        )  # fmt: skip
    return twin


def _finite(value: Any) -> bool:
    """Whether every number in lists, mappings and arrays is finite."""
    if isinstance(value, dict):
        return all(_finite(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(one) for one in value)
    if isinstance(value, float | np.floating) or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
        return bool(np.isfinite(value).all())
    return True


def _check(api: str, name: str, base: str, world: World) -> int:
    """Play, look at everything that is left, and return how many hostile replies were sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flower's averages, on metrics that overflow
        own = {"server_momentum": 0.5} if (api, base) == ("legacy", "FedAvgM") else {}
        strategy = selection(
            api, _made(name), base_of(api, base, fraction_evaluate=float(world.evaluates), **own),
            validation=validation(), learning_rate=0.1, min_available=1, max_latency=MAX_LATENCY, busy_timeout=0.0,
            filter=Filter(score="accuracy") if name.startswith("fedcm") else None,
        )  # fmt: skip
        PLAY[api](world, strategy)
    assert [record.round for record in strategy.history.rounds] == list(range(1, ROUNDS + 2))
    assert all(_finite([model]) for model in world.models)
    assert base != "FedAvg" or all([a.dtype for a in model] == [np.float32] * 2 for model in world.models)
    assert not nonfinite_key(strategy.selector), nonfinite_key(strategy.selector)
    state = strategy.state_dict()
    assert _finite({part: own for part, own in state.items() if part not in ("selector", "history")})
    assert _finite({key: value for key, value in vars(strategy.base).items() if "arrays" in key or key.endswith("_t")})
    for row in strategy.history.clients:
        if row.client_id.startswith("h") and row.client_id[1:].isdigit() and int(row.client_id[1:]) < HONEST:
            assert (row.completed, row.problem) == (True, ""), row
        assert row.problem.isprintable()
        assert row.client_id.isprintable()
        assert 0.0 <= row.latency_s <= MAX_LATENCY
    for record in strategy.history.rounds:
        assert np.isfinite([record.round_s, record.simulated_s]).all()
        assert not np.isinf([record.energy_j, record.total_energy_j]).any()
    rows = [strategy.roster.ids.index(f"h{k}") for k in range(HONEST)]
    twin = _twin(name, strategy, rows).state_dict() if SELECTORS[name][1] else {}
    for key in SELECTORS[name][1]:
        assert state["selector"][key][rows].tolist() == twin[key][rows].tolist(), key
    return world.sent


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in ("flwr", "fedsel_flwr")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _generated(api: str, examples: int) -> int:
    """Play so many generated courses; returns how many hostile replies were sent in them."""
    sent = 0

    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        course=courses(),
        said=st.lists(METRICS, min_size=HOSTILE, max_size=HOSTILE),
        name=st.sampled_from(sorted(SELECTORS)),
        base=st.sampled_from(BASES),
        evaluates=st.booleans(),
    )
    def play(course: Any, said: Any, name: str, base: str, evaluates: bool) -> None:
        nonlocal sent
        sent += _check(api, name, base, World(course, said, evaluates))

    play()
    return sent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("api", sorted(PLAY))
def test_some_hundred_hostile_replies(api: str) -> None:
    assert _generated(api, 4) >= 2 * HOSTILE * ROUNDS  # those refused in the roll call are not asked


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("api", sorted(PLAY))
def test_fifty_thousand_hostile_replies_in_each_api(api: str) -> None:
    sent = 0
    while sent < 50_000:
        sent += _generated(api, 200)
    print(f"{api}: {sent} hostile replies")
    assert sent >= 50_000


def test_the_traps_are_traps() -> None:
    """The generated bytes that must not be unpickled would raise, if they were."""
    with pytest.raises(SystemExit):
        pickle.loads(pickle.dumps(Trap()))
