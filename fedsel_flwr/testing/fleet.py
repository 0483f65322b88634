"""A fleet of simulated clients in plain types: connections, replies, and faults of replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from fedsel_flwr.selectors.columns import COLUMNS, VECTORS
from fedsel_flwr.selectors.round_report import RoundReport

Model = list[np.ndarray[Any, Any]]


class NoReply(Exception):
    """Raised instead of a reply, for a client that never answers."""


@dataclass(frozen=True)
class Reply:
    """The reply of a client after training.

    Attributes:
        arrays: The client's model, or bytes that cannot be decoded.
        num_examples: Training examples behind the model.
        metrics: The reported metrics: numbers, texts, and arrays for vectors.
        refused: The client's reason for not training. Empty if the client trained.
    """

    arrays: Model | bytes
    num_examples: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass
class ReceivedUpdate:
    """An update as the base strategy received it."""

    node: str
    arrays: Model
    num_examples: Any


@dataclass(frozen=True)
class Fault:
    """A way in which a client can fail or misreport.

    Attributes:
        name: The fault in words, for messages.
        change: Returns the changed reply, or raises an exception.
        loses: When the update is lost: always, never, or on the virtual clock, which believes reported latencies.
        named: Whether the history must name the problem although the update is not lost.
    """

    name: str
    change: Callable[[Reply], Reply]
    loses: Literal["always", "on the virtual clock", "never"] = "always"
    named: bool = False


IMPOSTOR = -1
"""Number of the connection that claims the id of client 0, which is always connected."""
STRAGGLER, INTERMITTENT, RECONNECTING, FAILS_TO_INTRODUCE, NEWCOMER = 1, 2, 3, 4, 5
"""Numbers of five clients.

The first is slow. The second is offline in every third round. The third reconnects in every second round. The fourth
fails its first properties request. The fifth joins in round 3.
"""
LAST_ROUNDS = 6
"""Number of rounds after those with one fault each.

In the first all clients raise, in the second all send NaN, and in the third all except one fail. Three rounds without a
fault follow.
"""


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The settings that all runs of a strategy share.

    Attributes:
        arrays: The initial model.
        num_clients: Number of clients; their ids are 0 to num_clients - 1.
        keys: Names of the clients' metrics.
        max_latency: Longest wait for a client, seconds.
        metrics: Further metrics that every client reports.
        reported: The names of all metrics that the clients report; None for everything that is asked.
    """

    arrays: Model
    num_clients: int
    keys: Any
    max_latency: float
    metrics: Mapping[str, float]
    reported: frozenset[str] | None = None

    def told(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics that clients report, with a number for each name that the fleet does not know."""
        return dict(metrics) if self.reported is None else {name: metrics.get(name, 0.5) for name in self.reported}

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Every fault, in the order of the rounds."""
        return all_faults(self.keys.of, self.max_latency)

    @property
    def num_rounds(self) -> int:
        """Number of rounds of a full run."""
        return len(self.faults) + LAST_ROUNDS


@dataclass
class ObservedRound:
    """The record of a round: the fleet notes what its clients receive and send, and the harness all the rest.

    Attributes:
        number: The absolute round.
        connected: Node id -> number of the client.
        expected: Number of available clients -> number that the selector will choose, None if not known before.
        ended: Whether the strategy had ended the run before this round.
        before: The global model before the round.
        after: The global model after the round.
        asked: Node ids that were asked to train, an id twice if it was asked twice.
        keeps_model: Whether the selector only measures in this round and the model stays.
        broken: Node id -> its fault.
        sent: Node id -> its reply.
        configs: Node id -> the train config it received.
        evaluated: Node id -> the evaluation config it received, without probes.
        base_configs: Node -> the base's train config for it, None if the base was not asked.
        given: The updates that the base received, None if the base was not called.
        failures: Number of failures that the base received.
        base_model: The model that the base returned, None if it returned none.
        base_evaluated: Node id -> the evaluation config that the base sent.
        reports: The reports that the selector observed.
    """

    number: int
    connected: dict[str, int] = field(default_factory=dict)
    expected: dict[int, int | None] = field(default_factory=dict)
    ended: bool = False
    before: Model = field(default_factory=list)
    after: Model = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    keeps_model: bool = False
    broken: Mapping[str, Fault] = field(default_factory=dict)
    sent: dict[str, Reply] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    base_configs: dict[str, dict[str, Any]] | None = None
    given: list[ReceivedUpdate] | None = None
    failures: int = 0
    base_model: Model | None = None
    base_evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The round, for messages."""
        return f"in round {self.number}"


class Fleet:
    """The clients and their connections. A client's behaviour follows from its number and the round.

    Args:
        plan: The settings of the fleet.
        seed: Seed of the node ids and of the order of replies. No choice may depend on it.

    Attributes:
        now: The record of the current round; of round 0 before the first one.
        connected: Node id -> number of the client, for the connected nodes.
        numbers: Node id -> number of the client, for all nodes so far.
    """

    def __init__(self, plan: FleetPlan, seed: int = 0) -> None:
        self.plan, self.seed, self.now = plan, seed, ObservedRound(0)
        self.connected: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self._introduced: set[str] = set()

    @property
    def round(self) -> int:
        """The absolute round."""
        return self.now.number

    @property
    def arrays(self) -> Model:
        """The initial model."""
        return self.plan.arrays

    def begin_round(self) -> None:
        """Let clients connect, disconnect and reconnect."""
        number = self.round + 1
        absent = {INTERMITTENT: number % 3 == 1, NEWCOMER: number < 3, IMPOSTOR: number == 1}
        again = {number % self.plan.num_clients} | ({RECONNECTING} if number % 2 == 0 else set())
        wanted = {k for k in (IMPOSTOR, *range(self.plan.num_clients)) if not absent.get(k)}
        # Client 0 never reconnects. The impostor claims its id, and only the id of a connected client must be refused.
        stay = {node: k for node, k in self.connected.items() if k in wanted and (k not in again or k == 0)}
        # Each connection has another node id, a random number of 62 bits as in Flower.
        draws = {k: np.random.default_rng([self.seed, k + 1, number]) for k in sorted(wanted - {*stay.values()})}
        new = {str(int(draw.integers(2, 2**62))): k for k, draw in draws.items()}
        here = list((stay | new).items())
        order = np.random.default_rng([self.seed, number]).permutation(len(here))
        self.connected = dict(here[i] for i in order)
        self.numbers |= new
        self.now = ObservedRound(number, dict(self.connected))

    def id_of(self, node: str) -> str:
        """Return the id of the client behind a node id."""
        return str(max(0, self.numbers[node]))

    def nodes(self) -> list[SimpleNamespace]:
        """Return the server's view of the connections, in which a SuperNode is registered under its client's id.

        The impostor is registered under client 0's id, because an operator may use a name twice.
        """
        return [SimpleNamespace(node_id=int(node), name=self.id_of(node)) for node in self.connected]

    def in_arrival_order(self, items: Sequence[Any]) -> list[Any]:
        """Return the items in the order of their arrival in this round."""
        return [items[i] for i in np.random.default_rng([self.seed, self.round, 1]).permutation(len(items))]

    def assign_faults(self, nodes: Sequence[str]) -> None:
        """Assign the faults of this round to nodes that were asked to train."""
        # Sorted by client, because neither node ids nor the order of messages may decide which client fails.
        asked = sorted(nodes, key=lambda node: (self.numbers.get(node, IMPOSTOR), node))
        faults, late = self.plan.faults, self.round - len(self.plan.faults)
        if asked and late <= 0:
            self.now.broken = {asked[self.round % len(asked)]: faults[self.round - 1]}
        elif asked and late <= 3:
            fault = next(one for one in faults if one.name == ("sends NaN" if late == 2 else "raises an exception"))
            self.now.broken = dict.fromkeys(asked[1:] if late == 3 else asked, fault)

    def properties_of(self, node: str) -> dict[str, Any]:
        """Return the properties of the client behind a node. The first request to one client fails."""
        k, keys = self.numbers[node], self.plan.keys
        if k == FAILS_TO_INTRODUCE and node not in self._introduced:
            self._introduced.add(node)
            raise OSError("who am I?")
        return {keys.client_id: max(0, k), keys.num_examples: self.num_examples(k)}

    def training_reply(self, node: str, model: Model, config: Mapping[str, Any]) -> Reply:
        """Return the reply of a client after training, changed by its fault.

        Args:
            node: The node id.
            model: The model it received.
            config: The train config. ``needs`` names the columns to report.

        Raises:
            NoReply: The client never answers.
            OSError: The client fails.
        """
        self.now.configs[node] = dict(config)
        k, of = self.numbers[node], self.plan.keys.of
        # Seeded by client and round only, because neither node ids nor the order of messages may change a reply.
        draws = np.random.default_rng([max(0, k), self.round])
        arrays = [
            a + np.asarray(draws.normal(0.0, 0.1, a.shape), dtype=a.dtype) if a.dtype.kind == "f" else a for a in model
        ]
        told = {of("client_id"): max(0, k), of("train_loss"): float(draws.uniform(0.1, 2.0))}
        metrics = {**self.plan.metrics, **self._costs(k), **told, **self._columns(k, str(config.get("needs", "")))}
        reply = Reply([np.asarray(a) for a in arrays], self.num_examples(k), self.plan.told(metrics))
        if node in self.now.broken:
            reply = self.now.broken[node].change(reply)
        self.now.sent[node] = reply
        return reply

    def evaluation_reply(self, node: str, config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Return loss, number of examples and metrics of an evaluation. In every fourth round one client fails.

        The loss is among the metrics too, as in Flower's own apps of the Message API.
        """
        if "probe" not in config:
            self.now.evaluated[node] = dict(config)
        k = self.numbers[node]
        if self.round % 4 == k:
            raise OSError("the battery; is: empty")
        probed = self._columns(k, str(config.get("probe", "")))
        loss = 0.1 * (max(0, k) + 1)
        told = self.plan.told({"loss": loss, **self.plan.metrics, **probed, **self._costs(k)})
        return loss, self.num_examples(k), told

    def num_examples(self, k: int) -> int:
        """Return a client's number of examples."""
        return 10 + 3 * max(0, k)

    def _costs(self, k: int) -> dict[str, float]:
        # The last number keeps the streams of costs, columns and updates apart.
        draws = np.random.default_rng([max(0, k), self.round, 2])
        share = 0.9 if k == STRAGGLER else float(draws.uniform(0.05, 0.5))
        keys = self.plan.keys
        return {keys.of("latency"): share * self.plan.max_latency, keys.of("energy"): float(draws.uniform(0.5, 2.0))}

    def _columns(self, k: int, names: str) -> dict[str, Any]:
        draws, of = np.random.default_rng([max(0, k), self.round, 3]), self.plan.keys.of
        lengths = {"gradient": sum(array.size for array in self.plan.arrays)}
        columns = dict[str, Any]()
        for name in names.split(","):
            if name in VECTORS:
                columns[of(name)] = draws.normal(size=lengths.get(name, 4)).astype(np.float32)
            elif name in COLUMNS:
                columns[of(name)] = float(draws.uniform())
        return columns


def all_faults(of: Callable[[str], str], max_latency: float) -> tuple[Fault, ...]:
    """Return every fault, with metrics named by ``of("latency")`` and so on, and the longest latency in seconds."""
    return (
        Fault("raises an exception", _raises),
        Fault("never answers", _never_answers),
        Fault("refuses to train", lambda reply: replace(reply, refused="no training here")),
        Fault("sends NaN", _arrays(lambda model: [_full(model[0], math.nan), *model[1:]])),
        Fault("sends infinite numbers", _arrays(lambda model: [*model[:-1], _full(model[-1], math.inf)])),
        Fault("sends arrays of other shapes", _arrays(lambda model: [array[None] for array in model])),
        Fault("sends an array too few", _arrays(lambda model: model[:-1])),
        Fault("sends an array too many", _arrays(lambda model: [*model, model[0]])),
        Fault("sends texts for numbers", _arrays(lambda model: [np.full(array.shape, "x") for array in model])),
        Fault("sends complex numbers", _arrays(lambda model: [array.astype(np.complex64) for array in model])),
        Fault("sends bytes that are no arrays", lambda reply: replace(reply, arrays=b"\x00 no arrays")),
        Fault("claims to have no examples", lambda reply: replace(reply, num_examples=0)),
        Fault("claims a negative number of examples", lambda reply: replace(reply, num_examples=-5)),
        Fault("claims 2^62 examples", lambda reply: replace(reply, num_examples=2**62)),
        Fault(
            "reports twice the longest latency", _metrics({of("latency"): 2.0 * max_latency}), "on the virtual clock"
        ),
        Fault("reports an infinite latency", _metrics({of("latency"): math.inf}), "on the virtual clock"),
        Fault("reports a negative latency", _metrics({of("latency"): -1.0}), "never", True),
        Fault("reports NaN for its latency", _metrics({of("latency"): math.nan}), "never", True),
        Fault("reports a text for its latency", _metrics({of("latency"): "fast"}), "never", True),
        Fault("reports negative joules", _metrics({of("energy"): -3.0}), "never", True),
        Fault("reports huge metrics", _metrics({of("energy"): 1e300, of("train_loss"): 1e300}), "never", True),
        Fault("reports metrics that no other client reports", _metrics({"fleet-own": 0.5}), "never"),
        Fault("claims another client's id", _metrics({of("client_id"): 10**6}), "never", True),
    )


def _raises(reply: Reply) -> Reply:
    raise OSError("the battery; is: empty")


def _never_answers(reply: Reply) -> Reply:
    raise NoReply


def _arrays(change: Callable[[Any], Model]) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, arrays=change(reply.arrays))


def _metrics(changed: Mapping[str, Any]) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, metrics={**reply.metrics, **changed})


def _full(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    return np.full(array.shape, value, dtype=array.dtype if array.dtype.kind == "f" else np.float64)
