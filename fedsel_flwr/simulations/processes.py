"""Leaving no process behind, at the end of a run and when it is broken off."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that :func:`end_descendants` finds them (Linux only).

    Ray's workers outlive the raylet that started them, on a busy machine for seconds.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 5.0) -> int:
    """End every process that this one started, directly or not (Ray's raylet, GCS and workers).

    Args:
        grace_s: Seconds between asking a process to end and killing it.

    Returns:
        How many processes there were.
    """
    descendants = [process for process in psutil.Process().children(recursive=True) if not _is_tracker(process)]
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(descendants, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    return len(descendants)


@contextlib.contextmanager
def leaving_at_once(last: Callable[[], None], message: Callable[[], str], status: int) -> Iterator[None]:
    """After Ctrl-C or SIGTERM within the block: end the processes that this one started, then this one.

    In the signal's handler, for an exception would first have to pass Flower's orderly end, which on a busy machine
    waits long for Ray's dead workers; and Flower's server thread cannot be asked to stop.

    Args:
        last: Called first, in the handler; a second signal does not disturb it.
        message: Says, when it is over, the last line on standard error.
        status: The exit status.
    """
    signals = (signal.SIGINT, signal.SIGTERM)

    def leave(*_: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        last()
        end_descendants(grace_s=2.0)
        with contextlib.suppress(RuntimeError, OSError):  # the signal came while it was being written to
            sys.stdout.flush()
        os.write(2, f"{message()}\n".encode())
        os._exit(status)

    previous = {each: signal.signal(each, leave) for each in signals}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _is_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which ends with its parent, and which the parent still needs."""
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    return False
