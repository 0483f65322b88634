"""The NumPy world through Flower's own loops: fake clients, of both APIs, and runs that can be resumed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.common import EvaluateIns, EvaluateRes, GetPropertiesIns, GetPropertiesRes
from flwr.common import ndarrays_to_parameters as encoded

from fedsel_flwr.selectors import create
from tests.strategies import numpy_world as world
from tests.strategies.either_api import Server, base_of, make
from tests.strategies.helpers import OK, FakeProxy, parameters_to_ndarrays, run_rounds
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id


class WorldProxy(FakeProxy):
    """Client ``number`` of the NumPy world."""

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return GetPropertiesRes(OK, world.facts(self.number))

    def trained(self, arrays: list[np.ndarray], config: dict[str, Any], server_round: int) -> Any:
        if not world.answers(self.number):
            raise TypeError("the battery is empty")
        trained = world.train(arrays[0], np.array([self.number]))
        asked = world.asked(self.number, arrays[0], str(config.get("needs", "")))
        return [*trained], world.num_examples(self.number), world.metrics(self.number, server_round) | asked

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        (model,) = parameters_to_ndarrays(ins.parameters)
        answers = world.probed(self.number, model)  # the loss of the result would answer for one among them
        return EvaluateRes(OK, float("nan"), world.num_examples(self.number), answers)


def proxies() -> list[WorldProxy]:
    return [WorldProxy(f"node-{k}", k, number=k) for k in range(world.FLEET)]


def base(api: str, name: str = "FedAvg", **options: Any) -> Any:
    """A base by name that starts from the world's model."""
    start = {"initial_parameters": encoded([world.initial()])} if api == "legacy" else {}
    return base_of(api, name, **start, **options)


legacy_base = partial(base, "legacy")


def play(api: str, strategy: Any, rounds: int) -> list[world.Array]:
    """Play rounds; returns the global model after each of them."""
    return [arrays[0] for arrays in Server(api, strategy, proxies(), start=[world.initial()]).play(rounds).models]


def comparable(history: Any) -> Any:
    """What a history says, without texts that differ between the adapters."""
    rounds = [
        (r.round, r.num_available, r.num_selected, r.num_completed, r.round_s, r.simulated_s, r.energy_j, r.probe_s)
        for r in history.rounds
    ]
    clients = [
        (r.round, r.client_id, r.client, r.completed, r.latency_s, repr(r.energy_j), r.num_examples)
        for r in history.clients
    ]
    return rounds, clients


# ---- runs with checkpoints, and all that can be seen of them ---------------------------------------------------------

ROUNDS = 30


@dataclass(frozen=True)
class Run:
    """A run that can be begun, and resumed, in any process: options of the strategy, the selector and the base."""

    api: str
    base: str = "FedAdam"
    selector: str = "bsfl"
    rounds: int = ROUNDS
    evaluates: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    base_options: dict[str, Any] = field(default_factory=dict)
    watch: Callable[[Any], object] = field(default=id, compare=False)
    """Called with each strategy that is made."""

    def __str__(self) -> str:
        buffered = "-buffered" if "concurrency" in self.options else ""
        return f"{self.api}-{self.base}-{self.selector}{buffered}"

    def strategy(self, folder: Path | None, seen: Seen, resume: Any = True) -> Any:
        """A new strategy."""
        selector = create(self.selector, **world.selector_params(self.selector) | self.params)
        options: dict[str, Any] = {
            "max_latency": world.MAX_LATENCY, "availability": world.available, "validation": world.validation(),
            "learning_rate": world.ETA, **self.options,
        }  # fmt: skip
        if folder is not None:
            options |= {"checkpoint_dir": folder, "resume": resume}
        own: dict[str, Any] = {}
        if self.api == "legacy":
            evaluate_fn = seen.evaluate if self.evaluates else None
            own = {"evaluate_fn": evaluate_fn, "fit_metrics_aggregation_fn": lambda metrics: {}}
            options = {"total_rounds": self.rounds, **options}
        made = base(self.api, self.base, **own, **self.base_options)
        strategy = make(self.api, selector, made, on_round=seen.told.append, **options)
        self.watch(strategy)
        return strategy

    def play(self, folder: Path | None = None, resume: Any = True, step: Callable[[str], object] = str) -> Seen:
        """Run to the end; ``step`` is called with "e" when a model is evaluated, with "t" when a client is trained."""
        with quiet():
            return self._played(folder, resume, Seen(step))

    def _played(self, folder: Path | None, resume: Any, seen: Seen) -> Seen:
        strategy = self.strategy(folder, seen, resume)
        clients = proxies()
        for client in clients:
            client.fit = _stepping(client.fit, seen.step, seen)  # type: ignore[method-assign]
        if self.api == "legacy":
            server = run_rounds(strategy, clients, self.rounds, max_workers=1)
            seen.model = [array.tobytes() for array in parameters_to_ndarrays(server.parameters)]
        else:
            grid = FakeGrid({node_id(one.number): FakeNode(one, extra={}) for one in clients})
            initial = ArrayRecord({"model": Array(world.initial())})
            evaluate_fn = seen.evaluate_record if self.evaluates else None
            result = strategy.start(grid, initial, self.rounds, evaluate_fn=evaluate_fn)
            seen.model = [array.tobytes() for array in result.arrays.to_numpy_ndarrays()]
            seen.metrics = sorted(result.train_metrics_clientapp)
        seen.finish(strategy)
        seen.journal = None if folder is None else (folder / "journal.jsonl").read_text()
        return seen


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing in the log."""
    loggers = [logging.getLogger(name) for name in ("flwr", "fedsel_flwr")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass
class Seen:
    """What came of a run.

    Attributes:
        state: Everything that outlives a round, flat.
        records: The history's rounds and clients, in words.
        told: What the caller of ``on_round`` was told.
        evaluated: The rounds whose models were evaluated, and trained: those that clients were asked in.
        finished: Each round's record and those of its clients.
        metrics: The rounds of the result's metrics.
    """

    step: Callable[[str], object] = str
    model: list[bytes] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)
    metrics: list[int] = field(default_factory=list)
    journal: str | None = None

    def evaluate(self, number: int, arrays: Any, config: Any = None) -> tuple[float, dict[str, Any]]:
        """The central evaluation."""
        self.step("e")
        self.evaluated.append(number)
        loss, accuracy = world.validation().loss_and_accuracy(arrays)
        return loss, {"accuracy": accuracy}

    def evaluate_record(self, number: int, arrays: ArrayRecord) -> MetricRecord:
        """The same in the Message API."""
        loss, metrics = self.evaluate(number, arrays.to_numpy_ndarrays())
        return MetricRecord({"loss": loss, **metrics})

    def finish(self, strategy: Any) -> None:
        """Note what is left at the end, in a form that can be sent to another process."""
        self.state = flat({name: part for name, part in strategy.state_dict().items() if name != "history"})
        self.records = [repr(one) for one in [*strategy.history.rounds, *strategy.history.clients]]
        rounds, clients = strategy.history.rounds, list(strategy.history.clients)
        self.finished = [(one, [row for row in clients if row.round == one.round]) for one in rounds]
        self.told = [repr(one) for one in self.told]
        self.step = str

    def result(self) -> tuple[Any, ...]:
        """What must be the same, however often the run was cut off."""
        return self.model, self.state, self.records


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested state as one level, arrays as bytes, so that it can be compared and sent to another process."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, list) and any(isinstance(one, dict | np.ndarray) for one in value):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, dict):
            found |= {f"{prefix}{key}": sorted(value), **flat(value, f"{prefix}{key}.")}
        else:
            found[f"{prefix}{key}"] = value.tobytes() if isinstance(value, np.ndarray) else value
    return found


def _stepping(fit: Callable[..., Any], step: Callable[[str], object], seen: Seen) -> Callable[..., Any]:
    def stepping(ins: Any, timeout: Any, group_id: Any) -> Any:
        step("t")
        seen.trained.append(group_id)
        return fit(ins, timeout, group_id)

    return stepping
