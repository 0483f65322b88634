"""One round: its cohort, its outcome, its wall times, and the report and records of its end.

A round itself is never saved: checkpoints are written between rounds.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedsel_flwr.aggregation import Averaging
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.deadlines import Deadline
from fedsel_flwr.rounds.eligibility import Cooldown
from fedsel_flwr.rounds.history import round_note
from fedsel_flwr.rounds.models import Arrays, ModelList, Models, with_norm
from fedsel_flwr.rounds.records import ClientRecord
from fedsel_flwr.rounds.replies import NUMBERS, ClientResult, column_of
from fedsel_flwr.rounds.roll_call import ProbeFaults
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.untrusted import first_ids
from fedsel_flwr.selectors import RoundReport, Selector
from fedsel_flwr.selectors.columns import COLUMNS, MEASURED, VECTORS, columns_where

if TYPE_CHECKING:
    # Late updates are joined to the outcome of a round.
    from fedsel_flwr.rounds.late import LateUpdate

logger = logging.getLogger("fedsel_flwr")
FROM_REPLY = columns_where(lambda column: column.source == "reply")
"""Columns that clients report."""
RECORDED_NUMBERS = [COLUMNS[name].key for name in NUMBERS]
"""Names in the history of the numbers that are read from every reply."""
RECORDED_AS_READ = sorted(ClientRecord.__dataclass_fields__.keys() & ClientResult.__dataclass_fields__.keys())
"""Fields that a record of the history takes over from the result of reading a reply."""
STEPS = ("probe", "select", "collect", "aggregate", "observe")
"""Steps of the server in a round, in their order (:class:`Stopwatch`)."""


@dataclass(kw_only=True)
class Round:
    """A round in progress, from the choice of its clients to its record in the history.

    Attributes:
        number: The absolute round.
        available: Rows of the available clients, including those above ``max_participation``, shape (n,).
        reference: The global model that the clients receive; None if it cannot be decoded.
        num_available: Number of clients that the selector could choose.
        chosen: Row -> connection, by ascending row.
        probe_faults: The faults of the answers to the round's probes.
        draws: How often the selector drew each chosen client, shape (n,).
        asked: Rows of the clients that were sent the model in this round, shape (n,). In a buffered round other clients
            may arrive, which :attr:`chosen` then has.
        outcome: The outcome of the replies; None before they are collected.
        offered: Rows of the clients that the selector could choose before any probe, shape (n,).
        sent_s: Simulated seconds at which the clients got the model.
        deadline: When the round ends at the latest.
        late: The late updates that count in this round, each with its weight.
    """

    number: int
    available: IntArray
    reference: Arrays | None
    num_available: int = 0
    chosen: dict[int, str] = field(default_factory=dict)
    probe_faults: ProbeFaults = field(default_factory=ProbeFaults)
    draws: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    asked: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    outcome: Outcome | None = None
    offered: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    sent_s: float = 0.0
    deadline: Deadline = field(default_factory=Deadline)
    late: list[tuple[LateUpdate, float]] = field(default_factory=list)

    @property
    def rows(self) -> IntArray:
        """Return the chosen rows, ascending, shape (n,)."""
        return np.fromiter(self.chosen, dtype=np.int64, count=len(self.chosen))

    def add(self, chosen: Mapping[int, str], draws: IntArray) -> None:
        """Add clients of a selection; in buffered rounds there may be several.

        Args:
            chosen: Row -> connection, by ascending row.
            draws: How often the selector drew each of them, shape (n,).
        """
        if not self.chosen:
            self.chosen, self.draws = dict(chosen), draws
            return
        order, both = np.argsort([*self.chosen, *chosen]), self.chosen | dict(chosen)
        self.chosen = {row: both[row] for row in sorted(both)}
        self.draws = np.concatenate([self.draws, draws])[order]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a round's replies.

    Attributes:
        results: Connection -> its reply after reading, for every chosen client, by ascending row.
        usable: The connections whose updates may be aggregated, by ascending row.
        enough: Whether at least ``min_completed`` updates are usable, so that the round may change the model.
        models: The usable models in the types of the global model; none if arrays are not read.
        columns: The columns measured on the usable models, one row for each model.
        averaging: The scheme that averages the kept models; None leaves the averaging to the base strategy.
        round_s: Duration of the round without its probes, seconds.
        lacking: The reported columns that all usable replies lacked.
        left_out: Keys of metrics that the base does not get in this round, because a client has NaN or infinity there.
        as_sent: Whether each usable update has the structure of the arrays that its client received.
        staleness: Connection -> steps of the server since the client got its model; empty in synchronous rounds.
        arrived_s: Connection -> simulated seconds of its arrival; empty in synchronous rounds.
        deadline_s: Seconds after which the round had to end; infinity without a deadline.
        late: The late updates among the usable ones, by their names in ``results``.
    """

    results: Mapping[str, ClientResult]
    usable: list[str]
    enough: bool
    models: Models = field(default_factory=lambda: ModelList([]))
    columns: Mapping[str, FloatArray | BoolArray | IntArray] = field(default_factory=dict)
    averaging: Averaging | None = None
    round_s: float = 0.0
    lacking: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    as_sent: bool = True
    staleness: Mapping[str, int] = field(default_factory=dict)
    arrived_s: Mapping[str, float] = field(default_factory=dict)
    deadline_s: float = math.inf
    late: Mapping[str, LateUpdate] = field(default_factory=dict)

    @property
    def positions(self) -> IntArray:
        """Return the positions of the usable models that FedCA's filter keeps; all of them without a filter."""
        return np.flatnonzero(self.columns.get("kept", np.ones(len(self.usable))))

    @property
    def kept(self) -> list[str]:
        """Return the connections of the kept models, by ascending row."""
        return [self.usable[i] for i in self.positions]

    def with_models(self, changed: Mapping[int, Arrays]) -> Outcome:
        """Return the outcome with other models at some of the positions."""
        models, results = list(self.models.as_list()), dict(self.results)
        for i, arrays in changed.items():
            models[i], node = arrays, self.usable[i]
            results[node] = replace(results[node], converted=arrays)
        return replace(self, models=ModelList(models), results=results)

    def with_norms(self, reference: Arrays) -> Outcome:
        """Return the outcome with updates that can be clipped (:func:`~fedsel_flwr.rounds.models.with_norm`)."""
        models = {i: with_norm(arrays, reference) for i, arrays in enumerate(self.models.as_list())}
        return self.with_models({i: arrays for i, arrays in models.items() if arrays is not None})

    @property
    def weights(self) -> FloatArray:
        """Return the weight of each kept model in the mean, shape (n_kept,): the scheme's weight, else the client's."""
        if self.averaging is not None:
            return self.averaging.weights
        return np.array([self.results[node].weight for node in self.kept])


class Stopwatch:
    """Measures the wall time of each round, and of the server's steps in it, without the clients' work.

    The times stay in this process, because they differ from run to run, and equal runs have equal records and
    checkpoints. A resumed run therefore has no times of the rounds before its checkpoint.

    Args:
        clock: Returns seconds.

    >>> ticks = iter(range(100))
    >>> stopwatch = Stopwatch(clock=lambda: next(ticks))
    >>> stopwatch.begin()
    >>> stopwatch.switch("select")
    >>> stopwatch.end(1)
    >>> [float(stopwatch.columns(1)[name][0]) for name in ("probe_ms", "select_ms", "collect_ms", "round_ms")]
    [1000.0, 1000.0, 0.0, 2000.0]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Number, steps and whole duration of each round, one after the other: 56 bytes a round.
        self._rounds = array("d")
        self._spent = dict.fromkeys(STEPS, 0.0)
        self._step: str | None = None
        self._began = self._since = 0.0

    def begin(self) -> None:
        """Begin a round with its first step; the times of a round that did not end are dropped."""
        self._spent = dict.fromkeys(STEPS, 0.0)
        self._step, self._began = STEPS[0], self._clock()
        self._since = self._began

    def switch(self, step: str | None) -> None:
        """End the current step and begin another one.

        Args:
            step: One of :data:`STEPS`; None while the server waits for clients.
        """
        now = self._clock()
        if self._step is not None:
            self._spent[self._step] += now - self._since
        self._step, self._since = step, now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context, which is also a decorator, whose time counts as the clients' work."""
        step = self._step
        self.switch(None)
        try:
            yield
        finally:
            self.switch(step)

    def end(self, number: int) -> None:
        """End a round.

        Args:
            number: The absolute round.
        """
        self.switch(None)
        self._rounds.extend([number, *self._spent.values(), self._since - self._began])

    def columns(self, num_rounds: int) -> dict[str, FloatArray | IntArray]:
        """Return the times as columns, shape (num_rounds,) each.

        Args:
            num_rounds: Number of rounds of the run.

        Returns:
            ``round``, the number of the round. Then the milliseconds of each step: ``probe_ms`` (roll call, probes,
            initial accuracies), ``select_ms``, ``collect_ms`` (reading and measuring replies, filter),
            ``aggregate_ms`` and ``observe_ms`` (direction of the global model, report, records). Then ``round_ms``, the
            whole round with the clients' work, without the central evaluation and the checkpoint. A round that another
            process ran has NaN in each of these columns.
        """
        timed = np.array(self._rounds).reshape(-1, len(STEPS) + 2)
        times = np.full((len(STEPS) + 1, num_rounds), np.nan)
        times[:, timed[:, 0].astype(np.int64) - 1] = 1000.0 * timed[:, 1:].T
        names = [f"{name}_ms" for name in (*STEPS, "round")]
        return {"round": np.arange(1, num_rounds + 1), **dict(zip(names, times, strict=True))}


class Reporter(state_dicts.SavedFields):
    """Writes the selector's report and the history's records of a round.

    Args:
        selector: The selector. Its ``needs`` name the columns of a report, its ``requires`` those that every client
            must have.
        roster: The client ids by row.
        max_latency: Latency in seconds for clients that failed.
    """

    saved: ClassVar = {"_energy_max": state_dicts.plain_number}

    def __init__(self, selector: Selector, roster: Roster, max_latency: float) -> None:
        self._selector, self._roster, self._max_latency = selector, roster, max_latency
        # The largest energy, the reference of the energy scores.
        self._energy_max = 0.0

    def report(self, round: Round, outcome: Outcome, scalars: Mapping[str, float]) -> RoundReport:
        """Return the selector's report of a round.

        Args:
            round: The chosen clients.
            outcome: The outcome of their replies.
            scalars: The columns measured on the new global model.

        Returns:
            One row for each chosen client. A client that lacks a required column counts as failed, and the log names
            it. Other columns are NaN for clients that did not report them. A selector that reads "spare" gets the
            values of spares. For any other selector spares have failed. If the selector reads "first", this column
            marks the clients whose latency replaces a cold start.
        """
        results = list(outcome.results.values())
        completed = np.array([result.completed for result in results], dtype=np.bool_)
        columns: dict[str, Any] = self._reported_columns(results) | self._measured_columns(outcome)
        for name in sorted((self._selector.requires & columns.keys()) | (MEASURED & columns.keys())):
            value = columns[name]
            # A client lacks a vector column if any of its numbers is missing.
            lacking = completed & ~np.isfinite(value).all(axis=tuple(range(1, value.ndim)))
            if lacking.any() and name not in outcome.lacking:
                ids = [self._roster.ids[row] for row in round.rows[lacking]]
                remedy = "Make them report it" + (", or their joules" if name == "energy_score" else "")
                logger.warning(
                    "round %d: clients %s lack %s and count as failed for the selector. %s",
                    round.number, first_ids(ids), name, remedy,
                )  # fmt: skip
            completed &= ~lacking
        if "kept" in self._selector.needs:
            kept = set(outcome.kept)
            columns["kept"] = np.array([node in kept for node in outcome.results], dtype=np.bool_) & completed
        latency = np.array([result.latency_s for result in results], dtype=np.float64)
        latency = np.where(completed, latency, self._max_latency)
        # Last, because from here on an answered spare counts as completed, with its real time.
        if "spare" in self._selector.needs:
            spare = np.array([result.spare for result in results], dtype=np.bool_)
            completed |= spare & np.array([result.answered for result in results], dtype=np.bool_)
            latency[spare] = [result.spare_s for result in results if result.spare]
            columns["spare"] = spare
        if "first" in self._selector.needs:
            columns["first"] = np.array([result.first for result in results], dtype=np.bool_)
        if outcome.staleness and "staleness" in self._selector.needs:
            columns["staleness"] = np.array([outcome.staleness[node] for node in outcome.results], dtype=np.float64)
        columns |= scalars
        return RoundReport(clients=round.rows, completed=completed, latency=latency, **columns)

    def records(self, round: Round, outcome: Outcome) -> list[ClientRecord]:
        """Return the history's records of the chosen clients."""
        kept = set(outcome.kept)
        answers = [(row, node, outcome.results[node]) for row, node in round.chosen.items()]
        return [
            ClientRecord(
                round=round.number,
                client_id=self._roster.ids[row],
                client=row,
                kept=node in kept,
                staleness=outcome.staleness.get(node, 0),
                arrived_s=outcome.arrived_s.get(node, math.nan),
                # Semicolons separate problems, so a client's own text must not add one.
                problem="; ".join(
                    [one.replace(";", ",") for one in (*round.probe_faults.problems.get(row, ()), *result.problems)]
                ),
                **dict[str, Any](zip(RECORDED_NUMBERS, result.values.values(), strict=True)),
                **{name: getattr(result, name) for name in RECORDED_AS_READ},
            )
            for row, node, result in answers
        ]

    def note(self, round: Round, outcome: Outcome, cooldown: Cooldown) -> str:
        """Return what an operator wants to know of a round."""
        faults = []
        for row, result in zip(round.rows.tolist(), outcome.results.values(), strict=True):
            if not result.completed:
                out = cooldown.rounds_out(row, round.number)
                kind = "late" if result.spare or result.timed_out else result.problems[-1].split(":")[0]
                faults.append((self._roster.ids[row], f"{kind}, out for {out} rounds" if out else kind))
        late = [(self._roster.ids[one.row], one.late_s, weight) for one, weight in round.late]
        return round_note(outcome.round_s, outcome.deadline_s, len(round.chosen), faults, late)

    def _reported_columns(self, results: list[ClientResult]) -> dict[str, FloatArray]:
        """Return the reported columns that the selector needs; NaN for clients that did not report them."""
        columns: dict[str, FloatArray] = {}
        # In every round, needed or not, because E_max follows the energies.
        scores = self._energy_scores(results)
        for name in self._selector.needs & FROM_REPLY:
            if name == "energy_score":
                columns[name] = scores
            elif name == "num_examples":
                columns[name] = np.array([result.num_examples or np.nan for result in results], dtype=np.float64)
            elif name in NUMBERS:
                columns[name] = _numbers(results, name)
            else:
                # Without any usable vector the length is unknown. One NaN per row means that nothing was reported.
                column = column_of(name, [result.columns.get(name) for result in results])
                columns[name] = np.full((len(results), 1), np.nan) if column is None else column
        return columns

    def _measured_columns(self, outcome: Outcome) -> dict[str, FloatArray]:
        """Return the measured columns, one row for each chosen client; NaN for clients without a measurement."""
        columns: dict[str, FloatArray] = {}
        position = {node: i for i, node in enumerate(outcome.results)}
        for name in self._selector.needs & MEASURED:
            measured = outcome.columns.get(name)
            shape = np.shape(measured)[1:] if measured is not None else (0,) * (name in VECTORS)
            columns[name] = np.full((len(position), *shape), np.nan)
            if measured is not None:
                columns[name][[position[node] for node in outcome.usable]] = measured
        return columns

    def _energy_scores(self, results: list[ClientResult]) -> FloatArray:
        """Return the reported energy scores; without a score, 1 - E / E_max of the reported joules.

        E_max is the largest energy up to the end of the selector's warm-up. Without any energy by then, it is the
        largest energy of the first round that has one.
        """
        joules = _numbers(results, "energy")
        warmup = max(self._selector.common_warmup, getattr(self._selector, "warmup_rounds", 0))
        if not self._energy_max or self._selector.round <= warmup:
            self._energy_max = max([self._energy_max, *joules[np.isfinite(joules)]])
        scores = _numbers(results, "energy_score")
        derived = np.clip(1.0 - joules / (self._energy_max or 1.0), 0.0, 1.0)  # energy score, ours; NaN without joules
        return np.where(np.isfinite(scores), scores, derived)


def _numbers(results: list[ClientResult], name: str) -> FloatArray:
    """Return one of :data:`~fedsel_flwr.rounds.replies.NUMBERS` for each client; NaN if its answer was lost."""
    # The history has the numbers of a lost answer, but no server could have read them.
    return np.array([np.nan if result.lost else result.values[name] for result in results], dtype=np.float64)
