"""The course of a round, shared by every adapter: choose, collect, finish.

An adapter is a transport: it introduces connections, puts probes to them, carries the model out and the replies back,
and has the kept updates averaged. Everything else happens here, in plain types.

Who owns what outlives a round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from fedsel_flwr.aggregation.schemes import READS_TOTAL_EXAMPLES
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.collecting import Collector
from fedsel_flwr.rounds.eligibility import Availability, Busy, Cooldown, Participation, Trial, available
from fedsel_flwr.rounds.first_times import FirstTimes
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.probing import Probing
from fedsel_flwr.rounds.registration import Enrolment, Identifying, Introduction, Known
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roll_call import CANNOT_SAY, Facts, RollCall, Transport
from fedsel_flwr.rounds.roster import ClientValues, ConnectedClients, Roster
from fedsel_flwr.rounds.round import Outcome, Reporter, Round
from fedsel_flwr.rounds.run_length import Budget, RoundNumbering, ShouldStop, StopCriteria
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ASKED


class Parts(NamedTuple):
    """The owners of what outlives a round."""

    selector: Selector
    roster: Roster
    rollcall: RollCall
    enrolment: Enrolment
    probing: Probing
    busy: Busy
    cooldown: Cooldown
    trial: Trial
    participation: Participation
    first_times: FirstTimes
    measurer: Measurer
    reporter: Reporter
    history: History


def make_parts(
    selector: Selector,
    settings: Settings,
    roster: Roster,
    client_values: tuple[ClientValues, ...],
    roll_call_timeout: float,
) -> Parts:
    """The owners of a new run."""
    s = settings
    measurer = Measurer(selector, s.validation, s.filter, s.learning_rate, s.momentum)
    return Parts(
        selector=selector,
        roster=roster,
        rollcall=RollCall(roll_call_timeout),
        enrolment=Enrolment(
            selector,
            roster,
            measurer,
            client_values,
            s.max_examples,
            counts_everybody=s.averaging in READS_TOTAL_EXAMPLES,
        ),
        probing=Probing(selector, roster, settings),
        busy=Busy(settings.busy_timeout),
        cooldown=Cooldown(settings.cooldown),
        trial=Trial(roster),
        participation=Participation(settings.max_participation),
        first_times=FirstTimes(),
        measurer=measurer,
        reporter=Reporter(selector, roster, settings.max_latency),
        history=History(),
    )


class SelectionCore:
    """Asks the selector, reads replies, keeps time and the history.

    Args:
        selector: The selector; it must not be shared.
        settings: How clients are treated; :func:`~fedsel_flwr.rounds.settings.resolve_settings` makes them for one.
        roster: Who is who; None starts with an empty one.
        client_values: Selector parameters given by client id, bound to ``roster``; clients they do not cover are
            refused.
        availability: Who takes part in a round.
        budget: What the run may spend; None sets no limit.
        should_stop: The caller's signal that ends the run with the last round; None: there is none.
        roll_call_timeout: Seconds that the transport waits for introductions, for messages.

    Attributes:
        settings: How clients are treated.
        parts: The owners of what outlives a round.
        numbering: Which absolute round the server means.
        ending: Whether the run is over.
    """

    def __init__(
        self,
        selector: Selector,
        settings: Settings,
        *,
        roster: Roster | None = None,
        client_values: tuple[ClientValues, ...] = (),
        availability: Availability | None = None,
        budget: Budget | None = None,
        should_stop: ShouldStop | None = None,
        roll_call_timeout: float = 60.0,
    ) -> None:
        selector.over_selection, selector.common_warmup = settings.over_selection, settings.warmup_rounds
        self.settings, self._availability = settings, availability
        roster = Roster() if roster is None else roster
        self.parts = make_parts(selector, settings, roster, client_values, roll_call_timeout)
        self.ending = StopCriteria(selector, self.parts.history, budget, should_stop)
        self.numbering, self._identifying = RoundNumbering(), Identifying(settings)
        parts, identifying = self.parts, self._identifying
        self._collector = Collector(
            selector, settings, roster, parts.enrolment, parts.measurer, identifying, parts.first_times
        )
        self._round: Round | None = None

    @property
    def round(self) -> int:
        """The absolute round chosen last."""
        return self.parts.selector.round

    @property
    def asks(self) -> str:
        """The columns that clients report only when the train config asks for them, comma-separated."""
        return ",".join(sorted(self.parts.selector.needs & ASKED))

    @property
    def ended(self) -> bool:
        """Whether the run is over: the budget is spent, the selector is done, or ``should_stop`` has said so."""
        return self.ending.met

    @property
    def update_reader(self) -> str:
        """What reads the clients' updates one by one, for messages; empty if nothing does."""
        if self.parts.measurer.reads_updates:
            return self.parts.measurer.reader
        return "" if self.settings.max_update_norm is None else "max_update_norm"

    @property
    def max_examples(self) -> int | None:
        """Most examples that a client may claim now; None for no limit."""
        return self.parts.enrolment.max_examples()

    def in_simulation(self) -> None:
        """Times and failures are modelled: the log counts late and lost answers once, when the run is over."""
        self._collector.modelled = True

    def waits_for(self, chosen: int) -> int | None:
        """How many usable answers of so many chosen clients end a round; None: all of them."""
        return self._collector.waits_for(chosen)

    def reads_global(self, outcome: Outcome) -> bool:
        """Whether :meth:`finish` needs the arrays of the new global model."""
        return self.parts.measurer.reads_global or (outcome.averaging is not None and outcome.averaging.mixes)

    def begin_run(self, done: int = 0, should_stop: ShouldStop | None = None) -> None:
        """A run begins: the server may count its rounds from 1 again.

        Args:
            done: The rounds that were done before, if the server is known to count from 1.
            should_stop: A signal of this run alone; None: there is none.
        """
        self.numbering.begin_run(done)
        self.ending.begin_run(should_stop)

    def choose(
        self,
        connected: Collection[str],
        reference: Arrays | None,
        transport: Transport,
        server_round: int | None = None,
    ) -> list[str]:
        """Begin a round: call the roll, ask what the selector must know, and choose.

        Args:
            connected: Every connection there is.
            reference: The global model the round starts from; None if it cannot be decoded.
            transport: Reaches them.
            server_round: The server's number of this round; None counts along.

        Returns:
            The chosen connections, by ascending row. If there are none, the round is in the history already, or the
            run has :attr:`ended` and there is none.

        Raises:
            RunError: The server's round does not follow the selector's.
        """
        self.ending.check()
        if self.ended:
            return []
        parts, upcoming = self.parts, self.round + 1
        if server_round is not None:
            self.numbering.check(server_round, self.round)
        self._call_roll(connected, upcoming, transport)
        everybody = self._here(connected, upcoming)
        at_least = int(parts.selector.asked_per_round or 1)
        here = everybody.only(parts.participation.offered(everybody.rows, at_least))
        if (question := parts.probing.question(here)) is not None:
            parts.probing.answer(question, transport.probe(question.nodes, question.config), reference)
            here = here.only(parts.busy.ready(here.nodes))
            everybody = everybody.only(parts.busy.ready(everybody.nodes))
        parts.enrolment.received(reference)
        chosen = here.nodes_of(parts.selector.select(here.rows))
        self._round = Round(
            number=upcoming, num_available=len(here.rows), available=everybody.rows, chosen=chosen, reference=reference
        )
        if not chosen:
            self.collect({})
            self.finish()
        return list(chosen.values())

    def enroll(self, facts: Mapping[str, Facts], known: Mapping[str, Known] | None = None) -> None:
        """Enter connections into the roster; rows that go from one client to another are forgotten by every part.

        Args:
            facts: Connection -> what it said of itself.
            known: Connection -> who it is in the server's words; None where the server cannot tell.
        """
        if not facts:
            return
        introductions = {node: Introduction.of(said, self.settings.keys) for node, said in facts.items()}
        new, evicted = self.parts.enrolment.enter(introductions, self.round + 1, known or {})
        if evicted.size:
            for part in self.parts:
                part.forget(evicted)
        if new:
            self.parts.enrolment.welcome({row: introductions[node] for row, node in new.items()})

    def collect(self, replies: Mapping[str, Reply], stack: ModelStack | None = None) -> Outcome:
        """Read what came back; faults are logged with the clients' ids.

        Args:
            replies: Connection -> reply; a chosen connection without one did not answer.
            stack: The models of the chosen clients, a row for each in the order of :meth:`choose`; None where each
                reply has its own.

        Returns:
            Which updates may be aggregated.

        Raises:
            RunError: No round is open, or models must be measured or mixed, but the global model is not made of
                NumPy arrays.
        """
        round = self._open()
        round.check_open()
        round.outcome = self._collector.collect(round, replies, stack)
        return round.outcome

    def finish(self, after: Arrays | None = None) -> Arrays | None:
        """End the round: mix the model as the averaging scheme says, let the selector observe, enter the history.

        Args:
            after: The mean of the kept models, or whatever the base strategy made of them; None if the model stayed.

        Returns:
            The new global model: ``after`` itself, or that mixed with the old one; None if the model stayed.

        Raises:
            RunError: No replies were collected, or the round is finished already.
        """
        round, parts = self._open(), self.parts
        outcome, before = round.collected(), round.reference
        if after is not None and before is not None and outcome.averaging is not None and outcome.averaging.mixes:
            after = outcome.averaging.mix(before, after)
        scalars: dict[str, float] = {}
        if before is not None and parts.measurer.reads_global:
            scalars = parts.measurer.global_model(before, before if after is None else after)
        parts.selector.observe(report := parts.reporter.report(round, outcome, scalars))
        results = outcome.results.values()
        completed = np.array([result.completed for result in results], dtype=np.bool_)
        spare = np.array([result.spare for result in results], dtype=np.bool_)
        # a client that failed for the selector alone would be chosen again and again, as one that never answers
        parts.cooldown.note(round.rows, report.completed | spare, round.number)
        parts.trial.note(round.rows, completed | spare)
        parts.participation.note(round.available, round.rows)
        parts.first_times.note(round.rows, outcome.results)
        probe_s, probe_j = parts.probing.settle()
        parts.history.append(
            round=round.number,
            num_available=round.num_available,
            round_s=outcome.round_s,
            probe_s=probe_s,
            probe_j=probe_j,
            clients=parts.reporter.records(round, outcome),
        )
        round.finished = True
        parts.history.log_unusable_rounds()
        return after

    def state_dict(self) -> state_dicts.State:
        """Everything that outlives a round, part by part; call it between rounds."""
        return state_dicts.save_parts(self.parts._asdict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state of :meth:`state_dict`; the server may count its rounds on or from 1.

        Raises:
            StateError: A part is missing or does not fit; nothing has changed then.
        """
        state_dicts.load_parts(self.parts._asdict(), state)
        self._round = None
        self.begin_run()

    def _call_roll(self, connected: Collection[str], upcoming: int, transport: Transport) -> None:
        """Find out who is new, and enter them; they are asked only for what somebody reads."""
        parts, identifying = self.parts, self._identifying
        parts.roster.release(connected, upcoming)
        parts.busy.release(connected)
        identifying.settle(transport)
        known = identifying.known(parts.busy.free(parts.roster.unregistered(connected)), transport)
        facts: Mapping[str, Facts] = dict.fromkeys(known, CANNOT_SAY)
        if known and (identifying.by_claim or parts.enrolment.reads_facts):
            one_first = identifying.one_first(transport)
            facts = parts.rollcall.call(known, upcoming, transport.introduce, one_first=one_first)
        self.enroll(facts, known)

    def _here(self, connected: Collection[str], upcoming: int) -> ConnectedClients:
        """The clients that are available in the round to come; each is asked for once."""
        roster, rounds = self.parts.roster, self.parts.history.rounds
        present = roster.present(connected)
        roster.seen(present.rows, upcoming)
        here = present.only(self.parts.busy.ready(present.nodes))
        here = here.only(self.parts.cooldown.ready(here.rows, upcoming))
        if self._availability is not None:
            seconds = rounds[-1].simulated_s if rounds else 0.0
            here = here.only(available(self._availability, [roster.ids[row] for row in here.rows], upcoming, seconds))
        return here.only(self.parts.trial.offered(here.rows))

    def _open(self) -> Round:
        if self._round is None:
            raise RunError("no round has begun: call choose, collect and finish once each, in this order")
        return self._round
