"""When a failure counts: a client that fails once may only have been unlucky."""

from __future__ import annotations

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.selectors.report import RoundReport

COUNTS_FROM = 2
"""The failure in a row from which on a selector takes it as a property of the client."""


def failed_again(in_a_row: IntArray, report: RoundReport) -> BoolArray:
    """Count failures in a row and say whose failure counts.

    Args:
        in_a_row: Failures in a row by client index, shape (K,); updated in place. An answer sets it to 0, and a spare
            that has not answered leaves it.
        report: A round's report.

    Returns:
        Shape (n,): the rows of clients that failed for at least the second time in a row.

    >>> import numpy as np
    >>> in_a_row = np.zeros(2, dtype=np.int64)
    >>> report = RoundReport(clients=[0, 1], completed=[True, False], latency=[1.0, 9.0])
    >>> [failed_again(in_a_row, report).tolist() for _ in range(2)]
    [[False, False], [False, True]]
    """
    k = report.clients
    in_a_row[k] += report.failed
    in_a_row[k[report.completed]] = 0
    return report.failed & (in_a_row[k] >= COUNTS_FROM)
