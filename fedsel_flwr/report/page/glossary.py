"""Glossary of the pages: the words that a chart or a table needs, and a line about each selector.

A selector's line is the summary of its class.
"""

from __future__ import annotations

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
