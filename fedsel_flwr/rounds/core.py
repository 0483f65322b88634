"""The steps of a round, shared by every adapter: choose, collect, finish.

An adapter connects these steps to one of Flower's APIs, or to the vectorized engine. It asks connections for their
identity, sends probes, sends the model, receives the replies, and lets the base strategy average the kept updates.
Everything else happens here, in plain types.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds import eligibility, state_dicts
from fedsel_flwr.rounds.collecting import ColdStarts, Collector
from fedsel_flwr.rounds.deadlines import Deadline, Deadlines
from fedsel_flwr.rounds.flights import Flights
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.late import LateUpdates
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.registration import ConnectionIdentity, IdentityResolver, Registrar
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.reply_checks import ColumnWatch, ReplyStructure
from fedsel_flwr.rounds.roll_call import NO_PROPERTIES, ProbeFaults, Probing, Properties, RollCall, Transport
from fedsel_flwr.rounds.roster import ClientValues, ConnectedClients, Roster
from fedsel_flwr.rounds.round import Outcome, Reporter, Round, Stopwatch
from fedsel_flwr.rounds.run_length import RoundNumbering, ShouldStop, StopCriteria
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import first_ids
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ASKED

logger = logging.getLogger("fedsel_flwr")
MOST_CHOSEN = 10
"""Largest number of chosen clients that a round's line names."""
ORDER_OF_CALLS = "Call choose, collect and finish once each, in this order."


class Parts:
    """The owners of a run's state; each attribute's name is the key in the checkpoint, in this order.

    Each is a :class:`~fedsel_flwr.rounds.state_dicts.Stateful`.

    Args:
        selector: The selector.
        settings: The resolved options of the strategy.
        roster: Connections, client ids and rows.
        client_values: Selector parameters by client id, bound to ``roster``.
    """

    # The clients at work, in buffered rounds only; the round trips, for automatic deadlines; the late updates.
    flights: Flights | None = None
    deadlines: Deadlines | None = None
    late: LateUpdates | None = None

    def __init__(
        self, selector: Selector, settings: Settings, roster: Roster, client_values: tuple[ClientValues, ...]
    ) -> None:
        measurer, watch = Measurer(selector, settings), ColumnWatch(selector, settings)
        self.selector, self.roster = selector, roster
        self.roll_call = RollCall(settings.roll_call_timeout)
        self.registrar = Registrar(selector, settings, roster, measurer, client_values)
        self.probing = Probing(selector, roster, settings, watch)
        self.missing_columns = watch
        self.busy = eligibility.Busy(settings.busy_timeout)
        self.cooldown = eligibility.Cooldown(settings.cooldown)
        self.newcomer_quota = eligibility.NewcomerQuota(roster)
        self.participation = eligibility.Participation(settings.max_participation)
        self.cold_starts = ColdStarts()
        self.measurer, self.direction = measurer, measurer.direction
        self.reply_structure = ReplyStructure(settings)
        self.reporter = Reporter(selector, roster, settings.max_latency)
        self.history = History()
        if settings.concurrency is not None:
            self.flights = Flights(settings)
        if settings.round_deadline_s == "auto":
            self.deadlines = Deadlines()
        if settings.late != "drop":
            self.late = LateUpdates(settings)


class SelectionCore:
    """Runs rounds: calls the selector, reads replies, and records the time and the history.

    Args:
        selector: The selector. No other core may use the same instance.
        settings: The resolved options, from :func:`~fedsel_flwr.rounds.settings.resolve_settings`.
        roster: Connections, client ids and rows; None starts with an empty roster.
        client_values: Selector parameters by client id, bound to ``roster``. Clients without an entry are refused.

    Attributes:
        settings: The resolved options.
        parts: The objects with state that a checkpoint saves.
        numbering: Maps the server's round numbers to absolute rounds.
        ending: The criteria that end the run.
        stopwatch: The wall time of each round, and of the server's steps in it.
    """

    def __init__(
        self,
        selector: Selector,
        settings: Settings,
        *,
        roster: Roster | None = None,
        client_values: tuple[ClientValues, ...] = (),
    ) -> None:
        selector.plan_rounds(over_selection=settings.over_selection, warmup_rounds=settings.warmup_rounds)
        self.settings, self._availability = settings, eligibility.as_availability(settings.availability)
        # Whether the clients that the availability names were compared with the clients of the run.
        self._compared = False
        roster = Roster() if roster is None else roster
        for limit in ("max_clients", "max_new_per_round", "evict_after"):
            if (given := getattr(settings, limit)) is not None:
                setattr(roster, limit, given)
        self.parts = parts = Parts(selector, settings, roster, client_values)
        self.ending = StopCriteria(selector, parts.history, settings.budget, settings.should_stop)
        self.numbering, self._identities = RoundNumbering(), IdentityResolver(settings)
        self.collector = Collector(parts, settings, self._identities)
        self._round: Round | None = None
        # Not among the parts, because a checkpoint must be the same in equal runs.
        self.stopwatch = Stopwatch()

    @property
    def round(self) -> int:
        """Return the absolute number of the last round whose clients were selected."""
        flights = self.parts.flights
        return self.parts.selector.round if flights is None else flights.step

    @property
    def at_work(self) -> int:
        """Return the number of clients whose replies are still to come; 0 between synchronous rounds."""
        return 0 if self.parts.flights is None else self.parts.flights.at_work

    @property
    def reference(self) -> Arrays | None:
        """Return the global model that the clients got in this round; None if it cannot be decoded."""
        return None if self._round is None else self._round.reference

    @property
    def in_round(self) -> bool:
        """Return whether a round has begun whose replies are not collected."""
        return self._round is not None and self._round.outcome is None

    @property
    def asks(self) -> str:
        """Return the columns that clients report only if the train config names them, comma-separated."""
        return ",".join(sorted(self.parts.selector.needs & ASKED))

    @property
    def ended(self) -> bool:
        """Return whether the run has ended: by its budget, the selector or ``should_stop``."""
        return self.ending.met

    @property
    def update_reader(self) -> str:
        """Name the reader of individual updates, for messages; empty if there is none."""
        return self.parts.measurer.reader or ("" if self.settings.max_update_norm is None else "max_update_norm")

    def summary(self, base: object) -> str:
        """Return who selects, who aggregates and whose times count, for the log at the start of a run."""
        return f'selector {self.parts.selector!r}, base {type(base).__name__}, clock "{self.settings.clock}"'

    def reads_global(self, outcome: Outcome) -> bool:
        """Return whether :meth:`finish` needs the arrays of the new global model."""
        return self.parts.measurer.reads_global or (outcome.averaging is not None and outcome.averaging.mixes)

    def begin_run(self, done: int = 0, should_stop: ShouldStop | None = None) -> None:
        """Start a run, in which the server may count its rounds from 1 again.

        Args:
            done: Number of finished rounds, if the server is known to count from 1.
            should_stop: A stop signal for this run only; None for no signal.
        """
        self.numbering.begin_run(done)
        self.ending.begin_run(should_stop)

    def choose(
        self,
        connected: Collection[str],
        reference: Arrays | None,
        transport: Transport,
        server_round: int | None = None,
        among: Sequence[str] | None = None,
    ) -> list[str]:
        """Start a round: call the roll, send the selector's probe, and select the cohort.

        Args:
            connected: All current connections.
            reference: The global model at the start of the round; None if it cannot be decoded.
            transport: Sends questions to the connections.
            server_round: The server's number of this round; None continues the count.
            among: The ids of the available clients, in a round that is repeated; None for those that are available now.

        Returns:
            The selected connections, by ascending row. An empty list means that the run has :attr:`ended`, that the
            round is already in the history, or that clients of earlier rounds are :attr:`at_work`.

        Raises:
            RunError: The server's round number does not follow the selector's. Or no client answers a column that the
                selector's first probe asks for.
        """
        self.ending.check()
        if self.ended:
            return []
        parts, upcoming = self.parts, self.round + 1
        if server_round is not None:
            self.numbering.check(server_round, self.round)
        self.stopwatch.begin()
        self._call_roll(connected, upcoming, transport)
        present = self._available(connected, upcoming)
        if parts.late is not None:
            present = present.only(parts.late.free(present.rows, parts.history.simulated_s))
        if among is not None:
            present = parts.roster.among(among, connected) or present
        # A model without arrays has nothing to compare the replies with.
        round = Round(number=upcoming, available=present.rows, reference=reference or None, offered=present.rows)
        if (flights := parts.flights) is None:
            self._select(round, present, reference, transport)
        else:
            if flights.lost():
                flights.reconnect(parts.roster.present(connected))
            free, sent_s, began = present, dict[int, float](), parts.history.simulated_s
            for _ in range(flights.calls):
                free = free.only(flights.free(free.rows, round.rows))
                spent = parts.probing.seconds
                self._select(round, free, reference, transport)
                # A probe delays only the clients that are selected after it.
                own = began + parts.probing.seconds - spent
                sent_s |= {row: own for row in round.chosen if row not in sent_s}
            flights.step = upcoming
            flights.send(round, sent_s)
        round.asked, self._round = round.rows, round
        round.sent_s = parts.history.simulated_s + parts.probing.seconds
        round.deadline = Deadline.of(round.rows, self.settings, parts.deadlines)
        if round.chosen and logger.isEnabledFor(logging.INFO):
            named = first_ids([parts.roster.ids[row] for row in round.chosen], MOST_CHOSEN)
            logger.info("round %d: %s chooses clients %s", upcoming, parts.selector.name, named)
        chosen = list(round.chosen.values())
        # Without selected clients no adapter receives a reply, so none would end this round.
        if not chosen and not self.at_work:
            self.collect({})
            self.finish()
        self.stopwatch.switch(None)
        return chosen

    def _select(self, round: Round, present: ConnectedClients, reference: Arrays | None, transport: Transport) -> None:
        """Call the selector once, after its probe, and add its clients to those of the round.

        Args:
            round: The round.
            present: The available clients that are not at work.
            reference: The global model.
            transport: Sends the probe.
        """
        parts = self.parts
        eligible = present.only(parts.participation.eligible(present.rows, int(parts.selector.asked_per_round or 1)))
        if (question := parts.probing.question(eligible, reference)) is not None:
            with self.stopwatch.paused():
                answers = transport.probe(list(question.asked.values()), question.config)
            faults, before = parts.probing.answer(question, answers, reference), round.probe_faults
            round.probe_faults = ProbeFaults(
                problems={**before.problems, **faults.problems}, lacking=before.lacking | faults.lacking
            )
            # A client that did not reply to the probe is now busy, and could not train either.
            eligible = eligible.only(parts.busy.eligible(eligible))
            busy = present.rows[~parts.busy.eligible(present)]
            round.available = round.available[~np.isin(round.available, busy)]
        parts.registrar.inform_initial_accuracy(reference)
        self.stopwatch.switch("select")
        chosen = parts.selector.select(eligible.rows)
        round.num_available = round.num_available or len(eligible.rows)
        round.add(eligible.nodes_of(chosen), parts.selector.draws(chosen))

    def register(
        self, properties: Mapping[str, Properties], known: Mapping[str, ConnectionIdentity] | None = None
    ) -> None:
        """Register connections in the roster, and reset the state of evicted clients in every part.

        Args:
            properties: Connection -> its own properties, from the roll call.
            known: Connection -> its identity according to the server; None if the server knows no identities.
        """
        if not properties:
            return
        new, evicted = self.parts.registrar.register(properties, self.round + 1, known or {})
        # Must come before informing the selector, because the new clients get the rows of the evicted clients.
        if evicted.size:
            for part in vars(self.parts).values():
                part.forget(evicted)
        if new:
            rows = np.sort(np.fromiter(new, dtype=np.int64, count=len(new)))
            self.parts.registrar.inform_selector(rows, [properties[new[row]] for row in rows.tolist()])

    def collect(self, replies: Mapping[str, Reply], stack: ModelStack | None = None) -> Outcome:
        """Read the replies and log faults with the clients' ids.

        Args:
            replies: Connection -> reply. A selected connection without an entry did not reply.
            stack: The models of the selected clients, one row each in the order of :meth:`choose`; None if each reply
                has its own model.

        Returns:
            The outcome of the round, with the updates to aggregate.

        Raises:
            RunError: :meth:`choose` was not called before. Or models must be measured or mixed, but the global model
                does not consist of NumPy arrays. Or no client reports a column that the selector reads.
        """
        if self._round is None or not self.in_round:
            raise RunError(f"collect was called before choose, or twice. {ORDER_OF_CALLS}")
        self.stopwatch.switch("collect")
        self._round.outcome = outcome = self._outcome(self._round, replies, stack)
        if (late := self.parts.late) is not None and self._round.chosen and not self.collector.only_measures:
            # The base gets the late updates too. The selector and the history get what came in time.
            outcome = late.join(self._round, outcome)
            late.hold(self._round, self._round.outcome, replies, stack)
        # Until finish the adapter lets the base strategy aggregate.
        self.stopwatch.switch("aggregate")
        return outcome

    def _outcome(self, round: Round, replies: Mapping[str, Reply], stack: ModelStack | None) -> Outcome:
        """Return the outcome of the replies, or in a buffered round of the arrivals."""
        if (flights := self.parts.flights) is None:
            outcome = self.collector.collect(round, replies, stack)
            if self.parts.late is not None and not round.chosen:
                # Nobody was free, so the round lasts until somebody is.
                outcome = replace(outcome, round_s=self.parts.late.next_arrival(round.sent_s))
            return outcome
        arrivals = flights.arrive(round, replies, stack)
        outcome = self.collector.collect(round, arrivals.replies, arrivals.models)
        if arrivals.replies:
            # The history adds the seconds of probes, which delay only the clients that were selected after them.
            # On the server's clock, a reply may have arrived while the server was evaluating.
            now_s = self.parts.history.simulated_s
            seconds = max(arrivals.end_s, now_s) - now_s - self.parts.probing.seconds
            outcome = replace(outcome, round_s=seconds, staleness=arrivals.staleness, arrived_s=arrivals.arrived_s)
        return flights.damped(outcome, round.reference or [])

    @property
    def current(self) -> Round:
        """Return the round in progress.

        Raises:
            RunError: There is none.
        """
        if self._round is None:
            raise RunError(f"no round is in progress. {ORDER_OF_CALLS}")
        return self._round

    def name_arrays(self, names: Sequence[str]) -> None:
        """Note the names of the model's arrays, by which running statistics are known; numbers replace no names."""
        numbered = all(name.isdigit() for name in names)
        for part in (self.parts.flights, self.parts.late):
            if part is not None and not (numbered and part.names):
                part.names = names

    def skip(self) -> None:
        """End the round without clients, because the base configures no client; the choice counts as never made.

        Raises:
            RunError: :meth:`choose` was not called before, or the replies are collected.
        """
        if (round := self._round) is None or not self.in_round:
            raise RunError(f"skip was called before choose, or after collect. {ORDER_OF_CALLS}")
        if self.parts.flights is not None:
            self.parts.flights.cancel(round.number)
        round.chosen, round.asked = {}, round.rows[:0]
        self.stopwatch.switch("collect")
        round.outcome = self.collector.collect(round, {}, None)
        self.finish(remark="skipped: the base strategy configured no client")

    def finish(self, after: Arrays | None = None, remark: str = "") -> Arrays | None:
        """End the round: mix the model by the averaging scheme, pass the report to the selector, write the history.

        Args:
            after: The mean of the kept models, or the base strategy's result; None if the model did not change.
            remark: A remark on the round for the history: its kind, a colon and details.

        Returns:
            The new global model: ``after``, or ``after`` mixed with the old model. None if the model did not change.

        Raises:
            RunError: :meth:`collect` was not called after the last finished round.
        """
        if self._round is None or self._round.outcome is None:
            raise RunError(f"finish was called before collect, or twice. {ORDER_OF_CALLS}")
        round, parts, outcome, before = self._round, self.parts, self._round.outcome, self._round.reference
        if after is not None and before is not None and outcome.averaging is not None and outcome.averaging.mixes:
            after = outcome.averaging.mix(before, after)
        self.stopwatch.switch("observe")
        scalars: dict[str, float] = {}
        if before is not None and parts.measurer.reads_global:
            scalars = parts.measurer.global_model(before, before if after is None else after)
        parts.selector.observe(report := parts.reporter.report(round, outcome, scalars))
        results = outcome.results.values()
        completed = np.array([result.completed for result in results], dtype=np.bool_)
        spare = np.array([result.spare for result in results], dtype=np.bool_)
        # Uses the report, because otherwise a client that fails only for the selector would be selected repeatedly.
        late = ~completed & np.array([math.isfinite(result.done_s) for result in results], dtype=np.bool_)
        parts.cooldown.note(round.rows, report.completed | spare | (late & self.settings.reads_late), round.number)
        # Uses the replies, because an update is usable even if a column is missing, and a spare has not failed.
        parts.newcomer_quota.note(round.rows, completed | spare)
        parts.participation.note(round.available, round.asked)
        parts.cold_starts.note(round.rows, outcome.results)
        if parts.deadlines is not None:
            end_s = round.sent_s + outcome.round_s
            parts.deadlines.note_round(round.rows, outcome.results.values(), round.sent_s, end_s)
        parts.history.append(
            round=round.number,
            num_available=round.num_available,
            round_s=outcome.round_s,
            **parts.probing.take_costs(),
            clients=parts.reporter.records(round, outcome),
            remark=remark or parts.missing_columns.remark(round.probe_faults.lacking, outcome.lacking),
            deadline_s=outcome.deadline_s if math.isfinite(outcome.deadline_s) else math.nan,
            num_late=len(round.late),
            late_j=float(np.nansum([one.energy_j for one, _ in round.late])),
            note=parts.reporter.note(round, outcome, parts.cooldown) if self.settings.ends_early else "",
        )
        self._round = None
        parts.history.log_unusable_rounds()
        self.stopwatch.end(round.number)
        return after

    def state_dict(self) -> state_dicts.State:
        """Return the state of all parts; call this method between rounds."""
        return state_dicts.save_parts(vars(self.parts))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state of :meth:`state_dict`; the server may continue its count of rounds or start at 1.

        Automatic deadlines may be switched on or off between two starts; they begin without times.

        Raises:
            StateError: A part is missing or does not fit; nothing has changed.
        """
        if isinstance(state, Mapping):
            fresh = {} if self.parts.deadlines is None else {"deadlines": Deadlines().state_dict()}
            state = fresh | {name: own for name, own in state.items() if fresh or name != "deadlines"}
        state_dicts.load_parts(vars(self.parts), state)
        # The rounds after the loaded one are run again.
        self._round, self.stopwatch = None, Stopwatch()
        self.begin_run()

    def _call_roll(self, connected: Collection[str], upcoming: int, transport: Transport) -> None:
        """Find new clients and register them; ask for their properties only if a part reads the answers."""
        parts, identities = self.parts, self._identities
        parts.roster.release(connected, upcoming)
        parts.busy.release(connected)
        identities.settle(transport)
        known = identities.resolve(parts.busy.free(parts.roster.unregistered(connected)), transport)
        properties: Mapping[str, Properties] = dict.fromkeys(known, NO_PROPERTIES)
        if known and (identities.by_claim or parts.registrar.reads_properties):
            one_first = identities.one_first(transport)
            introduce = self.stopwatch.paused()(transport.introduce)
            properties = parts.roll_call.call(known, upcoming, introduce, one_first=one_first)
        self.register(properties, known)

    def _available(self, connected: Collection[str], upcoming: int) -> ConnectedClients:
        """Return the clients available in the next round, including clients above ``max_participation``."""
        roster = self.parts.roster
        present = roster.present(connected)
        # Must come before the checks, because a connected client is not absent, even if it is busy or in cool-down.
        roster.seen(present.rows, upcoming)
        here = present.only(self.parts.busy.eligible(present))
        here = here.only(self.parts.cooldown.eligible(here.rows, upcoming))
        if self._availability is not None:
            ids = [roster.ids[row] for row in here.rows]
            known, self._compared = () if self._compared else roster.ids, True
            now_s = self.parts.history.simulated_s
            here = here.only(eligibility.available(self._availability, ids, upcoming, now_s, known))
        # Must come last, so that the places for new clients go to clients that pass all other checks.
        return here.only(self.parts.newcomer_quota.eligible(here.rows))
