"""Glossary of the pages: the words that a chart or a table needs, and a line about each selector.

A selector's line is the summary of its class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsel_flwr.report.sweeps import selector_of
from fedsel_flwr.selectors.registry import describe, names

WORDS_OF_FAILURES = {
    "timeout": "no answer in time", "late": "the update came after max_latency or the round's deadline",
    "exception": "an error in the client's training", "unavailable": "the message could not be delivered",
    "model": "the arrays cannot be used, for example because they are not finite",
    "metrics": "the metrics cannot be used", "dropout": "the client was lost during the round", "other": "all others",
}  # fmt: skip
"""Reason of failure -> explanation."""
CEILING = (
    "Ceiling: what sorted groups save, the most that is possible if all clients are selected equally often. A selector "
    "that prefers fast clients can save more. Its share of the ceiling is then above 100 %."
)
JAIN = (
    "Jain's index: 1 if all clients are selected equally often. If one of n clients is selected always, and the others "
    "never, it is 1/n."
)


def words_of_comparison(window: int, max_latency_s: float) -> list[tuple[str, str]]:
    """Return the words of a comparison's page, each with its meaning.

    Args:
        window: Number of measured rounds whose mean accuracy must reach the target.
        max_latency_s: Seconds after which an update is late; NaN if it is unknown.
    """
    limit = f" ({max_latency_s:g} s)" if math.isfinite(max_latency_s) else ""
    return [
        ("target", f"The accuracy that a run must reach. The mean of {window} measured rounds must reach it, so that "
                   "one lucky round does not count."),
        ("failed", "A selected client without a usable update in time. Its latency counts as max_latency."),
        ("late", f"A failed client whose update would come after max_latency{limit}."),
        ("crashed, lost", "A failed client that stopped during the round, or whose update got lost."),
        ("Jain's index", "1 if all clients are selected equally often. If one of n clients is selected always, and the "
                         "others never, it is 1/n."),
        ("worst tenth", "The tenth of the clients on whose data the model has the lowest accuracy."),
        ("clients asked", "Selected and probed clients. A probe asks a client for a value before the selection."),
        ("probes", "The seconds of a round for the probes. Most selectors have none."),
        ("p (Holm)", "The p-value after Holm's correction for the number of compared selectors."),
        ("ceiling", "In fedsel advise: what sorted groups of clients save, the most with equal shares of the clients."),
    ]  # fmt: skip


def selector_summaries(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the labels of known selectors, each with the summary of its class.

    >>> selector_summaries(["round-robin", "mine"])[0][0]
    'round-robin'
    >>> len(selector_summaries(["round-robin", "mine"]))
    1
    """
    known = set(names())
    found = ((label, selector_of(label)) for label in labels)
    return [(label, str(describe(name).get("summary", "-"))) for label, name in found if name in known]
