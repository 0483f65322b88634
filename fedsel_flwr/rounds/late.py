"""Late updates: what a client trained for a round that ended without it still counts, in the round in which it arrives.

==============  ==============================  ======================================================================
symbol          here                            meaning
==============  ==============================  ======================================================================
tau_s           ``staleness``                   rounds that the update missed
u_s, u-hat_F    ``late``, mean of ``fresh``     a late update; the mean of the n_F updates that arrived in time
Lambda_s        in :func:`importance`           ||u-hat - (u + n u-hat) / (n + 1)||^2 / ||u-hat||^2
w_s             :func:`importance`              (1 - beta) / (tau + 1) + beta (1 - exp(-Lambda / Lambda_max))
beta            :data:`BETA`                    0.35
==============  ==============================  ======================================================================

The base gets the model w_t + u_s, whose weight is w_s times its number of examples. Updates in time have the weight 1.
With ``late = "damped"`` it gets w_t + (1 + tau)^(-1/2) u_s with the weight 1, as in buffered rounds.

Deviations:
    * The authors' code divides the exponential by ``scale_coff``, 10 by default. Here it is 1 by default.
    * The weight is multiplied by the client's number of examples, as in FedAvg.
    * Without an update in time, or if their mean is 0, the second term of w_s is 0.
    * Integers and running statistics of a batch normalization are the client's values, as in
      :mod:`~fedsel_flwr.rounds.flights`.

References:
    A. Abdelmoniem et al., REFL: resource-efficient federated learning, EuroSys 2023, doi:10.1145/3552326.3567485. The
    weights are those of the authors' code: ahmedcs/REFL at aa7e642, ``update_importance`` in core/aggregator.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.aggregation import Averaging
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.flights import damping, moved, own_values
from fedsel_flwr.rounds.models import Arrays, ModelList, ModelStack, cast_like, flat
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.round import Outcome, Round
from fedsel_flwr.rounds.settings import Settings

if TYPE_CHECKING:
    # The core owns the late updates.
    from fedsel_flwr.rounds.core import SelectionCore

MOMENT_S = 1e-9
"""Seconds by which sums of the same times may differ."""
BETA = 0.35
"""Share of the second term, ``stale_beta`` of the authors' code."""


def importance(fresh: FloatArray, late: FloatArray, staleness: IntArray, scale_coff: float = 1.0) -> FloatArray:
    """Return the weight of each late update beside the weight 1 of an update in time, shape (m,).

    Args:
        fresh: The updates in time, shape (n, d).
        late: The late updates, shape (m, d).
        staleness: Rounds that each of them missed, shape (m,).
        scale_coff: Divisor of the exponential.

    >>> importance(np.array([[1.0]]), np.array([[3.0], [-1.0]]), np.array([0, 1])).round(4)
    array([0.8712, 0.5462])
    """
    first = (1.0 - BETA) / (staleness + 1.0)
    mean = fresh.mean(axis=0) if len(fresh) else np.zeros(late.shape[1])
    size, n = float(mean @ mean), len(fresh)
    if not size:
        return np.asarray(first)
    differs = (((mean - late) / (n + 1)) ** 2).sum(axis=1) / size  # Lambda
    ratio = differs / (differs.max(initial=0.0) or 1.0)
    return np.asarray(first + BETA * (1.0 - np.exp(-ratio) / scale_coff))


@dataclass(frozen=True, kw_only=True, eq=False)
class LateUpdate:
    """An update that has missed its round.

    Attributes:
        node: The client's connection.
        row: The client.
        round: The absolute round for which it trained.
        arrival_s: Simulated seconds of its arrival; minus infinity if it has arrived.
        late_s: Seconds from the end of its round to its arrival.
        weight: Its weight in a mean, without that of its staleness.
        energy_j: Joules of the training; NaN if unknown.
        change: The update; arrays of the client's own as they are.
        metrics: The metrics of the reply, as far as they are numbers, texts or lists.
    """

    node: str
    row: int
    round: int
    arrival_s: float
    late_s: float
    weight: float
    energy_j: float
    change: Arrays
    metrics: dict[str, Any]

    def key(self) -> str:
        """Return a name that no connection has, because the client may have trained for this round too."""
        return f"{self.node}, trained for round {self.round}"


READERS: Mapping[str, state_dicts.Reader] = {
    **dict.fromkeys(("arrival_s", "late_s", "weight", "energy_j"), state_dicts.plain_number),
    **dict.fromkeys(("row", "round"), state_dicts.whole_number),
    "node": lambda name, value: str(value), "change": state_dicts.arrays_of, "metrics": state_dicts.mapping,
}  # fmt: skip
"""Field of a saved :class:`LateUpdate` -> its reader."""


class LateUpdates:
    """The updates that are late.

    Args:
        settings: How late updates count.

    Attributes:
        names: The names of the model's arrays, by which running statistics are known; empty if they have no names.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.names: Sequence[str] = ()
        self._held: list[LateUpdate] = []

    def free(self, rows: IntArray, now_s: float) -> BoolArray:
        """Return whether each client's update is not still to come at this simulated time, shape (n,)."""
        return ~np.isin(rows, [one.row for one in self._held if one.arrival_s > now_s + MOMENT_S])

    def next_arrival(self, now_s: float) -> float:
        """Return the seconds until an update arrives; 0 if none is still to come."""
        return min((one.arrival_s - now_s for one in self._held if one.arrival_s > now_s + MOMENT_S), default=0.0)

    def hold(self, round: Round, outcome: Outcome, replies: Mapping[str, Reply], stack: ModelStack | None) -> None:
        """Keep the updates of a round's stragglers.

        Args:
            round: The round.
            outcome: The outcome of its replies.
            replies: Connection -> reply.
            stack: The clients' models, by ascending row; None if the replies have them.
        """
        for i, (row, node) in enumerate(round.chosen.items()):
            result = outcome.results[node]
            if result.completed or math.isnan(result.done_s):
                continue
            arrays = replies[node].arrays if stack is None else [layer[i] for layer in stack.layers]
            sent = SentModel(node, row, round.number, round.reference or [])
            self.receive(
                sent, arrays or [], result, replies[node], late_s=result.done_s - outcome.round_s,
                arrival_s=round.sent_s + result.done_s, draws=int(round.draws[i]),
            )  # fmt: skip

    def receive(
        self, sent: SentModel, arrays: Arrays, result: ClientResult, reply: Reply, *,
        late_s: float, arrival_s: float = -math.inf, draws: int = 1,
    ) -> None:  # fmt: skip
        """Keep an update.

        Args:
            sent: What the client was sent.
            arrays: The client's model.
            result: The reply after reading.
            reply: The reply.
            late_s: Seconds from the end of its round to its arrival.
            arrival_s: Simulated seconds of its arrival; minus infinity if it has arrived.
            draws: How often the selector drew the client.
        """
        own = own_values(sent.model, self.names)
        model = cast_like(sent.model, arrays) or arrays
        examples = self._settings.averaging != "mean"
        self._held.append(
            LateUpdate(
                node=sent.node, row=sent.row, round=sent.round, arrival_s=arrival_s,
                late_s=late_s, weight=result.weight if examples else float(draws),
                energy_j=result.values["energy"],
                change=moved(model, old=sent.model, new=[np.zeros_like(array) for array in sent.model], own=own),
                metrics={
                    key: value
                    for key, value in reply.metrics.items()
                    if key not in result.faulty_keys and isinstance(value, int | float | str | list)
                },
            )
        )  # fmt: skip

    def join(self, round: Round, outcome: Outcome) -> Outcome:
        """Return the outcome with the updates that have arrived until the end of the round, and note them there."""
        limit, end_s = self._settings.max_staleness, round.sent_s + outcome.round_s
        self._held = [one for one in self._held if limit is None or round.number - one.round <= limit]
        here = [one for one in self._held if one.arrival_s <= end_s + MOMENT_S]
        enough = len(outcome.usable) + len(here) >= self._settings.min_completed
        if not here or not enough or round.reference is None:
            return outcome
        self._held = [one for one in self._held if one not in here]
        tau = np.array([round.number - one.round for one in here])
        model, names = round.reference, self.names
        own, change = own_values(model, names), [one.change for one in here]
        measured = [i for i, stays in enumerate(own) if not stays]
        shares, factors = np.ones(len(here)), np.ones(len(here))
        if self._settings.late == "damped":
            shares = damping(tau)
        else:
            fresh = outcome.models.flat(measured) - flat(model, measured) if len(outcome.models) else np.zeros((0, 0))
            factors = importance(fresh, ModelList(change).flat(measured), tau, self._settings.late_scale_coff)
        move = partial(moved, old=[np.zeros_like(array) for array in model], new=model, own=own)
        models = [move(one, share=share) for one, share in zip(change, shares, strict=True)]
        round.late = [(one, float(one_factor)) for one, one_factor in zip(here, factors * shares, strict=True)]
        late_weights = factors * [one.weight for one in here]
        results = {
            one.key(): ClientResult(
                completed=True, latency_s=math.nan, latency_source="reported",
                num_examples=max(1, int(one.weight)), weight=one.weight, converted=arrays,
            )
            for one, arrays in zip(here, models, strict=True)
        }  # fmt: skip
        together: ModelList | ModelStack = ModelList([*outcome.models.as_list(), *models])
        if isinstance(stack := outcome.models, ModelStack):
            layers = zip(stack.layers, *models, strict=True)
            together = ModelStack([np.concatenate([layer, np.stack(further)]) for layer, *further in layers])
        weights = outcome.weights if outcome.usable else np.zeros(0)
        return replace(
            outcome,
            results={**outcome.results, **results},
            usable=[*outcome.usable, *results],
            models=together,
            enough=True,
            averaging=Averaging(np.concatenate([weights, late_weights]), 0.0, 1.0),
            late={one.key(): one for one in here},
        )

    def forget(self, rows: IntArray) -> None:
        """Drop the updates of evicted clients."""
        self._held = [one for one in self._held if one.row not in rows]

    def state_dict(self) -> state_dicts.State:
        """Return the late updates."""
        return {"held": [copy.deepcopy(vars(one)) for one in self._held]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        held = state_dicts.read(state, {"held": partial(state_dicts.records, readers=READERS)})["held"]
        self._held = [LateUpdate(**one) for one in held]


@dataclass(frozen=True)
class SentModel:
    """A model that a client got, for a reply that may come after the end of its round.

    Attributes:
        node: The client's connection.
        row: The client.
        round: The absolute round.
        model: The model.
        client_id: The client's id.
    """

    node: str
    row: int
    round: int
    model: Arrays
    client_id: str = ""

    @classmethod
    def of(cls, core: SelectionCore, node: str) -> SentModel:
        """Return what a client of the round in progress got."""
        round, roster = core.current, core.parts.roster
        row = roster.row_of(node)
        return cls(node, row, round.number, round.reference or [], roster.ids[row])

    def received(self, core: SelectionCore, reply: Reply, late_s: float) -> None:
        """Note the reply, which has come after the end of its round, on the server's clock.

        Args:
            core: Plays the rounds.
            reply: The reply.
            late_s: Seconds since the end of its round.
        """
        parts, took = core.parts, reply.observed_s
        # The row of an evicted client may be another client's now.
        if reply.error or took is None or parts.roster.ids[self.row] != self.client_id:
            return
        parts.cooldown.forgive(self.row)
        if parts.deadlines is not None:
            parts.deadlines.note(np.array([self.row]), np.array([took]), np.zeros(1), parts.history.simulated_s)
        if parts.late is not None and (result := core.collector.read_late(self, reply)).completed:
            parts.late.receive(self, reply.arrays or [], result, reply, late_s=late_s)
