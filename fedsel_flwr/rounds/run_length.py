"""Which absolute round the server means: Flower counts from 1 in every run, the selector goes on.

When a run ends before its rounds are over: its budget, its selector, or the caller says so.
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
    """Keeps the server's rounds and the selector's together.

    The first round of a run fixes the offset, which is 0, or the rounds that a loaded selector has seen where the
    server counts from 1 again.

    A run that goes on from a checkpoint begins after the rounds it has done: Flower's round 0 is the last of these.

    >>> numbering = RoundNumbering()
    >>> numbering.check(server_round=1, seen=40), numbering.absolute(1)
    (None, 41)
    >>> numbering.begin_run(done=50)
    >>> numbering.absolute(0)
    50
    """

    def __init__(self) -> None:
        self._offset: int | None = None  # absolute round - the server's; None before a run's first
        self._done = 0

    def begin_run(self, done: int = 0) -> None:
        """A run begins: the server may count from 1 again.

        Args:
            done: The rounds that were done before, where the server is known to count from 1.
        """
        self._offset, self._done = None, done

    def absolute(self, server_round: int) -> int:
        """The absolute number of a round that the server counts."""
        return server_round + (self._done if self._offset is None else self._offset)

    def check(self, server_round: int, seen: int) -> None:
        """Take in the server's number of the round about to be chosen.

        Args:
            server_round: The server's number.
            seen: How many rounds the selector has seen.

        Raises:
            RunError: The two have not gone on together.
        """
        offset = seen + 1 - server_round
        if self._offset is None and offset in (0, seen):
            self._offset = offset
        if offset != self._offset:
            allowed = {1, seen + 1} if self._offset is None else {seen + 1 - self._offset}
            expected = " or ".join(map(str, sorted(allowed)))
            raise RunError(
                f"the server begins round {server_round}, but the selector has seen {seen} rounds, so that round "
                f"{expected} was expected: use a strategy for one run at a time, and do not call select yourself"
            )


ShouldStop = Callable[[int, History], bool]
"""Called with the number of the round that ended last and the history so far; True ends the run."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may spend; it ends with the round in which one of them is used up.

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
        """Whether nothing is left."""
        if not history.rounds:
            return False
        last = history.rounds[-1]
        return last.simulated_s >= self.simulated_s or last.total_energy_j >= self.joules


class StopCriteria:
    """Says whether a run has ended; all reasons end it in the same way.

    Args:
        selector: Ends the run when it has nothing left to choose.
        history: What happened so far.
        budget: What the run may spend; None sets no limit.
        should_stop: The caller's signal; None: there is none.

    Raises:
        ParameterError: ``should_stop`` cannot be called.

    >>> from fedsel_flwr.selectors import Random
    >>> history = History()
    >>> ending = StopCriteria(Random(clients_per_round=1), history, should_stop=lambda number, history: number >= 2)
    >>> ended = []
    >>> for number in (1, 2, 3):
    ...     _ = history.append(round=number, num_available=1, round_s=2.0, clients=[])
    ...     ending.check()
    ...     ended.append(ending.met)
    >>> ended
    [False, True, True]
    """

    def __init__(
        self,
        selector: Selector,
        history: History,
        budget: Budget | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        check_should_stop(should_stop)
        self._selector, self._history, self._budget = selector, history, budget or Budget()
        self._own, self._signals = should_stop, [should_stop]
        self._asked, self._stopped = 0, False

    @property
    def met(self) -> bool:
        """Whether the run is over: the budget is spent, the selector is done, or ``should_stop`` has said so."""
        return self._stopped or self._budget.spent(self._history) or self._selector.done

    def begin_run(self, should_stop: ShouldStop | None = None) -> None:
        """A run begins: signals are asked again, also about a last round from before.

        Args:
            should_stop: A signal of this run alone, on top of the lasting one; None: there is none.
        """
        self._signals, self._asked, self._stopped = [self._own, should_stop], 0, False

    def check(self) -> None:
        """Ask the signals about the last round, once for each round."""
        last = self._history.last
        if last is None or last.round == self._asked or self._stopped:
            return
        self._asked = last.round
        said = [bool(signal(last.round, self._history)) for signal in self._signals if signal is not None]
        self._stopped = any(said)


def check_should_stop(should_stop: object) -> None:
    """Refuse a signal that is no function.

    Raises:
        ParameterError: It cannot be called.
    """
    if should_stop is not None and not callable(should_stop):
        raise ParameterError(
            "should_stop must be a function of a round's number and the history, got " + type(should_stop).__name__
        )
