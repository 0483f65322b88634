"""Settings: the options of a strategy, resolved once for every adapter."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fedsel_flwr.aggregation import SCHEMES
from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.checks import one_of, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.untrusted import to_float
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.base import over_selected
from fedsel_flwr.selectors.columns import COLUMNS, RECORDED, with_fields

logger = logging.getLogger("fedsel_flwr")
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a strategy: eligibility, time, measurement and averaging. See :func:`resolve_settings`.

    Args:
        max_latency: Longest wait for a client, seconds.
        min_completed: With fewer usable updates the global model stays as it is.
        channels: Clients that transmit at the same time (Xia's N); None takes as many as are chosen.
        averaging: How the kept models are averaged, one of :data:`fedsel_flwr.aggregation.SCHEMES`; None leaves it to
            the base strategy.
        averaging_is_papers: Whether ``averaging`` comes from the selector's paper. Models that cannot be decoded are
            then averaged with its weights; if the user asks for a scheme, they are refused.
        filter: FedCA's filter; None keeps every usable model.
        validation: The server's examples; None if there are none.
        learning_rate: The clients' nominal initial learning rate, for selectors that read gradients.
        momentum: Momentum of the server's direction (GPFL's gamma).
        clock: "virtual" takes the reported latency; "server" bounds it by the time that the server measured.
        clock_slack: On the server's clock, seconds by which a report may undercut the observed time. None allows a
            tenth of the observed time: a false report then gains little, whether latencies are short or long.
        identity: What identifies clients. None: in a simulation their own claim, else the name that they are
            registered with or, without one, their node id.
        busy_timeout: Seconds after which a client that has not answered an earlier question is asked again; None
            never asks it again.
        cooldown: Leave a client out for 2^n rounds after n failures in a row. :func:`resolve_settings` resolves "auto".
        over_selection: Ask ceil((1 + x) m) clients and keep the m that answer first; the others are late.
        round_deadline_s: Seconds after which a round ends; clients that have not answered are late. None: no deadline.
        max_update_norm: Largest L2 norm of a client's update, over all its arrays; a client with a larger one has
            failed. None for no limit.
        max_examples: Most examples that a client may claim; a larger claim counts as this many. "auto" takes four times
            the median of what clients claim. None for no limit.
        max_participation: Largest share of its last 20 rounds in which a client may have been asked, in (0, 1]; None
            for no limit.
        warmup_rounds: The first rounds, in which all available clients are asked instead of the selector's choice.
        compare_models: Whether clients' arrays must have the global model's shapes; boosted trees grow.
        keys: Names under which clients report.

    Raises:
        ParameterError: A value is out of range.
    """

    max_latency: float = 60.0
    min_completed: int = 1
    channels: int | None = None
    averaging: str | None = None
    averaging_is_papers: bool = False
    filter: Filter | None = None
    validation: Validation | None = None
    learning_rate: float | None = None
    momentum: float = 0.1
    clock: Clock = "virtual"
    clock_slack: float | None = None
    identity: Identity | None = None
    busy_timeout: float | None = 3600.0
    cooldown: bool = False
    over_selection: float = 0.0
    round_deadline_s: float | None = None
    max_update_norm: float | None = None
    max_examples: MaxExamples | None = None
    max_participation: float | None = None
    warmup_rounds: int = 0
    compare_models: bool = True
    keys: MetricKeys = field(default_factory=MetricKeys)

    def __post_init__(self) -> None:
        """Check every value."""
        real("max_latency", self.max_latency, above=0.0)
        whole("min_completed", self.min_completed, 1)
        if self.channels is not None:
            whole("channels", self.channels, 1)
        if self.averaging is not None:
            one_of("averaging", self.averaging, tuple(SCHEMES))
        if self.clock_slack is not None:
            real("clock_slack", self.clock_slack, at_least=0.0)
        real("over_selection", self.over_selection, at_least=0.0)
        if self.round_deadline_s is not None:
            real("round_deadline_s", self.round_deadline_s, above=0.0)
        whole("warmup_rounds", self.warmup_rounds, 0)
        if self.max_examples is not None and self.max_examples != "auto":
            whole("max_examples", self.max_examples, 1)
        if self.max_participation is not None:
            real("max_participation", self.max_participation, above=0.0, at_most=1.0)
        if self.busy_timeout is not None:
            real("busy_timeout", self.busy_timeout, at_least=0.0)
        if not isinstance(self.cooldown, bool):
            # "auto" is resolved before: Settings hold what is done.
            raise ParameterError(f'cooldown must be True, False or "auto", got {self.cooldown!r}')
        one_of("clock", self.clock, get_args(Clock))
        if self.identity is not None:
            one_of("identity", self.identity, get_args(Identity))
        if self.max_update_norm is not None:
            real("max_update_norm", self.max_update_norm, above=0.0)
            if not self.compare_models:
                raise ParameterError(
                    "max_update_norm needs models of one shape, but the base strategy's models grow. Leave "
                    "max_update_norm out"
                )

    @property
    def ends_early(self) -> bool:
        """Whether a round may end before all chosen clients have answered."""
        return bool(self.over_selection) or self.round_deadline_s is not None


def resolve_settings(
    selector: Selector,
    *,
    max_latency: float | None = None,
    channels: int | None = None,
    averaging: str | None = None,
    filter: Filter | None = None,
    cooldown: CooldownSetting = "auto",
    over_selection: float = 0.0,
    keys: MetricKeys | None = None,
    **others: Any,
) -> Settings:
    """Resolve the options for a selector: what is not given is the selector's own, its paper's, or the default.

    Args:
        selector: The selector; its ``paper_options`` say how its paper averages and filters.
        max_latency: None takes the selector's, else 60 s; a selector's "auto" concerns its rewards alone.
        channels: None takes as many as are asked, ``clients_per_round`` or more with ``over_selection``.
        averaging: None takes the paper's.
        filter: None takes the paper's.
        cooldown: "auto" is on for selectors that would ask an unresponsive client for ever, off for all others.
        over_selection: Needs a selector that has ``clients_per_round``.
        keys: None takes the default names.
        **others: Further options of :class:`Settings`.

    Raises:
        ParameterError: A value is out of range, or strategy and selector have different ``max_latency``.
    """
    paper = selector.paper_options
    if filter is None and "filter" in paper:
        filter = Filter(score=paper["filter"])
    over_selection, m = real("over_selection", over_selection, at_least=0.0), selector.clients_per_round
    if over_selection and m is None:
        raise ParameterError(
            f"over_selection = {over_selection:g} asks for more than clients_per_round, but {selector.name} has none "
            "and decides itself how many it asks. Give the selector clients_per_round, or leave over_selection out"
        )
    settings = Settings(
        max_latency=_common_max_latency(selector, max_latency),
        channels=over_selected(m, over_selection) if channels is None and m is not None else channels,
        cooldown=selector.asks_failed_for_ever if cooldown == "auto" else cooldown,
        over_selection=over_selection,
        averaging=averaging or paper.get("averaging"),
        averaging_is_papers=not averaging and "averaging" in paper,
        filter=filter,
        keys=keys or MetricKeys(),
        **others,
    )
    _check_warmup(selector, settings.warmup_rounds)
    _check_fairness(selector, settings.max_participation)
    # A warning, not an error: the run is valid, but every client gets the best latency reward.
    low, high = to_float(getattr(selector, "min_latency", None)), settings.max_latency
    if low is not None and low >= high:
        logger.warning("min_latency is %g s and max_latency %g s: every client counts as the fastest", low, high)
    return settings


def _common_max_latency(selector: Selector, given: float | None) -> float:
    """Return the one ``max_latency`` of strategy and selector; a selector's "auto" counts as not given."""
    own: float | str | None = getattr(selector, "max_latency", None)
    if own is None or isinstance(own, str):
        return 60.0 if given is None else given
    if given is None:
        return own
    if own != given:
        raise ParameterError(f"max_latency is {given} for the strategy but {own} for the selector. Give it once")
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
