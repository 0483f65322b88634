"""Leaving no process behind."""

from __future__ import annotations

import contextlib

import psutil


def end_descendants(grace_s: float = 5.0) -> int:
    """End every process that this one started, directly or not (Ray's raylet, GCS and workers).

    Args:
        grace_s: Seconds between asking a process to end and killing it.

    Returns:
        How many processes there were.
    """
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(descendants, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    return len(descendants)
