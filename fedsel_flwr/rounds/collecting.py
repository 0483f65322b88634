"""What came back in a round: every reply read, the usable models, what is measured on them, how they are averaged.

Who answers in time: over-selection keeps the first answers, a deadline ends the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedsel_flwr.aggregation import averaging
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.first_times import FirstTimes
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import Arrays, ModelList, Models, ModelStack, fault_in_norm
from fedsel_flwr.rounds.registration import Enrolment, Identifying
from fedsel_flwr.rounds.replies import ClientResult, Reply, of_one_length, read_reply
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.round import FROM_REPLY, Outcome, Round
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import log_faults, usable_count
from fedsel_flwr.selectors import Selector
from fedsel_flwr.wireless import finish_times, round_time


def in_time(
    results: Mapping[str, ClientResult], settings: Settings, wanted: int | None
) -> tuple[dict[str, ClientResult], float]:
    """Decide who is late for the round, and how long it takes.

    A client is done after its latency; in a cohort larger than the channels, after that and the waves before its own.

    Args:
        results: Connection -> its reply after reading, by ascending row.
        settings: The channels and the round's deadline.
        wanted: The round ends when this many usable answers are here; among clients done at the same time the lower
            rows count as earlier. None waits for all.

    Returns:
        The results, where late ones are not completed and hold max_latency, and the seconds the round takes: until the
        last answer that is waited for, at most until the deadline.
    """
    latency = np.array([result.latency_s for result in results.values()], dtype=np.float64)
    channels, deadline = settings.channels or max(1, len(latency)), settings.round_deadline_s or math.inf
    if wanted is None and deadline == math.inf:
        return dict(results), round_time(latency, channels)
    done = finish_times(latency, channels)
    completed = np.array([result.completed for result in results.values()], dtype=np.bool_)
    early = np.flatnonzero(completed & (done <= deadline))
    waited = ~np.array([result.spare for result in results.values()], dtype=np.bool_)
    end = min(deadline, float(done[waited].max(initial=0.0)))
    if wanted is not None and len(early) >= wanted:
        early = early[np.argsort(done[early], kind="stable")[:wanted]]
        end = float(done[early[-1]])
    here = set(early.tolist())
    return {
        node: result
        if i in here or not result.completed
        else _late(result, float(done[i]), end, settings, spare=len(here) == wanted)
        for i, (node, result) in enumerate(results.items())
    }, end


def _late(result: ClientResult, done: float, end: float, settings: Settings, spare: bool) -> ClientResult:
    """A result that came after the end of the round."""
    why = "enough others were there" if spare else f"round_deadline_s = {settings.round_deadline_s:g} s"
    return replace(
        result,
        completed=False,
        problems=(*result.problems, f"late: done after {done:.6g} s, the round ended after {end:.6g} s ({why})"),
        latency_s=settings.max_latency,
        latency_source="max_latency",
        spare=spare,
        answered=spare,
        spare_s=result.latency_s if spare else 0.0,
    )


NOTHING = Reply(error="no answer", timed_out=True)


class Collector:
    """Reads the replies of a round.

    Args:
        selector: Its ``needs`` say what is read and measured.
        settings: How clients are treated.
        roster: Where rows find their ids.
        enrolment: Keeps the numbers of examples.
        measurer: Measures models.
        identifying: Says whether a client's own word about its identity counts.
        first_times: Replaces the first time of each client.

    Attributes:
        modelled: Whether a simulation draws the clients' times and failures, which are then no warnings one by one.
    """

    def __init__(
        self,
        selector: Selector,
        settings: Settings,
        roster: Roster,
        enrolment: Enrolment,
        measurer: Measurer,
        identifying: Identifying,
        first_times: FirstTimes,
    ) -> None:
        self._selector, self._settings, self._roster = selector, settings, roster
        self._enrolment, self._measurer, self._identifying = enrolment, measurer, identifying
        self._first_times, self._wanted = first_times, selector.needs & FROM_REPLY
        self.modelled = False

    def waits_for(self, chosen: int) -> int | None:
        """How many of the chosen clients the round waits for; None waits for all of them.

        A round in which the selector asks more than that, such as an opening that measures everybody, waits for all,
        and so does a round of the warm-up.
        """
        selector = self._selector
        opening = selector.keeps_model or selector.warming_up
        if not selector.over_selection or opening or chosen > selector.asked_per_round:
            return None
        return int(selector.clients_per_round)

    def collect(self, round: Round, replies: Mapping[str, Reply], stack: ModelStack | None) -> Outcome:
        """Read what came back; faults are logged with the clients' ids.

        Args:
            round: Who was chosen, and the model they received.
            replies: Connection -> reply; a chosen connection without one did not answer.
            stack: The models of the chosen clients, by ascending row; None where each reply has its own.

        Returns:
            Which updates may be aggregated.

        Raises:
            RunError: Models must be measured or mixed, but the global model is not made of NumPy arrays.
        """
        s, ids, by_claim = self._settings, self._roster.ids, self._identifying.by_claim
        reference = round.reference if s.compare_models else None
        faults = None if stack is None or reference is None else self._faults(stack, reference)
        claims = {node: usable_count(one.num_examples) for node, one in replies.items() if not one.error}
        claimed = np.array([claims.get(node, 0) for node in round.chosen.values()], dtype=np.int64)
        max_examples = self._enrolment.max_examples(round.rows, claimed)
        results = {
            node: read_reply(
                replies.get(node, NOTHING), s, client_id=ids[row] if by_claim else None, reference=reference,
                wanted=self._wanted, fault=None if faults is None else faults[i], max_examples=max_examples,
            )
            for i, (row, node) in enumerate(round.chosen.items())
        }  # fmt: skip
        results = of_one_length(results, self._wanted)
        results, round_s = in_time(results, s, self.waits_for(len(results)))
        results = self._first_times.replaced(round.rows, results)
        log_faults(
            f"round {round.number}",
            [
                (ids[row], problem)
                for row, node in round.chosen.items()
                for problem in results[node].problems[: -1 if results[node].spare else None]  # others were earlier
            ],
            simulated=self.modelled,
        )
        counted = np.array([result.num_examples > 0 for result in results.values()], dtype=np.bool_)
        self._enrolment.reported(round.rows, np.where(counted, claimed, 0))
        usable = np.flatnonzero([result.completed for result in results.values()])
        nodes = list(results)
        only_measured = self._selector.keeps_model and not self._selector.warming_up
        enough = len(usable) >= s.min_completed and not only_measured
        outcome = Outcome(results=results, usable=[nodes[i] for i in usable], enough=enough, round_s=round_s)
        if not len(usable):
            return outcome
        if reference is None:
            return self._unread(round, outcome)
        if stack is not None:
            models: Models = stack.take(usable).cast_like(reference)
        else:
            models = ModelList([results[n].converted or replies[n].arrays or [] for n in outcome.usable])
        return self._measured(round, replace(outcome, models=models), reference)

    def _faults(self, stack: ModelStack, reference: Arrays) -> list[str]:
        """What is wrong with each model of a stack; empty if nothing."""
        faults, limit = stack.faults(reference), self._settings.max_update_norm
        if limit is None:
            return faults
        return [
            fault or fault_in_norm(one, reference, limit) for fault, one in zip(faults, stack.as_list(), strict=True)
        ]

    def _unread(self, round: Round, outcome: Outcome) -> Outcome:
        """The outcome where nobody can look into the models."""
        s, measurer = self._settings, self._measurer
        asked_for = s.averaging and not s.averaging_is_papers
        if measurer.reads_updates or measurer.reads_global or asked_for or s.max_update_norm is not None:
            raise RunError(
                "the global model cannot be decoded into NumPy arrays, but the filter, the selector, the averaging "
                "scheme or max_update_norm works on its numbers: use a base strategy whose model is arrays, or a "
                "selector of latencies"
            )
        return self._averaged(outcome, self._draws(round, outcome))

    def _measured(self, round: Round, outcome: Outcome, reference: Arrays) -> Outcome:
        """The outcome with what the server measures on the usable models, and how they are averaged."""
        draws = self._draws(round, outcome)
        outcome = replace(outcome, columns=self._measurer.models(outcome.models, reference, draws))
        kept = set(outcome.kept)
        if not kept:
            return replace(outcome, enough=False)
        return self._averaged(outcome, draws)

    def _draws(self, round: Round, outcome: Outcome) -> IntArray:
        """How often the client behind each usable model was drawn."""
        usable = set(outcome.usable)
        return self._selector.draws(np.array([row for row, node in round.chosen.items() if node in usable]))

    def _averaged(self, outcome: Outcome, draws: IntArray) -> Outcome:
        """The outcome with what the averaging scheme makes of the kept models."""
        if self._settings.averaging is None or not outcome.enough:
            return outcome
        draws = np.asarray(outcome.columns.get("draws", draws), dtype=np.int64)[outcome.positions]
        total, num_clients = self._enrolment.total_examples(), self._selector.num_clients
        scheme = averaging(self._settings.averaging, outcome.weights, total, num_clients, draws)  # (3), (5) of Kim
        return replace(outcome, averaging=scheme)
