"""The log's lines for what was wrong with clients: some are named, the rest are counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

logger = logging.getLogger("fedsel_flwr")
NAMED = 8
"""Clients that are named for each kind of problem in a round; the history has all of them."""


def log_faults(where: str, faults: Iterable[tuple[str, str]]) -> None:
    """Warn of clients' problems.

    Args:
        where: The round, in words.
        faults: Client id and problem; the text before a problem's colon is its kind.
    """
    met: Counter[str] = Counter()
    for client_id, problem in faults:
        kind = problem.split(":")[0]
        met[kind] += 1
        if met[kind] <= NAMED:
            logger.warning("%s, client %s: %s", where, client_id, problem)
    more = {kind: count - NAMED for kind, count in met.most_common() if count > NAMED}
    if more:
        told = ", ".join(f"{kind} ({count})" for kind, count in more.items())
        logger.warning("%s: %d more problems that are not listed one by one: %s", where, sum(more.values()), told)


def some(ids: Sequence[str]) -> str:
    """A list of clients for a message; of a long one the first.

    >>> some(["a", "b"]), some(list("abcdefghijk"))
    ("['a', 'b']", "['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] and 3 more")
    """
    rest = len(ids) - NAMED
    return str(list(ids)) if rest <= 0 else f"{list(ids[:NAMED])} and {rest} more"
