"""One round of selection in plain types, shared by every adapter: no Flower, no torch.

An adapter calls, in this order: :meth:`SelectionCore.enroll` for new connections, :meth:`SelectionCore.question` and,
if it asks, :meth:`SelectionCore.answer`, :meth:`SelectionCore.received`, :meth:`SelectionCore.choose`,
:meth:`SelectionCore.collect` with what came back, and, after aggregating the kept updates in the order given,
:meth:`SelectionCore.finish`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from fedsel_flwr.aggregation import averaging
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.client_values import ClientValues
from fedsel_flwr.rounds.enrolment import Enrolment
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.probing import Probing
from fedsel_flwr.rounds.replies import NOT_REPORTED, Arrays, Reply, read_reply
from fedsel_flwr.rounds.reporting import Reporter
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.settings import Availability, Introduction, Outcome, Question, Settings
from fedsel_flwr.selectors import Selector
from fedsel_flwr.wireless import round_time

__all__ = ["Availability", "Introduction", "Outcome", "Question", "SelectionCore", "Settings"]

logger = logging.getLogger("fedsel_flwr")


class SelectionCore:
    """Asks the selector, reads replies, keeps time and the history.

    Args:
        selector: The selector.
        settings: How clients are treated.
        roster: Who is who.
        client_values: Selector parameters given by client id; clients they do not cover are refused.
        availability: Called with client id, round and simulated seconds; False leaves the client out of the round.
        measurer: Measures on the server what the selector needs.
    """

    def __init__(
        self,
        selector: Selector,
        settings: Settings,
        roster: Roster,
        client_values: tuple[ClientValues, ...] = (),
        availability: Availability | None = None,
        measurer: Measurer | None = None,
    ) -> None:
        self.selector, self.settings, self.roster = selector, settings, roster
        self.measurer = measurer or Measurer(selector)
        self.history = History()
        self._availability = availability
        self._enrolment = Enrolment(selector, roster, self.measurer, client_values)
        self._probing = Probing(selector, roster, settings)
        self._reporter = Reporter(selector, roster, settings.max_latency)
        self._chosen: dict[int, str] = {}
        self._num_available = 0
        self._failures: dict[int, int] = {}
        self._out_until: dict[int, int] = {}
        self._not_reporting: set[int] = set()  # clients that leave the time to the server, which is logged once

    @property
    def round(self) -> int:
        """The round chosen last."""
        return self.selector.round

    @property
    def measures_global(self) -> bool:
        """Whether :meth:`finish` needs the global model before and after the round."""
        return bool(self.selector.needs & {"projection", "global_accuracy", "global_loss"})

    def strangers(self, connected: Collection[str]) -> list[str]:
        """Connections that the roll call should ask who they are; those that are gone are released."""
        self.roster.release(connected, self.round + 1)
        return self.roster.strangers(connected)

    def enroll(self, introductions: Mapping[str, Introduction]) -> None:
        """Bind connections to rows and tell the selector about new clients; see :meth:`Enrolment.enroll`."""
        for row in self._enrolment.enroll(introductions, self.round + 1):
            self._failures.pop(row, None)
            self._out_until.pop(row, None)
            self._not_reporting.discard(row)

    def received(self, model: Arrays | None) -> None:
        """Note the global model that the round starts from, before the choice; see :meth:`Enrolment.received`."""
        self._enrolment.received(model)

    def question(self, connected: Collection[str]) -> Question | None:
        """Ask the selector what must be asked before the choice.

        Args:
            connected: Every connection there is.

        Returns:
            None, or whom to ask; the adapter gives the answers to :meth:`answer`, also when there are none.
        """
        return self._probing.question(self._here(connected))

    def answer(self, answers: Mapping[str, Mapping[str, object]]) -> None:
        """Pass connection -> metrics, the answers to a question, on to the selector; see :meth:`Probing.answer`."""
        self._probing.answer(answers)

    def choose(self, connected: Collection[str]) -> list[str]:
        """Choose this round's clients among the connected ones.

        Args:
            connected: Every connection there is; those not enrolled are left out.

        Returns:
            The chosen connections, by ascending row.
        """
        here = self._here(connected)
        available = list(here)
        chosen = self.selector.select(np.array(available, dtype=np.int64))
        self._num_available = len(available)
        self._chosen = {int(row): here[int(row)] for row in chosen}
        return list(self._chosen.values())

    def collect(self, replies: Mapping[str, Reply], reference: Arrays | None) -> Outcome:
        """Read what came back; every fault is logged with the client's id.

        Args:
            replies: Connection -> reply; a chosen connection without one did not answer.
            reference: The global model the clients received; None if it cannot be decoded.

        Returns:
            Which updates may be aggregated.

        Raises:
            RunError: Models must be measured or mixed, but the global model is not made of NumPy arrays.
        """
        s, results = self.settings, {}
        for row, node in self._chosen.items():
            reply = replies.get(node, Reply(error="no answer"))
            results[node] = result = read_reply(
                reply, reference=reference, client_id=self.roster.ids[row], max_latency=s.max_latency,
                clock=s.clock, clock_slack=s.clock_slack, keys=s.keys,
            )  # fmt: skip
            for problem in result.problems:
                known = problem == NOT_REPORTED and row in self._not_reporting
                level = logging.DEBUG if known else logging.WARNING
                logger.log(level, "round %d, client %s: %s", self.round, self.roster.ids[row], problem)
            if NOT_REPORTED in result.problems:
                self._not_reporting.add(row)
        self._enrolment.reported({row: results[node].num_examples for row, node in self._chosen.items()})
        usable = [node for node, result in results.items() if result.completed]
        enough = len(usable) >= s.min_completed and not self.selector.keeps_model
        outcome = Outcome(results=results, usable=usable, enough=enough)
        if usable and reference is None and (self.measurer.reads_updates or self.measures_global or s.averaging):
            raise RunError(
                "the global model cannot be decoded into NumPy arrays, but the filter, the selector or the averaging "
                "scheme works on its numbers: use a base strategy whose model is arrays, or a selector of latencies"
            )
        return self._measured(outcome, replies, reference) if usable and reference is not None else outcome

    def finish(self, outcome: Outcome, before: Arrays | None = None, after: Arrays | None = None) -> RoundRecord:
        """Let the selector observe the round and enter it into the history.

        Args:
            outcome: What :meth:`collect` returned.
            before: The global model of the round; needed where the server measures.
            after: The new global model; None if it stayed.

        Returns:
            The round's record.
        """
        rows, results = list(self._chosen), [outcome.results[node] for node in self._chosen.values()]
        latency = np.array([result.latency_s for result in results])
        scalars = {} if before is None else self.measurer.global_model(before, before if after is None else after)
        self.selector.observe(self._reporter.report(self._chosen, outcome, scalars))
        for row, result in zip(rows, results, strict=True):
            failures = 0 if result.completed else self._failures.get(row, 0) + 1
            self._failures[row] = failures
            if self.settings.cooldown and failures:
                self._out_until[row] = self.round + 2 ** min(failures, 30)
        probe_s, probe_j = self._probing.settle()
        return self.history.append(
            round=self.round,
            num_available=self._num_available,
            round_s=round_time(latency, self.settings.channels or max(1, len(latency))),
            probe_s=probe_s,
            probe_j=probe_j,
            clients=[self._reporter.record(row, result) for row, result in zip(rows, results, strict=True)],
        )

    def _measured(self, outcome: Outcome, replies: Mapping[str, Reply], reference: Arrays) -> Outcome:
        """The outcome with what the server measures on the usable models, and how they are averaged."""
        models = [outcome.results[node].converted or replies[node].arrays or [] for node in outcome.usable]
        outcome = replace(outcome, columns=self.measurer.models(models, reference))
        if not outcome.kept:
            return replace(outcome, enough=False)
        if self.settings.averaging is None or not outcome.enough:
            return outcome
        weights = np.array([outcome.results[node].weight for node in outcome.kept])
        draws = self.selector.draws(np.array([row for row, node in self._chosen.items() if node in outcome.kept]))
        total, num_clients = self._enrolment.total_examples(), self.selector.num_clients
        scheme = averaging(self.settings.averaging, weights, total, num_clients, draws)  # (3), (5) of Kim et al.
        return replace(outcome, averaging=scheme)

    def _here(self, connected: Collection[str]) -> dict[int, str]:
        """Row -> connection of the clients that can be chosen in the round to come, by ascending row."""
        upcoming = self.round + 1
        seconds = self.history.rounds[-1].simulated_s if self.history.rounds else 0.0
        return {
            row: node
            for row, node in self.roster.present(connected, upcoming).items()
            if self._out_until.get(row, 0) < upcoming
            and (self._availability is None or self._availability(self.roster.ids[row], upcoming, seconds))
        }
