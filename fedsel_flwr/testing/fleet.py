"""A fleet of clients in plain types: who is connected in which round, who is broken, and what each of them answers.

What clients of the fleet may answer in place of an honest reply, in plain types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from fedsel_flwr.selectors.columns import COLUMNS, VECTORS

Model = list[np.ndarray[Any, Any]]


class Silence(Exception):
    """Nothing comes of this client."""


@dataclass
class Answer:
    """What a client is about to send after training; faults change it.

    Attributes:
        arrays: Its model; bytes that are no arrays at all, where a fault says so.
        num_examples: Examples behind it.
        metrics: What it reports; arrays are vectors. A list stands for a text in an API without texts.
        refused: Empty, or why the client says that it has not trained.
    """

    arrays: Model | bytes
    num_examples: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class Fault:
    """One way to be broken.

    Attributes:
        name: In words, for messages.
        change: Changes the answer, or raises.
        loses: Whether the update is lost: always, never, or on the clock that believes what clients report.
        named: Whether the history must say what was wrong, although the update is not lost.
    """

    name: str
    change: Callable[[Answer], None]
    loses: Literal["always", "on the virtual clock", "never"] = "always"
    named: bool = False


def all_faults(latency: str, energy: str, train_loss: str, client_id: str, max_latency: float) -> tuple[Fault, ...]:
    """Every fault, given the names under which clients report and the longest wait for them, seconds."""
    return (
        Fault("raises an exception", _raises),
        Fault("never answers", _silent),
        Fault("refuses to train", _refuses),
        Fault("sends NaN", _arrays(lambda model: [_full(model[0], math.nan), *model[1:]])),
        Fault("sends infinite numbers", _arrays(lambda model: [*model[:-1], _full(model[-1], math.inf)])),
        Fault("sends arrays of other shapes", _arrays(lambda model: [array[None] for array in model])),
        Fault("sends an array too few", _arrays(lambda model: model[:-1])),
        Fault("sends an array too many", _arrays(lambda model: [*model, model[0]])),
        Fault("sends texts for numbers", _arrays(lambda model: [np.full(array.shape, "x") for array in model])),
        Fault("sends complex numbers", _arrays(lambda model: [array.astype(np.complex64) for array in model])),
        Fault("sends bytes that are no arrays", _garbage),
        Fault("claims to have no examples", _examples(0)),
        Fault("claims a negative number of examples", _examples(-5)),
        Fault("claims 2^62 examples", _examples(2**62)),
        Fault("reports twice the longest latency", _metric(latency, 2.0 * max_latency), "on the virtual clock"),
        Fault("reports an infinite latency", _metric(latency, math.inf), "on the virtual clock"),
        Fault("reports a negative latency", _metric(latency, -1.0), "never", True),
        Fault("reports NaN for its latency", _metric(latency, math.nan), "never", True),
        Fault("reports a text for its latency", _metric(latency, "fast"), "never", True),
        Fault("reports negative joules", _metric(energy, -3.0), "never", True),
        Fault("reports huge metrics", _huge(energy, train_loss), "never", True),
        Fault("reports metrics that nobody else reports", _metric("fleet-own", 0.5), "never"),
        Fault("claims another client's id", _metric(client_id, 10**6), "never", True),
    )


def _full(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    return np.full(array.shape, value, dtype=array.dtype if array.dtype.kind == "f" else np.float64)


def _arrays(change: Callable[[Model], Model]) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        assert not isinstance(answer.arrays, bytes)
        answer.arrays = change(answer.arrays)

    return fault


def _metric(key: str, value: Any) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        answer.metrics[key] = value

    return fault


def _examples(value: int) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        answer.num_examples = value

    return fault


def _huge(*keys: str) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        answer.metrics.update(dict.fromkeys(keys, 1e300))

    return fault


def _raises(answer: Answer) -> None:
    raise OSError("the battery; is: empty")


def _silent(answer: Answer) -> None:
    raise Silence


def _refuses(answer: Answer) -> None:
    answer.refused = "no training here"


def _garbage(answer: Answer) -> None:
    answer.arrays = b"\x00 no arrays"


IMPOSTOR = -1
"""Number of the connection that claims to be client 0, which stays connected all the time."""
SLOW, GONE, RESTLESS, CONFUSED, LATE = 1, 2, 3, 4, 5
"""Who is slow, who is away in every third round, who reconnects in every second, whose first introduction fails, and
who joins in the third round only."""
LAST_ROUNDS = 6
"""Rounds after those with a fault each: all raise, all send NaN, all but one fail, and three in which nobody does."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every play of one strategy has in common.

    Attributes:
        arrays: The initial model.
        num_clients: Clients, with the ids 0 to num_clients - 1.
        keys: Names under which clients report.
        max_latency: Longest wait for a client, seconds.
        metrics: What clients report beside.
    """

    arrays: Model
    num_clients: int
    keys: Any
    max_latency: float
    metrics: Mapping[str, float]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Every fault there is; each takes its turn."""
        of = self.keys.of
        return all_faults(of("latency"), of("energy"), of("train_loss"), of("client_id"), self.max_latency)

    @property
    def num_rounds(self) -> int:
        """Rounds until every fault had its turn."""
        return len(self.faults) + LAST_ROUNDS


@dataclass
class Fleet:
    """The clients and their connections; everything about them follows from number and round.

    Args:
        plan: How many there are, and how they report.
        seed: Draws the names of the connections and the order of everything; no choice may depend on it.

    Attributes:
        round: The absolute round.
        connected: Connection -> number of the client, of those connected now.
        numbers: The same of all connections there ever were.
        broken: Connection -> how it is broken in this round.
    """

    plan: Plan
    seed: int = 0
    round: int = 0
    connected: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    broken: dict[str, Fault] = field(default_factory=dict)
    _introduced: set[str] = field(default_factory=set)

    def begin_round(self) -> None:
        """Let clients come, go and reconnect."""
        self.round += 1
        self.broken = {}
        gone = ({GONE} if self.round % 3 == 1 else set[int]()) | ({LATE} if self.round < 3 else set[int]())
        again = {self.round % self.plan.num_clients} | ({RESTLESS} if self.round % 2 == 0 else set())
        impostor = {IMPOSTOR} if self.round > 1 else set[int]()
        wanted = ({*range(self.plan.num_clients)} | impostor) - gone
        stay = {node: k for node, k in self.connected.items() if k in wanted and (k not in again or k == 0)}
        new = {self._node(k): k for k in sorted(wanted - {*stay.values()})}
        here = list((stay | new).items())
        order = np.random.default_rng([self.seed, self.round]).permutation(len(here))
        self.connected = dict(here[i] for i in order)
        self.numbers |= new

    def id_of(self, node: str) -> str:
        """The id of the client behind a connection."""
        return str(max(0, self.numbers[node]))

    def nodes(self) -> list[SimpleNamespace]:
        """What the server says of the connections: the SuperNode of a client is registered under the client's id.

        So is the impostor's: an operator may use a name twice.
        """
        return [SimpleNamespace(node_id=int(node), name=self.id_of(node)) for node in self.connected]

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        """Items in the order in which they happen to arrive."""
        return [items[i] for i in np.random.default_rng([self.seed, self.round, 1]).permutation(len(items))]

    def ask(self, nodes: Sequence[str]) -> None:
        """Decide who of those that were asked to train is broken in this round."""
        asked = sorted(nodes, key=lambda node: (self.numbers.get(node, IMPOSTOR), node))
        faults, late = self.plan.faults, self.round - len(self.plan.faults)
        if not asked or late > 3:
            return
        if late <= 0:
            self.broken = {asked[self.round % len(asked)]: faults[self.round - 1]}
        else:
            fault = next(one for one in faults if one.name == ("sends NaN" if late == 2 else "raises an exception"))
            self.broken = dict.fromkeys(asked[1:] if late == 3 else asked, fault)

    def introduction(self, node: str) -> dict[str, Any]:
        """What a connection says of itself; the first words of one client are an error."""
        k, keys = self.numbers[node], self.plan.keys
        if k == CONFUSED and node not in self._introduced:
            self._introduced.add(node)
            raise OSError("who am I?")
        return {keys.client_id: max(0, k), keys.num_examples: self.num_examples(k)}

    def trained(self, node: str, model: Model, config: Mapping[str, Any]) -> Answer:
        """What a client sends after training, if it sends anything.

        Args:
            node: The connection.
            model: The model that it received.
            config: The round's config; ``needs`` names the columns that it is asked for.
        """
        k = self.numbers[node]
        draws = np.random.default_rng([max(0, k), self.round])
        arrays = [
            a + np.asarray(draws.normal(0.0, 0.1, a.shape), dtype=a.dtype) if a.dtype.kind == "f" else a for a in model
        ]
        answer = Answer([np.asarray(a) for a in arrays], self.num_examples(k), {**self.plan.metrics, **self._spent(k)})
        answer.metrics[self.plan.keys.of("client_id")] = max(0, k)
        answer.metrics[self.plan.keys.of("train_loss")] = float(draws.uniform(0.1, 2.0))
        answer.metrics |= self._columns(k, str(config.get("needs", "")))
        if node in self.broken:
            self.broken[node].change(answer)
        return answer

    def measured(self, node: str, config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Loss, number of examples and metrics after evaluating; one client fails in every fourth round."""
        k = self.numbers[node]
        if self.round % 4 == k:
            raise OSError("the battery; is: empty")
        probed = self._columns(k, str(config.get("probe", "")))
        return 0.1 * (max(0, k) + 1), self.num_examples(k), {**self.plan.metrics, **probed, **self._spent(k)}

    def num_examples(self, k: int) -> int:
        """How many examples a client has."""
        return 10 + 3 * max(0, k)

    def _spent(self, k: int) -> dict[str, float]:
        draws = np.random.default_rng([max(0, k), self.round, 2])
        share = 0.9 if k == SLOW else float(draws.uniform(0.05, 0.5))
        keys = self.plan.keys
        return {keys.of("latency"): share * self.plan.max_latency, keys.of("energy"): float(draws.uniform(0.5, 2.0))}

    def _columns(self, k: int, names: str) -> dict[str, Any]:
        draws = np.random.default_rng([max(0, k), self.round, 3])
        lengths = {"gradient": sum(array.size for array in self.plan.arrays)}
        return {
            self.plan.keys.of(name): (
                draws.normal(size=lengths.get(name, 4)).astype(np.float32)
                if name in VECTORS
                else float(draws.uniform())
            )
            for name in names.split(",")
            if name in COLUMNS
        }

    def _node(self, k: int) -> str:
        """A name for the next connection of a client: a random number of 62 bits, as Flower's node ids."""
        return str(int(np.random.default_rng([self.seed, k + 1, self.round]).integers(2, 2**62)))
