"""One round: what lives from the choice to the end, made once and never saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedsel_flwr.aggregation import Averaging
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.models import Arrays, ModelList, Models
from fedsel_flwr.rounds.replies import ClientResult


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back in a round.

    Attributes:
        results: Connection -> its reply after reading, for every chosen client, by ascending row.
        usable: The connections whose updates may be aggregated, by ascending row.
        enough: Whether at least ``min_completed`` are usable and the round may change the model; else it must stay.
        models: The usable models in the types of the global one; none where arrays are not looked at.
        columns: What was measured on the usable models, a row for each.
        averaging: How the kept models are to be averaged; None leaves it to the base strategy.
        round_s: Seconds that the round took, without its probes.
    """

    results: Mapping[str, ClientResult]
    usable: list[str]
    enough: bool
    models: Models = field(default_factory=lambda: ModelList([]))
    columns: Mapping[str, FloatArray | BoolArray | IntArray] = field(default_factory=dict)
    averaging: Averaging | None = None
    round_s: float = 0.0

    @property
    def positions(self) -> IntArray:
        """Which of the usable models FedCA's filter keeps; without a filter all of them."""
        if "kept" not in self.columns:
            return np.arange(len(self.usable))
        return np.flatnonzero(self.columns["kept"])

    @property
    def kept(self) -> list[str]:
        """The connections of the kept models, by ascending row."""
        return [self.usable[i] for i in self.positions]

    @property
    def weights(self) -> FloatArray:
        """What each kept model weighs in the mean, shape (n_kept,): the scheme's weight, else the client's."""
        if self.averaging is not None:
            return self.averaging.weights
        return np.array([self.results[node].weight for node in self.kept])


@dataclass(kw_only=True)
class Round:
    """A round in the making: chosen, then collected, then finished, each once.

    Attributes:
        number: The absolute round.
        num_available: Clients that could have been chosen.
        available: Rows of the clients that were available, those above ``max_participation`` too, shape (n,).
        chosen: Row -> connection, by ascending row.
        reference: The global model the clients receive; None if it cannot be decoded.
        outcome: What came back; None until then.
        finished: Whether the round is in the history.
    """

    number: int
    num_available: int
    available: IntArray
    chosen: dict[int, str]
    reference: Arrays | None
    outcome: Outcome | None = None
    finished: bool = False

    @property
    def rows(self) -> IntArray:
        """The chosen rows, ascending, shape (n,)."""
        return np.fromiter(self.chosen, dtype=np.int64, count=len(self.chosen))

    def collected(self) -> Outcome:
        """What came back in this round, which is not finished yet.

        Raises:
            RunError: Nothing was collected yet, or the round is finished.
        """
        if self.outcome is None or self.finished:
            raise RunError(
                f"round {self.number} " + ("is finished already" if self.finished else "has no replies yet")
                + ": call choose, collect and finish once each, in this order"
            )  # fmt: skip
        return self.outcome

    def check_open(self) -> None:
        """Refuse to collect twice.

        Raises:
            RunError: Replies were collected already.
        """
        if self.outcome is not None:
            raise RunError(
                f"round {self.number} has its replies already: call choose, collect and finish once each, in this order"
            )
