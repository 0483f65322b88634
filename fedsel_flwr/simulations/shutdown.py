"""Shut down at once after Ctrl-C or SIGTERM: kill all child processes, leave only what a run can be resumed from."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from fedsel_flwr.rounds.storage import TEMPORARY

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAIN_THREAD_S = 1.5
"""Seconds that the main thread has to notice a signal before another thread shuts down in its place."""
SHUTDOWN_LIMIT_S = 7.0
"""Longest shutdown, seconds; then every process is killed and no message of the caller's is printed."""
KILL_LIMIT_S = 2.0
"""Longest wait for the end of killed processes, seconds."""
POLL_S = 0.05
"""Seconds between two looks at processes that are ending."""
RESTORE_S = 0.01
"""Seconds between two restorations of the system's action on SIGTERM."""
ACTION_BYTES = 1024
"""Size of a buffer for ``struct sigaction``; more than any system's has."""
UNFINISHED = re.compile(r"\..+-[a-z0-9_]{8}")
"""Folders in which :func:`fedsel_flwr.report.run_folder.atomic_write` writes a file."""
_ENDING = threading.Lock()
"""Held by the thread that ends this process."""
# Linux's number of the option in <sys/prctl.h>; Python has no name for it.
_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def shutdown_on_signal(
    on_signal: Callable[[], None], message: Callable[[], str], status: int
) -> Iterator[SignalShutdown]:
    """Shut this process and its children down after Ctrl-C or SIGTERM within the block.

    Args:
        on_signal: Called first; a second signal does not disturb it.
        message: Returns the last line on standard error.
        status: The exit status.

    Yields:
        The handler, whose attributes may be changed within the block.
    """
    shutdown = SignalShutdown(on_signal, message, status)
    # Python allows only the main thread to set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return
    with shutdown.listening():
        yield shutdown


class SignalShutdown:
    """Kills the processes that this one started, then ends this one, when a signal comes.

    Everything is done in the signal's handler. An exception would first have to pass Flower's orderly end, which on a
    busy machine waits long for Ray's dead workers. Flower's server thread cannot be asked to stop.

    Python runs handlers in the main thread, and not while a library works there. So a listener thread hears of each
    signal at once. If the main thread does not answer in time, the listener shuts down in its place.

    Args:
        on_signal: As the attribute.
        message: As the attribute.
        status: The exit status.

    Attributes:
        on_signal: Called first; a second signal does not disturb it.
        message: Returns the last line on standard error.
        folder: Folder from which unfinished files are removed; None removes none.
    """

    def __init__(self, on_signal: Callable[[], None], message: Callable[[], str], status: int) -> None:
        self.on_signal, self.message = on_signal, message
        self.folder: Path | None = None
        self._status, self._seen = status, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the block lasts; only the main thread can."""
        before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        try:
            # Windows takes only sockets for waking up, and has no pthread_kill.
            with contextlib.nullcontext() if os.name == "nt" else self._listener_thread():
                yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextlib.contextmanager
    def _listener_thread(self) -> Iterator[None]:
        """Run the listener thread, to which Python's C handler writes the number of each signal."""
        read, write = os.pipe()
        # The C handler must never wait: Python refuses a wake-up descriptor that blocks.
        os.set_blocking(write, False)
        earlier = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        listener = threading.Thread(
            target=self._listen, args=(read, _keeper_of_sigterm()), name="signal-listener", daemon=True
        )
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            os.close(write)
            # The listener reads the end of the pipe. If a signal came before that, it ends this process.
            listener.join()
            os.close(read)

    def _handle(self, *_: object) -> None:
        """Handle a signal in the main thread."""
        # A second signal interrupts this very function: it returns to the shutdown under way.
        if self._seen:
            return
        self._seen = True
        self._shut_down()
        # The listener shuts down already. Returning would let the program run on meanwhile.
        while True:
            time.sleep(1.0)

    def _listen(self, read: int, restore: Callable[[], object]) -> None:
        """Wait for a signal in the listener thread, and make sure that it is handled."""
        heard = b""
        # Other signals, such as a terminal's resizing, pass through the same pipe.
        while not heard or heard[0] not in map(int, SIGNALS):
            # Only Ray takes the action away.
            while not select.select([read], [], [], RESTORE_S if "ray" in sys.modules else POLL_S)[0]:
                if "ray" in sys.modules:
                    restore()
            heard = os.read(read, 1)
            if not heard:
                return
        late = "fedsel: interrupted; the remaining processes were killed"
        limit = threading.Timer(SHUTDOWN_LIMIT_S, _exit, [late, self._status, os.dup(2)])
        limit.daemon = True
        limit.start()
        deadline = time.monotonic() + MAIN_THREAD_S
        main = threading.main_thread().ident
        while main is not None and time.monotonic() < deadline and not _ENDING.locked():
            # The system may have given the signal to any thread. Sent to the main one, it interrupts a system call
            # there, after which Python runs the handler. SIGINT, as Ray may just have taken away the one of SIGTERM.
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        # The main thread is inside a library, or shuts down.
        self._shut_down()
        limit.join()

    def _shut_down(self) -> None:
        end_process(self.message, self._status, self.on_signal, self.folder)


def end_process(
    message: Callable[[], str], status: int, first: Callable[[], None] = lambda: None, folder: Path | None = None
) -> None:
    """Kill all children and end this process; returns at once if another thread is ending it.

    Args:
        message: Returns the last line on standard error; called when the children have ended.
        status: The exit status.
        first: Called before anything else.
        folder: Folder from which unfinished files are removed; None removes none.
    """
    if not _ENDING.acquire(blocking=False):
        return
    # Nothing may keep this process from ending, a progress display that breaks included.
    with contextlib.suppress(Exception):
        first()
    # os._exit flushes nothing. A signal may have come while this very buffer was being written to: that is the
    # RuntimeError.
    with contextlib.suppress(RuntimeError, OSError):
        sys.stdout.flush()
    # Ray's C++ in this process complains about each of its processes that ends.
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    end_descendants()
    # After the children: they may have been writing there.
    if folder is not None:
        remove_unfinished(folder)
    # The message reads files of the run, one of which may be half written, and may need a half-finished import.
    try:
        line = message()
    except Exception as error:
        line = f"fedsel: interrupted ({type(error).__name__})"
    _exit(line, status, stderr)


def _exit(line: str, status: int, stderr: int) -> None:
    # The descriptor itself: a signal may have interrupted a write to sys.stderr. The reader may be gone.
    with contextlib.suppress(OSError):
        os.write(stderr, f"{line}\n".encode())
    _kill_descendants()
    # Not sys.exit: it would wait for threads and exit handlers of Flower and Ray.
    os._exit(status)


def _keeper_of_sigterm() -> Callable[[], object]:
    """Return a function that restores the system's present action on SIGTERM.

    When Ray ends, its C++ resets the action to the default without Python's knowledge, and then needs a second or more.
    A signal in that time would end the process silently.
    """
    # The C function: signal.signal works in the main thread only, which is inside Ray.
    sigaction = ctypes.CDLL(None).sigaction
    action = ctypes.create_string_buffer(ACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, action)
    return lambda: sigaction(int(signal.SIGTERM), action, None)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that :func:`end_descendants` finds them (Linux only).

    Ray's workers outlive the raylet that started them, on a busy machine for seconds.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> int:
    """Kill every process that this one started, directly or not, and wait for their end.

    Returns:
        How many processes there were.
    """
    first, deadline = _kill_descendants(), time.monotonic() + KILL_LIMIT_S
    # More than once: one of them may have started another before its own end.
    while time.monotonic() < deadline and _kill_descendants():
        time.sleep(POLL_S)
    return first


def _kill_descendants() -> int:
    """Kill every process that this one started; return how many still ran."""
    count = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                # Takes a child's exit status; another's is taken by its own parent.
                process.wait(0)
            elif not _is_tracker(process):
                process.kill()
                count += 1
    return count


def _is_tracker(process: psutil.Process) -> bool:
    """Tell whether this is Python's resource tracker, or loky's: they end with their parent, which still needs them."""
    return any(".resource_tracker import main" in part for part in process.cmdline())


def remove_unfinished(folder: Path) -> None:
    """Remove the files in a run's folder that were being written."""
    for place, folders, files in os.walk(folder):
        for name in [name for name in folders if UNFINISHED.fullmatch(name)]:
            shutil.rmtree(Path(place, name), ignore_errors=True)
            # os.walk goes into whatever this list still holds.
            folders.remove(name)
        for name in files:
            if name.endswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    Path(place, name).unlink()
