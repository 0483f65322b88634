"""Printing with rich to a reader that may go, as ``| head`` does."""

from __future__ import annotations

from rich.console import Console

from fedsel_flwr.report.pipes import fall_silent


class PipedConsole(Console):
    """rich's console, which ends the program where its reader has gone; this one falls silent, and the run goes on."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        fall_silent()
