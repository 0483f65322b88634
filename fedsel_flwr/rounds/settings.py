"""Settings: the options of a strategy, each declared once, and resolved for a selector.

:class:`Options` is the only list of them. The signature of every strategy, the keys of a scenario's table
``aggregation`` and :class:`Settings` derive from it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedsel_flwr.aggregation import SCHEMES
from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.checks import one_of, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.untrusted import to_float
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.base import over_selected
from fedsel_flwr.selectors.columns import COLUMNS, RECORDED, with_fields

if TYPE_CHECKING:
    # types of options only; these rooms read the settings themselves
    from fedsel_flwr.rounds.checkpoints import Resume
    from fedsel_flwr.rounds.eligibility import Availability
    from fedsel_flwr.rounds.history import RoundRecord
    from fedsel_flwr.rounds.measuring import Validation
    from fedsel_flwr.rounds.run_length import Budget, ShouldStop

logger = logging.getLogger("fedsel_flwr")
Check = Callable[[str, Any], Any]
"""Takes an option's name and value, and returns the value or raises :class:`ParameterError`."""
Clock = Literal["virtual", "server"]
Identity = Literal["node", "key", "name", "claim"]
"""What identifies a client: its node id, its public key, the name it is registered with, or its own claim."""
MaxExamples = int | Literal["auto"]
"""Most examples that a client may claim; "auto" takes a multiple of the median claim."""
CooldownSetting = bool | Literal["auto"]
"""Whether clients are left out after failures; "auto" follows the selector's class."""
OWN_METRICS = (RECORDED - {"train_loss", "num_examples"}) | {"energy_modelled", "client_id"}
"""Metrics that only this package reads."""


@with_fields("str", {name: COLUMNS[name].key for name in sorted(RECORDED)})
@dataclass(frozen=True, kw_only=True)
class MetricKeys:
    """The names under which clients report; change them if a deployment uses others.

    There is a field for each recorded column of :mod:`fedsel_flwr.selectors.columns`.
    """

    latency: str = COLUMNS["latency"].key
    energy: str = COLUMNS["energy"].key
    download: str = COLUMNS["download"].key
    compute: str = COLUMNS["compute"].key
    upload: str = COLUMNS["upload"].key
    train_loss: str = COLUMNS["train_loss"].key
    client_id: str = "client_id"
    num_examples: str = COLUMNS["num_examples"].key
    energy_score: str = COLUMNS["energy_score"].key
    energy_modelled: str = "energy_modelled"

    def own_keys(self) -> frozenset[str]:
        """Return the keys of metrics that only this package reads."""
        return frozenset(getattr(self, name) for name in OWN_METRICS)

    def of(self, column: str) -> str:
        """Return the key of a column that clients report; the table's if no field is called so."""
        return str(getattr(self, column, None) or COLUMNS[column].key)


def _rule(check: Check, key: str = "", unset: object = None) -> dict[str, object]:
    """Declare how an option is checked, and its key in a scenario's table ``aggregation``.

    Args:
        check: Checks a value other than a default of None.
        key: Its key; empty if scenarios do not have the option.
        unset: What stands for None in a scenario, as TOML has no None.
    """
    return {"check": check, "key": key, "unset": unset}


def _cooldown(name: str, value: object) -> object:
    if not isinstance(value, bool) and value != "auto":
        raise ParameterError(f'{name} must be True, False or "auto", got {value!r}')
    return value


def _max_examples(name: str, value: object) -> MaxExamples:
    return "auto" if value == "auto" else _count(name, value)


def _count(name: str, value: object, minimum: int = 1) -> int:
    number = whole(name, value, minimum)
    # Larger ones are no exact floats, and soon no NumPy integers.
    if number > 2**53:
        raise ParameterError(f"{name} must be at most 2^53, got {value!r}")
    return number


ABOVE_0 = partial(real, above=0.0)
BELOW_1 = partial(real, at_least=0.0, below=1.0)
AT_LEAST_0 = partial(real, at_least=0.0)
SCHEME = partial(one_of, allowed=tuple(SCHEMES))
SHARE = partial(real, above=0.0, at_most=1.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a strategy: eligibility, time, measurement, averaging, the end of a run and its checkpoints.

    An option is declared here and nowhere else: a line below with its default, its check and its key in scenarios, and
    its meaning under Args.

    Args:
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
            tenth of the observed time: a false report then gains little, whether latencies are short or long.
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
            max_latency. The selector's constants keep m, which it must have.
        round_deadline_s: Seconds after which a round ends; a client that has not answered by then is a straggler, and
            has failed. None for no deadline.
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
        metric_keys: Names under which clients report; None takes those of :class:`MetricKeys`.
        roll_call_timeout: Seconds to wait for the registration of new clients, and for answers to probes.
        averaging: How the usable (with a filter: kept) models are averaged, one of
            :data:`fedsel_flwr.aggregation.SCHEMES`; None takes that of the selector's paper, else leaves it to base.
        filter: FedCA's filter, which keeps the best combination of models; None takes that of the selector's paper,
            else keeps every usable one.
        validation: Examples on the server and how to run the model on them, for the filter and for selectors that
            measure models.
        learning_rate: Nominal initial learning rate of the clients, for selectors that read gradients.
        momentum: Momentum of the server's direction (GPFL's gamma), below 1.
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

    Raises:
        ParameterError: A value is out of range.
    """

    max_latency: float | None = field(default=None, metadata=_rule(ABOVE_0))
    min_completed: int = field(default=1, metadata=_rule(_count, key="min_completed"))
    min_available: int | None = field(default=None, metadata=_rule(_count))
    wait_timeout: float = field(default=600.0, metadata=_rule(AT_LEAST_0, key="wait_timeout_s"))
    channels: int | None = field(default=None, metadata=_rule(_count))
    clock: Clock = field(default="virtual", metadata=_rule(partial(one_of, allowed=get_args(Clock))))
    clock_slack: float | None = field(default=None, metadata=_rule(AT_LEAST_0))
    identity: Identity | None = field(default=None, metadata=_rule(partial(one_of, allowed=get_args(Identity))))
    busy_timeout: float | None = field(default=3600.0, metadata=_rule(AT_LEAST_0))
    cooldown: CooldownSetting = field(default="auto", metadata=_rule(_cooldown, key="cooldown"))
    over_selection: float = field(default=0.0, metadata=_rule(AT_LEAST_0, key="over_selection"))
    round_deadline_s: float | None = field(default=None, metadata=_rule(ABOVE_0, key="round_deadline_s", unset=0.0))
    max_update_norm: float | None = field(default=None, metadata=_rule(ABOVE_0, key="max_update_norm", unset=0.0))
    max_examples: MaxExamples | None = field(default=None, metadata=_rule(_max_examples, key="max_examples", unset=0))
    max_participation: float | None = field(default=None, metadata=_rule(SHARE, key="max_participation", unset=0.0))
    warmup_rounds: int = field(default=0, metadata=_rule(partial(_count, minimum=0), key="warmup_rounds"))
    max_clients: int | None = field(default=None, metadata=_rule(_count))
    max_new_per_round: int | None = field(default=None, metadata=_rule(_count))
    evict_after: int | None = field(default=None, metadata=_rule(_count))
    metric_keys: MetricKeys | None = None
    roll_call_timeout: float = field(default=60.0, metadata=_rule(ABOVE_0))
    averaging: str | None = field(default=None, metadata=_rule(SCHEME, key="averaging", unset=""))
    filter: Filter | None = None
    validation: Validation | None = None
    learning_rate: float | None = field(default=None, metadata=_rule(ABOVE_0))
    momentum: float = field(default=0.1, metadata=_rule(BELOW_1, key="direction_momentum"))
    availability: Availability | Collection[str | int] | None = None
    budget: Budget | None = None
    evaluate_in: Callable[[int], bool] | None = None
    should_stop: ShouldStop | None = None
    on_round: Callable[[RoundRecord], None] | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int = 1
    keep_checkpoints: int = 3
    resume: Resume = False
    total_rounds: int | None = field(default=None, metadata=_rule(_count))

    def __post_init__(self) -> None:
        """Check every value."""
        for one in fields(Options):
            value, check = getattr(self, one.name), one.metadata.get("check")
            if check is not None and (value is not None or one.default is not None):
                object.__setattr__(self, one.name, check(one.name, value))
        if self.checkpoint_dir is None and self.resume:
            raise ParameterError(
                f"resume={self.resume!r} needs checkpoint_dir. Give the folder that holds the run's checkpoints"
            )


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """The options of a strategy as they hold for its selector; :func:`resolve_settings` makes them.

    Args:
        max_latency: Of strategy and selector.
        cooldown: Whether clients are left out after failures.
        averaging_is_papers: Whether ``averaging`` comes from the selector's paper. Models that cannot be decoded are
            then averaged with its weights; if the user asks for a scheme, they are refused.
        compare_models: Whether clients' arrays must have the global model's shapes; boosted trees grow.

    Raises:
        ParameterError: A value is out of range, or does not go with another.
    """

    max_latency: float = 60.0
    cooldown: bool = False
    averaging_is_papers: bool = False
    compare_models: bool = True

    def __post_init__(self) -> None:
        """Check every value, and what goes together."""
        super().__post_init__()
        if self.max_update_norm is not None and not self.compare_models:
            raise ParameterError(
                "max_update_norm needs models of one shape, but the base strategy's models grow. Leave "
                "max_update_norm out"
            )

    @cached_property
    def keys(self) -> MetricKeys:
        """The names under which clients report."""
        return self.metric_keys or MetricKeys()

    @property
    def ends_early(self) -> bool:
        """Whether a round may end before all chosen clients have answered."""
        return bool(self.over_selection) or self.round_deadline_s is not None


def resolve_settings(selector: Selector, *, compare_models: bool = True, **options: Any) -> Settings:
    """Resolve the options for a selector: what is not given is the selector's own, its paper's, or the default.

    Args:
        selector: The selector; its ``paper_options`` say how its paper averages and filters.
        compare_models: Whether clients' arrays must have the global model's shapes.
        **options: Those of :class:`Options`.

    Raises:
        ParameterError: A value is out of range, or strategy and selector have different ``max_latency``.
    """
    given, paper, m = Options(**options), selector.paper_options, selector.clients_per_round
    if given.over_selection and m is None:
        raise ParameterError(
            f"over_selection = {given.over_selection:g} needs clients_per_round, but {selector.name} decides itself "
            "how many clients it asks. Give the selector clients_per_round, or leave over_selection out"
        )
    resolved = {
        "max_latency": _common_max_latency(selector, given.max_latency),
        "channels": given.channels or (None if m is None else over_selected(m, given.over_selection)),
        "cooldown": selector.asks_failed_for_ever if given.cooldown == "auto" else given.cooldown,
        "averaging": given.averaging or paper.get("averaging"),
        "averaging_is_papers": not given.averaging and "averaging" in paper,
        "filter": given.filter or (Filter(score=paper["filter"]) if "filter" in paper else None),
        "compare_models": compare_models,
    }
    settings = Settings(**vars(given) | resolved)
    _check_warmup(selector, settings.warmup_rounds)
    _check_fairness(selector, settings.max_participation)
    # A warning, not an error: the run is valid, but every client gets the best latency reward.
    low, high = to_float(getattr(selector, "min_latency", None)), settings.max_latency
    if low is not None and low >= high:
        logger.warning(
            "min_latency is %g s, but max_latency is only %g s, so every client counts as the fastest. Lower "
            "min_latency",
            low,
            high,
        )
    return settings


def _common_max_latency(selector: Selector, given: float | None) -> float:
    """Return the one ``max_latency`` of strategy and selector; a selector's "auto" counts as not given."""
    own: float | str | None = getattr(selector, "max_latency", None)
    if own is None or isinstance(own, str):
        return 60.0 if given is None else given
    if given is None:
        return own
    if own != given:
        raise ParameterError(f"max_latency is {given} for the strategy but {own} for the selector. Set it only once")
    return given


def _check_warmup(selector: Selector, rounds: int) -> None:
    """Refuse a warm-up as long as the run, if the selector knows how long the run is."""
    total = to_float(getattr(selector, "total_rounds", None))
    if rounds and total is not None and rounds >= total:
        raise ParameterError(
            f"warmup_rounds = {rounds} leaves {selector.name} nothing to choose in total_rounds = {total:g}. Lower "
            "warmup_rounds, or raise the number of rounds"
        )


def _check_fairness(selector: Selector, max_participation: float | None) -> None:
    """Refuse a ``max_participation`` below a share that the selector guarantees to a client."""
    fairness = getattr(selector, "fairness", None)
    # ClientValues show registered clients alone; ``given`` has those still to come as well.
    shares = getattr(fairness, "given", fairness)
    if max_participation is None or not isinstance(shares, Mapping) or not shares:
        return
    client, share = max(shares.items(), key=lambda item: item[1])
    if share > max_participation:
        raise ParameterError(
            f"max_participation = {max_participation:g} is below the fairness {share:g} of client {client}. Raise "
            "max_participation, or lower the fairness"
        )
