"""The recorder: base class of the callbacks for tracking libraries, with the figures of a round.

A library that fails does not end the run. :func:`together` combines several callbacks into one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Self

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.rounds.records import RoundRecord

logger = logging.getLogger("fedsel_flwr")
OnRound = Callable[[RoundRecord], None]


class Recorder(ABC):
    """A callback for ``on_round``; also a context manager that closes at the end.

    An exception in a round or at the end does not end the run. The first one is logged as a warning, and later rounds
    are still handed over.
    """

    _failed = False

    def __call__(self, record: RoundRecord) -> None:
        """Write a finished round.

        Args:
            record: The round.
        """
        with self._logging_errors(f"in round {record.round}"):
            self.write(record.round, figures(record))

    def close(self, *, failed: bool = False) -> None:
        """Close the library's run.

        Args:
            failed: Whether an exception ended the run.
        """
        with self._logging_errors("at the end"):
            self.end(failed=failed)

    @abstractmethod
    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Write a round's figures; may raise whatever the library raises."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Close the library's run; may raise whatever the library raises."""

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the library's run, as failed if an exception ended it."""
        self.close(failed=error is not None)

    @contextlib.contextmanager
    def _logging_errors(self, when: str) -> Iterator[None]:
        try:
            yield
        # Any exception: a run of hours must not end because a tracking server is away.
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "%s failed %s, the run goes on, further failures are not logged: %s",
                    type(self).__name__, when, described(error),
                )  # fmt: skip
            self._failed = True


def figures(record: RoundRecord) -> dict[str, float]:
    """Return a round's finite figures under the names of :class:`~fedsel_flwr.rounds.records.RoundRecord`.

    >>> record = RoundRecord(round=1, num_available=9, num_selected=3, num_completed=2, round_s=0.5, simulated_s=0.5,
    ...                      energy_j=float("nan"), total_energy_j=float("nan"), accuracy=0.25)
    >>> figures(record)["accuracy"], "energy_j" in figures(record)
    (0.25, False)
    """
    values = {name: float(value) for name, value in vars(record).items() if name != "round"}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def import_library(module: str, package: str) -> ModuleType:
    """Import a library's module.

    Args:
        module: The module's name.
        package: The package that holds it.

    Raises:
        RunError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(
            f"this callback needs {package}, which is not installed ({error}). Install it with pip install {package}"
        ) from error


def together(*callbacks: OnRound) -> OnRound:
    """Combine callbacks into one that calls them in the order given.

    >>> seen = []
    >>> together(seen.append, lambda record: seen.append(2 * record))(1)
    >>> seen
    [1, 2]
    """

    def on_round(record: RoundRecord) -> None:
        for callback in callbacks:
            callback(record)

    return on_round
