"""What the callbacks of all libraries have in common: which figures, and what happens when the library fails.

Several callbacks in place of one.
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


class Recorder(ABC):
    """A callback for ``on_round``; also a context manager that closes at the end.

    An exception in a round or at the end ends nothing: the first one is logged as a warning, and later rounds are tried
    all the same.
    """

    _failed = False

    def __call__(self, record: RoundRecord) -> None:
        """Hand a round over.

        Args:
            record: The round.
        """
        with self._told(f"in round {record.round}"):
            self.write(record.round, figures(record))

    def close(self, *, failed: bool = False) -> None:
        """The run is over.

        Args:
            failed: Whether it was cut off.
        """
        with self._told("at the end"):
            self.end(failed=failed)

    @abstractmethod
    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Write a round's figures; may raise whatever the library raises."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Close the library's run; may raise likewise."""

    def __enter__(self) -> Self:
        """The callback itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; a run that an exception ended has failed."""
        self.close(failed=error is not None)

    @contextlib.contextmanager
    def _told(self, when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a run of hours does not end because a tracking server is away
            if not self._failed:
                logger.warning(
                    "%s failed %s, the run goes on, further failures are not logged: %s",
                    type(self).__name__, when, described(error),
                )  # fmt: skip
            self._failed = True


def figures(record: RoundRecord) -> dict[str, float]:
    """A round's figures under the names of :class:`~fedsel_flwr.rounds.records.RoundRecord`, the known ones.

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
        module: Its name.
        package: What is installed for it.

    Raises:
        RunError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(
            f"this callback needs {package}, which is not installed ({error}): pip install {package}"
        ) from error


OnRound = Callable[[RoundRecord], None]


def together(*callbacks: OnRound) -> OnRound:
    """A callback that calls others, in the order given.

    >>> seen = []
    >>> together(seen.append, lambda record: seen.append(2 * record))(1)
    >>> seen
    [1, 2]
    """

    def on_round(record: RoundRecord) -> None:
        for callback in callbacks:
            callback(record)

    return on_round
