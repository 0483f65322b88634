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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.models import Arrays, ModelList, ModelStack, fault_in_arrays
from fedsel_flwr.rounds.replies import Reply, read_reply
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
        chosen: Row -> connection, by ascending row.
        sent_s: Simulated seconds at which each client got the model, shape (n,).
        draws: Number of draws of each client, shape (n,).
        at_work: Whether each client's arrival is still to come, shape (n,).
        arrival_s: Simulated seconds of each arrival, shape (n,); empty until the replies are known.
        replies: The reply of each client that is at work.
        models: The model of each client that is at work, if the replies have none.
    """

    step: int
    model: Arrays
    chosen: dict[int, str]
    sent_s: FloatArray
    draws: IntArray
    at_work: BoolArray
    arrival_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    replies: dict[int, Reply] = field(default_factory=dict)
    models: dict[int, Arrays] = field(default_factory=dict)

    @property
    def rows(self) -> IntArray:
        """Return the clients' rows, ascending, shape (n,)."""
        return np.fromiter(self.chosen, dtype=np.int64, count=len(self.chosen))


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
        return frozenset(
            node
            for batch in self._batches
            for node, busy in zip(batch.chosen.values(), batch.at_work, strict=True)
            if busy
        )

    @property
    def calls(self) -> int:
        """Return how often the selector is called in the next step, for one buffer each."""
        return (self._concurrency - self.at_work) // self._buffer

    def free(self, rows: IntArray, chosen: IntArray) -> BoolArray:
        """Return whether each of ``rows`` is neither at work nor among ``chosen``, shape (n,)."""
        busy = np.concatenate([chosen, *(batch.rows[batch.at_work] for batch in self._batches)])
        free = np.ones(1 + max(rows.max(initial=-1), busy.max(initial=-1)), dtype=np.bool_)
        free[busy] = False
        return np.asarray(free[rows])

    def send(self, round: Round, sent_s: Mapping[int, float]) -> None:
        """Note that the clients of a round got its model.

        Args:
            round: The round, with the chosen clients.
            sent_s: Row -> simulated seconds at which the client got the model.
        """
        number = len(round.chosen)
        self._batches.append(
            Batch(
                step=round.number, model=round.reference or [], chosen=dict(round.chosen),
                sent_s=np.array([sent_s[row] for row in round.chosen]), draws=round.draws,
                at_work=np.ones(number, dtype=np.bool_),
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
            batch.chosen = {row: nodes.get(row, node) for row, node in batch.chosen.items()}

    def receive_arrived(self, replies: Mapping[str, Reply]) -> None:
        """Note the replies that have arrived on the server's clock; all other clients are still at work."""
        for batch in self._batches:
            if not len(batch.arrival_s):
                batch.arrival_s = np.full(len(batch.at_work), np.inf)
            for i, (row, node) in enumerate(batch.chosen.items()):
                if batch.at_work[i] and node in replies:
                    batch.replies[row] = replies[node]
                    batch.arrival_s[i] = batch.sent_s[i] + (replies[node].observed_s or 0.0)

    def receive(self, batch: Batch, replies: Mapping[str, Reply], stack: ModelStack | None) -> None:
        """Note the replies to the model of a batch, and when each arrives: a failure at ``max_latency``.

        Args:
            batch: The batch.
            replies: Connection -> reply, for every client of the batch.
            stack: The clients' models, by ascending row; None if the replies have them.
        """
        faults: Sequence[str | None] = [None] * len(batch.at_work) if stack is None else stack.faults(batch.model)
        models = None if stack is None else stack.as_list()
        seconds = []
        for i, (row, node) in enumerate(batch.chosen.items()):
            reply = replies.get(node, Reply(error="no answer", timed_out=True))
            read = read_reply(reply, self._settings, client_id=None, reference=batch.model, fault=faults[i])
            seconds.append(read.latency_s)
            if batch.at_work[i]:
                batch.replies[row] = reply
                if models is not None:
                    # A copy, because a view would keep the whole stack until the last of its clients arrives.
                    batch.models[row] = [array.copy() for array in models[i]]
        batch.arrival_s = batch.sent_s + np.array(seconds)

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
        waiting = [
            (float(batch.arrival_s[i]), row, batch, int(i))
            for batch in self._batches
            for row, i in zip(batch.rows[batch.at_work].tolist(), np.flatnonzero(batch.at_work), strict=True)
            if row in batch.replies
        ]
        # Of arrivals at the same time, the lower rows count as earlier.
        first = sorted(waiting, key=lambda one: one[:2])[: self._buffer]
        end = first[-1][0] if first else 0.0
        first.sort(key=lambda one: one[1])
        round.draws = np.array([batch.draws[i] for _, _, batch, i in first], dtype=np.int64)
        round.chosen, found = {}, Arrivals(end_s=end)
        for arrival_s, row, batch, i in first:
            node, batch.at_work[i] = batch.chosen[row], False
            staleness, reply = round.number - batch.step, batch.replies.pop(row)
            if self._settings.max_staleness is not None and staleness > self._settings.max_staleness:
                limit = self._settings.max_staleness
                reply = replace(reply, error=f"stale: {staleness} steps, more than max_staleness = {limit}")
            model = batch.models.pop(row, None)
            if staleness and round.reference is not None:
                change = partial(moved, old=batch.model, new=round.reference, own=self._own(batch.model))
                model = None if model is None else change(model)
                # An unusable model stays as it is, and is refused when the reply is read.
                if reply.arrays is not None and not fault_in_arrays(reply.arrays, batch.model):
                    reply = replace(reply, arrays=change(reply.arrays))
            round.chosen[row] = node
            found.replies[node] = reply
            found.staleness[node], found.arrived_s[node] = staleness, arrival_s
            if model is not None:
                found.models.append(model)
        self._batches = [batch for batch in self._batches if batch.at_work.any()]
        return found

    def damped(self, outcome: Outcome, reference: Arrays) -> Outcome:
        """Return the outcome with models of which only the share s(tau) of each update is left."""
        staleness = outcome.staleness
        if not len(outcome.models) or not any(staleness[node] for node in outcome.usable):
            return outcome
        own, models, results = self._own(reference), list(outcome.models.as_list()), dict(outcome.results)
        for i, node in enumerate(outcome.usable):
            if tau := staleness[node]:
                models[i] = moved(models[i], old=reference, new=reference, own=own, share=damping(tau))
                results[node] = replace(results[node], converted=models[i])
        as_stack = isinstance(outcome.models, ModelStack)
        return replace(outcome, models=stacked(models) if as_stack else ModelList(models), results=results)

    def _own(self, model: Arrays) -> list[bool]:
        """Return whether each array of a model is the client's own value, and no part of the update."""
        names = self.names or [""] * len(model)
        return [
            array.dtype.kind != "f" or name.endswith(RUNNING_STATISTICS)
            for array, name in zip(model, names, strict=True)
        ]

    def forget(self, rows: IntArray) -> None:
        """Drop the clients in ``rows``."""
        for batch in self._batches:
            batch.at_work &= ~np.isin(batch.rows, rows)

    def state_dict(self) -> state_dicts.State:
        """Return the clients at work and the models that they got; what they trained is not saved."""
        return {
            "step": self.step,
            "batches": [
                {
                    "step": batch.step, "model": [np.array(array) for array in batch.model],
                    "rows": batch.rows, "nodes": [*batch.chosen.values()], "sent_s": batch.sent_s.copy(),
                    "draws": batch.draws.copy(), "at_work": batch.at_work.copy(),
                }
                for batch in self._batches
            ],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, ("step", "batches"))
        step = state_dicts.whole_number("step", state["step"])
        if not isinstance(state["batches"], list):
            raise StateError(f"batches must be a list, got {state['batches']!r:.80}")
        self._batches, self.step = [_batch(one) for one in state["batches"]], step


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
    models: list[Arrays] = field(default_factory=list)


def _batch(state: object) -> Batch:
    """Return a batch of a saved state."""
    keys = ("step", "model", "rows", "nodes", "sent_s", "draws", "at_work")
    state_dicts.expect_keys(state, keys)
    assert isinstance(state, Mapping)
    nodes = state_dicts.texts("nodes", state["nodes"])
    read = partial(state_dicts.array, rows=len(nodes))
    model = state["model"]
    if not isinstance(model, list) or not all(isinstance(array, np.ndarray) for array in model):
        raise StateError(f"model must be a list of arrays, got {model!r:.80}")
    rows = read("rows", state["rows"], np.int64).tolist()
    return Batch(
        step=state_dicts.whole_number("step", state["step"]), model=[array.copy() for array in model],
        chosen=dict(zip(rows, nodes, strict=True)), sent_s=read("sent_s", state["sent_s"], np.float64),
        draws=read("draws", state["draws"], np.int64), at_work=read("at_work", state["at_work"], np.bool_),
    )  # fmt: skip


def damping(staleness: int) -> float:
    """Return s(tau) = (1 + tau)^(-1/2).

    >>> damping(0), damping(3)
    (1.0, 0.5)
    """
    return float((1.0 + staleness) ** -0.5)


def moved(model: Arrays, *, old: Arrays, new: Arrays, own: Sequence[bool], share: float = 1.0) -> Arrays:
    """Return new + share (model - old), in the types of the model; arrays of the client's own are left as they are.

    >>> moved([np.array([3.0])], old=[np.array([1.0])], new=[np.array([5.0])], own=[False], share=0.5)
    [array([6.])]
    """
    return [
        array if stays or array.dtype.kind != "f" else np.asarray(here + share * (array - there), dtype=array.dtype)
        for array, there, here, stays in zip(model, old, new, own, strict=True)
    ]


def stacked(models: Sequence[Arrays]) -> ModelStack:
    """Return models as a stack."""
    return ModelStack([np.stack(layers) for layers in zip(*models, strict=True)])
