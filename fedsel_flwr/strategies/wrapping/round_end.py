"""End of a round: its checkpoint, its central evaluation, the call of ``on_round``, and the last model after an error.

A round is finished when its central evaluation begins. Its checkpoint is written at this point. A run that resumes from
this checkpoint repeats the round's evaluation and the call of ``on_round``, even if both were complete.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from fedsel_flwr.callbacks.prometheus import Exporter
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.run_length import ShouldStop
from fedsel_flwr.rounds.untrusted import to_float
from fedsel_flwr.strategies.wrapping.resuming import Resuming

logger = logging.getLogger("fedsel_flwr")
NamedArrays = tuple[Sequence[str], Arrays]


class RoundEnd:
    """Ends an adapter's rounds, and resumes its run before the first one.

    Attributes:
        core: Plays the rounds.
    """

    core: SelectionCore
    _resuming: Resuming
    # The last round, and what returns the names and arrays of the model after it, decoded only then.
    _kept: tuple[int, Callable[[], NamedArrays] | None] = (0, None)
    _on_round: Callable[[RoundRecord], None] | None
    _evaluate_in: Callable[[int], bool] | None
    _exporter: Exporter | None = None
    _started = False

    @property
    def history(self) -> History:
        """The history, round by round and client by client."""
        return self.core.parts.history

    @property
    def fingerprint(self) -> dict[str, str]:
        """The fingerprint that a checkpoint must match: part or parameter -> its value as text.

        Before the run, add facts that the strategy cannot know, such as the data.
        """
        return self._resuming.fingerprint

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint from which the run is resumed, loaded at the first access; None in a new run.

        For engines that drive :attr:`core` themselves. Flower's servers load the checkpoint when the run begins.
        """
        return self._resuming.begin()

    @property
    def metrics_url(self) -> str | None:
        """The address of the run's metrics; None before and after the run, and without ``metrics_address``."""
        return None if self._exporter is None else self._exporter.url

    @property
    def last_model(self) -> LastModel | None:
        """The global model after the last finished round, however the run ended; None before the run."""
        number, read = self._kept
        if read is None:
            return None
        names, arrays = read()
        return LastModel(round=number, names=list(names), arrays=list(arrays))

    @contextmanager
    def saving_on_error(self) -> Iterator[None]:
        """Return a context in which an error names the place of the last model and writes its missing checkpoint.

        An error also ends the run's metrics.
        """
        try:
            yield
        # Ctrl-C must not lose the model either.
        except BaseException as error:
            self._note_last_model(error)
            self.end_metrics()
            raise

    def model_after(self, number: int, model: Arrays) -> None:
        """Keep the global model after a round; for engines that drive :attr:`core` themselves."""
        self._kept = number, lambda: ([str(i) for i in range(len(model))], model)

    def round_trained(self, number: int, model: Arrays, names: Sequence[str] | None = None) -> None:
        """Write the checkpoint of a round, if one is due; call this before the round's central evaluation.

        For engines that drive :attr:`core` themselves.

        Args:
            number: The absolute round.
            model: The global model after it.
            names: The names of its arrays; None numbers them.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        self._resuming.write_if_due(number, model, names)

    def evaluation_due(self, server_round: int) -> bool:
        """Return whether this round took place and ``evaluate_in`` allows its central evaluation."""
        number = self.core.numbering.absolute(server_round)
        # Flower also counts rounds after the end of the run, which choose no clients.
        if number > self.core.round:
            return False
        return self._evaluate_in is None or self.core.ended or self._evaluate_in(number)

    def finish_round(
        self, server_round: int, evaluate: Callable[[], tuple[object, ...]], save: Callable[[], None]
    ) -> None:
        """Evaluate a round centrally if due, call ``on_round``, and determine whether the run ends with it.

        The last round of a run always has an evaluation and a checkpoint.

        For engines that drive :attr:`core` themselves.

        Args:
            server_round: The server's number of the round.
            evaluate: Returns loss and accuracy of the global model; nothing if there is no central evaluation.
            save: Writes the round's checkpoint, if it has none (:meth:`round_trained`).
        """
        due = self.evaluation_due(server_round)
        self.round_ended(server_round, *(evaluate() if due else ()))
        if self.core.ended and self.core.numbering.absolute(server_round) == self.core.round:
            # ``should_stop`` has just ended the run, so only now is it known that this round needs a checkpoint and
            # accuracy.
            save()
            if not due and (found := evaluate()):
                self.round_ended(server_round, *found)
        if self._resuming.is_over:
            self.end_metrics()

    def round_ended(self, server_round: int, loss: object = None, accuracy: object = None) -> None:
        """Record the central evaluation of a round, if there was one; call ``on_round`` and ``should_stop``.

        Nothing is called if the round is not in the history. For engines that drive :attr:`core` themselves.
        """
        number = self.core.numbering.absolute(server_round)
        if loss is not None or accuracy is not None:
            self.history.record_evaluation(number, loss=_or_nan(loss), accuracy=_or_nan(accuracy))
        last = self.history.last
        if last is None or last.round != number:
            return
        self.history.close_round()
        if self._exporter is not None:
            self._exporter.update(self.history)
        if self._on_round is not None:
            self._on_round(last)
        self.core.ending.check()

    def begin_metrics(self) -> None:
        """Start the server of the run's metrics, if ``metrics_address`` is set and the server does not run yet.

        For engines that drive :attr:`core` themselves: call this after loading the checkpoint (:attr:`resumed`).

        Raises:
            RunError: The server cannot be bound to the address.
        """
        if self._exporter is not None:
            self._exporter.begin(self.history)

    def end_metrics(self) -> None:
        """Stop the server of the run's metrics, if there is one.

        The strategy calls this itself when the run ends. With the legacy API, the strategy knows this end only if
        ``total_rounds`` is set, because Flower does not tell strategies its number of rounds.
        """
        if self._exporter is not None:
            self._exporter.close()

    def _named(self, model: Any, /) -> NamedArrays:
        """Return the names and arrays of a model of the API, for a checkpoint."""
        raise NotImplementedError

    def _save(self, number: int, model: Any) -> None:
        """Write the checkpoint of a round, if one is due; else keep the states after the round."""
        if model is not None and self._resuming.is_due(number):
            names, arrays = self._named(model)
            self.round_trained(number, arrays, names)
        self._resuming.hold(number)

    def _keep(self, number: int, model: Any) -> None:
        """Keep the model after a round, so that an error does not lose it; 0 is before the first round."""
        self._kept = number, partial(self._named, model)

    def _note_last_model(self, error: BaseException) -> None:
        """Add the place of the last model to an error that ends the run; with checkpoints the model is written."""
        # Methods are nested (start around each other method). The innermost one marks the error, the others leave it
        # unchanged.
        if (number := self._kept[0]) and not hasattr(error, "model_after"):
            error.model_after = number  # type: ignore[attr-defined]
            note = f"the model after round {number} is {self._save_last_model()}"
            error.add_note(note)
            if isinstance(error, Exception):
                logger.warning("the run ends in an error (%s); %s", type(error).__name__, note)

    def _save_last_model(self) -> str:
        """Write the last round's checkpoint if it was not due, and return the place of the model."""
        try:
            last = self.last_model
            path = None if last is None else self._resuming.write_on_error(last.round, last.arrays, last.names)
        # The user must see the error that ends the run, not that of a full disk.
        except Exception as failure:
            return f"strategy.last_model; its checkpoint could not be written: {failure}"
        if path is None:
            return "strategy.last_model"
        return f"strategy.last_model, and in {str(path)!r}: resume from there with resume=True"

    def _evaluate_and_finish(
        self, server_round: int, model: Any, evaluate: Callable[[int], Any], read: Callable[[Any], tuple[object, ...]]
    ) -> Any:
        """Write the round's checkpoint first, so that a failed evaluation loses no training; then finish the round.

        Args:
            server_round: The server's number of the round.
            model: The global model after it.
            evaluate: Function of the absolute round, called only if its evaluation is due.
            read: Returns loss and accuracy from the result of ``evaluate``.

        Returns:
            The result of ``evaluate``; None if there was no evaluation.
        """
        number = self.core.numbering.absolute(server_round)
        result = None

        def measure() -> tuple[object, ...]:
            nonlocal result
            result = evaluate(number)
            return () if result is None else read(result)

        save = partial(self._save, number, model)
        save()
        self.finish_round(server_round, measure, save)
        return result

    def _begin_run(self, initial: Mapping[str, Any] | None, should_stop: ShouldStop | None = None) -> Checkpoint | None:
        """Begin a Flower run, which counts rounds from 1; a strategy's first run resumes if there is a checkpoint.

        A second run of the same strategy continues from its own state, because the checkpoint is older.
        """
        checkpoint = None if self._started else self._resuming.begin(initial)
        self._started = True
        if (flights := self.core.parts.flights) is not None:
            flights.begin_run()
        self.core.begin_run(0 if checkpoint is None else checkpoint.round, should_stop)
        self.begin_metrics()
        return checkpoint


Params = ParamSpec("Params")
Returned = TypeVar("Returned")
Strategy = TypeVar("Strategy", bound=RoundEnd)


def saves_on_error(
    method: Callable[Concatenate[Strategy, Params], Returned],
) -> Callable[Concatenate[Strategy, Params], Returned]:
    """Decorate a strategy's method so that its errors do not lose the last model."""

    @functools.wraps(method)
    def guarded(self: Strategy, /, *args: Params.args, **kwargs: Params.kwargs) -> Returned:
        with self.saving_on_error():
            return method(self, *args, **kwargs)

    return guarded


@dataclass(frozen=True, kw_only=True)
class LastModel:
    """The global model after a round.

    Attributes:
        round: The absolute round; 0 for the initial model, if no round has ended.
        names: The names of its arrays.
        arrays: Its arrays; the bytes of a model that does not consist of arrays, such as trees.
    """

    round: int
    names: list[str]
    arrays: Arrays


def _or_nan(value: object) -> float:
    as_float = to_float(value)
    return float("nan") if as_float is None else as_float
