"""What happens between two rounds: the checkpoint, the central evaluation, and the word to whoever waits for the round.

A round is finished when its central evaluation begins: then its checkpoint is written. A run that goes on from there
evaluates the round again, if that was cut off or not, and tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fedsel_flwr.rounds.budget import ShouldStop
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

    def _begin_run(self, initial: Mapping[str, Any] | None, should_stop: ShouldStop | None = None) -> Checkpoint | None:
        """Flower begins a run, from 1; the strategy's first goes on from a checkpoint, if there is one."""
        checkpoint = None if self._started else self._resuming.begin(initial)
        self._started = True
        self.core.begin_run(0 if checkpoint is None else checkpoint.round, should_stop)
        return checkpoint

    def evaluation_due(self, server_round: int) -> bool:
        """Whether the central evaluation of this round is wanted: it is one that took place, and its turn."""
        number = self.core.numbering.absolute(server_round)
        if number > self.core.round:
            return False  # the run has ended, and Flower counts on
        return self._evaluate_in is None or self.core.ended or self._evaluate_in(number)

    def finish_round(
        self, server_round: int, evaluate: Callable[[], tuple[object, ...]], save: Callable[[], None]
    ) -> None:
        """Evaluate a round centrally if that is due, tell of it, and find out whether the run ends with it.

        The round that ends a run is evaluated in any case, and has its checkpoint.

        For engines that drive :attr:`core` themselves.

        Args:
            server_round: The server's number of the round.
            evaluate: Returns loss and accuracy of the global model; nothing if there is no central evaluation.
            save: Writes the round's checkpoint, if it has none (:meth:`round_trained`).
        """
        due = self.evaluation_due(server_round)
        self.round_ended(server_round, *(evaluate() if due else ()))
        if not self.core.ended or self.core.numbering.absolute(server_round) != self.core.round:
            return
        save()
        if not due and (found := evaluate()):
            self.round_ended(server_round, *found)

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
        """Close the round in the history, tell the caller and ask for a stop, if it is one that was recorded."""
        last = self.history.last
        if last is None or last.round != self.core.numbering.absolute(server_round):
            return
        self.history.close_round()
        if self._on_round is not None:
            self._on_round(last)
        self.core.ending.ask()


def _or_nan(value: object) -> float:
    as_float = number(value)
    return float("nan") if as_float is None else as_float
