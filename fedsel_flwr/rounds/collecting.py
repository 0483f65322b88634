"""Collecting a round: read every reply, find the stragglers, measure the usable models, decide the averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fedsel_flwr.aggregation import averaging
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.cold_starts import ColdStarts
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.missing_columns import ColumnWatch
from fedsel_flwr.rounds.models import Arrays, ModelList, Models, ModelStack, fault_in_norm
from fedsel_flwr.rounds.registration import IdentityResolver, Registrar
from fedsel_flwr.rounds.replies import (
    ClientResult,
    Reply,
    read_reply,
    requires_weight,
    with_equal_lengths,
    with_finite_metrics,
)  # fmt: skip
from fedsel_flwr.rounds.reply_structure import ReplyStructure, Structure, with_fault
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.round import FROM_REPLY, Outcome, Round
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import log_faults, usable_count
from fedsel_flwr.selectors import Selector
from fedsel_flwr.wireless import finish_times, round_time

NO_ANSWER = Reply(error="no answer", timed_out=True)


class Collector:
    """Reads the replies of a round.

    Args:
        selector: The selector. Its ``needs`` name the columns to read and measure.
        settings: The options of the strategy.
        roster: The client ids by row.
        registrar: Stores the numbers of examples.
        measurer: Measures models.
        identities: Decides whether a client's own claim of its identity counts.
        cold_starts: Replaces the first time of each client.
        watch: Ends the run if no client reports what the selector reads.
        structure: The structure of the run's replies, if they are not held against the global model.

    Attributes:
        simulated: Whether a simulation draws the clients' times and failures. The log then has no warnings about them.
    """

    def __init__(
        self,
        selector: Selector,
        settings: Settings,
        roster: Roster,
        registrar: Registrar,
        measurer: Measurer,
        identities: IdentityResolver,
        cold_starts: ColdStarts,
        watch: ColumnWatch,
        structure: ReplyStructure,
    ) -> None:
        self._selector, self._settings, self._roster = selector, settings, roster
        self._registrar, self._measurer, self._identities = registrar, measurer, identities
        self._cold_starts, self._watch, self._wanted = cold_starts, watch, selector.needs & FROM_REPLY
        self._structure = structure
        self.simulated = False

    def waits_for(self, chosen: int) -> int | None:
        """Return the number of chosen clients that the round waits for; None waits for all of them.

        A warm-up round waits for all clients. So does a round in which the selector asks more clients than usual, such
        as an opening that measures every client.
        """
        selector = self._selector
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
        s, ids, by_claim = self._settings, self._roster.ids, self._identities.by_claim
        # A stack was trained on the global model itself.
        reference = round.reference if s.compare_models or stack is not None else None
        measured = None if reference is None else self._measurer.measured(reference)
        # Before any reply is read, because the limit depends on the claims of the whole cohort.
        claims = {node: usable_count(one.num_examples) for node, one in replies.items() if not one.error}
        claimed = np.array([claims.get(node, 0) for node in round.chosen.values()], dtype=np.int64)
        reads_weights = s.payload != "own" or bool(s.averaging and not s.averaging_is_papers)
        weighted = requires_weight(reads_weights, [one.num_examples for one in replies.values() if not one.error])
        limit = self._registrar.max_examples(round.rows, claimed)
        read = partial(
            read_reply, settings=s, wanted=self._wanted, max_examples=limit, weighted=weighted, measured=measured
        )
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
            structure = self._structure.expected(fine, model)
            answers = [with_fault(one, structure) for one in answers]
            references = [one.sent or model if structure is None else None for one in answers]
        rows = zip(round.chosen.values(), answers, names, faults, references, strict=True)
        results = {node: read(a, client_id=name, fault=fault, reference=own) for node, a, name, fault, own in rows}
        results = with_equal_lengths(results, self._wanted)
        results, round_s = end_round(results, s, self.waits_for(len(results)))
        # After the stragglers: the round lasted as long as the server waited, cold starts included.
        results = self._cold_starts.replace_times(round.rows, results)
        used = [replies[node].metrics for node, result in results.items() if result.completed or result.answered]
        lacking = self._watch.check_replies(round.number, used)
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
            self._structure.check_any_usable(results, round.number)
        # The claims themselves, without the cut: the limit follows the median of the claims.
        counted = np.array([result.num_examples > 0 for result in results.values()], dtype=np.bool_)
        self._registrar.note_sizes(round.rows, np.where(counted, claimed, 0))
        usable = np.flatnonzero([result.completed for result in results.values()])
        nodes = list(results)
        # An opening that only measures clients leaves the global model unchanged.
        only_measured = self._selector.keeps_model and not self._selector.warming_up
        enough = len(usable) >= s.min_completed and not only_measured
        outcome = Outcome(
            results=results, usable=[nodes[i] for i in usable], enough=enough, round_s=round_s,
            lacking=lacking, left_out=left_out, as_sent=structure is None,
        )  # fmt: skip
        if enough:
            self._structure.decide(structure)
        if not len(usable):
            return outcome
        if reference is None:
            return self._undecoded(round, outcome)
        if stack is not None:
            models: Models = stack.take(usable).cast_like(reference)
        else:
            models = ModelList([results[n].converted or replies[n].arrays or [] for n in outcome.usable])
        return self._measured(round, replace(outcome, models=models), reference)

    def _faults(self, stack: ModelStack, reference: Arrays, measured: Sequence[int] | None) -> list[str]:
        """Return the fault of each model of a stack; an empty text for a usable model."""
        faults, limit = stack.faults(reference), self._settings.max_update_norm
        if limit is None:
            return faults
        return [
            fault or fault_in_norm(one, reference, limit, measured)
            for fault, one in zip(faults, stack.as_list(), strict=True)
        ]

    def _undecoded(self, round: Round, outcome: Outcome) -> Outcome:
        """Return the outcome for models that cannot be decoded, or that are not compared with the global model."""
        s, measurer = self._settings, self._measurer
        asked_for = s.averaging and not s.averaging_is_papers
        reads = measurer.reads_updates or measurer.reads_global or asked_for or s.max_update_norm is not None
        # Without a comparison of models nothing reads updates, and the global model is still of arrays.
        if reads and not (s.checks_structure and round.reference is not None):
            raise RunError(
                "the global model cannot be decoded into NumPy arrays, but the filter, the selector, the averaging "
                "scheme or max_update_norm needs its numbers. Use a base strategy whose model is arrays, or a "
                "selector of latencies."
            )
        return self._averaged(outcome, self._draws(round, outcome))

    def _measured(self, round: Round, outcome: Outcome, reference: Arrays) -> Outcome:
        """Return the outcome with the columns measured on the usable models, and their averaging."""
        draws = self._draws(round, outcome)
        outcome = replace(outcome, columns=self._measurer.models(outcome.models, reference, draws))
        kept = set(outcome.kept)
        if not kept:
            return replace(outcome, enough=False)
        return self._averaged(outcome, draws)

    def _draws(self, round: Round, outcome: Outcome) -> IntArray:
        """Return the number of draws of each usable model's client."""
        usable = set(outcome.usable)
        return self._selector.draws(np.array([row for row, node in round.chosen.items() if node in usable]))

    def _averaged(self, outcome: Outcome, draws: IntArray) -> Outcome:
        """Return the outcome with the averaging of the kept models."""
        if self._settings.averaging is None or not outcome.enough:
            return outcome
        # The filter may keep only some copies of a model that was drawn several times.
        draws = np.asarray(outcome.columns.get("draws", draws), dtype=np.int64)[outcome.positions]
        total, num_clients = self._registrar.total_examples(), self._selector.num_clients
        scheme = averaging(self._settings.averaging, outcome.weights, total, num_clients, draws)  # (3), (5) of Kim
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
    return replace(
        result,
        completed=False,
        problems=(
            *result.problems,
            f"late: the update came after {done:.6g} s, but the round ended after {end:.6g} s ({why})",
        ),
        latency_s=settings.max_latency,
        latency_source="max_latency",
        spare=spare,
        answered=spare,
        spare_s=result.latency_s if spare else 0.0,
    )
