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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.flower import task_identity
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.testing.fleet import NoReply, Reply
from fedsel_flwr.testing.in_process import RUN, SERVER, TASK, InProcessGrid, InProcessProxy
from fedsel_flwr.testing.random_rounds import nonfinite_key
from tests.strategies.either_api import base_of, selection
from tests.strategies.helpers import SHAPES, Federation
from tests.strategies.message.models import arrays_of

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


@st.composite
def models(draw: Any) -> list[np.ndarray] | bytes:
    """Arrays near a model's form, with a number that is odd here and there, or bytes that are none."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return draw(RAW)
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


@st.composite
def courses(draw: Any) -> list[list[tuple[Reply, int]]]:
    """A reply for each round and each hostile client, of parts that are put together anew, and the way it comes.

    The ways 0 to 4: as it should; 5: not at all; 6: as an error; 7: as a refusal.
    """
    several = {"min_size": 4, "max_size": 6}
    arrays, metrics = draw(st.lists(models(), **several)), draw(st.lists(METRICS, **several))
    counts = draw(st.lists(st.one_of(st.integers(1, 99), SCALAR), **several))
    mixed = np.random.default_rng(draw(st.integers(0, 2**32)))

    def one() -> tuple[Reply, int]:
        a, c, m = (int(mixed.integers(len(part))) for part in (arrays, counts, metrics))
        own = dict(metrics[m])
        if mixed.random() < 0.5:  # the rest is more often looked at where the latency is sound
            own["latency_s"] = float(mixed.uniform(0.1, 4.0))
        return Reply(arrays[a], counts[c], own), int(mixed.integers(8))

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
        "local_accuracy": 0.25 * (1 + k), "sketch": np.array([k, 1, 0, 1], "<f4"),
        "gradient": np.full(8, k, "<f4"),
    }  # fmt: skip


def _recordable(value: Any) -> Any:
    """A value in a type that Flower's records take."""
    if isinstance(value, bytes):
        return [float(len(value))]
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else [2**62, -(2**62)]
    return value


@dataclass
class World:
    """One play: the clients in the form of ``fedsel_flwr.testing``, hostile from number ``HONEST`` on.

    Attributes:
        api: "legacy" or "message".
        course: What hostile clients send after training.
        said: What they say of themselves.
        sent: How many hostile replies were sent.
        models: The global model after each round.
    """

    api: str
    course: list[list[tuple[Reply, int]]]
    said: list[Mapping[str, Any]]
    sent: int = 0
    round: int = 1
    models: list[list[np.ndarray]] = field(default_factory=list)
    connected: dict[str, int] = field(default_factory=lambda: {str(100 + k): k for k in range(HONEST)})

    def nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=int(node), name="") for node in self.connected]

    def in_arrival_order(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

    def properties_of(self, node: str) -> dict[str, Any]:
        k = self.connected[node]
        return {"client_id": f"h{k}", "num_examples": 10 + k} if k < HONEST else dict(self.said[k - HONEST])

    def training_reply(self, node: str, model: Any, config: Any) -> Reply:
        k = self.connected[node]
        if k < HONEST:
            return Reply(honest_model(k, self.round), 10 + k, honest_metrics(k, self.round))
        self.sent += 1
        return self._hostile(k - HONEST)

    def evaluation_reply(self, node: str, config: Any) -> tuple[float, Any, dict[str, Any]]:
        k = self.connected[node]
        if k < HONEST:
            return 1.0, 10, honest_metrics(k, self.round)
        reply = self._hostile((k + 3) % HOSTILE)
        return reply.metrics.get("loss", float("nan")), reply.num_examples, reply.metrics

    def _hostile(self, k: int) -> Reply:
        reply, way = self.course[max(0, self.round - 2)][k]
        if way == 5:
            raise NoReply
        if way == 6:
            raise ValueError(str(reply.metrics))
        if self.api == "message":
            told = {key: _recordable(value) for key, value in reply.metrics.items()}
            reply = replace(reply, num_examples=_recordable(reply.num_examples), metrics=told)
        return replace(reply, refused=str(reply.metrics) if way == 7 else "")

    def next_round(self) -> list[str]:
        """Begin a round; returns the nodes that are new."""
        self.round += 1
        new = {str(200 + k): k for k in range(HONEST, HONEST + HOSTILE)} if self.round == 2 else {}
        self.connected |= new
        return list(new)


def play_legacy(world: World, strategy: Any) -> None:
    """Play the course with a server of the legacy API."""
    clients: Any = world
    federation = Federation(strategy, [InProcessProxy(node, clients) for node in world.connected])
    for _ in range(ROUNDS + 1):
        world.models.append(federation.play(1).arrays())
        for node in world.next_round():
            federation.manager.register(InProcessProxy(node, clients))


def play_messages(world: World, strategy: Any) -> None:
    """Play the course with a server of the Message API."""

    def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number:
            world.models.append(arrays.to_numpy_ndarrays())
            world.next_round()
        return MetricRecord({"loss": 1.0})

    clients: Any = world
    with task_identity(RUN, TASK, SERVER):
        strategy.start(InProcessGrid(clients), arrays_of(), ROUNDS + 1, timeout=5.0, evaluate_fn=evaluated)


PLAY: dict[str, Any] = {"legacy": play_legacy, "message": play_messages}


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


def _check(name: str, base: str, world: World, evaluates: bool) -> int:
    """Play, look at everything that is left, and return how many hostile replies were sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flower's averages, on metrics that overflow
        own = {"server_momentum": 0.5} if (world.api, base) == ("legacy", "FedAvgM") else {}
        strategy = selection(
            world.api, _made(name), base_of(world.api, base, fraction_evaluate=float(evaluates), **own),
            validation=validation(), learning_rate=0.1, min_available=1, max_latency=MAX_LATENCY, busy_timeout=0.0,
            roll_call_timeout=0.1,
            filter=Filter(score="accuracy") if name.startswith("fedcm") else None,
        )  # fmt: skip
        PLAY[world.api](world, strategy)
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
        sent += _check(name, base, World(api, course, said), evaluates)

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
