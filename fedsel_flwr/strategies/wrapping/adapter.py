"""Adapter between a Flower API and the course of a round: the options and attributes that both APIs share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.checks import real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.checkpoints import Checkpoints, Resume
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.eligibility import Availability, as_availability
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.rounds.run_length import Budget, ShouldStop
from fedsel_flwr.rounds.settings import CooldownSetting, Identity, MaxExamples, MetricKeys, resolve_settings
from fedsel_flwr.rounds.state_dicts import State
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping import bases, resuming
from fedsel_flwr.strategies.wrapping.failure_reasons import DeadActors
from fedsel_flwr.strategies.wrapping.round_end import LastModelKeeper, RoundEnd
from fedsel_flwr.strategies.wrapping.waiting import Clients, LateReplies


class Adapter(RoundEnd):
    """Builds the core from a strategy's options.

    Args:
        selector: The selector; it must not be shared with another strategy.
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        max_latency: Longest wait for a client, seconds; None takes the selector's if that is a number, else 60.
        min_completed: With fewer usable updates the global model stays as it is.
        min_available: Clients that must be connected before a round; None takes the larger of what the base asks
            for and ``clients_per_round``.
        wait_timeout: Seconds after which waiting for clients ends in an error.
        channels: Clients that transmit at the same time (Xia's N); a larger cohort goes in waves. None takes
            as many as are asked.
        clock: "virtual" believes the reported latency (simulation); "server" times each client itself. The selector
            does not learn each client's first time, which contains the start of its process (``latency_source``
            "first").
        clock_slack: On the server's clock, seconds by which a report may undercut the observed time; None allows a
            tenth of the observed time.
        identity: What identifies a client, also when it reconnects. "name" is the name that its SuperNode is
            registered with, or its node id if it has none. "node" is its node id, "key" a digest of its public key,
            "claim" the ``client_id`` that it reports. None takes "claim" in a simulation (the virtual clock, or
            Flower's in-memory grid), else "name".
        busy_timeout: Seconds for which a client that has not answered in time, whatever it was asked, is not asked
            again; None sets no bound. An answer or a new connection frees it earlier. A round with fewer free clients
            than ``min_completed`` waits for them as long as for the last round, at most ``wait_timeout``. Then all are
            asked.
        cooldown: Exclude a client for 2^n rounds after n failures in a row. A client that failed for the selector
            alone, because it lacks a column that the selector requires, counts too. "auto" does so for selectors whose
            class says that they ask failed clients for ever (DivFL, PCZFL), and for no others.
        over_selection: Ask ceil((1 + x) m) clients, m = ``clients_per_round``, and keep the m usable answers that come
            first; the others are spares. Their joules are counted, but the base strategy sees neither result nor
            failure of them. A selector that reads "spare" gets what is known of them; for any other they took
            max_latency. The selector's constants keep m.
        round_deadline_s: Seconds after which a round ends; a client that has not answered by then is a straggler, and
            has failed.
        max_update_norm: Refuse an update whose L2 norm, over all arrays of its difference to the global model, is
            larger; None for no limit.
        max_examples: Most examples that a client may claim, which are its weight in an average and what selectors read.
            A larger claim is cut to this number and noted in the history, the update is kept. "auto" takes four times
            the median of the clients' last claims. None for no limit.
        max_participation: Largest share, in (0, 1], of the last 20 rounds in which a client was available that it may
            have been asked in, counted from its fifth. A client above it is not eligible. Rounds that ask everybody do
            not count. If fewer than ``clients_per_round`` (one, for selectors without it) would be eligible, the least
            asked of the others are eligible too. None for no limit.
        warmup_rounds: In the first rounds ask everybody available in place of the selector's choice, without probes;
            the selector learns from what they report. The same for every selector.
        max_clients: Refuse newcomers beyond this many clients.
        max_new_per_round: Admit at most this many newcomers a round after the first. A round then also chooses at most
            this many clients that joined later and have delivered no usable update yet.
        evict_after: With ``max_clients`` reached, replace clients away for more than this many rounds.
        metric_keys: Names under which clients report.
        roll_call_timeout: Seconds to wait for the registration of new clients, and for answers to probes.
        averaging: How the usable (with a filter: kept) models are averaged, one of
            :data:`fedsel_flwr.aggregation.SCHEMES`; None takes that of the selector's paper, else leaves it to base.
        filter: FedCA's filter, which keeps the best combination of models; None takes that of the selector's paper,
            else keeps every usable one.
        validation: Examples on the server and how to run the model on them, for the filter and for selectors that
            measure models.
        learning_rate: Nominal initial learning rate of the clients, for selectors that read gradients.
        momentum: Momentum of the server's direction (GPFL's gamma).
        availability: The ids of the only clients that may participate, or a function. That is called with client id,
            round and simulated seconds; False excludes the client from the round. In simulations and deployments.
        budget: What the run may spend, in simulated seconds and joules; the rounds that Flower still counts after that
            choose nobody and are not in the history.
        evaluate_in: Called with an absolute round; False skips its central evaluation. The round that ends a run by its
            budget or by ``should_stop`` is always evaluated. None evaluates every round.
        should_stop: Called with each finished round's absolute number and the history so far, after ``on_round``; True
            ends the run with this round. That round is evaluated and has its checkpoint in any case, and ``on_round``
            gets the evaluated record as well. A resumed run calls it again for the checkpoint's round.
        on_round: Called with each finished round's record, after the central evaluation. A resumed run calls it again
            for the checkpoint's round.
        checkpoint_dir: Folder of this run's checkpoints; None writes none. A checkpoint is written when a round's
            central evaluation begins, or after the round if there is none.
        checkpoint_every: Rounds from one checkpoint to the next; the last round has one in any case.
        keep_checkpoints: Checkpoints that are kept; older ones are deleted.
        resume: False begins a new run and refuses a ``checkpoint_dir`` that holds one. True resumes the run if there is
            a checkpoint, and begins a new one if there is none. "must" refuses to begin a new run.
        total_rounds: The last round; in rounds that the server still counts after it nobody is chosen. With
            checkpoints, None takes the selector's.
        roster: Connections, client ids and rows; None starts with an empty one.
        client_values: Selector parameters given by client id, already bound to ``roster``.

    Attributes:
        selector: The selector.
        history: What happened, round by round and client by client.
        base: The wrapped strategy.
        roster: Connections, client ids and rows.
        last_model: The global model after the last round that ended, whatever ended the run; None before it began.

    Raises:
        ParameterError: A parameter is out of its range, or the base can never work with so few clients.
    """

    strategy_type: ClassVar[type]
    default_base: ClassVar[Callable[[], Any]]
    waits_for_everybody: ClassVar[bool] = False
    # The timeout of the last round, which Flower's servers say only when they send.
    _timeout: float | None = None

    def __init__(
        self,
        selector: Selector,
        base: Any = None,
        *,
        max_latency: float | None = None,
        min_completed: int = 1,
        min_available: int | None = None,
        wait_timeout: float = 600.0,
        channels: int | None = None,
        clock: Literal["virtual", "server"] = "virtual",
        clock_slack: float | None = None,
        identity: Identity | None = None,
        busy_timeout: float | None = 3600.0,
        cooldown: CooldownSetting = "auto",
        over_selection: float = 0.0,
        round_deadline_s: float | None = None,
        max_update_norm: float | None = None,
        max_examples: MaxExamples | None = None,
        max_participation: float | None = None,
        warmup_rounds: int = 0,
        max_clients: int | None = None,
        max_new_per_round: int | None = None,
        evict_after: int | None = None,
        metric_keys: MetricKeys | None = None,
        roll_call_timeout: float = 60.0,
        averaging: str | None = None,
        filter: Filter | None = None,
        validation: Validation | None = None,
        learning_rate: float | None = None,
        momentum: float = 0.1,
        availability: Availability | Collection[str | int] | None = None,
        budget: Budget | None = None,
        evaluate_in: Callable[[int], bool] | None = None,
        should_stop: ShouldStop | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        keep_checkpoints: int = 3,
        resume: Resume = False,
        total_rounds: int | None = None,
        roster: Roster | None = None,
        client_values: tuple[ClientValues, ...] = (),
    ) -> None:
        if not isinstance(selector, Selector):
            raise ParameterError(
                f"selector must be a fedsel_flwr.selectors.Selector, got {type(selector).__name__}. Make one with "
                "fedsel_flwr.selectors.create(name, ...)"
            )
        if base is not None and not isinstance(base, self.strategy_type):
            kind = f"{self.strategy_type.__module__}.{self.strategy_type.__qualname__}"
            raise ParameterError(
                f"base must be a {kind}, got {type(base).__name__}. Strategies of the other API have the same names: "
                "check the import"
            )
        self.base: Any = base if base is not None else type(self).default_base()
        # What can be refused is refused here, before a server starts.
        cohort = selector.clients_per_round
        if cohort is not None:
            bases.check_cohort(self.base, cohort)
        self.wait_timeout = real("wait_timeout", wait_timeout, at_least=0.0)
        self.min_available = (
            max(bases.min_available(self.base), cohort or 1)
            if min_available is None
            else whole("min_available", min_available, 1)
        )
        settings = resolve_settings(
            selector, max_latency=max_latency, min_completed=min_completed, channels=channels, averaging=averaging,
            filter=filter, validation=validation, learning_rate=learning_rate, momentum=momentum, clock=clock,
            clock_slack=clock_slack, identity=identity, busy_timeout=busy_timeout, cooldown=cooldown,
            over_selection=over_selection, round_deadline_s=round_deadline_s, max_update_norm=max_update_norm,
            max_examples=max_examples, max_participation=max_participation, warmup_rounds=warmup_rounds,
            keys=metric_keys, compare_models=bases.compares_models(self.base),
        )  # fmt: skip
        if self.waits_for_everybody and settings.clock == "server" and settings.ends_early:
            raise ParameterError(
                "over_selection and round_deadline_s on the server's clock need a server that ends a round before "
                "everybody has answered, but that of the legacy API waits for every client. Use the strategies of "
                'fedsel_flwr.strategies.message, or clock = "virtual" in a simulation'
            )
        if settings.filter is not None:
            bases.check_filter(self.base)
        if settings.averaging not in (None, "fedpdp", "mean"):
            bases.check_is_average(self.base, str(settings.averaging))
        self.roster = roster or Roster()
        limits = {"max_clients": max_clients, "max_new_per_round": max_new_per_round, "evict_after": evict_after}
        for name, value in limits.items():
            if value is not None:
                setattr(self.roster, name, whole(name, value, 1))
        self._question_timeout = real("roll_call_timeout", roll_call_timeout, above=0.0)
        self.core = SelectionCore(
            selector, settings, roster=self.roster, client_values=client_values,
            availability=as_availability(availability),
            budget=budget, should_stop=should_stop,
            roll_call_timeout=roll_call_timeout,
        )  # fmt: skip
        if self.core.parts.measurer.reads_updates:
            bases.warn_of_privacy(self.base, self.core.parts.measurer.reader)
        self._on_round, self._evaluate_in = on_round, evaluate_in
        if total_rounds is not None:
            total_rounds = whole("total_rounds", total_rounds, 1)
        if checkpoint_dir is None and resume:
            raise ParameterError(
                f"resume={resume!r} needs checkpoint_dir. Give the folder that holds the run's checkpoints"
            )
        checkpoints = (
            Checkpoints(checkpoint_dir, every=checkpoint_every, keep=keep_checkpoints, resume=resume)
            if checkpoint_dir is not None
            else None
        )
        last_round = resuming.total_rounds(selector, total_rounds, checkpoints is not None)
        self._resuming = resuming.Resuming(self.core, self.base, checkpoints, last_round)
        self._dead_actors = DeadActors()
        self._keeper = LastModelKeeper(self._resuming)
        self._late = LateReplies(self.core.parts.busy)
        # Connection -> what was sent to it in this round: a proxy in the legacy API, a message in the other.
        self._dispatched: dict[str, Any] = {}

    @property
    def selector(self) -> Selector:
        """The selector."""
        return self.core.parts.selector

    def state_dict(self) -> State:
        """Return everything that outlives a round, the base strategy's own state excluded.

        Returns:
            Part -> its state, of numbers, texts, lists and NumPy arrays (copies); call it between rounds.
        """
        return self.core.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, in this process or another.

        Args:
            state: The state of a strategy with the same parameters. Flower may count its rounds on, or from 1 again;
                selector, history and clients see the absolute round.

        Raises:
            StateError: A part is missing or does not fit; nothing has changed then.
        """
        self.core.load_state_dict(state)

    def __repr__(self) -> str:
        """Name the selector and the base."""
        return f"{type(self).__name__}(selector={self.selector.name!r}, base={self.base!r})"

    def _check_actors(self, errors: Iterable[str]) -> None:
        """End the run if the texts of the round's failures say that Flower's simulation cannot continue."""
        self._dead_actors.check(errors, self.core.round, self._resuming.resume_hint)

    def _wait_for_free(self, connected: Callable[[], Clients]) -> Clients:
        """Fetch late replies, and wait a bounded time if too few clients are free; return the connected clients."""
        # A client that trains may need as long as the last round allowed; before the first round it can only owe an
        # answer to the roll call.
        timeout = min(self.wait_timeout, self._timeout or self._question_timeout)
        return self._late.wait_for_free(connected, self.core.settings.min_completed, timeout)

    def _fault(self, node: str, problems: Collection[str]) -> str:
        """Return what was wrong with a client's reply, for the base strategy and Flower's log."""
        return f"client {self.roster.name(node)}: {'; '.join(problems)}"
