"""Telling, while a comparison runs, how far it is."""

from __future__ import annotations

from collections.abc import Callable

from fedsel_flwr.rounds.history import History, RoundRecord

StartRun = Callable[[str, int], None]
"""Told the label and the rounds of a run that starts."""
Update = Callable[[RoundRecord, int], None]
"""Told a finished round, and how many clients have failed so far."""


def telling(
    label: str, rounds: int, start_run: StartRun | None, update: Update | None
) -> Callable[[RoundRecord], None]:
    """Tell that a run starts; return what tells each of its rounds, together with the failed clients so far."""
    failed = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal failed
        failed += record.num_selected - record.num_completed
        if update:
            update(record, failed)

    if start_run:
        start_run(label, rounds)
    return on_round


def tell_last(history: History, update: Update) -> None:
    """Tell the last round of a run that was over before."""
    if history.rounds:
        update(history.rounds[-1], sum(record.num_selected - record.num_completed for record in history.rounds))
