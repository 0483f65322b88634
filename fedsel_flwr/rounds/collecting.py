"""Collecting a round: read every reply, find the stragglers, measure the usable models, decide the averaging.

The first time that the server measures for a client is replaced, so that selectors do not learn it
(:class:`ColdStarts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedsel_flwr.aggregation import averaging
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.deadlines import Deadline
from fedsel_flwr.rounds.eligibility import ClientArrays
from fedsel_flwr.rounds.models import Arrays, ModelList, Models, ModelStack, fault_in_norm
from fedsel_flwr.rounds.registration import IdentityResolver
from fedsel_flwr.rounds.replies import (
    NO_ANSWER,
    ClientResult,
    Reply,
    read_reply,
    requires_weight,
    with_equal_lengths,
    with_finite_metrics,
)  # fmt: skip
from fedsel_flwr.rounds.reply_checks import Structure, with_fault
from fedsel_flwr.rounds.round import FROM_REPLY, Outcome, Round
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import log_faults, usable_count
from fedsel_flwr.wireless import finish_times, round_time

if TYPE_CHECKING:
    # The core owns the parts, and calls the collector.
    from fedsel_flwr.rounds.core import Parts
    from fedsel_flwr.rounds.late import SentModel

LEAST_SHARE = 0.01
"""Smallest usable training time that a client reports, as a share of the round's shortest first time."""


@dataclass
class Collector:
    """Reads the replies of a round.

    Args:
        parts: The owners of the run's state, which read, measure and count.
        settings: The options of the strategy.
        identities: Decides whether a client's own claim of its identity counts.
        simulated: Whether a simulation draws the clients' times and failures. The log then has no warnings about them.
    """

    parts: Parts
    settings: Settings
    identities: IdentityResolver
    simulated: bool = False

    def waits_for(self, chosen: int) -> int | None:
        """Return the number of chosen clients that the round waits for; None waits for all of them.

        A warm-up round waits for all clients. So does a round in which the selector asks more clients than usual, such
        as an opening that measures every client.
        """
        selector = self.parts.selector
        opening = selector.keeps_model or selector.warming_up
        usual = selector.asked_per_round
        if not self.settings.has_spares or opening or (usual is not None and chosen > usual):
            return None
        return self.settings.wait_for or selector.clients_per_round

    @property
    def only_measures(self) -> bool:
        """Whether this round is an opening that only measures clients, so that the global model stays."""
        return self.parts.selector.keeps_model and not self.parts.selector.warming_up

    def collect(self, round: Round, replies: Mapping[str, Reply], stack: ModelStack | None) -> Outcome:
        """Read the replies and log faults with the clients' ids.

        Args:
            round: The chosen clients, and the model they received.
            replies: Connection -> reply. A chosen connection without an entry did not answer.
            stack: The models of the chosen clients, by ascending row; None if each reply has its own.

        Returns:
            The outcome of the round, which names the updates to aggregate.

        Raises:
            RunError: Models must be measured or mixed, but the global model is not made of NumPy arrays. Or no client
                has ever reported a column that the selector reads.
        """
        s, parts, ids, by_claim = self.settings, self.parts, self.parts.roster.ids, self.identities.by_claim
        wanted = parts.selector.needs & FROM_REPLY
        # A stack was trained on the global model itself.
        reference = round.reference if s.compare_models or stack is not None else None
        measured = None if reference is None else parts.measurer.measured(reference)
        # Before any reply is read, because the limit depends on the claims of the whole cohort.
        claims = {node: usable_count(one.num_examples) for node, one in replies.items() if not one.error}
        claimed = np.array([claims.get(node, 0) for node in round.chosen.values()], dtype=np.int64)
        reads_weights = s.payload != "own" or bool(s.averaging and not s.averaging_is_papers)
        weighted = requires_weight(reads_weights, [one.num_examples for one in replies.values() if not one.error])
        limit = parts.registrar.max_examples(round.rows, claimed)
        read = partial(read_reply, settings=s, wanted=wanted, max_examples=limit, weighted=weighted, measured=measured)
        answers = [replies.get(node, NO_ANSWER) for node in round.chosen.values()]
        names = [ids[row] if by_claim else None for row in round.chosen]
        faults: Sequence[str | None] = [None] * len(answers)
        references: Sequence[Arrays | None] = [reference] * len(answers)
        structure: Structure | None = None
        if stack is not None and reference is not None:
            faults = self._faults(stack, reference, measured)
        elif s.checks_structure and (model := round.reference) is not None:
            # Only replies without another fault show the structure.
            fine = (a for a, name in zip(answers, names, strict=True) if read(a, client_id=name, fault="").completed)
            structure = parts.reply_structure.expected(fine, model)
            answers = [with_fault(one, structure) for one in answers]
            references = [one.sent or model if structure is None else None for one in answers]
        rows = zip(round.chosen.values(), answers, names, faults, references, strict=True)
        results = {node: read(a, client_id=name, fault=fault, reference=own) for node, a, name, fault, own in rows}
        results = with_equal_lengths(results, wanted)
        results, round_s, deadline_s = end_round(results, s, self.waits_for(len(results)), round.deadline)
        # After the stragglers: the round lasted as long as the server waited, cold starts included.
        results = parts.cold_starts.replace_times(round.rows, results)
        used = [replies[node].metrics for node, result in results.items() if result.completed or result.answered]
        lacking = parts.missing_columns.check(round.number, used)
        # One line has named the columns that all replies lack.
        quiet = tuple(f"{name}: not reported" for name in lacking)
        results, left_out = with_finite_metrics(results, replies)
        told = [
            (ids[row], problem)
            for row, node in round.chosen.items()
            # The last problem of a spare is that other clients were earlier, which is no fault.
            for problem in results[node].problems[: -1 if results[node].spare else None]
            if not problem.startswith(quiet)
        ]
        log_faults(f"round {round.number}", told, simulated=self.simulated)
        if s.payload != "trees":
            parts.reply_structure.check_any_usable(results, round.number)
        # The claims themselves, without the cut: the limit follows the median of the claims.
        counted = np.array([result.num_examples > 0 for result in results.values()], dtype=np.bool_)
        parts.registrar.note_sizes(round.rows, np.where(counted, claimed, 0))
        usable = np.flatnonzero([result.completed for result in results.values()])
        nodes = list(results)
        enough = len(usable) >= s.min_completed and not self.only_measures
        outcome = Outcome(
            results=results, usable=[nodes[i] for i in usable], enough=enough, round_s=round_s,
            lacking=lacking, left_out=left_out, as_sent=structure is None, deadline_s=deadline_s,
        )  # fmt: skip
        if enough:
            parts.reply_structure.decide(structure)
        if not len(usable):
            return outcome
        draws = round.draws[usable]
        if reference is None:
            self._check_unread(round)
        else:
            if stack is not None:
                models: Models = stack.take(usable).cast_like(reference)
            else:
                models = ModelList([results[n].converted or replies[n].arrays or [] for n in outcome.usable])
            columns = parts.measurer.models(models, reference, draws)
            outcome = replace(outcome, models=models, columns=columns)
        # The filter may keep no model.
        if not outcome.kept:
            return replace(outcome, enough=False)
        return self._averaged(outcome, draws)

    def read_late(self, sent: SentModel, reply: Reply) -> ClientResult:
        """Read a reply that has come after the end of its round."""
        parts = self.parts
        name, limit = sent.client_id if self.identities.by_claim else None, parts.registrar.max_examples()
        measured = parts.measurer.measured(sent.model)
        return read_reply(
            reply, self.settings, client_id=name, reference=sent.model, measured=measured, max_examples=limit
        )

    def _faults(self, stack: ModelStack, reference: Arrays, measured: Sequence[int] | None) -> list[str]:
        """Return the fault of each model of a stack; an empty text for a usable model."""
        limit, models = self.settings.max_update_norm, zip(stack.faults(reference), stack.as_list(), strict=True)
        return [fault or fault_in_norm(model, reference, limit, measured) for fault, model in models]

    def _check_unread(self, round: Round) -> None:
        """Refuse models that are not decoded, or not compared with the global model, if their numbers are read."""
        s, measurer = self.settings, self.parts.measurer
        asked_for = s.averaging and not s.averaging_is_papers
        reads = measurer.reader or measurer.reads_global or asked_for or s.max_update_norm is not None
        reads = reads or s.late != "drop"
        # Without a comparison of models nothing reads updates, and the global model is still of arrays.
        if reads and not (s.checks_structure and round.reference is not None):
            raise RunError(
                "the global model cannot be decoded into NumPy arrays, but the filter, selector, averaging, late or "
                "max_update_norm needs its numbers. Use a base whose model is arrays, or a selector of latencies"
            )

    def _averaged(self, outcome: Outcome, draws: IntArray) -> Outcome:
        """Return the outcome with the averaging of the kept models."""
        # Without weights of all clients, a base with its own aggregation has no use for those of the selector's paper.
        unweighted = self.settings.averaging_is_papers and not (outcome.weights > 0).all()
        if self.settings.averaging is None or not outcome.enough or unweighted:
            return outcome
        # The filter may keep only some copies of a model that was drawn several times.
        draws = np.asarray(outcome.columns.get("draws", draws), dtype=np.int64)[outcome.positions]
        total, num_clients = self.parts.registrar.total_examples(), self.parts.selector.num_clients
        scheme = averaging(self.settings.averaging, outcome.weights, total, num_clients, draws)  # (3), (5) of Kim
        return replace(outcome, averaging=scheme)


def end_round(
    results: Mapping[str, ClientResult], settings: Settings, wanted: int | None, deadline: Deadline
) -> tuple[dict[str, ClientResult], float, float]:
    """Decide when the round ends, how long it took, and which clients are stragglers.

    If the cohort is larger than the number of channels, clients train in waves. A client is done after its latency plus
    the waves before its own. A failed client has the latency ``max_latency``
    (:func:`~fedsel_flwr.rounds.replies.read_reply`), so a round that waits for all clients lasts that long.

    Args:
        results: Connection -> its reply after reading, by ascending row.
        settings: The channels and the longest wait.
        wanted: Number of usable answers that end the round. Of clients done at the same time, the lower rows count as
            earlier; with ``wait_for`` all of them count. None waits for all clients.
        deadline: When the round ends at the latest.

    Returns:
        The results, in which stragglers are not completed and have the latency max_latency. Then the duration
        of the round in seconds: until the last answer that it waits for, at most until the deadline. And the seconds
        of the deadline, infinity without one.
    """
    latency = np.array([result.latency_s for result in results.values()], dtype=np.float64)
    channels = settings.channels or max(1, len(latency))
    if wanted is None and deadline == Deadline():
        return dict(results), round_time(latency, channels), math.inf
    done = finish_times(latency, channels)
    completed = np.array([result.completed for result in results.values()], dtype=np.bool_)
    limit = deadline.settled(np.sort(done[completed]).tolist())
    in_time = np.flatnonzero(completed & (done <= limit))
    # On the server's clock the transport marks spares itself, and the round did not wait for them.
    waited = ~np.array([result.spare for result in results.values()], dtype=np.bool_)
    end = min(limit, float(done[waited].max(initial=0.0)))
    if wanted is not None and len(in_time) >= wanted:
        # A stable sort: of equal times the lower rows count as earlier.
        first = in_time[np.argsort(done[in_time], kind="stable")[:wanted]]
        end = float(done[first[-1]])
        if settings.wait_for is None:
            in_time = first
        elif settings.clock == "virtual":
            in_time = in_time[done[in_time] <= end]
        else:
            # All of these have arrived before the server went on.
            end = float(done[in_time].max())
    kept = set(in_time.tolist())
    beyond = np.array([0.0 if result.completed else result.beyond_s for result in results.values()])
    timed = {
        node: replace(result, done_s=seconds) if math.isfinite(seconds) else result
        for (node, result), seconds in zip(results.items(), (done + beyond).tolist(), strict=True)
    }
    return (
        {
            node: result
            if i in kept or not result.completed
            else _straggler(result, end, settings, limit, spare=wanted is not None and len(kept) >= wanted)
            for i, (node, result) in enumerate(timed.items())
        },
        end,
        limit,
    )


def _straggler(result: ClientResult, end: float, settings: Settings, limit: float, spare: bool) -> ClientResult:
    """Return a result that came after the end of the round."""
    why = "enough other updates had arrived" if spare else f"round_deadline_s = {limit:g} s"
    late = f"late: the update came after {result.done_s:.6g} s, but the round ended after {end:.6g} s ({why})"
    return replace(
        result,
        completed=False,
        problems=(*result.problems, late),
        latency_s=settings.max_latency,
        latency_source="max_latency",
        spare=spare,
        answered=spare,
        spare_s=result.latency_s if spare else 0.0,
    )


class ColdStarts(ClientArrays):
    """Replaces the first measured time of each client by an estimate from other times.

    On the server's clock, the first time of a client includes the start of its process. That start can take fifty times
    as long as the training. A selector that learned this time would avoid the client for many rounds. The selector
    therefore gets an estimate in seconds. The history has the estimate as the latency, with "first" as
    ``latency_source``, and the measured time as ``first_s``. The duration of the round does not change. The play
    counts, and no client trains twice.

    All clients with a first time in the same round get the same estimate, so that it favours none of them:

    1. the median over all clients of their last time after the first,
    2. without such times, the median of the training times that these clients report (``compute_s``), but at least a
       hundredth of their shortest first time: one client cannot set a time near 0,
    3. without such reports, the shortest of their first times.

    The estimate of a client is at most its measured time. A row has one cold start, which a reconnection does not
    repeat. After a failure the first time is still to come. A report that agrees with the server's time is used as it
    is. A client without a measured time has no cold start. For a spare that has not answered, the server knows only its
    own wait, and that time stays.

    >>> ColdStarts.substitute(np.array([12.0, 15.0]), np.array([0.2, 0.3]), np.zeros(0))
    0.25
    >>> ColdStarts.substitute(np.array([12.0, 15.0]), np.array([0.2, 0.3]), np.array([0.5, 0.7, 0.9]))
    0.7
    >>> ColdStarts.substitute(np.array([12.0, 15.0]), np.zeros(0), np.zeros(0))
    12.0
    """

    newcomer: ClassVar = {"_timed": np.bool_(False), "_last": np.float64(np.nan)}
    _timed: BoolArray
    """Whether the cold start has passed."""
    _last: FloatArray
    """Seconds of the last time after the first; NaN without one."""

    def replace_times(self, rows: IntArray, results: Mapping[str, ClientResult]) -> dict[str, ClientResult]:
        """Return the results of a round with the seconds for the selector and the history.

        Nothing is stored before :meth:`note`, so a round that never finishes leaves no times.

        Args:
            rows: The chosen rows, ascending, shape (n,).
            results: Connection -> its reply after reading, in the order of ``rows``.
        """
        read = list(results.values())
        timed = self._timed_in(read)
        # Early returns: simulations time no client, and after the first rounds no client is new.
        if not timed.any():
            return dict(results)
        self._grow(rows)
        first = timed & ~self._timed[rows] & np.array([result.latency_source != "reported" for result in read])
        if not first.any():
            return dict(results)
        cold = [result for result, new in zip(read, first, strict=True) if new]
        claimed = np.array([result.values["compute"] for result in cold])
        measured = np.array([_own_seconds(result) for result in cold])
        # NaN, from clients without a reported training time, fails the comparison too.
        last = self._last_with(rows, read, timed & ~first)
        seconds = self.substitute(measured, claimed[claimed > 0], last[np.isfinite(last)])
        return {
            node: _with_seconds(result, min(seconds, _own_seconds(result))) if first[i] else result
            for i, (node, result) in enumerate(results.items())
        }

    def note(self, rows: IntArray, results: Mapping[str, ClientResult]) -> None:
        """Store the times of a finished round, from the results of :meth:`replace_times`."""
        read = list(results.values())
        timed = self._timed_in(read)
        if not timed.any():
            return
        later = timed & ~np.array([result.first for result in read], dtype=np.bool_)
        self._grow(rows)
        self._last = self._last_with(rows, read, later)
        self._timed[rows[timed]] = True

    @staticmethod
    def substitute(measured: FloatArray, claimed: FloatArray, known: FloatArray) -> float:
        """Return the estimate that replaces the first times of a round, seconds.

        Args:
            measured: The first times themselves, seconds, at least one.
            claimed: Training times that these clients report, seconds above 0.
            known: The last time after the first of other clients, seconds.
        """
        if known.size:
            return float(np.median(known))
        if claimed.size:
            return max(float(np.median(claimed)), LEAST_SHARE * float(measured.min()))
        return float(measured.min())

    def _last_with(self, rows: IntArray, read: Sequence[ClientResult], later: BoolArray) -> FloatArray:
        """Return each client's last time after the first, this round's ``later`` times included, as a copy."""
        # A copy, because the round may still fail. Only ``note`` stores times.
        last = self._last.copy()
        last[rows[later]] = [_own_seconds(result) for result, it in zip(read, later, strict=True) if it]
        return last

    @staticmethod
    def _timed_in(read: Sequence[ClientResult]) -> BoolArray:
        """Return whether the server measured each client's time from question to usable answer, shape (n,)."""
        answered = [result.timed and (result.completed or (result.spare and result.answered)) for result in read]
        return np.array(answered, dtype=np.bool_)


def _own_seconds(result: ClientResult) -> float:
    """Return the time of a client itself; the latency of a spare is that of a failure, max_latency."""
    return result.latency_s if result.completed else result.spare_s


def _with_seconds(result: ClientResult, seconds: float) -> ClientResult:
    if result.completed:
        return replace(result, latency_s=seconds, latency_source="first", first=True, first_s=result.latency_s)
    return replace(result, spare_s=seconds, first=True)
