"""The journal of a run: each finished round as one line of JSON, written as it ends.

A run that is cut off leaves its journal; one that ends well has Parquet files in its place. A line that was being
written when the process died is passed over: the rounds before it are whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fedsel_flwr.errors import ParameterError, RunError

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord

JOURNAL = "journal.jsonl"


class Journal:
    """Writes a run's rounds.

    Args:
        folder: The run's; a journal that is there is begun anew.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._rows = 0
        try:
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise RunError(f"the journal {str(self.path)!r} cannot be begun: {error.strerror}") from error

    def write(self, record: RoundRecord, clients: Sequence[ClientRecord]) -> None:
        """Add a finished round.

        Args:
            record: The round.
            clients: The clients of all rounds so far; those of this round are the last ones.

        Raises:
            RunError: The disk is full, or otherwise refuses.
        """
        line = json.dumps({"round": asdict(record), "clients": [asdict(row) for row in clients[self._rows :]]})
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"round {record.round} cannot be written to {str(self.path)!r}: {error.strerror}; the rounds before it "
                "are there"
            ) from error
        self._rows = len(clients)

    def close(self) -> None:
        """Write nothing more; the file stays."""
        try:
            self._file.close()
        except OSError:  # what could not be written has been told
            return

    def remove(self) -> None:
        """Close and delete the file, whose content stands elsewhere now."""
        self.close()
        self.path.unlink(missing_ok=True)


def read_journal(folder: Path) -> History:
    """Read the rounds that were finished.

    Args:
        folder: The run's folder.

    Returns:
        The history, without a line that was cut off at the end.

    Raises:
        ParameterError: There is no journal, or a line before the last is damaged.
    """
    from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord

    path, history = folder / JOURNAL, History()
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ParameterError(f"{str(folder)!r} holds no journal: {error.strerror}") from error
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break was cut off
        try:
            said = json.loads(line)
            history.rounds.append(RoundRecord(**said["round"]))
            history.clients.extend(ClientRecord(**row) for row in said["clients"])
        except (ValueError, KeyError, TypeError) as error:
            raise ParameterError(f"line {number} of {str(path)!r} is no round: {error}") from error
    return history
