"""The plain types in which an adapter and the core talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedsel_flwr.aggregation import SCHEMES, Averaging
from fedsel_flwr.checks import BoolArray, FloatArray, one_of, real, whole
from fedsel_flwr.rounds.replies import ClientResult, MetricKeys

Availability = Callable[[str, int, float], bool]
"""Called with client id, round and simulated seconds; False leaves the client out of the round."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a strategy treats its clients; see :class:`fedsel_flwr.strategies.adapter.Adapter`.

    Raises:
        ParameterError: A value is out of range.
    """

    max_latency: float = 60.0
    min_completed: int = 1
    channels: int | None = 1
    averaging: str | None = None
    clock: Literal["virtual", "server"] = "virtual"
    clock_slack: float = 5.0
    cooldown: bool = False
    keys: MetricKeys = field(default_factory=MetricKeys)

    def __post_init__(self) -> None:
        """Check every value."""
        real("max_latency", self.max_latency, above=0.0)
        whole("min_completed", self.min_completed, 1)
        if self.channels is not None:
            whole("channels", self.channels, 1)
        if self.averaging is not None:
            one_of("averaging", self.averaging, tuple(SCHEMES))
        real("clock_slack", self.clock_slack, at_least=0.0)
        one_of("clock", self.clock, ("virtual", "server"))


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a connection says of itself in the roll call; None where it says nothing."""

    client_id: object = None
    num_examples: object = None
    energy_score: object = None

    @classmethod
    def of(cls, facts: Mapping[str, object], keys: MetricKeys) -> Introduction:
        """Pick out of an answer's facts what counts; Flower's own "num-examples" will do too."""
        return cls(
            client_id=facts.get(keys.client_id),
            num_examples=facts.get(keys.num_examples, facts.get("num-examples")),
            energy_score=facts.get(keys.energy_score),
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """A selector's probe, for the adapter to send.

    Attributes:
        nodes: The connections to ask.
        config: What to send beside the current model: the columns, comma-separated, under ``probe``, and the absolute
            round about to be chosen under ``round``.
    """

    nodes: list[str]
    config: dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back in a round.

    Attributes:
        results: Connection -> its reply after reading, for every chosen client, by ascending row.
        usable: The connections whose updates may be aggregated, by ascending row.
        enough: Whether at least ``min_completed`` are usable and the round may change the model; else it must stay.
        columns: What was measured on the usable models, a row for each.
        averaging: How the kept models are to be averaged; None leaves it to the base strategy.
    """

    results: Mapping[str, ClientResult]
    usable: list[str]
    enough: bool
    columns: Mapping[str, FloatArray | BoolArray] = field(default_factory=dict)
    averaging: Averaging | None = None

    @property
    def kept(self) -> list[str]:
        """The usable connections that FedCA's filter keeps; without a filter all of them."""
        if "kept" not in self.columns:
            return self.usable
        return [node for node, kept in zip(self.usable, self.columns["kept"], strict=True) if kept]
