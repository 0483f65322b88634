"""The log's lines for what was wrong with clients: some are named, the rest are counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import History

logger = logging.getLogger("fedsel_flwr")
NAMED = 8
"""Clients that are named for each kind of problem in a round; the history has all of them."""


MODELLED = ("late", "lost", "crashed")
"""Kinds of problems that a simulation's own clocks and draws bring about: a warning tells them once a run."""


def log_faults(where: str, faults: Iterable[tuple[str, str]], modelled: bool = False) -> None:
    """Warn of clients' problems.

    Args:
        where: The round, in words.
        faults: Client id and problem; the text before a problem's colon is its kind.
        modelled: Whether a simulation draws them: problems of :data:`MODELLED` are then no warnings, but of level INFO.
    """
    faults = list(faults)
    if modelled:
        own = [fault for fault in faults if _kind(fault[1]) in MODELLED]
        faults = [fault for fault in faults if _kind(fault[1]) not in MODELLED]
        _log(logging.INFO, where, own)
    _log(logging.WARNING, where, faults)


def log_modelled(history: History, spares: bool = False) -> None:
    """Warn once, when a simulation is over, of the answers that were late or lost.

    Args:
        history: The run's.
        spares: Whether rounds asked more clients than they waited for; the others count as late there.
    """
    counts = history.problem_counts()
    told = [f"{counts[kind]:,} {kind}" for kind in MODELLED if counts[kind]]
    if told:
        asked = sum(record.num_selected for record in history.rounds)
        more = ", those included that no round waited for" if spares else ""
        logger.warning("%s of %s answers in %s rounds%s; the history names the clients", ", ".join(told), f"{asked:,}",
                       f"{len(history.rounds):,}", more)  # fmt: skip


def _log(level: int, where: str, faults: Iterable[tuple[str, str]]) -> None:
    met: Counter[str] = Counter()
    for client_id, problem in faults:
        kind = _kind(problem)
        met[kind] += 1
        if met[kind] <= NAMED:
            logger.log(level, "%s, client %s: %s", where, client_id, problem)
    more = {kind: count - NAMED for kind, count in met.most_common() if count > NAMED}
    if more:
        told = ", ".join(f"{kind} ({count})" for kind, count in more.items())
        logger.log(level, "%s: %d more problems that are not listed one by one: %s", where, sum(more.values()), told)


def _kind(problem: str) -> str:
    return problem.split(":")[0]


def some(ids: Sequence[str]) -> str:
    """A list of clients for a message; of a long one the first.

    >>> some(["a", "b"]), some(list("abcdefghijk"))
    ("['a', 'b']", "['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] and 3 more")
    """
    rest = len(ids) - NAMED
    return str(list(ids)) if rest <= 0 else f"{list(ids[:NAMED])} and {rest} more"
