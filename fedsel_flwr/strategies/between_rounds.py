"""What happens between two rounds: the checkpoint, the central evaluation, and the word to whoever waits for the round.

A round is finished when its central evaluation begins: then its checkpoint is written. A run that goes on from there
evaluates the round again, if that was cut off or not, and tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.untrusted import number
from fedsel_flwr.strategies.last_model import Keeper, LastModel
from fedsel_flwr.strategies.resuming import Resuming


class BetweenRounds:
    """What an adapter does after a round, and before the first one.

    Attributes:
        core: The course of a round.
    """

    core: SelectionCore
    _resuming: Resuming
    _keeper: Keeper
    _on_round: Callable[[RoundRecord], None] | None
    _evaluate_in: Callable[[int], bool] | None
    _started = False

    @property
    def history(self) -> History:
        """What happened, round by round and client by client."""
        return self.core.parts.history

    @property
    def made_for(self) -> dict[str, str]:
        """What a checkpoint must agree with, in words; add what the strategy cannot know before the run begins."""
        return self._resuming.made_for

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint that the run goes on from, taken over when this is first asked for; None if it begins anew.

        For engines that drive :attr:`core` themselves; Flower's servers take it over when the run begins.
        """
        return self._resuming.begin()

    @property
    def last_model(self) -> LastModel | None:
        """The global model after the last round that ended, whatever ended the run; None before it began."""
        return self._keeper.model

    def rescuing(self) -> AbstractContextManager[None]:
        """A block whose error says where the last model is; with checkpoints it is written, though none was due."""
        return self._keeper.rescuing()

    def model_after(self, number: int, model: Arrays) -> None:
        """Keep the global model after a round at hand; for engines that drive :attr:`core` themselves."""
        self._keeper.keep(number, lambda: ([str(i) for i in range(len(model))], model))

    def round_trained(self, number: int, model: Arrays, names: Sequence[str] | None = None) -> None:
        """Write the checkpoint of a round, if one is due; to be called before the round's central evaluation.

        For engines that drive :attr:`core` themselves.

        Args:
            number: The absolute round.
            model: The global model after it.
            names: The names of its arrays; None counts them.

        Raises:
            RunError: It cannot be written.
        """
        self._resuming.trained(number, model, names)

    def _begin_run(self, initial: Mapping[str, Any] | None) -> Checkpoint | None:
        """Flower begins a run, from 1; the strategy's first goes on from a checkpoint, if there is one."""
        checkpoint = None if self._started else self._resuming.begin(initial)
        self._started = True
        self.core.numbering.begin_run(0 if checkpoint is None else checkpoint.round)
        return checkpoint

    def evaluation_due(self, server_round: int) -> bool:
        """Whether the central evaluation of this round is wanted: it is one that took place, and its turn."""
        number = self.core.numbering.absolute(server_round)
        if number > self.core.round:
            return False  # the run has ended, and Flower counts on
        return self._evaluate_in is None or self.core.ended or self._evaluate_in(number)

    def round_ended(self, server_round: int, loss: object = None, accuracy: object = None) -> None:
        """Enter the central evaluation of a round, where there was one, and tell the caller of ``on_round``.

        For engines that drive :attr:`core` themselves.
        """
        if loss is not None or accuracy is not None:
            self._enter_evaluation(server_round, loss, {"accuracy": accuracy})
        self._end_round(server_round)

    def _enter_evaluation(self, server_round: int, loss: object, metrics: Mapping[str, object]) -> None:
        """Enter the central evaluation into the history."""
        accuracy = _or_nan(metrics.get("accuracy"))
        self.history.evaluated(self.core.numbering.absolute(server_round), loss=_or_nan(loss), accuracy=accuracy)

    def _end_round(self, server_round: int) -> None:
        """Close the round in the history and tell the caller, if it is one that was recorded."""
        last = self.history.last
        if last is None or last.round != self.core.numbering.absolute(server_round):
            return
        self.history.close_round()
        if self._on_round is not None:
            self._on_round(last)


def _or_nan(value: object) -> float:
    as_float = number(value)
    return float("nan") if as_float is None else as_float
