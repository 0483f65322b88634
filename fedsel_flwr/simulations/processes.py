"""Leaving no process behind, at the end of a run and when it is broken off."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import psutil

_PR_SET_CHILD_SUBREAPER = 36
PILLARS = ("raylet", "gcs_server")
"""Ray's two processes that everything else of Ray hangs on; children of the process that started Ray."""


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that :func:`end_descendants` finds them (Linux only).

    Ray's workers outlive the raylet that started them, on a busy machine for seconds.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 5.0, but: Sequence[psutil.Process] = ()) -> int:
    """End every process that this one started, directly or not (Ray's raylet, GCS and workers).

    Args:
        grace_s: Seconds between asking a process to end and killing it.
        but: These stay.

    Returns:
        How many processes there were.
    """
    there = psutil.Process().children(recursive=True)
    descendants = [process for process in there if process not in but and not _is_tracker(process)]
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

    Ray's threads in this process end it with a status of their own as soon as the raylet is gone. So the raylet and the
    GCS are frozen first, and end last, when everything is said and this process leaves.

    Args:
        last: Called first, in the handler; a second signal does not disturb it.
        message: Says, when it is over, the last line on standard error.
        status: The exit status.
    """
    signals = (signal.SIGINT, signal.SIGTERM)

    def leave(*_: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        pillars = [child for child in psutil.Process().children() if name_of(child) in PILLARS]
        for pillar in pillars:
            with contextlib.suppress(psutil.Error):
                pillar.suspend()
        with contextlib.suppress(Exception):  # nothing keeps this process; a display that breaks does not either
            last()
        with contextlib.suppress(RuntimeError, OSError):  # the signal came while it was being written to
            sys.stdout.flush()
        end_descendants(grace_s=2.0, but=pillars)
        with contextlib.suppress(OSError):  # nobody listens
            os.write(2, f"{message()}\n".encode())
        for pillar in pillars:
            with contextlib.suppress(psutil.Error):
                pillar.kill()
        os._exit(status)

    previous = {each: signal.signal(each, leave) for each in signals}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def name_of(process: psutil.Process) -> str:
    """A process's name; empty if it is gone."""
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def _is_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, or loky's: they end with their parent, and it still needs them."""
    with contextlib.suppress(psutil.Error):
        return any(".resource_tracker import main" in part for part in process.cmdline())
    return False
