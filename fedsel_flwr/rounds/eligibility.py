"""Who takes part in a round, beyond being connected.

Who still works on something earlier.

Who is left in peace after failures.

How many of those who joined later and have delivered nothing yet may be chosen in a round.

A cap on the share of the rounds in which one client is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.roster import Roster, canonical_id

Availability = Callable[[str, int, float], bool]
"""Called with client id, round and simulated seconds; False leaves the client out of the round. One with a method
``at(ids, round, seconds)`` is asked for all clients at once and returns booleans, shape (n,)."""


class Only:
    """Lets given clients take part, in every round, and nobody else.

    Args:
        ids: Their ids, as the roster has them: names of SuperNodes, node ids, or what simulated clients say.

    Raises:
        ParameterError: ``ids`` is empty or no collection, or one of them cannot be an id.

    >>> Only(["clinic-a", 7]).at(["7", "8", "clinic-a"], 1, 0.0).tolist()
    [True, False, True]
    """

    def __init__(self, ids: Collection[str | int]) -> None:
        example = "availability must be a function or client ids, such as ['clinic-a', 'clinic-c']"
        if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
            raise ParameterError(f"{example}, got {ids!r}")
        if not len(ids):
            raise ParameterError(f"{example}, got none: leave it out to let everybody take part")
        names = {one: canonical_id(one) for one in ids}
        if wrong := [one for one, name in names.items() if name is None]:
            raise ParameterError(f"{example}, but {wrong[0]!r} cannot be an id")
        self.ids = frozenset(name for name in names.values() if name is not None)

    def __call__(self, client_id: str, round: int, seconds: float) -> bool:
        """Whether a client takes part."""
        return client_id in self.ids

    def at(self, ids: Sequence[str], round: int, seconds: float) -> BoolArray:
        """Which of ``ids`` take part, shape (n,)."""
        return np.array([one in self.ids for one in ids], dtype=np.bool_)


def as_availability(given: Availability | Collection[str | int] | None) -> Availability | None:
    """A function as it is, client ids as :class:`Only` these."""
    return given if given is None or callable(given) else Only(given)


def available(availability: Availability, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
    """Ask once for each client.

    Args:
        availability: Who is there.
        ids: Client ids.
        round: The round about to be chosen.
        simulated_s: Seconds since the start.

    Returns:
        Which of them take part, shape (n,).

    Raises:
        RunError: ``availability.at`` returned another shape.

    >>> available(lambda client_id, round, seconds: client_id != "1", ["0", "1"], 1, 0.0).tolist()
    [True, False]
    """
    at_once = getattr(availability, "at", None)
    if at_once is None:
        return np.array([bool(availability(client_id, round, simulated_s)) for client_id in ids], dtype=np.bool_)
    there = np.asarray(at_once(ids, round, simulated_s), dtype=np.bool_)
    if there.shape != (len(ids),):
        raise RunError(f"availability.at must return a boolean for each of {len(ids)} clients, got shape {there.shape}")
    return there


class Busy:
    """Connections that have not answered a question, and are not asked again until they do or a bound has passed.

    A SuperNode works off one message after the other. One that hangs answers nobody, and one that trains for longer
    than the server waits comes to the next question only after that.

    A run of Flower that begins anew forgets them: what was asked in the one before is answered to nobody, so that
    nothing would free them before the bound. The first question finds out.

    Args:
        timeout: Seconds after which a connection that never answered may be asked again; None: it may not.
        clock: Seconds that go on from one process to the next.

    >>> busy = Busy(timeout=60.0)
    >>> busy.owe(["a", "b"])
    >>> busy.answered("b")
    >>> busy.free(["a", "b", "c"])
    ['b', 'c']
    """

    def __init__(self, timeout: float | None = 3600.0, clock: Callable[[], float] = time.time) -> None:
        self._timeout, self._clock = inf if timeout is None else timeout, clock
        self._until: dict[str, float] = {}  # connection -> when it may be asked again

    def __contains__(self, node: object) -> bool:
        """Whether a connection is busy."""
        return isinstance(node, str) and self._clock() < self._until.get(node, -inf)

    def owe(self, nodes: Iterable[str]) -> None:
        """The server gave up waiting for these."""
        self._until |= dict.fromkeys(nodes, self._clock() + self._timeout)

    def answered(self, node: str) -> None:
        """An answer came late, or the word that none will come."""
        self._until.pop(node, None)

    def free(self, nodes: Iterable[str]) -> list[str]:
        """Those of ``nodes`` that are not busy."""
        return [node for node in nodes if node not in self] if self._until else list(nodes)

    def ready(self, nodes: Sequence[str]) -> BoolArray:
        """Which of ``nodes`` are not busy, shape (n,)."""
        if not self._until:
            return np.ones(len(nodes), dtype=np.bool_)
        return np.array([node not in self for node in nodes], dtype=np.bool_)

    def release(self, connected: Collection[str]) -> None:
        """Forget connections that are gone: whoever comes back has begun anew."""
        for node in self._until.keys() - connected if self._until else ():
            self._until.pop(node, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._until.clear()

    def state_dict(self) -> state_dicts.State:
        """When each may be asked again, seconds; infinite where the answer is waited for."""
        return {"until": dict(self._until)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        until = state["until"]
        if not isinstance(until, Mapping):
            raise StateError(f"until must be a mapping from connection to seconds, got {until!r:.80}")
        self._until = {str(node): state_dicts.plain_number("until", end) or 0.0 for node, end in until.items()}

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""


LONGEST = 30
"""Doublings after which the time out stays as it is."""


class Cooldown:
    """Counts failures in a row, and leaves a client out for 2^n rounds after the n-th.

    Args:
        active: Whether anybody is left out.

    >>> import numpy as np
    >>> cooldown = Cooldown(active=True)
    >>> cooldown.note(np.array([0, 1]), np.array([True, False]), round=1)
    >>> [cooldown.ready(np.arange(2), round).tolist() for round in (2, 3, 4)]
    [[True, False], [True, False], [True, True]]
    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._failures: IntArray = np.zeros(0, dtype=np.int64)  # in a row, by row of the selector
        self._out_until: IntArray = np.zeros(0, dtype=np.int64)  # the last round without the client

    def ready(self, rows: IntArray, round: int) -> BoolArray:
        """Which of ``rows`` may be chosen in ``round``."""
        self._grow(rows)
        return np.asarray(self._out_until[rows] < round)

    def note(self, rows: IntArray, completed: BoolArray, round: int) -> None:
        """Take in how the clients chosen in ``round`` did."""
        self._grow(rows)
        self._failures[rows] = np.where(completed, 0, self._failures[rows] + 1)
        if self._active:
            failed = rows[~completed]
            self._out_until[failed] = round + 2 ** np.minimum(self._failures[failed], LONGEST)

    def state_dict(self) -> state_dicts.State:
        """Failures in a row, and the last round without each client."""
        return {"failures": self._failures.copy(), "out_until": self._out_until.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        failures = state_dicts.array("failures", state["failures"], np.int64)
        out_until = state_dicts.array("out_until", state["out_until"], np.int64, rows=len(failures))
        self._failures, self._out_until = failures, out_until

    def forget(self, rows: IntArray) -> None:
        """Let newcomers start without failures."""
        self._grow(rows)
        self._failures[rows] = self._out_until[rows] = 0

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._failures = state_dicts.extended(self._failures, length, 0)
        self._out_until = state_dicts.extended(self._out_until, length, 0)


class Trial:
    """Offers the selector few clients on trial, so that ids made up in thousands cannot take every round.

    Selectors that prefer the unknown come back to it until its bound has fallen, so that it is not enough to admit few
    at a time. Who is there in the first round has nothing to prove; who joins later is on trial until one of its
    updates can be used. Of those on trial a round offers as many as the roster admits, whoever was tried least first.

    Args:
        roster: Its ``max_new_per_round`` is the number; None for no limit.

    >>> trial = Trial(Roster(max_new_per_round=1))
    >>> trial.offered(np.arange(2)).tolist(), trial.offered(np.arange(4)).tolist()
    ([True, True], [True, True, True, False])
    >>> trial.note(np.array([0, 2]), np.array([True, False]))
    >>> trial.offered(np.arange(4)).tolist()
    [True, True, False, True]
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._trusted: BoolArray = np.zeros(0, dtype=np.bool_)  # by row: there at first, or has delivered
        self._tries: IntArray = np.zeros(0, dtype=np.int64)

    def offered(self, rows: IntArray) -> BoolArray:
        """Which of ``rows``, shape (n,), may be chosen in the round to come."""
        limit = self._roster.max_new_per_round
        if limit is None or not rows.size:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        if not self._trusted.any():
            self._trusted[rows] = True
        offered = self._trusted[rows]
        places = np.flatnonzero(~offered)
        offered[places[np.argsort(self._tries[rows[places]], kind="stable")[:limit]]] = True
        return offered

    def note(self, rows: IntArray, completed: BoolArray) -> None:
        """Take in how the clients chosen in a round did."""
        if self._roster.max_new_per_round is None:
            return
        self._grow(rows)
        self._tries[rows] += 1
        self._trusted[rows[completed]] = True

    def state_dict(self) -> state_dicts.State:
        """Who has nothing to prove, and how often each was tried."""
        return {"trusted": self._trusted.copy(), "tries": self._tries.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        trusted = state_dicts.array("trusted", state["trusted"], np.bool_)
        self._tries = state_dicts.array("tries", state["tries"], np.int64, rows=len(trusted))
        self._trusted = trusted

    def forget(self, rows: IntArray) -> None:
        """Put newcomers on trial."""
        rows = rows[rows < len(self._trusted)]
        self._trusted[rows], self._tries[rows] = False, 0

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._trusted = state_dicts.extended(self._trusted, length, False)
        self._tries = state_dicts.extended(self._tries, length, 0)


WINDOW = 20
"""Rounds of a client that its share is counted over: the last ones in which it was available."""
FIRST = 5
"""Rounds in which a client must have been available before its share counts."""


class Participation:
    """Does not offer the selector clients that were asked in too large a share of their last rounds.

    A share is counted over the last 20 rounds in which the client was available, from its fifth on. Rounds in which
    everybody available was asked do not count: no client was preferred there. A client above the cap stays available,
    so its share falls in each round without it.

    Args:
        cap: Largest share, in (0, 1]; None sets no cap.

    >>> import numpy as np
    >>> cap, everybody = Participation(0.5), np.arange(3)
    >>> for _ in range(5):
    ...     cap.note(everybody, np.array([2]))
    >>> cap.offered(everybody, at_least=1).tolist(), cap.offered(everybody, at_least=3).tolist()
    ([True, True, False], [True, True, True])
    """

    def __init__(self, cap: float | None) -> None:
        self._cap = cap
        self._asked: IntArray = np.zeros(0, dtype=np.int64)  # by row: a bit for each round, the last one lowest
        self._rounds: IntArray = np.zeros(0, dtype=np.int64)  # by row: how many of these bits count, at most 20

    def offered(self, rows: IntArray, at_least: int) -> BoolArray:
        """Which of ``rows`` may be chosen in the round to come.

        Args:
            rows: Clients that are available, shape (n,).
            at_least: So many are offered: of those above the cap, the least asked fill the places.
        """
        if self._cap is None:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        share = self._share(rows)
        offered = (self._rounds[rows] < FIRST) | (share <= self._cap)
        if (lacking := at_least - np.count_nonzero(offered)) > 0:
            capped = np.flatnonzero(~offered)
            offered[capped[np.argsort(share[capped], kind="stable")[:lacking]]] = True
        return offered

    def note(self, rows: IntArray, chosen: IntArray) -> None:
        """Take in whom of the available ``rows`` the round asked."""
        if self._cap is None or chosen.size == rows.size:
            return
        self._grow(rows)
        self._asked[rows] = (self._asked[rows] << 1 | np.isin(rows, chosen)) & (1 << WINDOW) - 1
        self._rounds[rows] = np.minimum(self._rounds[rows] + 1, WINDOW)

    def state_dict(self) -> state_dicts.State:
        """In which of its last rounds each client was asked, as bits, and how many rounds these are."""
        return {"asked": self._asked.copy(), "rounds": self._rounds.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        asked = state_dicts.array("asked", state["asked"], np.int64)
        self._rounds = state_dicts.array("rounds", state["rounds"], np.int64, rows=len(asked))
        self._asked = asked

    def forget(self, rows: IntArray) -> None:
        """Let newcomers start without rounds."""
        rows = rows[rows < len(self._rounds)]
        self._asked[rows] = self._rounds[rows] = 0

    def _share(self, rows: IntArray) -> FloatArray:
        asked = (self._asked[rows, None] >> np.arange(WINDOW) & 1).sum(axis=1)
        return np.asarray(asked / np.maximum(self._rounds[rows], 1))

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._asked = state_dicts.extended(self._asked, length, 0)
        self._rounds = state_dicts.extended(self._rounds, length, 0)
