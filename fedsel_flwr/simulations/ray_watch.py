"""Noticing that Ray has died: Ray itself waits for a minute, and then ends the process without a word on the run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import TracebackType
from typing import Any

import psutil

from fedsel_flwr.errors import RunError
from fedsel_flwr.simulations.cluster import knock
from fedsel_flwr.simulations.processes import PILLARS, name_of

PERIOD_S = 0.3
GRACE_S = 20.0
"""So long may Flower take to end after Ray's death; then the process ends, as Ray would end it."""
SILENT_S = 5.0
"""So long may the head of a cluster be out of reach."""
EXIT_DEAD = 2
"""The exit status where Flower does not come to its end."""


class Watch:
    """Looks after Ray's processes from a thread of its own, while the block lasts.

    Args:
        address: Of the cluster that was joined; None for Ray's processes that this process has started. Of those that
            are left when one has died, the others are ended: whoever waits for a worker then hears of its end.
    """

    def __init__(self, address: str | None) -> None:
        self._address = None if address is None else _head(address)
        self._said = ""
        self._over, self._closed = threading.Event(), threading.Event()
        self._workers: set[psutil.Process] = set()
        self._pillars = [] if address else [p for p in psutil.Process().children() if name_of(p) in PILLARS]
        self._thread = threading.Thread(target=self._look, name="ray-watch", daemon=True)

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        self._over.set()
        self._closed.set()

    @property
    def died(self) -> bool:
        """Whether Ray has died."""
        return bool(self._said)

    def over(self) -> None:
        """Ray may end from now on."""
        self._over.set()

    def check(self) -> None:
        """Raise :class:`RunError` if Ray has died."""
        if self._said:
            raise RunError(self._said)

    def _look(self) -> None:
        silent = 0.0
        while not self._over.wait(PERIOD_S):
            if self._address is None:
                for raylet in self._pillars:
                    with contextlib.suppress(psutil.Error):
                        self._workers |= set(raylet.children(recursive=True))
                dead = [name_of(process) or "a process of it" for process in self._pillars if not _alive(process)]
                if dead:
                    return self._end(f"Ray died ({' and '.join(dead)} ended; was it killed, or memory short?)")
            else:
                try:
                    knock(self._address)
                    silent = 0.0
                except OSError as error:
                    silent += PERIOD_S
                    if silent >= SILENT_S or isinstance(error, ConnectionRefusedError):
                        return self._end(f"the head of the Ray cluster at {self._address} is gone ({error})")

    def _end(self, said: str) -> None:
        if self._over.is_set():
            return
        self._said = said
        for process in (*self._pillars, *self._workers):
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not self._closed.wait(GRACE_S):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os.write(2, f"fedsel: error: {said}; the process ends, as Flower waits for it\n".encode())
            os._exit(EXIT_DEAD)


def _head(address: str) -> str:
    """HOST:PORT of the head, which "auto" does not say."""
    if address != "auto":
        return address
    import ray

    context: Any = ray.get_runtime_context()
    return str(context.gcs_address)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
