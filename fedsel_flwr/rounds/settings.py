"""Settings: the options of a strategy, each declared once, and resolved for a selector.

:class:`Options` is the only list of options. The signature of every strategy, the keys of a scenario's table
``aggregation`` and :class:`Settings` derive from it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedsel_flwr.aggregation import SCHEMES, Filter
from fedsel_flwr.checks import one_of, parse_address, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds import option_checks
from fedsel_flwr.rounds.checkpoints import Resume
from fedsel_flwr.rounds.eligibility import Availability
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.rounds.run_length import Budget, ShouldStop
from fedsel_flwr.rounds.untrusted import to_float
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.base import over_selected
from fedsel_flwr.selectors.columns import COLUMNS, FROM_CLIENTS, PER_UPDATE, RECORDED, with_fields

logger = logging.getLogger("fedsel_flwr")
Check = Callable[[str, Any], Any]
"""Function of an option's name and value. It returns the value or raises :class:`ParameterError`."""
Clock = Literal["virtual", "server"]
Identity = Literal["node", "key", "name", "claim"]
"""Identity of a client: its node id, its public key, its registered name, or its own claim."""
MaxExamples = int | Literal["auto"]
"""Largest number of examples that a client may claim; "auto" uses a multiple of the median claim."""
MissingColumns = Literal["error", "random"]
"""Whether a run ends or continues if no client reports a column that the selector reads."""
Switch = bool | Literal["auto"]
"""On, off, or "auto": as the selector or the base strategy needs it."""
Weighting = Literal["examples", "uniform"]
"""Weights of the updates in a buffered round."""
RoundDeadline = float | Literal["auto"]
"""Seconds after which a round ends; "auto" follows the clients' own times."""
Late = Literal["drop", "use", "damped"]
"""What happens to an update that misses its round (:mod:`fedsel_flwr.rounds.late`)."""
Payload = Literal["model", "private", "own", "trees"]
"""Content of the replies that a base aggregates: models, models under differential privacy, arrays that the base itself
defines, or boosted trees, which grow."""
OWN_METRICS = (RECORDED - {"train_loss", "num_examples"}) | {"energy_modelled", "client_id"}
"""Metrics that only this package reads."""


@with_fields("str", {name: COLUMNS[name].key for name in sorted(FROM_CLIENTS)})
@dataclass(frozen=True, kw_only=True)
class MetricKeys:
    """Metric names in clients' reports; change them if a deployment uses others.

    There is one field for each column of :mod:`fedsel_flwr.selectors.columns` that clients report. The names count in
    the roll call, in answers to probes and in replies after training.

    >>> MetricKeys(loss="eval_loss", latency="seconds").of("loss")
    'eval_loss'
    """

    client_id: str = "client_id"
    energy_modelled: str = "energy_modelled"

    if TYPE_CHECKING:
        # The table has the other fields, so a list of them for type checkers would be a second one.
        def __init__(self, **keys: str) -> None: ...

        def __getattr__(self, column: str) -> str: ...

    def own_keys(self) -> frozenset[str]:
        """Return the keys of metrics that only this package reads."""
        return frozenset(getattr(self, name) for name in OWN_METRICS)

    def of(self, column: str) -> str:
        """Return the key of a column that clients report."""
        return str(getattr(self, column))


def _option(default: object, check: Check, key: str = "", unset: object = None) -> Any:
    """Declare an option: its default, its check, and its key in a scenario's table ``aggregation``.

    Args:
        default: The value of an option that is not set.
        check: Checks any value except a default of None.
        key: The key of the option; empty if scenarios do not have the option.
        unset: The value that means None in a scenario, because TOML has no None.
    """
    return field(default=default, metadata={"check": check, "key": key, "unset": unset})


def _switch(name: str, value: object) -> object:
    if not isinstance(value, bool) and value != "auto":
        raise ParameterError(f'{name} must be True, False or "auto", got {value!r}')
    return value


def _address(name: str, value: object) -> object:
    parse_address(name, value)
    return value


def _or_auto(name: str, value: object, check: Callable[..., Any], **limits: float) -> Any:
    return "auto" if value == "auto" else check(name, value, **limits)


def _count(name: str, value: object, minimum: int = 1) -> int:
    number = whole(name, value, minimum)
    # Larger numbers are not exact as floats, and soon too large for NumPy's integers.
    if number > 2**53:
        raise ParameterError(f"{name} must be at most 2^53, got {value!r}")
    return number


def _one_of(words: Any) -> Check:
    return partial(one_of, allowed=get_args(words))


ABOVE_0 = partial(real, above=0.0)
AT_LEAST_0 = partial(real, at_least=0.0)
SHARE = partial(real, above=0.0, at_most=1.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a strategy: eligibility, time, measurement, averaging, the end of a run and its checkpoints.

    Options are declared only here: each with its default, its check, its key in scenarios, and a description under
    Args.

    Args:
        max_latency: Latency, in seconds, of a client that failed or took longer. If None: the selector's
            ``max_latency`` if that is a number, else 60.
        min_completed: Smallest number of usable updates. With fewer, the global model does not change.
        concurrency: Number of clients at work at the same time, in buffered rounds. It is a multiple of ``buffer``. A
            round ends after ``buffer`` arrivals, and the other clients continue. The selector is then called for as
            many free clients. An update that misses tau rounds counts (1 + tau)^(-1/2) times (FedBuff). If None: each
            round waits for all of its clients.
        buffer: Number of arrivals that end a buffered round. Only ``clients_per_round`` is possible, also the default.
        max_staleness: Largest number of rounds that an update may miss, in buffered rounds and with ``late``. If None:
            no limit.
        weighting: Weights of the updates in a buffered round: "examples", or "uniform" as in FedBuff.
        min_available: Number of clients that must be connected before a round. If None: the larger of
            ``clients_per_round`` and the base's own minimum.
        wait_timeout: Seconds after which waiting for clients ends in an error.
        channels: Number of clients that transmit at the same time (Xia's N). A larger cohort transmits in waves. If
            None: all selected clients transmit at the same time.
        clock: With "virtual", latencies are those that clients report (simulation). With "server", the server measures
            the latency of each client. The selector does not learn a client's first measured time, because that time
            includes the start of the client's process (``latency_source`` "first").
        clock_slack: On the server's clock, seconds by which a reported latency may be below the measured one. If None:
            a tenth of the measured latency, so that a false report gains little.
        identity: What identifies a client, also when it reconnects. With "name": the registered name of its SuperNode,
            or the node id if the SuperNode has no name. With "node": the node id. With "key": a digest of the
            SuperNode's public key. With "claim": the ``client_id`` that the client reports. If None: "claim" in a
            simulation (the virtual clock, or Flower's in-memory grid), else "name".
        busy_timeout: Seconds for which a client is not asked again after a late or missing reply to any message. A
            reply or a new connection ends this time. If None: no limit. If fewer than ``min_completed`` clients remain,
            the round first waits for replies, as long as the timeout of the last round and at most ``wait_timeout``.
            After this wait all clients may be asked.
        cooldown: Whether to exclude a client for 2^n rounds after n failures in a row. A client that lacks a column
            that the selector requires has failed too. A late reply is no failure with ``late``, or with an automatic
            ``round_deadline_s``. The default "auto" excludes clients only for selectors that could select a failed
            client forever (``everyone``, DivFL, PCZFL).
        over_selection: Extra clients asked, as a share x of ``clients_per_round`` (m). A round asks ceil((1 + x) m)
            clients, and uses the first m usable replies. The other clients are spares. The joules of spares count, but
            the base strategy sees neither their results nor their failures. A selector that reads "spare" gets the
            values of spares. For any other selector, the latency of a spare is ``max_latency``. The selector must have
            ``clients_per_round``, and its constants still use m.
        wait_for: Number of usable replies after which a round ends, as with ``over_selection``: the other clients are
            spares. A round that asks that many clients or fewer waits for all of them. If None: no such
            number.
        round_deadline_s: Seconds after which a round ends. A client that has not replied by then is a straggler, and
            has failed. With "auto", the clients' own times of earlier rounds decide
            (:mod:`~fedsel_flwr.rounds.deadlines`). If None: no deadline.
        late: What happens to an update that misses its round, because of the deadline or because enough others were
            earlier. With "drop" it is ignored. With "use" it counts in the round in which it arrives, weighted by its
            staleness and by how much it differs from the updates of that round (REFL). With "damped" it counts
            (1 + tau)^(-1/2) times, tau being the number of rounds that it missed. Until it arrives its client is not
            asked. The selector learns nothing of it. ``max_staleness`` limits tau.
        late_scale_coff: With late = "use", the number by which exp(-Lambda / Lambda_max) is divided in the weight of a
            late update (:mod:`~fedsel_flwr.rounds.late`); 10 in the code of REFL's authors.
        compare_models: Whether a reply must have the shapes and types of the global model's arrays. With False, it must
            have those of the arrays that the client received. If no reply of the first round that aggregates has them,
            it must have those of most replies of that round. With "auto": False if the base brings its own aggregation
            and nothing here reads updates, else True. Wrappers for differential privacy need True.
        max_update_norm: Refuse an update with a larger L2 norm, over the floating-point arrays of its difference to the
            global model. If None: no limit.
        max_examples: Largest number of examples that a client may claim. The number is the client's weight in an
            average, and selectors read it. A larger claim is reduced to this limit and recorded in the history, and the
            update is still used. With "auto": four times the median of the clients' last claims. If None: no limit.
        max_participation: Largest share of rounds in which a client may be selected, in (0, 1]. The share is computed
            over the client's last 20 available rounds, from its fifth such round on. A client above the limit is not
            eligible. Rounds that select all clients do not count. If fewer than ``clients_per_round`` clients are
            eligible (one, for selectors without it), the least selected of the others are eligible too. If None: no
            limit.
        warmup_rounds: Number of first rounds that select all available clients, without the selector and without
            probes. The selector learns from the reports of these rounds, which are the same for every selector.
        max_clients: Refuse new clients beyond this number of clients. If None: no limit.
        max_new_per_round: Register at most this many new clients per round after the first. A round then also selects
            at most this many clients that joined after the first round and have not yet delivered a usable update. If
            None: no limit.
        evict_after: When ``max_clients`` is reached, replace clients that were absent for more than this many rounds.
            If None: never.
        metric_keys: Metric names in clients' reports. If None: those of :class:`MetricKeys`.
        missing_columns: What happens if no client reports a column that the selector cannot do without: one that it
            requires, or that clients compute on request, such as the loss. On the virtual clock the latency is such a
            column too. With "error", the run ends in the first round with usable replies, or at the first probe. The
            message lists the metrics that arrived. With "random", the run continues with a warning, and the selector
            chooses without this column.
        roll_call_timeout: Seconds to wait for replies to the roll call and to probes.
        averaging: Averaging scheme for the usable models (with a filter, for the kept models), one of
            :data:`fedsel_flwr.aggregation.SCHEMES`. If None: the scheme of the selector's paper, else the base's own
            averaging.
        filter: FedCA's filter, which averages only the best combination of models. If None: the filter of the
            selector's paper, else no filter.
        validation: Examples on the server, and a function that runs the model on them. The filter, and selectors that
            measure models, need this option.
        learning_rate: Nominal initial learning rate of the clients, for selectors that read gradients.
        momentum: Momentum of the server's direction (GPFL's gamma), below 1.
        availability: The ids of the only clients that may participate, or a function of client id, round and simulated
            seconds. The function returns False to exclude the client from the round. For simulations and deployments. A
            list that names none of the clients ends the run at the first roll call. Unknown ids are logged once.
        budget: Limits of the run, in simulated seconds and joules. After the budget is used up, no client is selected,
            and the history has no further rounds, even if Flower still counts them.
        evaluate_in: Function of the absolute round; False skips the central evaluation of the round. The round that
            ends a run by its budget or by ``should_stop`` is always evaluated. If None: every round is evaluated.
        should_stop: Function of the absolute number of a finished round and the history so far, called after
            ``on_round``. If it returns True, the run ends with this round. The last round always has an evaluation and
            a checkpoint, and ``on_round`` also gets the evaluated record. A resumed run repeats the call for the
            checkpoint's round.
        on_round: Function of the record of each finished round, called after the central evaluation. A resumed run
            repeats the call for the checkpoint's round.
        metrics_address: Port, or HOST:PORT, at which a monitoring server (Prometheus) can fetch the run's metrics over
            HTTP. Without HOST, only programs on this machine can connect. Port 0 takes a free port, and the log states
            it. If None: no metrics. This option needs the extra ``metrics``.
        checkpoint_dir: Folder of this run's checkpoints. If None: no checkpoints. A checkpoint is written when a
            round's central evaluation begins, or after the round if there is no evaluation.
        keep_arrivals: Whether each reply is written into ``checkpoint_dir`` as it arrives. A server that is started
            again then asks only the clients whose reply is missing. The updates are on the disk until the round has
            its checkpoint. Only in the Message API, on the server's clock.
        checkpoint_every: Number of rounds from one checkpoint to the next. The last round always has one.
        keep_checkpoints: Number of checkpoints on disk. Older ones are deleted.
        resume: With False, the strategy starts a new run, and refuses a ``checkpoint_dir`` that holds one. With True,
            it resumes the run of the checkpoint, or starts a new run if there is no checkpoint. With "must", it refuses
            to start a new run.
        total_rounds: The last round. Later rounds that the server still counts select no clients. If None and there are
            checkpoints: the selector's ``total_rounds``.

    Raises:
        ParameterError: A value is out of range.
    """

    max_latency: float | None = _option(None, ABOVE_0)
    min_completed: int = _option(1, _count, key="min_completed")
    concurrency: int | None = _option(None, _count, key="concurrency", unset=0)
    buffer: int | None = _option(None, _count, key="buffer", unset=0)
    max_staleness: int | None = _option(None, partial(_count, minimum=0), key="max_staleness", unset=-1)
    weighting: Weighting = _option("examples", _one_of(Weighting), key="weighting")
    min_available: int | None = _option(None, _count)
    wait_timeout: float = _option(600.0, AT_LEAST_0, key="wait_timeout_s")
    channels: int | None = _option(None, _count)
    clock: Clock = _option("virtual", _one_of(Clock))
    clock_slack: float | None = _option(None, AT_LEAST_0)
    identity: Identity | None = _option(None, _one_of(Identity))
    busy_timeout: float | None = _option(3600.0, AT_LEAST_0)
    cooldown: Switch = _option("auto", _switch, key="cooldown")
    over_selection: float = _option(0.0, AT_LEAST_0, key="over_selection")
    wait_for: int | None = _option(None, _count, key="wait_for", unset=0)
    round_deadline_s: RoundDeadline | None = _option(
        None, partial(_or_auto, check=real, above=0.0), key="round_deadline_s", unset=0.0
    )
    late: Late = _option("drop", _one_of(Late), key="late")
    late_scale_coff: float = _option(1.0, partial(real, at_least=1.0), key="late_scale_coff")
    compare_models: Switch = _option("auto", _switch)
    max_update_norm: float | None = _option(None, ABOVE_0, key="max_update_norm", unset=0.0)
    max_examples: MaxExamples | None = _option(None, partial(_or_auto, check=_count), key="max_examples", unset=0)
    max_participation: float | None = _option(None, SHARE, key="max_participation", unset=0.0)
    warmup_rounds: int = _option(0, partial(_count, minimum=0), key="warmup_rounds")
    max_clients: int | None = _option(None, _count)
    max_new_per_round: int | None = _option(None, _count)
    evict_after: int | None = _option(None, _count)
    metric_keys: MetricKeys | None = None
    missing_columns: MissingColumns = _option("error", _one_of(MissingColumns), key="missing_columns")
    roll_call_timeout: float = _option(60.0, ABOVE_0)
    averaging: str | None = _option(None, partial(one_of, allowed=tuple(SCHEMES)), key="averaging", unset="")
    filter: Filter | None = None
    validation: Validation | None = None
    learning_rate: float | None = _option(None, ABOVE_0)
    momentum: float = _option(0.1, partial(real, at_least=0.0, below=1.0), key="direction_momentum")
    availability: Availability | Collection[str | int] | None = None
    budget: Budget | None = None
    evaluate_in: Callable[[int], bool] | None = None
    should_stop: ShouldStop | None = None
    on_round: Callable[[RoundRecord], None] | None = None
    metrics_address: str | int | None = _option(None, _address)
    checkpoint_dir: str | os.PathLike[str] | None = None
    keep_arrivals: bool = False
    checkpoint_every: int = 1
    keep_checkpoints: int = 3
    resume: Resume = False
    total_rounds: int | None = _option(None, _count)

    def __post_init__(self) -> None:
        """Check every value."""
        for one in fields(Options):
            value, check = getattr(self, one.name), one.metadata.get("check")
            if check is not None and not (value is None and "None" in str(one.type)):
                object.__setattr__(self, one.name, check(one.name, value))
        if self.checkpoint_dir is None and self.resume:
            raise ParameterError(f"resume={self.resume!r} needs checkpoint_dir, the folder of the run's checkpoints")


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """The options of a strategy, resolved for its selector by :func:`resolve_settings`.

    Args:
        max_latency: The common value of strategy and selector.
        cooldown: Whether clients are excluded after failures.
        averaging_is_papers: Whether ``averaging`` comes from the selector's paper. Models that cannot be decoded are
            then averaged with the paper's weights. If the user set ``averaging``, such models are refused.
        compare_models: Whether clients' arrays must have the global model's shapes; False for boosted trees.
        payload: The content of the replies that the base aggregates.
        update_reader: The part that compares updates with the global model, for messages; empty if there is none.

    Raises:
        ParameterError: A value is out of range, or conflicts with another.
    """

    max_latency: float = 60.0
    cooldown: bool = False
    averaging_is_papers: bool = False
    compare_models: bool = True
    payload: Payload = "model"
    update_reader: str = ""

    @property
    def checks_structure(self) -> bool:
        """Whether replies must have a structure that is not necessarily that of the global model."""
        return not self.compare_models and self.payload != "trees"

    @cached_property
    def keys(self) -> MetricKeys:
        """The metric names in clients' reports."""
        return self.metric_keys or MetricKeys()

    @property
    def has_spares(self) -> bool:
        """Whether a round may ask more clients than it waits for."""
        return bool(self.over_selection) or self.wait_for is not None

    @property
    def ends_early(self) -> bool:
        """Whether a round may end before all selected clients have replied."""
        return self.has_spares or self.round_deadline_s is not None

    @property
    def reads_late(self) -> bool:
        """Whether anything is learned from replies after the end of their round."""
        return self.late != "drop" or self.round_deadline_s == "auto"


def resolve_settings(selector: Selector, *, payload: Payload = "model", **options: Any) -> Settings:
    """Resolve the options for a selector: an option that is not set comes from the selector, its paper or the default.

    Args:
        selector: The selector. Its ``paper_options`` hold the averaging and the filter of its paper.
        payload: The content of the replies that the base aggregates.
        **options: The options of :class:`Options`.

    Raises:
        ParameterError: A value is out of range, or strategy and selector have different ``max_latency``.
    """
    given, paper, m = Options(**options), selector.paper_options, selector.clients_per_round
    if given.over_selection and m is None:
        raise ParameterError(
            f"over_selection = {given.over_selection:g} needs clients_per_round, but {selector.name} decides itself "
            "how many clients it asks. Give the selector clients_per_round, or leave over_selection out"
        )
    option_checks.check_buffered(selector, given)
    option_checks.check_wait_for(given, m)
    option_checks.check_late(selector, given, payload)
    option_checks.check_keep_arrivals(given)
    averaging = given.averaging or ("mean" if given.weighting == "uniform" else None)
    resolved = {
        "max_latency": _common_max_latency(selector, given.max_latency),
        "channels": given.channels or given.concurrency or (m and over_selected(m, given.over_selection)),
        "cooldown": selector.asks_failed_for_ever if given.cooldown == "auto" else given.cooldown,
        "buffer": None if given.concurrency is None else m,
        "averaging": averaging or paper.get("averaging"),
        "averaging_is_papers": averaging is None and "averaging" in paper,
        "filter": given.filter or (Filter(score=paper["filter"]) if "filter" in paper else None),
        "payload": payload,
        "update_reader": (reader := _update_reader(selector, given, payload)),
        "compare_models": _compares_models(given, payload, reader),
    }
    settings = Settings(**vars(given) | resolved)
    option_checks.check_warmup(selector, settings.warmup_rounds)
    option_checks.check_fairness(selector, settings.max_participation)
    # A warning, not an error: the run is valid, but every client gets the best latency reward.
    low, high = to_float(getattr(selector, "min_latency", None)), settings.max_latency
    if low is not None and low >= high:
        logger.warning(
            "min_latency is %g s, but max_latency is only %g s: all clients count as the fastest. Lower min_latency",
            low,
            high,
        )
    return settings


def _update_reader(selector: Selector, given: Options, payload: Payload) -> str:
    """Name the part that reads individual updates; an averaging scheme of the selector's paper sets only weights."""
    if columns := ", ".join(sorted(selector.needs & PER_UPDATE)):
        return f"{selector.name} ({columns})"
    if given.filter is not None or "filter" in selector.paper_options:
        return "FedCA's filter"
    if given.max_update_norm is not None:
        return "max_update_norm"
    own = "the base's differential privacy" if payload == "private" else ""
    return own if given.averaging is None else f"averaging={given.averaging!r}"


def _compares_models(given: Options, payload: Payload, reader: str) -> bool:
    """Return whether replies are held against the global model."""
    option = given.compare_models
    if payload == "trees" and (option is True or given.max_update_norm is not None):
        raise ParameterError(
            "compare_models=True and max_update_norm need models of one shape, but trees grow. Leave them out"
        )
    if option is False and reader and payload != "trees":
        raise ParameterError(
            f"compare_models=False allows any update, but {reader} compares each update with the model. Leave one out"
        )
    return payload != "trees" and (bool(reader) or payload != "own" if option == "auto" else option)


def _common_max_latency(selector: Selector, given: float | None) -> float:
    """Return the common ``max_latency`` of strategy and selector; a selector's "auto" counts as missing."""
    own: float | str | None = getattr(selector, "max_latency", None)
    common = option_checks.set_once("max_latency", given, None if isinstance(own, str) else own)
    return 60.0 if common is None else common
