"""Eligibility: the checks that decide which connected clients the selector may choose in a round.

A client must pass five checks, in this order. Its connection is not busy. It is not in cool-down after failures. The
user's availability includes it. It is within the quota for new clients. Its participation is below the cap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.roster import ConnectedClients, Roster, canonical_id
from fedsel_flwr.rounds.untrusted import shown

logger = logging.getLogger("fedsel_flwr")
Availability = Callable[[str, int, float], bool]
"""Function of client id, round and simulated seconds; False excludes the client from the round. If the function has a
method ``at(ids, round, seconds)``, that method answers for all clients at once and returns booleans, shape (n,). If it
has an attribute ``ids``, the log has a warning about those of these ids that no client has."""
MAX_DOUBLINGS = 30
"""Number of consecutive failures after which the cool-down stops growing."""
SHARE_WINDOW = 20
"""Length of the window of participation: the last rounds in which the client was available."""
SHARE_MIN_ROUNDS = 5
"""Number of rounds in which a client must have been available before its participation counts."""


def as_availability(given: Availability | Collection[str | int] | None) -> Availability | None:
    """Return a function unchanged; turn client ids into a function that makes only these clients available.

    Args:
        given: A function, or client ids as in the roster: names of SuperNodes, node ids, or the ids that simulated
            clients report. None for no limit.

    Raises:
        ParameterError: The ids are empty or no collection, or one of them is not a valid id.

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
    return ListedClients(frozenset(one for one in ids if one is not None))


@dataclass(frozen=True)
class ListedClients:
    """Availability of the clients in a list, and of no other.

    Args:
        ids: The client ids.
    """

    ids: frozenset[str]

    def __call__(self, client_id: str, round: int, simulated_s: float) -> bool:
        """Return whether a client is in the list."""
        return client_id in self.ids


def available(
    availability: Availability, ids: Sequence[str], round: int, simulated_s: float, known: Collection[str] = ()
) -> BoolArray:
    """Call ``availability`` once for each client.

    Args:
        availability: Function that decides which clients take part.
        ids: Client ids.
        round: The round about to be chosen.
        simulated_s: Simulated seconds since the start.
        known: The ids of the run's clients, to compare with those that ``availability`` names; empty for no comparison.

    Returns:
        Whether each client takes part, shape (n,).

    Raises:
        RunError: ``availability.at`` returned another shape. Or a list names none of the known clients.

    >>> available(lambda client_id, round, seconds: client_id != "1", ["0", "1"], 1, 0.0).tolist()
    [True, False]
    """
    if known:
        _check_named(availability, known)
    at_once = getattr(availability, "at", None)
    if at_once is None:
        return np.array([bool(availability(client_id, round, simulated_s)) for client_id in ids], dtype=np.bool_)
    mask = np.asarray(at_once(ids, round, simulated_s), dtype=np.bool_)
    if mask.shape != (len(ids),):
        raise RunError(f"availability.at must return a boolean for each of {len(ids)} clients, got shape {mask.shape}")
    return mask


def _check_named(availability: Availability, known: Collection[str]) -> None:
    """Warn if ``availability`` names unknown clients; refuse a list that names only unknown clients."""
    named: Collection[str] = getattr(availability, "ids", ())
    unknown = sorted(set(named).difference(known))
    if not unknown:
        return
    numbers = f"availability names {len(named)} clients: {len(named) - len(unknown)} known, {len(unknown)} unknown"
    example = f"such as {shown(unknown[0])}"
    cure = f"Use the ids in the history, such as {shown(min(known, default=''))}."
    if isinstance(availability, ListedClients) and len(unknown) == len(named):
        raise RunError(f"{numbers}, {example}, so that no client may take part. {cure}")
    logger.warning("%s, %s. %s", numbers, example, cure)


class Busy(state_dicts.NotByClient):
    """Tracks connections without an answer: they are not asked again until they answer or a time limit has passed.

    A SuperNode processes one message after the other. One that hangs answers nothing. One that trains for longer than
    the server waits answers the next question only after that.

    A new run of Flower clears the list. Answers to an earlier run never arrive, so these connections would stay busy
    until the time limit. The first question of the new run shows which of them still work.

    Args:
        timeout: Seconds after which a connection that never answered may be asked again; None for never.
        clock: Returns monotonic seconds, which no change of the machine's date affects.

    >>> busy = Busy(timeout=60.0)
    >>> busy.owe(["a", "b"])
    >>> busy.answered("b")
    >>> busy.free(["a", "b", "c"])
    ['b', 'c']
    """

    def __init__(self, timeout: float | None = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout, self._clock = inf if timeout is None else timeout, clock
        # Connection -> time at which it may be asked again.
        self._until: dict[str, float] = {}

    def __contains__(self, node: object) -> bool:
        """Return whether a connection is busy."""
        return isinstance(node, str) and self._clock() < self._until.get(node, -inf)

    def owe(self, nodes: Iterable[str]) -> None:
        """Mark connections as busy: the server stopped waiting for their answer."""
        self._until |= dict.fromkeys(nodes, self._clock() + self._timeout)

    def answered(self, node: str) -> None:
        """Free a connection, because its late answer came or will never come."""
        self._until.pop(node, None)

    def free(self, nodes: Iterable[str]) -> list[str]:
        """Return the connections in ``nodes`` that are not busy."""
        return [node for node in nodes if node not in self] if self._until else list(nodes)

    def eligible(self, clients: ConnectedClients) -> BoolArray:
        """Return whether each client's connection is not busy, shape (n,)."""
        # The usual case returns early, without a loop over a large fleet.
        if not self._until:
            return np.ones(len(clients.rows), dtype=np.bool_)
        return np.array([node not in self for node in clients.nodes], dtype=np.bool_)

    def release(self, connected: Collection[str]) -> None:
        """Free connections that have ended, because a client that reconnects has restarted."""
        for node in self._until.keys() - connected if self._until else ():
            # A late answer may free the same connection from another thread in the meantime.
            self._until.pop(node, None)

    def clear(self) -> None:
        """Free all connections."""
        self._until.clear()

    def state_dict(self) -> state_dicts.State:
        """Return the seconds until each connection may be asked again; infinite for only after its answer."""
        # Not the time itself: a monotonic clock starts again with the machine.
        now = self._clock()
        return {"until": {node: end - now for node, end in dict(self._until).items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        until = state_dicts.read(state, {"until": state_dicts.mapping})["until"]
        left = {node: state_dicts.plain_number("until", end) for node, end in until.items()}
        # At most the limit, because states of earlier versions hold times.
        self._until = {node: self._clock() + min(seconds, self._timeout) for node, seconds in left.items()}


class ClientArrays(state_dicts.SavedFields):
    """Arrays with one element per client, by row of the selector; base class for counts by client.

    A subclass declares its arrays. Growing, saving, loading and forgetting follow from the declaration.

    Attributes:
        newcomer: Attribute -> the element of a new client, whose type is that of the array. The attribute's name
            without the underscore is the key in a saved state.
    """

    newcomer: ClassVar[Mapping[str, np.generic]]

    def __init_subclass__(cls) -> None:
        """Let the arrays be saved."""
        cls.saved = {name: partial(state_dicts.array, dtype=type(element)) for name, element in cls.newcomer.items()}

    def __init__(self) -> None:
        for attribute, element in self.newcomer.items():
            setattr(self, attribute, np.zeros(0, dtype=element.dtype))

    def forget(self, rows: IntArray) -> None:
        """Reset the clients in ``rows`` to the values of new clients."""
        for attribute, element in self.newcomer.items():
            array = getattr(self, attribute)
            # A client that was never read has no element yet.
            array[rows[rows < len(array)]] = element

    def _grow(self, rows: IntArray) -> None:
        """Extend the arrays to hold the clients in ``rows``."""
        length = int(rows.max(initial=-1)) + 1
        for attribute, element in self.newcomer.items():
            setattr(self, attribute, state_dicts.extended(getattr(self, attribute), length, element))


class Cooldown(ClientArrays):
    """Counts consecutive failures, and excludes a client for 2^n rounds after the n-th.

    Args:
        active: Whether clients are excluded at all.

    >>> import numpy as np
    >>> cooldown = Cooldown(active=True)
    >>> cooldown.note(np.array([0, 1]), np.array([True, False]), round=1)
    >>> [cooldown.eligible(np.arange(2), round).tolist() for round in (2, 3, 4)]
    [[True, False], [True, False], [True, True]]
    """

    newcomer: ClassVar = {"_failures": np.int64(0), "_out_until": np.int64(0)}
    _failures: IntArray
    """Number of consecutive failures."""
    _out_until: IntArray
    """The last round that excludes the client."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self._active = active

    def eligible(self, rows: IntArray, round: int) -> BoolArray:
        """Return whether each client in ``rows`` may be chosen in ``round``."""
        self._grow(rows)
        return np.asarray(self._out_until[rows] < round)

    def rounds_out(self, row: int, round: int) -> int:
        """Return for how many rounds after ``round`` a client is excluded."""
        return max(0, int(self._out_until[row]) - round) if row < len(self._out_until) else 0

    def forgive(self, row: int) -> None:
        """Count a client's failures from 0 again, because its reply was only late."""
        self._grow(np.array([row]))
        self._failures[row] = self._out_until[row] = 0

    def note(self, rows: IntArray, completed: BoolArray, round: int) -> None:
        """Update the counts after ``round``, in which the clients in ``rows`` were chosen."""
        self._grow(rows)
        # Counted if inactive too, so that a resumed run with the cool-down switched on knows the earlier failures.
        self._failures[rows] = np.where(completed, 0, self._failures[rows] + 1)
        if self._active:
            failed = rows[~completed]
            # Without the limit 2^n overflows an int64 after 62 failures, and every round would ask the client.
            self._out_until[failed] = round + 2 ** np.minimum(self._failures[failed], MAX_DOUBLINGS)


class NewcomerQuota(ClientArrays):
    """Limits how many unproven new clients a round may choose, so that invented ids cannot fill every round.

    A limit on admissions alone is not enough. Selectors that prefer unknown clients choose a client repeatedly until
    its confidence bound has fallen. The clients of the first round are never limited. A client that joins later counts
    as new until one of its updates is usable. Of the new clients, those with the fewest tries come first.

    Args:
        roster: The roster. Its ``max_new_per_round`` is the limit of new clients in a round; None for no limit.

    >>> quota = NewcomerQuota(Roster(max_new_per_round=1))
    >>> quota.eligible(np.arange(2)).tolist(), quota.eligible(np.arange(4)).tolist()
    ([True, True], [True, True, True, False])
    >>> quota.note(np.array([0, 2]), np.array([True, False]))
    >>> quota.eligible(np.arange(4)).tolist()
    [True, True, False, True]
    """

    newcomer: ClassVar = {"_trusted": np.bool_(False), "_tries": np.int64(0)}
    _trusted: BoolArray
    """Whether a client was present in the first round or has delivered a usable update."""
    _tries: IntArray
    """Number of rounds that chose the client."""

    def __init__(self, roster: Roster) -> None:
        super().__init__()
        self._roster = roster

    def eligible(self, rows: IntArray) -> BoolArray:
        """Return whether each client in ``rows``, shape (n,), may be chosen in the next round."""
        limit = self._roster.max_new_per_round
        if limit is None or not rows.size:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        # The first round: no client is trusted yet, so the quota would limit it.
        if not self._trusted.any():
            self._trusted[rows] = True
        eligible = self._trusted[rows]
        newcomers = np.flatnonzero(~eligible)
        # A stable sort: of new clients with equally many tries the lower rows come first, in every run.
        eligible[newcomers[np.argsort(self._tries[rows[newcomers]], kind="stable")[:limit]]] = True
        return eligible

    def note(self, rows: IntArray, completed: BoolArray) -> None:
        """Update the tries after a round, and trust the clients in ``rows`` that completed it."""
        if self._roster.max_new_per_round is None:
            return
        self._grow(rows)
        self._tries[rows] += 1
        self._trusted[rows[completed]] = True


class Participation(ClientArrays):
    """Excludes clients that were asked in too large a share of their recent rounds.

    The share covers the last 20 rounds in which the client was available, and counts from its fifth such round. Rounds
    that asked every available client do not count, because they preferred no client. A client above the cap stays
    available, so its share falls in each round that does not ask it.

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
    """One bit per round, the last round in the lowest bit."""
    _rounds: IntArray
    """Number of bits that count, at most 20."""

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self._cap = cap

    def eligible(self, rows: IntArray, at_least: int) -> BoolArray:
        """Return whether each client in ``rows`` may be chosen in the next round.

        Args:
            rows: Available clients, shape (n,).
            at_least: Number of clients that must stay eligible. If too few are below the cap, the least asked of the
                others are eligible too.
        """
        if self._cap is None:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        asked: IntArray = (self._asked[rows, None] >> np.arange(SHARE_WINDOW) & 1).sum(axis=1)
        # A client without counted rounds has the share 0, not 0 / 0.
        share = asked / np.maximum(self._rounds[rows], 1)
        eligible = (self._rounds[rows] < SHARE_MIN_ROUNDS) | (share <= self._cap)
        if (lacking := at_least - np.count_nonzero(eligible)) > 0:
            capped = np.flatnonzero(~eligible)
            eligible[capped[np.argsort(share[capped], kind="stable")[:lacking]]] = True
        return eligible

    def note(self, rows: IntArray, chosen: IntArray) -> None:
        """Record which of the available clients in ``rows`` the round asked."""
        if self._cap is None or chosen.size == rows.size:
            return
        self._grow(rows)
        # The mask drops the round that leaves the window.
        self._asked[rows] = (self._asked[rows] << 1 | np.isin(rows, chosen)) & (1 << SHARE_WINDOW) - 1
        self._rounds[rows] = np.minimum(self._rounds[rows] + 1, SHARE_WINDOW)
