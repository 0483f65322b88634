"""Adapter between a Flower API and the steps of a round.

:class:`Adapter` has the options and attributes of the strategies in both APIs, and aggregates a round. It reads the
replies, checks and measures them, and lets the base aggregate the usable ones. Then it reports the round to the
selector, and keeps the new model. Each API translates between these steps and its own types (:class:`Translation`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from fedsel_flwr.callbacks.prometheus import Exporter
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.checkpoints import Checkpoints
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply, requires_weight
from fedsel_flwr.rounds.roster import ClientValues, Roster, id_order
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.rounds.settings import Options, resolve_settings
from fedsel_flwr.rounds.state_dicts import State
from fedsel_flwr.rounds.untrusted import MAX_METRICS, is_finite, shown, usable_count
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping import bases, resuming
from fedsel_flwr.strategies.wrapping.failure_reasons import DeadActors
from fedsel_flwr.strategies.wrapping.round_end import RoundEnd
from fedsel_flwr.strategies.wrapping.waiting import Clients, LateReplies, Startup

logger = logging.getLogger("fedsel_flwr")
P = ParamSpec("P")
S = TypeVar("S")


@dataclass(frozen=True)
class Arguments(Options):
    """The arguments of a strategy: its selector, its base and its options.

    Args:
        selector: The selector. It must not be shared with another strategy.
        base: Any Flower strategy of the same API; None for FedAvg without federated evaluation.
        roster: Connections, client ids and rows; None starts with an empty roster.
        client_values: Selector parameters by client id, already bound to ``roster``.
    """

    selector: Selector
    base: Any = None
    roster: Roster | None = field(default=None, kw_only=True)
    client_values: tuple[ClientValues, ...] = field(default=(), kw_only=True)


def _takes(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[S, Arguments], None]], Callable[Concatenate[S, P], None]]:
    """Give a constructor the signature of a dataclass, for ``help()``, editors and type checkers."""
    signature = inspect.signature(arguments)

    def decorate(init: Callable[[S, Arguments], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def construct(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, arguments(*args, **kwargs))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        shown = signature.replace(parameters=[itself, *signature.parameters.values()], return_annotation=None)
        vars(construct).update(__signature__=shown)
        construct.__doc__ = "\n\n".join(inspect.cleandoc(str(one.__doc__)) for one in (Arguments, Options))
        return construct

    return decorate


class Evaluation(NamedTuple):
    """A client's reply to an evaluation, in plain types.

    Attributes:
        weight: The number of examples, or what stands for it.
        metrics: Key and value of each metric; the loss is one of them.
        fault: The reason why it cannot be used; empty if none is known.
    """

    weight: object
    metrics: Collection[tuple[str, object]]
    fault: str = ""

    def problem(self, weight_key: str, requires_weight: bool = True) -> str:
        """Return the reason why the base cannot average this reply; empty if it can.

        >>> Evaluation(10, [("loss", float("nan"))]).problem("num_examples")
        'loss: expected finite numbers, got nan'
        """
        if self.fault:
            return self.fault
        if len(self.metrics) > MAX_METRICS:
            return f"metrics: {len(self.metrics)} reported, more than {MAX_METRICS}"
        if requires_weight and not usable_count(self.weight):
            return f"{weight_key}: expected a number above 0, got {shown(self.weight)}"
        bad = [(key, value) for key, value in self.metrics if not is_finite(value)]
        return f"{bad[0][0]}: expected finite numbers, got {shown(bad[0][1])}" if bad else ""


class Translation(Protocol):
    """Translation between the steps of an aggregation and the types of one API.

    ``arrived`` are the replies that have arrived, in a form of the API's choice.
    """

    def _errors(self, arrived: Any) -> Iterable[str]:
        """Return the texts of the errors among the replies."""

    def _models(self, arrived: Any) -> list[object]:
        """Return the undecoded models of the replies."""

    def _read(self, arrived: Any) -> dict[str, Reply]:
        """Read the replies into plain types: connection -> reply, for each chosen client."""

    def _landed(self, arrived: Any, outcome: Outcome) -> Any:
        """Return the replies of the clients in the outcome, which in buffered rounds may be those of earlier rounds."""
        return arrived

    def _base_result(self, arrived: Any, outcome: Outcome, faults: Mapping[str, str]) -> tuple[Any, Any]:
        """Let the base aggregate the kept replies; return its model and metrics.

        Args:
            arrived: The replies.
            outcome: The outcome of the round.
            faults: Connection -> reason, of the clients that failed. A reply among them that is no error of the client
                is replaced by a failure with this reason.
        """

    def _decode(self, model: Any, /) -> Arrays | None:
        """Return the arrays of a model of this API; None if they cannot be decoded."""

    def _encode(self, arrays: Arrays) -> Any:
        """Return arrays as a model of this API."""

    def _weight_key(self) -> str:
        """Return the name of the number by which the base weights replies to an evaluation."""

    def _read_evaluations(self, arrived: Any) -> Mapping[str, Evaluation]:
        """Read the replies to an evaluation of clients that succeeded into plain types: connection -> reply."""

    def _base_evaluation(self, arrived: Any, number: int, usable: list[str], faults: Mapping[str, str]) -> Any:
        """Let the base aggregate the usable replies to an evaluation.

        Args:
            arrived: The replies.
            number: The absolute round.
            usable: The connections of the usable replies, in the order of the clients' ids.
            faults: Connection -> reason, for the failures in place of unusable replies.
        """


class Adapter(RoundEnd, Translation):
    """Base class of the strategies in both APIs: builds the core from a strategy's options.

    Args:
        arguments: Selector, base and options (:class:`fedsel_flwr.rounds.settings.Options`) of the strategy, each as a
            separate argument.

    Attributes:
        selector: The selector.
        history: The record of the run, round by round and client by client.
        base: The wrapped strategy.
        roster: Connections, client ids and rows.
        last_model: The global model after the last finished round, however the run ended; None before the run.

    Raises:
        ParameterError: A parameter is out of range, or the base can never work with a cohort of this size.
    """

    strategy_type: ClassVar[type]
    default_base: ClassVar[Callable[[], Any]]
    waits_for_everybody: ClassVar[bool] = False
    # The global model of this API: that which the clients got, and after their replies the new one.
    _model: Any = None
    # The timeout of the last round, which Flower's servers pass only when they send.
    _timeout: float | None = None

    @_takes(Arguments)
    def __init__(self, arguments: Arguments) -> None:
        selector, base = arguments.selector, arguments.base
        if not isinstance(selector, Selector):
            raise ParameterError(
                f"selector must be a fedsel_flwr.selectors.Selector, got {type(selector).__name__}. Pass create(name)"
            )
        if base is not None and not isinstance(base, self.strategy_type):
            kind = f"{self.strategy_type.__module__}.{self.strategy_type.__qualname__}"
            raise ParameterError(
                f"base must be a {kind}, got {type(base).__name__}. Check the import: both APIs have this name"
            )
        self.base: Any = base if base is not None else type(self).default_base()
        # All checks that are possible now run here, before a server starts.
        bases.check_accepts_selector(self.base)
        cohort = arguments.wait_for or selector.clients_per_round
        if cohort is not None:
            bases.check_cohort(self.base, cohort)
        options = {one.name: getattr(arguments, one.name) for one in fields(Options)}
        settings = resolve_settings(selector, payload=bases.payload(self.base), **options)
        if self.waits_for_everybody and settings.clock == "server" and (settings.ends_early or settings.keep_arrivals):
            raise ParameterError(
                "over_selection, wait_for, round_deadline_s and keep_arrivals read replies as they come, but the "
                "legacy API's server waits for every client. Use fedsel_flwr.strategies.message, or a virtual clock"
            )
        if settings.filter is not None:
            bases.check_filter(self.base)
        for name in ("concurrency", "late"):
            if getattr(settings, name) not in (None, "drop"):
                bases.check_moved(self.base, name)
        if settings.averaging not in (None, "fedpdp", "mean"):
            bases.check_is_average(self.base, str(settings.averaging))
        self.wait_timeout = settings.wait_timeout
        self.min_available = settings.min_available or max(bases.min_available(self.base), cohort or 1)
        self.core = SelectionCore(selector, settings, roster=arguments.roster, client_values=arguments.client_values)
        self.roster = self.core.parts.roster
        if reader := self.core.parts.measurer.reader:
            bases.warn_of_privacy(self.base, reader)
        folder, every, keep = settings.checkpoint_dir, settings.checkpoint_every, settings.keep_checkpoints
        checkpoints = None if folder is None else Checkpoints(folder, every=every, keep=keep, resume=settings.resume)
        address = settings.metrics_address
        self._exporter = None if address is None else Exporter(address, checkpoints)
        last_round = resuming.total_rounds(selector, settings.total_rounds, checkpoints is not None)
        self._on_round, self._evaluate_in = settings.on_round, settings.evaluate_in
        self._resuming = resuming.Resuming(self.core, self.base, checkpoints, last_round)
        self._dead_actors = DeadActors()
        self._late = LateReplies(self.core.parts.busy)
        self._startup = Startup(self.wait_timeout)
        # Connection -> what it got in this round: a proxy (legacy API) or a message. The last attribute.
        self._dispatched: dict[str, Any] = {}
        # In buffered rounds: connection -> what was sent to it, and its reply, which arrives later on the clock.
        self._at_work: dict[str, tuple[Any, Any]] = {}

    @property
    def selector(self) -> Selector:
        """The selector."""
        return self.core.parts.selector

    def state_dict(self) -> State:
        """Return all lasting state, except the base strategy's own state.

        Returns:
            Part -> its state, of numbers, texts, lists and NumPy arrays (copies). Call this between rounds.
        """
        return self.core.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, in this process or another.

        Args:
            state: The state of a strategy with the same parameters. Flower's rounds may continue, or count from 1
                again. Selector, history and clients see the absolute round.

        Raises:
            StateError: A part is missing or does not fit; nothing has changed.
        """
        self.core.load_state_dict(state)
        if self._exporter is not None:
            self._exporter.follow(self.history)

    def __getattr__(self, name: str) -> Any:
        """Return the base's attribute, for public names that the strategy does not have."""
        # Not by ``self.base``, which is missing while an object is copied or unpickled.
        base = vars(self).get("base")
        error: AttributeError | None = None
        if base is not None and not name.startswith("_"):
            try:
                return getattr(base, name)
            # A property of the base may lack something else.
            except AttributeError as raised:
                error = raised
        lacks = f"neither {type(self).__name__} nor its base {type(base).__name__} has {name!r}"
        raise AttributeError(f"{lacks}: {error}" if error else lacks) from error

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the strategy if it has one of this name, else of the base."""
        own = vars(self)
        # The constructor sets the strategy's own attributes.
        ours = "_dispatched" not in own or name.startswith("_") or name in own or hasattr(type(self), name)
        # A name that nobody has yet is the base's too, unless a user's class may set it for itself. The base's class is
        # asked as well, because a property may have no value yet.
        packaged = type(self).__module__.startswith("fedsel_flwr.")
        theirs = not ours and (packaged or hasattr(self.base, name) or hasattr(type(self.base), name))
        (self.base if theirs else super()).__setattr__(name, value)

    def __repr__(self) -> str:
        """Return the names of the selector and the base."""
        return f"{type(self).__name__}(selector={self.selector.name!r}, base={self.base!r})"

    @property
    def _asking(self) -> dict[str, Any]:
        """The arguments that the transports of both APIs have in common."""
        actors, hint, settings = self._dead_actors, self._resuming.resume_hint, self.core.settings
        return {
            "timeout": settings.roll_call_timeout, "late": self._late, "base": self.base, "startup": self._startup,
            "keys": settings.keys,
            # The errors of a probe may show that Flower's simulation cannot continue.
            "check_errors": partial(actors.check, round=self.core.round + 1, resume_hint=hint, probe=True),
        }  # fmt: skip

    def _begin_round(self, model: Any) -> bool:
        """Take the global model of a new round; return False if the run is over, which then chooses no client."""
        self._model, self._dispatched = model, {}
        # Before anything can fail, so that an error of this round can name the place of the model.
        self._keep(self.core.round, model)
        if not (over := self._resuming.is_over):
            self.begin_metrics()
        return not over

    def _wait_for_free(self, wait_for: Callable[[S, int, float, str], Clients], source: S) -> Clients:
        """Fetch late replies, wait a bounded time if too few clients are free, and return the connected clients.

        Args:
            wait_for: Waits for a number of clients.
            source: Flower's client manager or grid.
        """
        # A client that trains may need as long as the last round allowed. Before the first round, a client can only owe
        # an answer to the roll call.
        timeout = min(self.wait_timeout, self._timeout or self.core.settings.roll_call_timeout)
        connected = partial(wait_for, source, self.min_available, self.wait_timeout, "min_available")
        return self._late.wait_for_free(connected, self.core.settings.min_completed, timeout)

    def _aggregate(self, arrived: Any) -> tuple[Any, Any]:
        """End a round with its replies.

        Returns:
            The new global model and the base's metrics, as Flower expects them; None if there are none.

        Raises:
            RunError: The base needs more models, the selector needs updates that secure aggregation hides, or Flower's
                simulation has lost its actors.
        """
        core = self.core
        # Converting the replies belongs to reading them, which ``collect`` does.
        core.stopwatch.switch("collect")
        self._dead_actors.check(self._errors(arrived), core.round, self._resuming.resume_hint)
        # Before replies are read: under secure aggregation every result holds the sum, which looks like an update.
        if reader := core.update_reader:
            bases.check_not_aggregated(self._models(arrived), reader)
        # The models are measured here, before the base, because a base may aggregate in place.
        outcome = core.collect(self._read(arrived))
        arrived = self._landed(arrived, outcome)
        model, metrics = None, None
        if outcome.enough:
            if bases.clips(self.base) and core.reference is not None:
                outcome = outcome.with_norms(core.reference)
            bases.check_survivors(self.base, len(outcome.kept), core.round)
            # A base counts failures, for accept_failures or to calibrate noise, and these include unusable updates.
            faults = {
                node: self._fault(node, result.problems)
                for node, result in outcome.results.items()
                if not result.completed and not result.spare
            }
            model, metrics = self._base_result(arrived, outcome, faults)
        # Decoding a model takes time and memory, so it is skipped if no part reads the arrays.
        after = self._decode(model) if model is not None and core.reads_global(outcome) else None
        mixed = core.finish(after)
        if mixed is not None and mixed is not after:
            # The averaging scheme has mixed in the old model.
            model = self._encode(mixed)
        self._model = self._model if model is None else model
        self._keep(core.round, self._model)
        if (last := self.history.last) is not None and last.note:
            # Flower's logger prints to the console of a deployment, without any setting.
            logging.getLogger("flwr").info("round %d: %s", last.round, last.note)
        return model, metrics

    def _aggregate_evaluation(self, server_round: int, arrived: Any) -> Any:
        """Let the base aggregate the replies to an evaluation that can be averaged, in id order."""
        number = self.core.numbering.absolute(server_round)
        read = self._read_evaluations(arrived)
        # Replies arrive in any order, and a sum of floats depends on the order.
        nodes = sorted(read, key=lambda node: id_order(self.roster.name(node)))
        own = bases.brings_own(self.base, "aggregate_evaluate")
        weighted = requires_weight(not own, [one.weight for one in read.values()])
        problems = {node: read[node].problem(self._weight_key(), weighted) for node in nodes}
        faults = {node: self._fault(node, (problem,)) for node, problem in problems.items() if problem}
        for node in faults:
            logger.warning("round %d, client %s: evaluation: %s", number, self.roster.name(node), problems[node])
        return self._base_evaluation(arrived, number, [node for node in nodes if node not in faults], faults)

    def _fault(self, node: str, problems: Collection[str]) -> str:
        """Return the fault of a client's reply, for the base strategy and Flower's log."""
        return f"client {self.roster.name(node)}: {'; '.join(problems)}"
