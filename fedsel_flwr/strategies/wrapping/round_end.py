"""What happens between two rounds: the checkpoint, the central evaluation, and the word to whoever waits for the round.

A round is finished when its central evaluation begins: then its checkpoint is written. A run that goes on from there
evaluates the round again, if that was cut off or not, and tells of it.

The global model after the last round, which outlives an error that ends the run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.run_length import ShouldStop
from fedsel_flwr.rounds.untrusted import to_float
from fedsel_flwr.strategies.wrapping.resuming import Resuming

logger = logging.getLogger("fedsel_flwr")
Named = tuple[Sequence[str], Arrays]
Params = ParamSpec("Params")
Returned = TypeVar("Returned")


@dataclass(frozen=True, kw_only=True)
class LastModel:
    """The global model after a round.

    Attributes:
        round: The absolute round; 0: no round has ended, and it is the one that the run began with.
        names: The names of its arrays.
        arrays: Its arrays; of a model that is not made of arrays, such as trees, the bytes.
    """

    round: int
    names: list[str]
    arrays: Arrays


class Keeper:
    """Keeps the last model at hand, and sees to it that an error does not lose it.

    Args:
        resuming: Writes the checkpoints.
    """

    def __init__(self, resuming: Resuming) -> None:
        self._resuming, self._round = resuming, 0
        self._read: Callable[[], Named] | None = None

    def keep(self, round: int, read: Callable[[], Named]) -> None:
        """A round has ended.

        Args:
            round: The absolute round; 0 before the first.
            read: Returns the names and arrays of the model, which are not decoded before somebody wants them.
        """
        self._round, self._read = round, read

    @property
    def model(self) -> LastModel | None:
        """The last model; None where the run has not begun."""
        if self._read is None:
            return None
        names, arrays = self._read()
        return LastModel(round=self._round, names=list(names), arrays=list(arrays))

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Have an error of whatever runs inside say where the last model is; with checkpoints it is written."""
        try:
            yield
        except BaseException as error:
            if self._round and not hasattr(error, "model_after"):
                error.model_after = self._round  # type: ignore[attr-defined]  # told once
                said = f"the model after round {self._round} is {self._saved()}"
                error.add_note(said)
                if isinstance(error, Exception):
                    logger.warning("the run ends in an error (%s); %s", type(error).__name__, said)
            raise

    def _saved(self) -> str:
        """Write the last round's checkpoint, if it was not due; where the model is, in words."""
        try:
            names, arrays = self._read() if self._read is not None else ([], [])
            path = self._resuming.rescued(self._round, arrays, names)
        except Exception as failure:  # the error that ends the run must come through
            return f"strategy.last_model; its checkpoint could not be written: {failure}"
        if path is None:
            return "strategy.last_model"
        return f"strategy.last_model, and in {str(path)!r}: go on from there with resume=True"


class _Rescuing(Protocol):
    def rescuing(self) -> AbstractContextManager[None]:
        """A block whose error does not lose the last model."""


Strategy = TypeVar("Strategy", bound=_Rescuing)


def rescued(
    method: Callable[Concatenate[Strategy, Params], Returned],
) -> Callable[Concatenate[Strategy, Params], Returned]:
    """A strategy's method whose errors do not lose the last model."""

    @functools.wraps(method)
    def inside(self: Strategy, /, *args: Params.args, **kwargs: Params.kwargs) -> Returned:
        with self.rescuing():
            return method(self, *args, **kwargs)

    return inside


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
        self.history.record_evaluation(
            self.core.numbering.absolute(server_round), loss=_or_nan(loss), accuracy=accuracy
        )

    def _end_round(self, server_round: int) -> None:
        """Close the round in the history, tell the caller and ask for a stop, if it is one that was recorded."""
        last = self.history.last
        if last is None or last.round != self.core.numbering.absolute(server_round):
            return
        self.history.close_round()
        if self._on_round is not None:
            self._on_round(last)
        self.core.ending.check()


def _or_nan(value: object) -> float:
    as_float = to_float(value)
    return float("nan") if as_float is None else as_float
