"""Buffered rounds: clients that train while the server makes further steps (FedBuff).

C clients are at work. The server makes a step after B arrivals, or when nobody is at work any more. An arrival is an
update or a failure. A round is such a step. If C = B, nobody is at work after a step, and the rounds are synchronous.

==========  =================  ==================================================================================
paper       here               meaning
==========  =================  ==================================================================================
C, K        ``concurrency``,   clients at work; arrivals in a step
            ``buffer``
tau_i       ``staleness``      steps of the server from the sending of the model to its use
Delta_i     in :func:`moved`   the client's model minus the model that it received
s(tau)      :func:`damping`    (1 + tau)^(-1/2)
eta_g       the base's rate    the base's own server rate, 1 for FedAvg
==========  =================  ==================================================================================

Deviations:
    * The base gets the model w + s(tau) Delta of each usable update, w being the current one. FedAvg weights these by
      examples, ``weighting="uniform"`` as in the paper. The sum is divided by the number of usable updates, which is K
      without failures.
    * Integers and running statistics of a batch normalization are the client's values as they are. An extrapolated
      variance could be negative.

References:
    J. Nguyen et al., Federated learning with buffered asynchronous aggregation, AISTATS 2022, Algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.models import Arrays, ModelStack, fault_in_arrays
from fedsel_flwr.rounds.replies import NO_ANSWER, Reply, latency_until_known
from fedsel_flwr.rounds.roster import ConnectedClients
from fedsel_flwr.rounds.round import Outcome, Round
from fedsel_flwr.rounds.settings import Settings

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of arrays that a batch normalization measures. An average turns its integers into floats."""


@dataclass(kw_only=True)
class Batch:
    """Clients that got the same model in the same step.

    Attributes:
        step: The step in which the model was sent, an absolute round.
        model: The model.
        rows: The clients, ascending, shape (n,).
        nodes: Their connections.
        sent_s: Simulated seconds at which each client got the model, shape (n,).
        draws: Number of draws of each client, shape (n,).
        at_work: Whether each client's arrival is still to come, shape (n,).
        arrival_s: Simulated seconds of each arrival, infinity if it is unknown, shape (n,); empty before any reply.
        replies: Place of a client that is at work -> its reply.
        models: The trained models, if the replies have none.
        held: The place of each client's model in ``models``, shape (n,).
    """

    step: int
    model: Arrays
    rows: IntArray
    nodes: list[str]
    sent_s: FloatArray
    draws: IntArray
    at_work: BoolArray
    arrival_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    replies: dict[int, Reply] = field(default_factory=dict)
    models: ModelStack | None = None
    held: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def busy_nodes(self) -> list[str]:
        """Return the connections of the clients that are at work."""
        return [self.nodes[i] for i in np.flatnonzero(self.at_work)]

    def take(self, places: IntArray) -> ModelStack | None:
        """Take clients from work, and return their models; the memory of a batch follows the clients at work."""
        self.at_work[places] = False
        if self.models is None:
            return None
        taken, busy = self.models.take(self.held[places]), np.flatnonzero(self.at_work)
        if 2 * len(busy) <= len(self.models):
            self.models = self.models.take(self.held[busy])
            self.held[busy] = np.arange(len(busy))
        return taken


READERS: Mapping[str, state_dicts.Reader] = {
    "step": state_dicts.whole_number,
    "model": state_dicts.arrays_of,
    "rows": partial(state_dicts.array, dtype=np.int64),
    "nodes": state_dicts.texts,
    "sent_s": partial(state_dicts.array, dtype=np.float64),
    "draws": partial(state_dicts.array, dtype=np.int64),
    "at_work": partial(state_dicts.array, dtype=np.bool_),
}
"""Field of a saved :class:`Batch` -> its reader."""


class Flights:
    """The clients at work, with the models that they received.

    Args:
        settings: Concurrency, buffer, largest staleness, and how replies are read.

    Attributes:
        step: The last step that was begun, an absolute round.
        names: The names of the model's arrays, by which running statistics are known; empty if they have no names.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._concurrency, self._buffer = int(settings.concurrency or 0), int(settings.buffer or 0)
        self.step = 0
        self.names: Sequence[str] = ()
        self._batches: list[Batch] = []

    @property
    def at_work(self) -> int:
        """Return the number of clients at work."""
        return sum(int(batch.at_work.sum()) for batch in self._batches)

    @property
    def nodes(self) -> frozenset[str]:
        """Return the connections of the clients at work."""
        return frozenset(node for batch in self._batches for node in batch.busy_nodes)

    @property
    def calls(self) -> int:
        """Return how often the selector is called in the next step, for one buffer each."""
        return (self._concurrency - self.at_work) // self._buffer

    def free(self, rows: IntArray, chosen: IntArray) -> BoolArray:
        """Return whether each of ``rows`` is neither at work nor among ``chosen``, shape (n,)."""
        return ~np.isin(rows, np.concatenate([chosen, *(batch.rows[batch.at_work] for batch in self._batches)]))

    def send(self, round: Round, sent_s: Mapping[int, float]) -> None:
        """Note that the clients of a round got its model.

        Args:
            round: The round, with the chosen clients.
            sent_s: Row -> simulated seconds at which the client got the model.
        """
        self._batches.append(
            Batch(
                step=round.number, model=round.reference or [], rows=round.rows, nodes=[*round.chosen.values()],
                sent_s=np.array([sent_s[row] for row in round.chosen]), draws=round.draws,
                at_work=np.ones(len(round.chosen), dtype=np.bool_),
            )
        )  # fmt: skip

    def cancel(self, step: int) -> None:
        """Forget the clients that were sent a model in a step."""
        self._batches = [batch for batch in self._batches if batch.step != step]

    def lost(self, before: int | None = None) -> list[Batch]:
        """Return the batches whose replies are unknown. A checkpoint holds none, so the clients must train again.

        Args:
            before: Only batches of earlier steps; None for all.
        """
        unknown = [batch for batch in self._batches if len(batch.arrival_s) < len(batch.at_work)]
        return [batch for batch in unknown if before is None or batch.step < before]

    def begin_run(self) -> None:
        """Begin a run of Flower. A deployment never gets the replies to an earlier run, so its clients are free."""
        if self._settings.clock == "server":
            self._batches = []

    def reconnect(self, present: ConnectedClients) -> None:
        """Let clients that must train again be reached by their connections of now, which a new run has changed."""
        nodes = present.nodes_of(present.rows)
        for batch in self.lost():
            batch.nodes = [nodes.get(row, node) for row, node in zip(batch.rows.tolist(), batch.nodes, strict=True)]

    def receive_arrived(self, replies: Mapping[str, Reply]) -> None:
        """Note the replies that have arrived on the server's clock; all other clients are still at work."""
        for batch in self._batches:
            if not len(batch.arrival_s):
                batch.arrival_s = np.full(len(batch.at_work), np.inf)
            for i in np.flatnonzero(batch.at_work).tolist():
                if (reply := replies.get(batch.nodes[i])) is not None:
                    batch.replies[i] = reply
                    batch.arrival_s[i] = batch.sent_s[i] + (reply.observed_s or 0.0)

    def receive(self, batch: Batch, replies: Mapping[str, Reply], stack: ModelStack | None) -> None:
        """Note the replies to the model of a batch, and when each arrives: a failure at ``max_latency``.

        Args:
            batch: The batch.
            replies: Connection -> reply, for every client of the batch.
            stack: The clients' models, by ascending row; None if the replies have them.
        """
        faults: Sequence[str | None] = [None] * len(batch.nodes) if stack is None else stack.faults(batch.model)
        answers = [replies.get(node, NO_ANSWER) for node in batch.nodes]
        seconds = [
            latency_until_known(reply, self._settings, reference=batch.model, fault=fault)
            for reply, fault in zip(answers, faults, strict=True)
        ]
        batch.arrival_s = batch.sent_s + np.array(seconds)
        batch.replies = {i: answers[i] for i in np.flatnonzero(batch.at_work).tolist()}
        batch.models, batch.held = stack, np.arange(len(batch.nodes))

    def arrive(self, round: Round, replies: Mapping[str, Reply], stack: ModelStack | None) -> Arrivals:
        """Note the replies of the clients that were just sent a model, and return the arrivals of the step.

        Args:
            round: The step in progress. Its chosen clients become those that arrive.
            replies: Connection -> reply, for every client that was just sent a model.
            stack: The models of these clients, by ascending row; None if the replies have them.
        """
        if self._settings.clock == "server":
            self.receive_arrived(replies)
        else:
            for batch in self.lost():
                self.receive(batch, replies, stack)
        known = [np.flatnonzero(batch.at_work & np.isfinite(batch.arrival_s)) for batch in self._batches]
        place = np.concatenate([np.zeros(0, dtype=np.int64), *known])
        whose = np.repeat(np.arange(len(known)), [len(places) for places in known])
        rows, arrival_s = np.zeros(len(place), dtype=np.int64), np.zeros(len(place))
        for i, (batch, places) in enumerate(zip(self._batches, known, strict=True)):
            rows[whose == i], arrival_s[whose == i] = batch.rows[places], batch.arrival_s[places]
        # Of arrivals at the same time, the lower rows count as earlier.
        first = np.lexsort((rows, arrival_s))[: self._buffer]
        found = Arrivals(end_s=float(arrival_s[first[-1]]) if len(first) else 0.0)
        first = first[np.argsort(rows[first])]
        round.chosen, draws, limit = {}, [], self._settings.max_staleness
        for one in first.tolist():
            batch, i = self._batches[whose[one]], int(place[one])
            node, staleness, reply = batch.nodes[i], round.number - batch.step, batch.replies.pop(i)
            if limit is not None and staleness > limit:
                reply = replace(reply, error=f"stale: {staleness} steps, more than max_staleness = {limit}")
            # An unusable model stays as it is, and is refused when the reply is read.
            if staleness and reply.arrays is not None and not fault_in_arrays(reply.arrays, batch.model):
                reply = replace(reply, arrays=self._moved(reply.arrays, batch, round))
            round.chosen[int(rows[one])] = node
            draws.append(batch.draws[i])
            found.replies[node] = reply
            found.staleness[node], found.arrived_s[node] = staleness, float(arrival_s[one])
        round.draws = np.array(draws, dtype=np.int64)
        parts = []
        for i in np.unique(whose[first]):
            batch = self._batches[i]
            if (models := batch.take(place[first[whose[first] == i]])) is not None:
                stale = round.number > batch.step
                parts.append(self._moved(models.layers, batch, round) if stale else models.layers)
        if parts:
            # The parts are in the order of the batches, the replies in that of the rows.
            order = np.argsort(np.argsort(whose[first], kind="stable"))
            found.models = ModelStack([np.concatenate(layers) for layers in zip(*parts, strict=True)]).take(order)
        self._batches = [batch for batch in self._batches if batch.at_work.any()]
        return found

    def damped(self, outcome: Outcome, reference: Arrays) -> Outcome:
        """Return the outcome with models of which only the share s(tau) of each update is left."""
        tau = np.array([outcome.staleness[node] for node in outcome.usable], dtype=np.int64)
        stale = np.flatnonzero(tau)
        if not len(outcome.models) or not len(stale):
            return outcome
        change = partial(moved, old=reference, new=reference, own=own_values(reference, self.names))
        if isinstance(stack := outcome.models, ModelStack):
            layers = [layer.copy() for layer in stack.layers]
            for layer, less in zip(layers, change(stack.take(stale).layers, share=damping(tau[stale])), strict=True):
                layer[stale] = less
            return replace(outcome, models=ModelStack(layers))
        models = stack.as_list()
        return outcome.with_models({i: change(models[i], share=damping(tau[i])) for i in stale.tolist()})

    def _moved(self, model: Arrays, batch: Batch, round: Round) -> Arrays:
        """Return the update of a model, or of a stack of models, on the model of a round."""
        new = round.reference
        return model if new is None else moved(model, old=batch.model, new=new, own=own_values(batch.model, self.names))

    def forget(self, rows: IntArray) -> None:
        """Drop the clients in ``rows``."""
        for batch in self._batches:
            batch.at_work &= ~np.isin(batch.rows, rows)

    def state_dict(self) -> state_dicts.State:
        """Return the clients at work and the models that they got; what they trained is not saved."""
        batches = [{name: copy.deepcopy(getattr(batch, name)) for name in READERS} for batch in self._batches]
        return {"step": self.step, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        batches = partial(state_dicts.records, readers=READERS)
        found = state_dicts.read(state, {"step": state_dicts.whole_number, "batches": batches})
        for batch in found["batches"]:
            for name in ("rows", "sent_s", "draws", "at_work"):
                if (got := len(batch[name])) != (nodes := len(batch["nodes"])):
                    raise StateError(f"{name} must be an array with {nodes} rows, one for each node, got {got}")
        self._batches, self.step = [Batch(**one) for one in found["batches"]], found["step"]


@dataclass
class Arrivals:
    """What arrives in a step.

    Attributes:
        end_s: Simulated seconds at its end.
        replies: Connection -> reply, by ascending row. Arrays are moved to the current model.
        staleness: Connection -> tau.
        arrived_s: Connection -> simulated seconds of its arrival.
        models: The models, if the replies have none, moved to the current model.
    """

    end_s: float
    replies: dict[str, Reply] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    arrived_s: dict[str, float] = field(default_factory=dict)
    models: ModelStack | None = None


def damping(staleness: npt.ArrayLike) -> FloatArray:
    """Return s(tau) = (1 + tau)^(-1/2), in the shape of ``staleness``.

    >>> damping([0, 3])
    array([1. , 0.5])
    """
    return np.asarray((1.0 + np.asarray(staleness)) ** -0.5)


def own_values(model: Arrays, names: Sequence[str]) -> list[bool]:
    """Return whether each array of a model is the client's own value, and no part of the update.

    Args:
        model: The model.
        names: The names of its arrays; empty if they have no names.
    """
    return [
        array.dtype.kind != "f" or name.endswith(RUNNING_STATISTICS)
        for array, name in zip(model, names or [""] * len(model), strict=True)
    ]


def moved(model: Arrays, *, old: Arrays, new: Arrays, own: Sequence[bool], share: npt.ArrayLike = 1.0) -> Arrays:
    """Return new + share (model - old), in the types of the model; arrays of the client's own are left as they are.

    Args:
        model: The model, or the layers of a stack of n models.
        old: The model that was received.
        new: The model to which the update moves.
        own: Whether each array is the client's own.
        share: The share that is left, a number, or shape (n,) for a stack.

    >>> moved([np.array([3.0])], old=[np.array([1.0])], new=[np.array([5.0])], own=[False], share=0.5)
    [array([6.])]
    """

    def change(array: Any, there: Any, here: Any) -> Any:
        left = np.asarray(share, dtype=array.dtype)
        return here + left.reshape(left.shape + (1,) * (array.ndim - left.ndim) * left.ndim) * (array - there)

    return [
        array if stays or array.dtype.kind != "f" else np.asarray(change(array, there, here), dtype=array.dtype)
        for array, there, here, stays in zip(model, old, new, own, strict=True)
    ]
