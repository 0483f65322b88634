"""Collecting a round: read every reply, find the stragglers, measure the usable models, decide the averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedsel_flwr.aggregation import averaging
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.models import Arrays, ModelList, Models, ModelStack, fault_in_norm
from fedsel_flwr.rounds.parts import Parts
from fedsel_flwr.rounds.registration import IdentityResolver
from fedsel_flwr.rounds.replies import (
    ClientResult,
    Reply,
    read_reply,
    requires_weight,
    with_equal_lengths,
    with_finite_metrics,
)  # fmt: skip
from fedsel_flwr.rounds.reply_structure import Structure, with_fault
from fedsel_flwr.rounds.round import FROM_REPLY, Outcome, Round
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import log_faults, usable_count
from fedsel_flwr.wireless import finish_times, round_time

NO_ANSWER = Reply(error="no answer", timed_out=True)


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
        if not selector.over_selection or opening or chosen > selector.asked_per_round:
            return None
        return int(selector.clients_per_round)

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
        results, round_s = end_round(results, s, self.waits_for(len(results)))
        # After the stragglers: the round lasted as long as the server waited, cold starts included.
        results = parts.cold_starts.replace_times(round.rows, results)
        used = [replies[node].metrics for node, result in results.items() if result.completed or result.answered]
        lacking = parts.missing_columns.check_replies(round.number, used)
        # One line has named the columns that all replies lack.
        quiet = tuple(f"{name}: not reported" for name in lacking)
        results, left_out = with_finite_metrics(results, replies)
        log_faults(
            f"round {round.number}",
            [
                (ids[row], problem)
                for row, node in round.chosen.items()
                # The last problem of a spare is that other clients were earlier, which is no fault.
                for problem in results[node].problems[: -1 if results[node].spare else None]
                if not problem.startswith(quiet)
            ],
            simulated=self.simulated,
        )
        if s.payload != "trees":
            parts.reply_structure.check_any_usable(results, round.number)
        # The claims themselves, without the cut: the limit follows the median of the claims.
        counted = np.array([result.num_examples > 0 for result in results.values()], dtype=np.bool_)
        parts.registrar.note_sizes(round.rows, np.where(counted, claimed, 0))
        usable = np.flatnonzero([result.completed for result in results.values()])
        nodes = list(results)
        # An opening that only measures clients leaves the global model unchanged.
        only_measured = parts.selector.keeps_model and not parts.selector.warming_up
        enough = len(usable) >= s.min_completed and not only_measured
        outcome = Outcome(
            results=results, usable=[nodes[i] for i in usable], enough=enough, round_s=round_s,
            lacking=lacking, left_out=left_out, as_sent=structure is None,
        )  # fmt: skip
        if enough:
            parts.reply_structure.decide(structure)
        if not len(usable):
            return outcome
        draws = parts.selector.draws(round.rows[usable])
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

    def _faults(self, stack: ModelStack, reference: Arrays, measured: Sequence[int] | None) -> list[str]:
        """Return the fault of each model of a stack; an empty text for a usable model."""
        limit, models = self.settings.max_update_norm, zip(stack.faults(reference), stack.as_list(), strict=True)
        return [fault or fault_in_norm(model, reference, limit, measured) for fault, model in models]

    def _check_unread(self, round: Round) -> None:
        """Refuse models that are not decoded, or not compared with the global model, if their numbers are read."""
        s, measurer = self.settings, self.parts.measurer
        asked_for = s.averaging and not s.averaging_is_papers
        reads = measurer.reads_updates or measurer.reads_global or asked_for or s.max_update_norm is not None
        # Without a comparison of models nothing reads updates, and the global model is still of arrays.
        if reads and not (s.checks_structure and round.reference is not None):
            raise RunError(
                "the global model cannot be decoded into NumPy arrays, but the filter, the selector, the averaging "
                "scheme or max_update_norm needs its numbers. Use a base strategy whose model is arrays, or a "
                "selector of latencies."
            )

    def _averaged(self, outcome: Outcome, draws: IntArray) -> Outcome:
        """Return the outcome with the averaging of the kept models."""
        if self.settings.averaging is None or not outcome.enough:
            return outcome
        # The filter may keep only some copies of a model that was drawn several times.
        draws = np.asarray(outcome.columns.get("draws", draws), dtype=np.int64)[outcome.positions]
        total, num_clients = self.parts.registrar.total_examples(), self.parts.selector.num_clients
        scheme = averaging(self.settings.averaging, outcome.weights, total, num_clients, draws)  # (3), (5) of Kim
        return replace(outcome, averaging=scheme)


def end_round(
    results: Mapping[str, ClientResult], settings: Settings, wanted: int | None
) -> tuple[dict[str, ClientResult], float]:
    """Decide when the round ends, how long it took, and which clients are stragglers.

    If the cohort is larger than the number of channels, clients train in waves. A client is done after its latency plus
    the waves before its own. A failed client has the latency ``max_latency``
    (:func:`~fedsel_flwr.rounds.replies.read_reply`), so a round that waits for all clients lasts that long.

    Args:
        results: Connection -> its reply after reading, by ascending row.
        settings: The channels and the round's deadline.
        wanted: Number of usable answers that end the round. Of clients done at the same time, the lower rows count as
            earlier. None waits for all clients.

    Returns:
        The results, in which stragglers are not completed and have the latency max_latency. And the duration
        of the round in seconds: until the last answer that it waits for, at most until the deadline.
    """
    latency = np.array([result.latency_s for result in results.values()], dtype=np.float64)
    channels, deadline = settings.channels or max(1, len(latency)), settings.round_deadline_s or math.inf
    if wanted is None and deadline == math.inf:
        return dict(results), round_time(latency, channels)
    done = finish_times(latency, channels)
    completed = np.array([result.completed for result in results.values()], dtype=np.bool_)
    in_time = np.flatnonzero(completed & (done <= deadline))
    # On the server's clock the transport marks spares itself, and the round did not wait for them.
    waited = ~np.array([result.spare for result in results.values()], dtype=np.bool_)
    end = min(deadline, float(done[waited].max(initial=0.0)))
    if wanted is not None and len(in_time) >= wanted:
        # A stable sort: of equal times the lower rows count as earlier.
        in_time = in_time[np.argsort(done[in_time], kind="stable")[:wanted]]
        end = float(done[in_time[-1]])
    kept = set(in_time.tolist())
    return {
        node: result
        if i in kept or not result.completed
        else _straggler(result, float(done[i]), end, settings, spare=len(kept) == wanted)
        for i, (node, result) in enumerate(results.items())
    }, end


def _straggler(result: ClientResult, done: float, end: float, settings: Settings, spare: bool) -> ClientResult:
    """Return a result that came after the end of the round."""
    why = "enough other updates had arrived" if spare else f"round_deadline_s = {settings.round_deadline_s:g} s"
    late = f"late: the update came after {done:.6g} s, but the round ended after {end:.6g} s ({why})"
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
