"""Saying what is waited for, with the seconds: only where it takes time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

AFTER_S = 1.0
"""What takes less is not told."""


class Waiting:
    """Tell that something starts, and how long it took.

    On a terminal the seconds run in one line. Elsewhere there are two lines, one at the start and one at the end.

    Args:
        what: What is waited for, for example "Starting Ray".
        there: What is said at the end, before the seconds.
        tell: Takes the running text in place of standard error, once a second ("Starting Ray, 3 s"), and nothing at
            the end.
        quiet: Say nothing.

    Example::

        with Waiting("Starting Ray", "Ray started"):
            ray.init()
    """

    def __init__(
        self, what: str, there: str, *, tell: Callable[[str], None] | None = None, quiet: bool = False
    ) -> None:
        self._what, self._there, self._tell, self._quiet = what, there, tell, quiet
        self._over, self._turn = threading.Event(), threading.Lock()
        self._told, self._began = False, 0.0

    def __enter__(self) -> Waiting:
        """Begin."""
        self._began = time.monotonic()
        if not self._quiet:
            threading.Thread(target=self._run, name="waiting", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, if :meth:`done` has not; after an error only the line is closed."""
        self._end("" if kind else self._there)

    def done(self) -> None:
        """It is there."""
        self._end(self._there)

    def _run(self) -> None:
        while not self._over.wait(AFTER_S):
            with self._turn:
                if not self._over.is_set():
                    self._say(int(time.monotonic() - self._began))

    def _say(self, seconds: int) -> None:
        if self._tell:
            self._tell(f"{self._what}, {seconds} s")
        elif _terminal():
            self._write(f"\r{self._what} ... {seconds} s")
        elif not self._told:
            self._write(f"{self._what} ...\n")
        self._told = True

    def _end(self, there: str) -> None:
        with self._turn:
            if self._over.is_set():
                return
            self._over.set()
            if not self._told or self._tell:
                return
            begin = "\r\x1b[K" if _terminal() else ""
            said = f"{there} in {time.monotonic() - self._began:.1f} s\n" if there else ""
            self._write(begin + said)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it
            return


def _terminal() -> bool:
    return bool(sys.stderr and sys.stderr.isatty())
