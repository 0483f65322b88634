"""The course of a round, shared by every adapter: choose, collect, finish.

An adapter is a transport: it introduces connections, puts probes to them, carries the model out and the replies back,
and has the kept updates averaged. Everything else happens here, in plain types.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.cold_starts import ColdStarts
from fedsel_flwr.rounds.collecting import Collector
from fedsel_flwr.rounds.eligibility import Busy, Cooldown, NewcomerQuota, Participation, as_availability, available
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.probing import Probing
from fedsel_flwr.rounds.registration import ClientProperties, ConnectionIdentity, IdentityResolver, Registrar
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roll_call import NO_PROPERTIES, Properties, RollCall, Transport
from fedsel_flwr.rounds.roster import ClientValues, ConnectedClients, Roster
from fedsel_flwr.rounds.round import Outcome, Reporter, Round
from fedsel_flwr.rounds.run_length import RoundNumbering, ShouldStop, StopCriteria
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ASKED

ORDER_OF_CALLS = "Call choose, collect and finish once each, in this order."


class SelectionCore:
    """Plays rounds: asks the selector, reads replies, keeps time and the history.

    Args:
        selector: The selector; it must not be shared.
        settings: How clients are treated; :func:`~fedsel_flwr.rounds.settings.resolve_settings` makes them for one.
        roster: Connections, client ids and rows; None starts with an empty one.
        client_values: Selector parameters given by client id, bound to ``roster``; clients they do not cover are
            refused.

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
    ) -> None:
        selector.plan_rounds(over_selection=settings.over_selection, warmup_rounds=settings.warmup_rounds)
        self.settings, self._availability = settings, as_availability(settings.availability)
        roster = Roster() if roster is None else roster
        for limit in ("max_clients", "max_new_per_round", "evict_after"):
            if (given := getattr(settings, limit)) is not None:
                setattr(roster, limit, given)
        measurer = Measurer(selector, settings)
        self.parts = Parts(
            selector=selector,
            roster=roster,
            roll_call=RollCall(settings.roll_call_timeout),
            registrar=Registrar(selector, settings, roster, measurer, client_values),
            probing=Probing(selector, roster, settings),
            busy=Busy(settings.busy_timeout),
            cooldown=Cooldown(settings.cooldown),
            newcomer_quota=NewcomerQuota(roster),
            participation=Participation(settings.max_participation),
            cold_starts=ColdStarts(),
            measurer=measurer,
            reporter=Reporter(selector, roster, settings.max_latency),
            history=History(),
        )
        self.ending = StopCriteria(selector, self.parts.history, settings.budget, settings.should_stop)
        self.numbering, self._identities = RoundNumbering(), IdentityResolver(settings)
        parts = self.parts
        self._collector = Collector(
            selector, settings, roster, parts.registrar, parts.measurer, self._identities, parts.cold_starts
        )
        self._round: Round | None = None

    @property
    def round(self) -> int:
        """Return the absolute round chosen last."""
        return self.parts.selector.round

    @property
    def asks(self) -> str:
        """Return the columns that clients report only if the train config asks for them, comma-separated."""
        return ",".join(sorted(self.parts.selector.needs & ASKED))

    @property
    def ended(self) -> bool:
        """Return whether the run is over: by budget, by the selector, or by ``should_stop``."""
        return self.ending.met

    @property
    def update_reader(self) -> str:
        """Name what reads the clients' updates one by one, for messages; empty if nothing does."""
        if self.parts.measurer.reads_updates:
            return self.parts.measurer.reader
        return "" if self.settings.max_update_norm is None else "max_update_norm"

    @property
    def max_examples(self) -> int | None:
        """Return the most examples that a client may claim now; None for no limit."""
        return self.parts.registrar.max_examples()

    def in_simulation(self) -> None:
        """Declare that times and failures are simulated: the log counts stragglers and dropouts once, after the run."""
        self._collector.simulated = True

    def waits_for(self, chosen: int) -> int | None:
        """Return how many usable answers end a round of ``chosen`` clients; None: all of them."""
        return self._collector.waits_for(chosen)

    def reads_global(self, outcome: Outcome) -> bool:
        """Return whether :meth:`finish` needs the arrays of the new global model."""
        return self.parts.measurer.reads_global or (outcome.averaging is not None and outcome.averaging.mixes)

    def begin_run(self, done: int = 0, should_stop: ShouldStop | None = None) -> None:
        """Begin a run: the server may count its rounds from 1 again.

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
            transport: Reaches the connections.
            server_round: The server's number of this round; None continues the count.

        Returns:
            The chosen connections, by ascending row. If there are none, either the run has :attr:`ended`, or the
            round is already in the history.

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
        present = self._available(connected, upcoming)
        at_least = int(parts.selector.asked_per_round or 1)
        eligible = present.only(parts.participation.eligible(present.rows, at_least))
        if (question := parts.probing.question(eligible)) is not None:
            parts.probing.answer(question, transport.probe(question.nodes, question.config), reference)
            # a client that did not answer the probe is busy now, and could not train either
            eligible = eligible.only(parts.busy.eligible(eligible.nodes))
            present = present.only(parts.busy.eligible(present.nodes))
        parts.registrar.inform_initial_accuracy(reference)
        chosen = eligible.nodes_of(parts.selector.select(eligible.rows))
        self._round = Round(
            number=upcoming,
            num_available=len(eligible.rows),
            available=present.rows,
            chosen=chosen,
            reference=reference,
        )
        # no reply will ever come, so no adapter would end this round
        if not chosen:
            self.collect({})
            self.finish()
        return list(chosen.values())

    def register(
        self, properties: Mapping[str, Properties], known: Mapping[str, ConnectionIdentity] | None = None
    ) -> None:
        """Enter connections into the roster; parts that hold values by row reset those of evicted clients.

        Args:
            properties: Connection -> what it said of itself.
            known: Connection -> who it is in the server's words; None if the server cannot tell.
        """
        if not properties:
            return
        said = {node: ClientProperties.read(one, self.settings.keys) for node, one in properties.items()}
        new, evicted = self.parts.registrar.register(said, self.round + 1, known or {})
        # before the selector learns of the newcomers, which take over the rows of the evicted clients
        if evicted.size:
            for part in self.parts:
                part.forget(evicted)
        if new:
            self.parts.registrar.inform_selector({row: said[node] for row, node in new.items()})

    def collect(self, replies: Mapping[str, Reply], stack: ModelStack | None = None) -> Outcome:
        """Read the replies; faults are logged with the clients' ids.

        Args:
            replies: Connection -> reply; a chosen connection without one did not answer.
            stack: The models of the chosen clients, a row for each in the order of :meth:`choose`; None if each
                reply has its own.

        Returns:
            Which updates may be aggregated.

        Raises:
            RunError: No round is open, or models must be measured or mixed, but the global model is not made of
                NumPy arrays.
        """
        if self._round is None or self._round.outcome is not None:
            raise RunError(f"collect was called before choose, or twice. {ORDER_OF_CALLS}")
        self._round.outcome = self._collector.collect(self._round, replies, stack)
        return self._round.outcome

    def finish(self, after: Arrays | None = None) -> Arrays | None:
        """End the round: mix the model by the averaging scheme, let the selector observe, write the history.

        Args:
            after: The mean of the kept models, or whatever the base strategy made of them; None if the model stayed.

        Returns:
            The new global model: ``after`` itself, or that mixed with the old one; None if the model stayed.

        Raises:
            RunError: No replies were collected since the last round was finished.
        """
        if self._round is None or self._round.outcome is None:
            raise RunError(f"finish was called before collect, or twice. {ORDER_OF_CALLS}")
        round, parts, outcome, before = self._round, self.parts, self._round.outcome, self._round.reference
        if after is not None and before is not None and outcome.averaging is not None and outcome.averaging.mixes:
            after = outcome.averaging.mix(before, after)
        scalars: dict[str, float] = {}
        if before is not None and parts.measurer.reads_global:
            scalars = parts.measurer.global_model(before, before if after is None else after)
        parts.selector.observe(report := parts.reporter.report(round, outcome, scalars))
        results = outcome.results.values()
        completed = np.array([result.completed for result in results], dtype=np.bool_)
        spare = np.array([result.spare for result in results], dtype=np.bool_)
        # by the report: a client that failed for the selector alone would be chosen again and again otherwise
        parts.cooldown.note(round.rows, report.completed | spare, round.number)
        # by the replies: a newcomer's update is usable even if the selector lacks a column, and a spare did not fail
        parts.newcomer_quota.note(round.rows, completed | spare)
        parts.participation.note(round.available, round.rows)
        parts.cold_starts.note(round.rows, outcome.results)
        probe_s, probe_j, num_probed = parts.probing.take_costs()
        parts.history.append(
            round=round.number,
            num_available=round.num_available,
            round_s=outcome.round_s,
            probe_s=probe_s,
            probe_j=probe_j,
            num_probed=num_probed,
            clients=parts.reporter.records(round, outcome),
        )
        self._round = None
        parts.history.log_unusable_rounds()
        return after

    def state_dict(self) -> state_dicts.State:
        """Return everything that outlives a round, part by part; call it between rounds."""
        return state_dicts.save_parts(self.parts._asdict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state of :meth:`state_dict`; the server may continue its count of rounds or start at 1.

        Raises:
            StateError: A part is missing or does not fit; nothing has changed then.
        """
        state_dicts.load_parts(self.parts._asdict(), state)
        self._round = None
        self.begin_run()

    def _call_roll(self, connected: Collection[str], upcoming: int, transport: Transport) -> None:
        """Find newcomers and enter them; they are asked only if somebody reads the answers."""
        parts, identities = self.parts, self._identities
        parts.roster.release(connected, upcoming)
        parts.busy.release(connected)
        identities.settle(transport)
        known = identities.resolve(parts.busy.free(parts.roster.unregistered(connected)), transport)
        properties: Mapping[str, Properties] = dict.fromkeys(known, NO_PROPERTIES)
        if known and (identities.by_claim or parts.registrar.reads_properties):
            one_first = identities.one_first(transport)
            properties = parts.roll_call.call(known, upcoming, transport.introduce, one_first=one_first)
        self.register(properties, known)

    def _available(self, connected: Collection[str], upcoming: int) -> ConnectedClients:
        """Return the clients that are available in the next round, those above ``max_participation`` included."""
        roster, rounds = self.parts.roster, self.parts.history.rounds
        present = roster.present(connected)
        # before the checks: a connected client is not absent, even if it is busy or cools down
        roster.seen(present.rows, upcoming)
        here = present.only(self.parts.busy.eligible(present.nodes))
        here = here.only(self.parts.cooldown.eligible(here.rows, upcoming))
        if self._availability is not None:
            seconds = rounds[-1].simulated_s if rounds else 0.0
            here = here.only(available(self._availability, [roster.ids[row] for row in here.rows], upcoming, seconds))
        # last, so that the few places for newcomers go to clients that can take them
        return here.only(self.parts.newcomer_quota.eligible(here.rows))


class Parts(NamedTuple):
    """The owners of what outlives a round, by their keys in a checkpoint."""

    selector: Selector
    roster: Roster
    roll_call: RollCall
    registrar: Registrar
    probing: Probing
    busy: Busy
    cooldown: Cooldown
    newcomer_quota: NewcomerQuota
    participation: Participation
    cold_starts: ColdStarts
    measurer: Measurer
    reporter: Reporter
    history: History
