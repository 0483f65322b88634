"""Eligibility: which connected clients the selector may choose in a round.

A client passes five checks, in this order: its connection is not busy, it has no cool-down after failures, the user's
availability lets it take part, it is within the quota for newcomers, and its participation is below the cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.roster import Roster, canonical_id

Availability = Callable[[str, int, float], bool]
"""Called with client id, round and simulated seconds; False leaves the client out of the round. One with a method
``at(ids, round, seconds)`` is asked for all clients at once and returns booleans, shape (n,)."""
MAX_DOUBLINGS = 30
"""Failures in a row after which a cool-down grows no longer."""
SHARE_WINDOW = 20
"""Rounds of a client that its participation is counted over: the last ones in which it was available."""
SHARE_MIN_ROUNDS = 5
"""Rounds in which a client must have been available before its participation counts."""


def as_availability(given: Availability | Collection[str | int] | None) -> Availability | None:
    """Return a function as it is; client ids as a function that lets them take part in every round, and no others.

    Args:
        given: A function, or client ids as the roster has them: names of SuperNodes, node ids, or what simulated
            clients say. None for no limit.

    Raises:
        ParameterError: The ids are none, or no collection, or one of them cannot be an id.

    >>> there = as_availability(["clinic-a", 7])
    >>> available(there, ["7", "8", "clinic-a"], 1, 0.0).tolist()
    [True, False, True]
    """
    if given is None or callable(given):
        return given
    cure = "Pass a function or client ids, such as ['clinic-a', 'clinic-c']."
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        raise ParameterError(f"availability must be a function or a list of client ids, got {given!r}. {cure}")
    if not len(given):
        raise ParameterError("availability lists no client. Leave it out to let every client take part.")
    ids = {canonical_id(one): one for one in given}
    if None in ids:
        raise ParameterError(f"availability lists {ids[None]!r}, which cannot be a client id. {cure}")
    return lambda client_id, round, seconds: client_id in ids


def available(availability: Availability, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
    """Ask ``availability`` about each client once.

    Args:
        availability: Which clients take part.
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
    mask = np.asarray(at_once(ids, round, simulated_s), dtype=np.bool_)
    if mask.shape != (len(ids),):
        raise RunError(f"availability.at must return a boolean for each of {len(ids)} clients, got shape {mask.shape}")
    return mask


class Busy(state_dicts.NotByClient):
    """Connections that owe an answer: they are not asked again until they answer or a time limit has passed.

    A SuperNode works off one message after the other. One that hangs answers nothing, and one that trains for longer
    than the server waits answers the next question only after that.

    A new run of Flower clears the list. Answers to an earlier run never arrive, so nothing would free these connections
    before the time limit. The first question of the new run finds out which of them still work.

    Args:
        timeout: Seconds after which a connection that never answered may be asked again; None: it may not.
        clock: Seconds on a clock that all processes share.

    >>> busy = Busy(timeout=60.0)
    >>> busy.owe(["a", "b"])
    >>> busy.answered("b")
    >>> busy.free(["a", "b", "c"])
    ['b', 'c']
    """

    # wall-clock time: a monotonic clock starts again with the machine, and the deadlines are saved in checkpoints
    def __init__(self, timeout: float | None = 3600.0, clock: Callable[[], float] = time.time) -> None:
        self._timeout, self._clock = inf if timeout is None else timeout, clock
        # connection -> when it may be asked again
        self._until: dict[str, float] = {}

    def __contains__(self, node: object) -> bool:
        """Return whether a connection is busy."""
        return isinstance(node, str) and self._clock() < self._until.get(node, -inf)

    def owe(self, nodes: Iterable[str]) -> None:
        """Note that connections owe an answer: the server gave up waiting for it."""
        self._until |= dict.fromkeys(nodes, self._clock() + self._timeout)

    def answered(self, node: str) -> None:
        """Free a connection: its late answer came, or word that none will come."""
        self._until.pop(node, None)

    def free(self, nodes: Iterable[str]) -> list[str]:
        """Return those of ``nodes`` that are not busy."""
        return [node for node in nodes if node not in self] if self._until else list(nodes)

    def eligible(self, nodes: Sequence[str]) -> BoolArray:
        """Return which of ``nodes`` are not busy, shape (n,)."""
        # the usual case: a large fleet is not walked through for nothing
        if not self._until:
            return np.ones(len(nodes), dtype=np.bool_)
        return np.array([node not in self for node in nodes], dtype=np.bool_)

    def release(self, connected: Collection[str]) -> None:
        """Free connections that are gone: a client that reconnects has started again."""
        for node in self._until.keys() - connected if self._until else ():
            # a late answer may free the same connection from another thread in the meantime
            self._until.pop(node, None)

    def clear(self) -> None:
        """Free all connections."""
        self._until.clear()

    def state_dict(self) -> state_dicts.State:
        """Return when each connection may be asked again, seconds; infinite if only its answer frees it."""
        return {"until": dict(self._until)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        until = state["until"]
        if not isinstance(until, Mapping):
            raise StateError(f"until must be a mapping from connection to seconds, got {until!r:.80}")
        self._until = {str(node): state_dicts.plain_number("until", end) or 0.0 for node, end in until.items()}


class ClientArrays:
    """Arrays with one element for each client, by row of the selector; the base of what is counted by client.

    A subclass declares its arrays; growing, saving, loading and forgetting follow from the declaration.

    Attributes:
        newcomer: Attribute -> the element of a new client, whose type is the array's. The attribute without its
            underscore is the key in a saved state.
    """

    newcomer: ClassVar[Mapping[str, np.generic]]

    def __init__(self) -> None:
        for attribute, element in self.newcomer.items():
            setattr(self, attribute, np.zeros(0, dtype=element.dtype))

    def state_dict(self) -> state_dicts.State:
        """Return copies of the arrays."""
        return {attribute.lstrip("_"): getattr(self, attribute).copy() for attribute in self.newcomer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        loaded: dict[str, Any] = {}
        length: int | None = None
        for attribute, element in self.newcomer.items():
            key = attribute.lstrip("_")
            loaded[attribute] = state_dicts.array(key, state[key], type(element), rows=length)
            length = len(loaded[attribute])
        self._check_loaded(loaded)
        # after all checks, so that a refused state changes nothing
        for attribute, array in loaded.items():
            setattr(self, attribute, array)

    def forget(self, rows: IntArray) -> None:
        """Treat the clients in ``rows`` as newcomers."""
        for attribute, element in self.newcomer.items():
            array = getattr(self, attribute)
            # a client that was never looked at has no element yet
            array[rows[rows < len(array)]] = element

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        """Raise :class:`StateError` if an array, attribute -> array, holds what it cannot."""

    def _grow(self, rows: IntArray) -> None:
        """Make room for the clients in ``rows``."""
        length = int(rows.max(initial=-1)) + 1
        for attribute, element in self.newcomer.items():
            setattr(self, attribute, state_dicts.extended(getattr(self, attribute), length, element))


class Cooldown(ClientArrays):
    """Counts failures in a row, and leaves a client out for 2^n rounds after the n-th.

    Args:
        active: Whether clients are left out at all.

    >>> import numpy as np
    >>> cooldown = Cooldown(active=True)
    >>> cooldown.note(np.array([0, 1]), np.array([True, False]), round=1)
    >>> [cooldown.eligible(np.arange(2), round).tolist() for round in (2, 3, 4)]
    [[True, False], [True, False], [True, True]]
    """

    newcomer: ClassVar = {"_failures": np.int64(0), "_out_until": np.int64(0)}
    _failures: IntArray
    """Failures in a row."""
    _out_until: IntArray
    """The last round without the client."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self._active = active

    def eligible(self, rows: IntArray, round: int) -> BoolArray:
        """Return which of ``rows`` may be chosen in ``round``."""
        self._grow(rows)
        return np.asarray(self._out_until[rows] < round)

    def note(self, rows: IntArray, completed: BoolArray, round: int) -> None:
        """Count which of the clients chosen in ``round`` completed it."""
        self._grow(rows)
        # counted if inactive too: a run that resumes with the cool-down switched on knows the failures before it
        self._failures[rows] = np.where(completed, 0, self._failures[rows] + 1)
        if self._active:
            failed = rows[~completed]
            # without the limit 2^n overflows an int64 after 62 failures, and the client would be asked in every round
            self._out_until[failed] = round + 2 ** np.minimum(self._failures[failed], MAX_DOUBLINGS)


class NewcomerQuota(ClientArrays):
    """Limits how many unproven newcomers a round may choose, so that thousands of invented ids cannot fill every round.

    Selectors that prefer the unknown return to a client until its confidence bound has fallen, so a limit on admissions
    alone is not enough. The clients of the first round have nothing to prove. One that joins later is a newcomer until
    one of its updates can be used. The least tried newcomers come first.

    Args:
        roster: Its ``max_new_per_round`` is the limit of newcomers in a round; None for no limit.

    >>> quota = NewcomerQuota(Roster(max_new_per_round=1))
    >>> quota.eligible(np.arange(2)).tolist(), quota.eligible(np.arange(4)).tolist()
    ([True, True], [True, True, True, False])
    >>> quota.note(np.array([0, 2]), np.array([True, False]))
    >>> quota.eligible(np.arange(4)).tolist()
    [True, True, False, True]
    """

    newcomer: ClassVar = {"_trusted": np.bool_(False), "_tries": np.int64(0)}
    _trusted: BoolArray
    """Whether a client was there in the first round or has delivered a usable update."""
    _tries: IntArray
    """How often a client was chosen."""

    def __init__(self, roster: Roster) -> None:
        super().__init__()
        self._roster = roster

    def eligible(self, rows: IntArray) -> BoolArray:
        """Return which of ``rows``, shape (n,), may be chosen in the next round."""
        limit = self._roster.max_new_per_round
        if limit is None or not rows.size:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        # the first round: without anybody trusted it would be limited to the quota
        if not self._trusted.any():
            self._trusted[rows] = True
        eligible = self._trusted[rows]
        newcomers = np.flatnonzero(~eligible)
        # stable: among equally often tried newcomers the lower rows come first, in every run
        eligible[newcomers[np.argsort(self._tries[rows[newcomers]], kind="stable")[:limit]]] = True
        return eligible

    def note(self, rows: IntArray, completed: BoolArray) -> None:
        """Count which of the clients chosen in a round completed it."""
        if self._roster.max_new_per_round is None:
            return
        self._grow(rows)
        self._tries[rows] += 1
        self._trusted[rows[completed]] = True


class Participation(ClientArrays):
    """Leaves out clients that were asked in too large a share of their last rounds.

    A share is counted over the last 20 rounds in which the client was available, from its fifth on. Rounds that asked
    every available client do not count: no client was preferred there. A client above the cap stays available, so its
    share falls in each round without it.

    Args:
        cap: Largest share, in (0, 1]; None sets no cap.

    >>> import numpy as np
    >>> cap, everybody = Participation(0.5), np.arange(3)
    >>> for _ in range(5):
    ...     cap.note(everybody, np.array([2]))
    >>> cap.eligible(everybody, at_least=1).tolist(), cap.eligible(everybody, at_least=3).tolist()
    ([True, True, False], [True, True, True])
    """

    newcomer: ClassVar = {"_asked": np.int64(0), "_rounds": np.int64(0)}
    _asked: IntArray
    """A bit for each round, the last one lowest."""
    _rounds: IntArray
    """How many of these bits count, at most 20."""

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self._cap = cap

    def eligible(self, rows: IntArray, at_least: int) -> BoolArray:
        """Return which of ``rows`` may be chosen in the next round.

        Args:
            rows: Clients that are available, shape (n,).
            at_least: Number of clients that must stay eligible: the least asked of those above the cap fill up.
        """
        if self._cap is None:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        share = self._share(rows)
        eligible = (self._rounds[rows] < SHARE_MIN_ROUNDS) | (share <= self._cap)
        if (lacking := at_least - np.count_nonzero(eligible)) > 0:
            capped = np.flatnonzero(~eligible)
            eligible[capped[np.argsort(share[capped], kind="stable")[:lacking]]] = True
        return eligible

    def note(self, rows: IntArray, chosen: IntArray) -> None:
        """Count which of the available ``rows`` the round asked."""
        if self._cap is None or chosen.size == rows.size:
            return
        self._grow(rows)
        # the mask drops the round that leaves the window
        self._asked[rows] = (self._asked[rows] << 1 | np.isin(rows, chosen)) & (1 << SHARE_WINDOW) - 1
        self._rounds[rows] = np.minimum(self._rounds[rows] + 1, SHARE_WINDOW)

    def _share(self, rows: IntArray) -> FloatArray:
        """Return the share of its counted rounds in which each client was asked, shape (n,)."""
        asked = (self._asked[rows, None] >> np.arange(SHARE_WINDOW) & 1).sum(axis=1)
        # a client without counted rounds has the share 0, not 0 / 0
        return np.asarray(asked / np.maximum(self._rounds[rows], 1))
