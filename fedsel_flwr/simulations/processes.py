"""Leaving no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Sequence

import psutil

_PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
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
    alive = _still_running(descendants, grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _still_running(alive, grace_s)
    return len(descendants)


def _still_running(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for the end of processes; return those that still run after so many seconds.

    A dead one whose parent is frozen stays a zombie, and is not waited for.
    """
    deadline, alive = time.monotonic() + timeout_s, list(processes)
    while (alive := [process for process in alive if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        process.wait(0)  # a child's status is taken, so that it is gone
    except psutil.TimeoutExpired:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


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
