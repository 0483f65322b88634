"""Run length: the absolute number of a round, and the criteria that end a run early.

Flower counts rounds from 1 in every run. The selector's count continues through resumed runs. :class:`RoundNumbering`
maps Flower's numbers to the selector's. A run ends before its last round if its budget is spent, the selector is done,
or the caller stops it (:class:`StopCriteria`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedsel_flwr.checks import real
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import Selector


class RoundNumbering:
    """Maps the server's round numbers to absolute ones, which are the selector's.

    The first round of a run fixes the offset. It is 0, or the number of rounds that a loaded selector has seen if the
    server counts from 1 again. A resumed run begins after its finished rounds. Flower's round 0 is the last of these.

    >>> numbering = RoundNumbering()
    >>> numbering.check(server_round=1, seen=40), numbering.absolute(1)
    (None, 41)
    >>> numbering.begin_run(done=50)
    >>> numbering.absolute(0)
    50
    """

    def __init__(self) -> None:
        # The absolute round minus the server's round; None before the first round of a run.
        self._offset: int | None = None
        self._done = 0

    def begin_run(self, done: int = 0) -> None:
        """Begin a run, in which the server may count from 1 again.

        Args:
            done: Number of finished rounds, if the server is known to count from 1.
        """
        self._offset, self._done = None, done

    def absolute(self, server_round: int) -> int:
        """Return the absolute number of a round of the server."""
        return server_round + (self._done if self._offset is None else self._offset)

    def check(self, server_round: int, seen: int) -> None:
        """Check the server's number of the next round; the first round of a run fixes the offset.

        Args:
            server_round: The server's number.
            seen: Number of rounds that the selector has seen.

        Raises:
            RunError: The server's round number does not match the selector's.
        """
        # Only two offsets are possible: the server counts absolutely, or from 1 after ``seen`` rounds.
        offset = seen + 1 - server_round
        if self._offset is None and offset in (0, seen):
            self._offset = offset
        if offset != self._offset:
            allowed = {1, seen + 1} if self._offset is None else {seen + 1 - self._offset}
            expected = " or ".join(map(str, sorted(allowed)))
            raise RunError(
                f"the server starts round {server_round}, but round {expected} was expected, because the selector "
                f"has seen {seen} rounds. Use a strategy for one run at a time, and do not call select yourself"
            )


ShouldStop = Callable[[int, History], bool]
"""Function of the last round's number and the history; True ends the run."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of a run. The run ends with the round in which a limit is reached.

    Args:
        simulated_s: Seconds on the strategy's clock, above 0; infinite for no limit.
        joules: Joules of all clients, above 0; infinite for no limit.

    Raises:
        ParameterError: A limit is not above 0.

    >>> history = History()
    >>> _ = history.append(round=1, num_available=1, round_s=2.0, clients=[])
    >>> Budget(simulated_s=2.0).spent(history), Budget(simulated_s=3.0).spent(history)
    (True, False)
    """

    simulated_s: float = math.inf
    joules: float = math.inf

    def __post_init__(self) -> None:
        """Check both limits."""
        for name, value in (("simulated_s", self.simulated_s), ("joules", self.joules)):
            if value != math.inf:
                real(name, value, above=0.0)

    def spent(self, history: History) -> bool:
        """Return whether a limit is reached."""
        if (last := history.last) is None:
            return False
        return last.simulated_s >= self.simulated_s or last.total_energy_j >= self.joules


class StopCriteria:
    """Stop criteria: the budget, the selector and the caller's signals. Each of them can end the run.

    Args:
        selector: Ends the run when it is done.
        history: The history so far.
        budget: The limits of the run; None sets no limit.
        should_stop: The caller's signal; None for no signal.

    Raises:
        ParameterError: ``should_stop`` cannot be called.

    >>> from fedsel_flwr.selectors import Random
    >>> history = History()
    >>> stop = StopCriteria(Random(clients_per_round=1), history, should_stop=lambda number, history: number >= 2)
    >>> ended = []
    >>> for number in (1, 2, 3):
    ...     _ = history.append(round=number, num_available=1, round_s=2.0, clients=[])
    ...     stop.check()
    ...     ended.append(stop.met)
    >>> ended
    [False, True, True]
    """

    def __init__(
        self, selector: Selector, history: History, budget: Budget | None = None, should_stop: ShouldStop | None = None
    ) -> None:
        check_should_stop(should_stop)
        self._selector, self._history, self._budget = selector, history, budget or Budget()
        self._lasting, self._signals = should_stop, [should_stop]
        self._checked, self._stopped = 0, False

    @property
    def met(self) -> bool:
        """Whether the run has ended: the budget is spent, the selector is done, or a signal returned True."""
        return self._stopped or self._budget.spent(self._history) or self._selector.done

    def begin_run(self, should_stop: ShouldStop | None = None) -> None:
        """Begin a run and reset the signals, so that they are called even for the last round of an earlier run.

        Args:
            should_stop: A signal for this run only, in addition to the permanent one; None for no signal.
        """
        self._signals, self._checked, self._stopped = [self._lasting, should_stop], 0, False

    def check(self) -> None:
        """Call the signals for the last round, once per round."""
        last = self._history.last
        if last is None or last.round == self._checked or self._stopped:
            return
        self._checked = last.round
        # A list, because every signal is called: each may count rounds or log.
        self._stopped = any([signal(last.round, self._history) for signal in self._signals if signal is not None])


def check_should_stop(should_stop: object) -> None:
    """Refuse a signal that cannot be called.

    Raises:
        ParameterError: It cannot be called.
    """
    if should_stop is not None and not callable(should_stop):
        raise ParameterError(
            "should_stop must be a function of a round's number and the history, got " + type(should_stop).__name__
        )
