"""One round of selection in plain types, shared by every adapter: no Flower, no torch.

An adapter calls, in this order and once a round: :meth:`SelectionCore.enroll` for connections never seen,
:meth:`SelectionCore.choose`, :meth:`SelectionCore.collect` with what came back, and, after aggregating the usable
updates in the order given, :meth:`SelectionCore.finish`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from fedsel_flwr.aggregation import averaging
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.history import History, RoundRecord
from fedsel_flwr.strategies.measuring import Measurer
from fedsel_flwr.strategies.replies import (
    Arrays,
    Reply,
    finite_number,
    read_reply,
    usable_count,
)
from fedsel_flwr.strategies.reporting import Reporter
from fedsel_flwr.strategies.roster import Roster, RowValues, canonical_id
from fedsel_flwr.strategies.terms import Availability, Introduction, Outcome, Question, Settings
from fedsel_flwr.wireless import round_time

__all__ = ["Availability", "Introduction", "Outcome", "Question", "SelectionCore", "Settings"]

logger = logging.getLogger("fedsel_flwr")
FRACTIONS = frozenset({"local_accuracy", "accuracy", "energy_score"})
"""Columns that lie in [0, 1]."""


class SelectionCore:
    """Keeps the roster, asks the selector, reads replies, keeps time and the history.

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
        client_values: tuple[RowValues, ...] = (),
        availability: Availability | None = None,
        measurer: Measurer | None = None,
    ) -> None:
        self.measurer = measurer or Measurer(selector)
        self._sizes: dict[int, int] = {}
        self._reporter = Reporter(selector, roster, settings.max_latency)
        self._initial_accuracy: float | None = None
        self._uninformed: list[int] = []
        self.selector, self.settings, self.roster = selector, settings, roster
        self.client_values, self._availability = client_values, availability
        self._asked: dict[int, str] = {}
        self._columns: tuple[str, ...] = ()
        self._probe_s = self._probe_j = 0.0
        self.history = History()
        self._chosen: dict[int, str] = {}
        self._num_available = 0
        self._failures: dict[int, int] = {}
        self._out_until: dict[int, int] = {}

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
        """Bind connections to rows and tell the selector about new clients.

        Args:
            introductions: Connection -> what it said. Without a usable id the connection's own name is the id.

        Raises:
            ParameterError: In the first roll call, parameters given by client do not cover a client.
        """
        named = set(self.roster.refused)
        self._refuse_uncovered(introductions, first_call=not self.roster.ids)
        claims = {
            node: canonical_id(said.client_id) or node
            for node, said in introductions.items()
            if node not in self.roster.refused
        }
        new, evicted = self.roster.enroll(claims, self.round + 1)
        for node in self.roster.refused.keys() - named:
            logger.warning("%s", self.roster.refused[node])
        for row in evicted:
            self._failures.pop(row, None)
            self._out_until.pop(row, None)
            self._sizes.pop(row, None)
        if evicted:
            self.selector.forget(np.array(evicted))
        if not new:
            return
        rows = self.roster.present(claims, self.round)
        said = {row: introductions[node] for row, node in rows.items() if row in new}
        columns: dict[str, list[float | None]] = {
            "num_examples": [usable_count(one.num_examples) or None for one in said.values()],
            "energy_score": [_score(one.energy_score) for one in said.values()],
        }
        self._sizes |= {row: count for row, one in said.items() if (count := usable_count(one.num_examples))}
        self._uninformed.extend(said)
        known = {name: np.array(column) for name, column in columns.items() if None not in column}
        self.selector.inform(np.array(list(said)), **{name: column.astype(float) for name, column in known.items()})

    def received(self, model: Arrays | None) -> None:
        """Note the global model that the round starts from, before the choice.

        A client that has not trained yet counts, for selectors that read ``accuracy``, with the accuracy of the first
        global model.
        """
        if "accuracy" not in self.selector.needs or model is None or not self._uninformed:
            return
        if self._initial_accuracy is None:
            self._initial_accuracy = self.measurer.initial_accuracy(model)
        accuracy = np.full(len(self._uninformed), self._initial_accuracy)
        self.selector.inform(np.array(self._uninformed), accuracy=accuracy)
        self._uninformed = []

    def question(self, connected: Collection[str]) -> Question | None:
        """Ask the selector what must be asked before the choice.

        Args:
            connected: Every connection there is.

        Returns:
            None, or whom to ask; the adapter gives the answers to :meth:`answer`, also when there are none.
        """
        here = self._here(connected)
        probe = self.selector.probe(np.array(list(here), dtype=np.int64))
        if probe is None or not len(probe.clients):
            return None
        self._asked = {int(row): here[int(row)] for row in probe.clients}
        self._columns = probe.columns
        return Question(
            nodes=list(self._asked.values()), config={"probe": ",".join(probe.columns), "round": self.round + 1}
        )

    def answer(self, answers: Mapping[str, Mapping[str, object]]) -> None:
        """Pass the answers to a probe on to the selector, and charge their simulated time and energy.

        A client that did not answer, or not with a finite number, informs with NaN and costs ``max_latency``.

        Args:
            answers: Connection -> the metrics it returned.
        """
        keys, limit = self.settings.keys, self.settings.max_latency
        columns: dict[str, list[float]] = {name: [] for name in self._columns}
        latency = []
        for row, node in self._asked.items():
            metrics = answers.get(node, {})
            for name in self._columns:
                value = finite_number(metrics.get(name))
                if value is not None and name in FRACTIONS and not 0 <= value <= 1:
                    value = None
                columns[name].append(np.nan if value is None else value)
                if value is None:
                    logger.warning("round %d, client %s: probe: no %s", self.round + 1, self.roster.ids[row], name)
            answered = all(np.isfinite(columns[name][-1]) for name in self._columns)
            seconds = finite_number(metrics.get(keys.latency)) if answered else None
            latency.append(limit if seconds is None or not 0 <= seconds <= limit else seconds)
            energy = finite_number(metrics.get(keys.energy))
            self._probe_j += energy if energy is not None and energy > 0 else 0.0
        self._probe_s += round_time(np.array(latency), self.settings.channels or len(latency))
        self.selector.inform(np.array(list(self._asked)), **{k: np.array(v) for k, v in columns.items()})

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
        """
        s, results = self.settings, {}
        for row, node in self._chosen.items():
            reply = replies.get(node, Reply(error="no answer"))
            results[node] = result = read_reply(
                reply, reference=reference, client_id=self.roster.ids[row], max_latency=s.max_latency,
                clock=s.clock, clock_slack=s.clock_slack, keys=s.keys,
            )  # fmt: skip
            for problem in result.problems:
                logger.warning("round %d, client %s: %s", self.round, self.roster.ids[row], problem)
        self._sizes |= {row: n for row, node in self._chosen.items() if (n := results[node].num_examples)}
        usable = [node for node, result in results.items() if result.completed]
        enough = len(usable) >= s.min_completed and not self.selector.keeps_model
        outcome = Outcome(results=results, usable=usable, enough=enough)
        return self._measured(outcome, replies, reference) if usable and reference is not None else outcome

    def finish(self, outcome: Outcome, before: Arrays | None = None, after: Arrays | None = None) -> RoundRecord:
        """Let the selector observe the round and enter it into the history.

        Args:
            outcome: What :meth:`collect` returned.
            before: The global model of the round; needed where the server measures.
            after: The new global model; None if it stayed.
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
        record = self.history.append(
            round=self.round,
            num_available=self._num_available,
            round_s=round_time(latency, self.settings.channels or max(1, len(latency))),
            probe_s=self._probe_s,
            probe_j=self._probe_j,
            clients=[self._reporter.record(row, result) for row, result in zip(rows, results, strict=True)],
        )
        self._probe_s = self._probe_j = 0.0
        return record

    def _measured(self, outcome: Outcome, replies: Mapping[str, Reply], reference: Arrays) -> Outcome:
        """The outcome with what the server measures on the usable models, and how they are averaged."""
        models = [outcome.results[node].converted or replies[node].arrays or [] for node in outcome.usable]
        outcome = replace(outcome, columns=self.measurer.models(models, reference))
        if not outcome.kept:
            return replace(outcome, enough=False)
        if self.settings.averaging is None or not outcome.enough:
            return outcome
        sizes = np.array([outcome.results[node].num_examples for node in outcome.kept], dtype=np.float64)
        num_clients = self.selector.num_clients
        known = list(self._sizes.values())
        total = sum(known) * num_clients / len(known)
        draws = self.selector.draws(np.array([row for row, node in self._chosen.items() if node in outcome.kept]))
        return replace(outcome, averaging=averaging(self.settings.averaging, sizes, total, num_clients, draws))

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

    def _refuse_uncovered(self, introductions: Mapping[str, Introduction], *, first_call: bool) -> None:
        """Refuse clients without an entry in a parameter given by client; at the start that is the user's mistake."""
        for node, said in introductions.items():
            claim = canonical_id(said.client_id)
            for values in self.client_values:
                if values.covers(claim or node):
                    continue
                if first_call and claim is not None:
                    raise ParameterError(
                        f"{values.name} has {len(values)} entries but none for client {claim!r}: give a mapping "
                        "{client_id: value} that covers every client (an array is for the ids 0..K-1)"
                    )
                self.roster.refused[node] = f"client {claim or node!r} refused: no entry in {values.name}"


def _score(value: object) -> float | None:
    """A reported energy score; None if it cannot be one."""
    number = finite_number(value)
    return number if number is not None and 0 <= number <= 1 else None
