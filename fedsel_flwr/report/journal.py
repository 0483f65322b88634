"""The journal of a run: each finished round as one line of JSON, written as it ends.

A run that is cut off leaves its journal; one that ends well has Parquet files in its place. A line that was being
written when the process died is passed over: the rounds before it are whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsel_flwr.errors import ParameterError, StateError

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import History

JOURNAL = "journal.jsonl"
"""What the ledger of a run is called in its folder (:class:`~fedsel_flwr.rounds.history_storage.Ledger`)."""


def read_journal(folder: Path) -> History:
    """Read the rounds that were finished.

    Args:
        folder: The run's folder.

    Returns:
        The history, in memory, without a line that was cut off at the end.

    Raises:
        ParameterError: There is no journal, or a line before the last is damaged.
    """
    from fedsel_flwr.rounds.history import History
    from fedsel_flwr.rounds.history_storage import Ledger

    ledger = Ledger(folder / JOURNAL)
    if not ledger.path.exists():
        raise ParameterError(f"{str(folder)!r} holds no journal: there is no {JOURNAL} in it")
    try:
        ledger.load()
    except StateError as error:
        raise ParameterError(str(error)) from error
    entries = [ledger.entry(line) for line in range(len(ledger))]
    ledger.close()
    return History.of([one.round for one in entries], [row for one in entries for row in one.clients])
