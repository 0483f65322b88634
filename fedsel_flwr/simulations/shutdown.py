"""Shutdown after Ctrl-C or SIGTERM: kill all child processes at once, and keep the files that a resumed run needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedsel_flwr.rounds.storage import WRITING, remove_unfinished

SHUTDOWN_LIMIT_S = 7.0
"""Longest shutdown, in seconds. After that, every process is killed without the caller's message."""
KILL_LIMIT_S = 2.0
"""Longest wait for killed processes to end, in seconds."""
WRITE_LIMIT_S = 1.0
"""Longest wait for a write that has begun, in seconds."""
POLL_S = 0.05
"""Seconds between two checks of processes that are ending."""
_ENDING = threading.Lock()
"""Held by the thread that ends this process."""
# Linux's number for this option in <sys/prctl.h>, for which Python has no name.
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class SignalShutdown:
    """Handler of a signal: it kills all child processes and then ends this process.

    The signal's handler does everything. An exception would first have to pass through Flower's own shutdown. On a busy
    machine that waits long for Ray's dead workers. Flower's server thread has no way to stop it from outside. Python
    runs handlers in the main thread, when a library that works there returns.

    Attributes:
        on_signal: Function called first. A second signal does not interrupt it.
        message: Function that returns the last line on standard error.
        status: The exit status.
        folder: Folder from which unfinished files are removed. If None, no files are removed.
    """

    on_signal: Callable[[], None]
    message: Callable[[], str]
    status: int
    folder: Path | None = None
    _seen: bool = False

    def __call__(self, *_: object) -> None:
        """Handle a signal; a second signal lets the shutdown continue that has begun."""
        if self._seen:
            return
        self._seen = True
        end_process(self.message, self.status, self.on_signal, self.folder)
        # Another thread is ending this process. Returning would let the program continue.
        while True:
            time.sleep(1.0)


@contextlib.contextmanager
def shutdown_on_signal(
    on_signal: Callable[[], None], message: Callable[[], str], status: int
) -> Iterator[SignalShutdown]:
    """Shut this process and its children down if Ctrl-C or SIGTERM comes within the block.

    Args:
        on_signal: Function called first. A second signal does not interrupt it.
        message: Function that returns the last line on standard error.
        status: The exit status.

    Yields:
        The handler. Its attributes may be changed within the block.
    """
    shutdown = SignalShutdown(on_signal, message, status)
    # Python allows only the main thread to set handlers.
    in_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, shutdown) for each in (signal.SIGINT, signal.SIGTERM) if in_main}
    try:
        yield shutdown
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def end_process(
    message: Callable[[], str], status: int, first: Callable[[], None] = lambda: None, folder: Path | None = None
) -> None:
    """Kill all child processes and end this process; return at once if another thread is ending it.

    Args:
        message: Function that returns the last line on standard error, called after the child processes have ended.
        status: The exit status.
        first: Function called before anything else.
        folder: Folder from which unfinished files are removed. If None, no files are removed.
    """
    if not _ENDING.acquire(blocking=False):
        return
    stderr = os.dup(2)
    late = "fedsel: interrupted; the remaining processes were killed"
    limit = threading.Timer(SHUTDOWN_LIMIT_S, _exit, [late, status, stderr])
    limit.daemon = True
    limit.start()
    # From here on no thread writes a round. Otherwise Flower's server thread could write one that the message does not
    # count, or one whose clients are killed below.
    WRITING.acquire(timeout=WRITE_LIMIT_S)
    # Nothing may prevent the end of this process, not even a broken progress display.
    with contextlib.suppress(Exception):
        first()
    # os._exit flushes nothing. The RuntimeError comes if the signal interrupted a write to this buffer.
    with contextlib.suppress(RuntimeError, OSError):
        sys.stdout.flush()
    # Ray's C++ code in this process prints a complaint for each of its processes that ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    end_descendants()
    # Done after the children have ended, because they may have been writing there.
    for place, _, _ in os.walk(folder) if folder is not None else ():
        remove_unfinished(Path(place))
    # The message may read a file that is half written, or need an import that is half finished.
    try:
        line = message()
    except Exception as error:
        line = f"fedsel: interrupted ({type(error).__name__})"
    _exit(line, status, stderr)


def _exit(line: str, status: int, stderr: int) -> None:
    # Write to the descriptor, because the signal may have interrupted a write to sys.stderr. The reader may be gone.
    with contextlib.suppress(OSError):
        os.write(stderr, f"{line}\n".encode())
    _kill_descendants()
    # Not sys.exit, because it would wait for threads and exit handlers of Flower and Ray.
    os._exit(status)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that :func:`end_descendants` finds them (Linux only).

    Ray's workers outlive the raylet that started them, for seconds on a busy machine.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> int:
    """Kill all child processes of this process and their descendants, and wait until they have ended.

    Returns:
        Number of these processes.
    """
    first, deadline = _kill_descendants(), time.monotonic() + KILL_LIMIT_S
    # Repeated, because a process may have started another one before it ended.
    while time.monotonic() < deadline and _kill_descendants():
        time.sleep(POLL_S)
    return first


def _kill_descendants() -> int:
    """Kill all descendants of this process; return the number of those that were still running."""
    count = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                # Collects the exit status of a child. Other descendants have another parent, which collects theirs.
                process.wait(0)
            elif not _is_tracker(process):
                process.kill()
                count += 1
    return count


def _is_tracker(process: psutil.Process) -> bool:
    """Return whether this is the resource tracker of Python or loky; they end with their parent, which needs them."""
    return any(".resource_tracker import main" in part for part in process.cmdline())
