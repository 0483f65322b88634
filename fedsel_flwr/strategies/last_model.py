"""The global model after the last round, which outlives an error that ends the run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.strategies.resuming import Resuming

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
