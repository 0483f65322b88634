"""Programmable clients, and rounds played with Flower's own server and client manager."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr import common
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters
from flwr.server import Server
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg, Strategy

from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy

ABSENT: Any = object()
OK = Status(common.Code.OK, "")
SHAPES = ((3, 2), (2,))
Arrays = list[np.ndarray]


def model(value: float = 0.0) -> Arrays:
    """A model of two small float32 arrays."""
    return [np.full(shape, value, dtype=np.float32) for shape in SHAPES]


def initial(value: float = 0.0) -> Parameters:
    """The same as Flower's parameters."""
    return ndarrays_to_parameters(model(value))


def update(number: int, arrays: Arrays, server_round: int) -> Arrays:
    """What honest client ``number`` makes of a model: numbers whose float32 sums depend on their order."""
    generator = np.random.default_rng([number, server_round])
    return [(array + generator.normal(0.1, 1.0, array.shape)).astype(array.dtype) for array in arrays]


@dataclass
class Answer:
    """What a client is about to return from ``fit``; faults change it."""

    proxy: FakeProxy
    parameters: Parameters
    metrics: dict[str, Any]
    num_examples: Any
    status: Status = field(default_factory=lambda: OK)


Fault = Callable[[Answer, float | None], None]


_DECODING = threading.Lock()


def parameters_to_ndarrays(parameters: Parameters) -> Arrays:
    """Flower's decoding, one thread at a time.

    NumPy parses headers with ast, whose recursion check CPython 3.11 may trip when threads of one process do so
    together (SystemError: AST constructor recursion depth mismatch).
    """
    with _DECODING:
        return common.parameters_to_ndarrays(parameters)


class FakeProxy(ClientProxy):
    """A client whose every answer can be programmed.

    Args:
        cid: The connection.
        client_id: The id it answers to get_properties; ABSENT leaves it out.
        number: Seed of its updates, and what its number of examples and its latency follow from.
        latency: Seconds it reports, or a function of the round.
        fault: Name of one of FAULTS; None is an honest client.
        on_properties: Called instead of answering get_properties at once.
        delay: Seconds that ``fit`` really takes.
        energy: Joules it reports.
        extra: Further metrics of its reply.
    """

    def __init__(
        self, cid: str, client_id: Any = ABSENT, *, number: int = 0,
        latency: float | Callable[[int], float] | None = None, fault: str | None = None,
        on_properties: Callable[[FakeProxy], None] | None = None, delay: float = 0.0, energy: float = 0.25,
        extra: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cid)
        self.client_id, self.number, self.fault = client_id, number, fault
        self.latency = 0.5 + 0.125 * number if latency is None else latency
        self.on_properties, self.delay, self.energy, self.extra = on_properties, delay, energy, extra or {}
        self.fits: list[FitIns] = []
        self.fit_rounds: list[int] = []
        self.asked = 0
        self.evaluations: list[int] = []
        self.num_examples = 10 + 3 * number

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> common.GetPropertiesRes:
        self.asked += 1
        if self.on_properties is not None:
            self.on_properties(self)
        properties = {} if self.client_id is ABSENT else {"client_id": self.client_id}
        return common.GetPropertiesRes(OK, {**properties, "num_examples": self.num_examples})

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> common.GetParametersRes:
        return common.GetParametersRes(OK, ndarrays_to_parameters(model(7.0)))

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        self.fits.append(ins)
        self.fit_rounds.append(group_id)
        time.sleep(self.delay)
        arrays, examples, metrics = self.trained(parameters_to_ndarrays(ins.parameters), dict(ins.config), group_id)
        answer = Answer(self, ndarrays_to_parameters(arrays), metrics, examples)
        if self.fault is not None:
            FAULTS[self.fault](answer, timeout)
        return FitRes(answer.status, answer.parameters, answer.num_examples, answer.metrics)

    def trained(self, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
        """What it makes of a model: arrays, number of examples and metrics."""
        latency = self.latency(server_round) if callable(self.latency) else self.latency
        metrics = {"latency_s": latency, "energy_j": self.energy, **self.extra}
        if self.client_id is not ABSENT:
            metrics["client_id"] = self.client_id
        return update(self.number, arrays, server_round), self.num_examples, metrics

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        self.evaluations.append(group_id or 0)
        return EvaluateRes(OK, 0.1 * (self.number + 1), self.num_examples, {})

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> common.DisconnectRes:
        return common.DisconnectRes("")


def arrays_fault(change: Callable[[Arrays], list[Any]]) -> Fault:
    def fault(answer: Answer, timeout: float | None) -> None:
        answer.parameters = ndarrays_to_parameters(change(parameters_to_ndarrays(answer.parameters)))

    return fault


def _metric(key: str, value: Any) -> Fault:
    def fault(answer: Answer, timeout: float | None) -> None:
        answer.metrics.pop(key, None)
        if value is not ABSENT:
            answer.metrics[key] = value

    return fault


def _part(name: str, value: Any) -> Fault:
    """Another value of a part of the answer."""
    return lambda answer, timeout: setattr(answer, name, value)


def _raises(answer: Answer, timeout: float | None) -> None:
    raise TypeError("the battery; is: empty")


def _straggler(answer: Answer, timeout: float | None) -> None:
    """Would answer after three times the round's timeout: Flower's own proxy gives up with this error."""
    time.sleep(timeout or 0.0)
    raise ValueError("Expected one Message but got: 0")


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.zeros((3, 2), dtype=np.float32))
    return buffer.getvalue()


UPDATE_FAULTS: dict[str, Fault] = {
    "nan": arrays_fault(lambda arrays: [arrays[0] * np.nan, *arrays[1:]]),
    "infinite": arrays_fault(lambda arrays: [*arrays[:-1], np.full_like(arrays[-1], np.inf)]),
    "shape": arrays_fault(lambda arrays: [arrays[0].T, *arrays[1:]]),
    "flat": arrays_fault(lambda arrays: [arrays[0].ravel(), *arrays[1:]]),
    "fewer": arrays_fault(lambda arrays: arrays[:-1]),
    "more": arrays_fault(lambda arrays: [*arrays, arrays[0]]),
    "none": arrays_fault(lambda arrays: []),
    "text": arrays_fault(lambda arrays: [np.full(a.shape, "x") for a in arrays]),
    "complex": arrays_fault(lambda arrays: [a.astype(np.complex64) for a in arrays]),
    "bytes": _part("parameters", Parameters([b"\x00garbage", b"more"], "numpy.ndarray")),
    "zip": _part("parameters", Parameters([_npz(), _npz()], "numpy.ndarray")),
    "too-large": arrays_fault(lambda arrays: [np.full(a.shape, 1e300) for a in arrays]),
}
EXAMPLE_FAULTS: dict[str, Fault] = {
    "negative-examples": _part("num_examples", -5),
    "no-examples": _part("num_examples", 0),
    "huge-examples": _part("num_examples", 2**62),
}
LATENCY_FAULTS: dict[str, Fault] = {
    "latency-negative": _metric("latency_s", -1),
    "latency-text": _metric("latency_s", "fast"),
    "latency-nan": _metric("latency_s", float("nan")),
    "latency-missing": _metric("latency_s", ABSENT),
    "latency-bool": _metric("latency_s", True),
}
FAULTS: dict[str, Fault] = {
    **UPDATE_FAULTS,
    **EXAMPLE_FAULTS,
    **LATENCY_FAULTS,
    "latency-infinite": _metric("latency_s", float("inf")),
    "raises": _raises,
    "straggler": _straggler,
    "status": _part("status", Status(common.Code.FIT_NOT_IMPLEMENTED, "no fit here")),
    "impostor": _metric("client_id", "h0"),
    "energy-negative": _metric("energy_j", -3.0),
    "energy-text": _metric("energy_j", "much"),
}


class RecordingBase(FedAvg):
    """FedAvg that keeps what it was given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"fraction_evaluate": 0.0, "initial_parameters": initial(), **kwargs})
        self.given: list[tuple[list[Any], list[Any]]] = []

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.given.append((list(results), list(failures)))
        return super().aggregate_fit(server_round, results, failures)


def fedavg(**kwargs: Any) -> FedAvg:
    """FedAvg with a model of its own and no federated evaluation."""
    return FedAvg(**{"fraction_evaluate": 0.0, "initial_parameters": initial(), **kwargs})


def fleet(count: int, prefix: str = "", cid: Callable[..., str] = "node-{}".format, **kwargs: Any) -> list[FakeProxy]:
    """Honest clients with the ids 0..count-1, or prefixed."""
    return [FakeProxy(cid(k), f"{prefix}{k}" if prefix else k, number=k, **kwargs) for k in range(count)]


@dataclass
class Federation:
    """A real server over fake clients, played round by round."""

    strategy: Strategy
    proxies: Iterable[ClientProxy] = ()
    timeout: float | None = None
    manager: ClientManager = field(default_factory=SimpleClientManager)
    max_workers: int = 8

    def __post_init__(self) -> None:
        for proxy in self.proxies:
            assert self.manager.register(proxy)
        self.server = Server(client_manager=self.manager, strategy=self.strategy)
        self.server.set_max_workers(self.max_workers)
        self.round = 0
        self.models: list[list[bytes]] = []

    def play(self, rounds: int = 1) -> Federation:
        """Play rounds as ``Server.fit`` does, so that clients can come and go in between."""
        if not self.round:
            self.server.parameters = self.server._get_initial_parameters(server_round=0, timeout=self.timeout)
            self.strategy.evaluate(0, self.server.parameters)
        for _ in range(rounds):
            self.round += 1
            result = self.server.fit_round(server_round=self.round, timeout=self.timeout)
            if result is not None and result[0]:
                self.server.parameters = result[0]
            self.strategy.evaluate(self.round, parameters=self.server.parameters)
            self.server.evaluate_round(server_round=self.round, timeout=self.timeout)
            self.models.append(list(self.server.parameters.tensors))
        return self

    def arrays(self) -> Arrays:
        """The global model."""
        return parameters_to_ndarrays(self.server.parameters)


def run_rounds(strategy: Strategy, proxies: Iterable[ClientProxy], rounds: int, max_workers: int = 8) -> Server:
    """Run Flower's own ``Server.fit``."""
    server = Federation(strategy, proxies, max_workers=max_workers).server
    server.fit(num_rounds=rounds, timeout=None)
    return server


@contextmanager
def within(least: float, most: float) -> Iterator[None]:
    """What takes from so many seconds to so many."""
    start = time.monotonic()
    yield
    assert least <= time.monotonic() - start < most


def chosen(strategy: SelectionStrategy) -> list[list[str]]:
    """The client ids of each round, in row order."""
    return [
        [row.client_id for row in strategy.history.clients if row.round == entry.round]
        for entry in strategy.history.rounds
    ]


def row_of(strategy: SelectionStrategy, client_id: str) -> int:
    """The selector's row of a client that was selected at least once."""
    return {row.client_id: row.client for row in strategy.history.clients}[client_id]


def all_in(proxies: list[FakeProxy], **kwargs: Any) -> tuple[SelectionStrategy, Federation]:
    """A strategy that trains everyone it knows, after one round."""
    options = {"min_available": 1, "max_latency": 60.0, **kwargs}
    strategy = SelectionStrategy(Random(clients_per_round=100, seed=0), fedavg(), **options)
    return strategy, Federation(strategy, proxies).play(1)
