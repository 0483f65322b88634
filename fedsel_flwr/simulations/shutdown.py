"""Shut down at once after Ctrl-C or SIGTERM: end every child process, and leave only what a run can be resumed from."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from fedsel_flwr.rounds.storage import TEMPORARY

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RAY_SERVERS = ("raylet", "gcs_server")
"""Ray's two processes on which all its others depend; children of the process that started Ray."""
MAIN_THREAD_S = 1.5
"""Seconds that the main thread has to notice a signal before another thread shuts down in its place."""
SHUTDOWN_LIMIT_S = 7.0
"""Longest shutdown, seconds; then every process is killed and no message of the caller's is printed."""
POLL_S = 0.05
"""Seconds between two looks at processes that are ending."""
RESTORE_S = 0.005
"""Seconds between two restorations of the handler of SIGTERM while Ray ends."""
ACTION_BYTES = 1024
"""Size of a buffer for ``struct sigaction``; more than any system's has."""
UNFINISHED = re.compile(r"\..+-[a-z0-9_]{8}")
"""Folders in which :func:`fedsel_flwr.report.run_folder.atomic_write` writes a file."""
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
    """Ends the processes that this one started, then this one, when a signal comes.

    Everything is done in the signal's handler. An exception would first have to pass Flower's orderly end, which on a
    busy machine waits long for Ray's dead workers. Flower's server thread cannot be asked to stop.

    Python runs handlers in the main thread. That thread sees a signal only if the system delivers it there, and not
    while a library works. So a listener thread hears of each signal at once and wakes the main thread. If the main
    thread does not answer, a third thread shuts down in its place.

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
        self._status, self._turn, self._begun = status, threading.Lock(), threading.Event()
        self._over = self._seen = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[SignalShutdown]:
        """Listen while the block lasts; only the main thread can."""
        before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        try:
            # Windows takes only sockets for waking up, and has no pthread_kill.
            with contextlib.nullcontext() if os.name == "nt" else self._listener_thread():
                yield self
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
        threading.Thread(target=self._listen, args=(read,), name="signal-listener", daemon=True).start()
        try:
            yield
        finally:
            self._over = True
            signal.set_wakeup_fd(earlier)
            # The listener reads the end of the pipe and closes its own side: closed here, it could be reused while
            # the thread still reads from it.
            os.close(write)

    def _handle(self, *_: object) -> None:
        """Handle a signal in the main thread."""
        # A second signal interrupts this very function: it returns to the shutdown under way.
        if self._seen:
            return
        self._seen = True
        self._shut_down()
        # Another thread shuts down already. Returning would let the program run on meanwhile.
        while True:
            time.sleep(1.0)

    def _listen(self, read: int) -> None:
        """Wait for a signal in the listener thread, and make sure that it is handled."""
        # Other signals, such as a terminal's resizing, pass through the same pipe.
        while heard := os.read(read, 1):
            if heard[0] in map(int, SIGNALS):
                break
        if not heard or self._over:
            os.close(read)
            return
        deadline = time.monotonic() + MAIN_THREAD_S
        while time.monotonic() < deadline and not self._begun.wait(0.1):
            main = threading.main_thread().ident
            # The system may have given the signal to any thread. Sent to the main one, it interrupts a system call
            # there, after which Python runs the handler.
            if main is not None and not self._begun.is_set():
                signal.pthread_kill(main, heard[0])
        # The main thread is inside a library. Another thread shuts down, so that this one can watch the time.
        if not self._begun.is_set():
            threading.Thread(target=self._shut_down, name="signal-shutdown", daemon=True).start()
        time.sleep(SHUTDOWN_LIMIT_S)
        self._exit("fedsel: interrupted; what was left has been killed", [])

    def _shut_down(self) -> None:
        """Stop the children, clean up and exit; the second thread that calls this returns at once."""
        if not self._turn.acquire(blocking=False):
            return
        self._begun.set()
        # Ray's threads in this process end it with a status of their own as soon as the raylet is gone. Frozen servers
        # keep their sockets open, so they are frozen first and killed last.
        servers = [child for child in psutil.Process().children() if process_name(child) in RAY_SERVERS]
        for server in servers:
            with contextlib.suppress(psutil.Error):
                server.suspend()
        # Nothing may keep this process from ending, a progress display that breaks included.
        with contextlib.suppress(Exception):
            self.on_signal()
        # os._exit flushes nothing. The signal may have come while this very buffer was being written to: that is the
        # RuntimeError.
        with contextlib.suppress(RuntimeError, OSError):
            sys.stdout.flush()
        end_descendants(grace_s=2.0, keep=servers)
        # After the children: they may have been writing there.
        if self.folder is not None:
            remove_unfinished(self.folder)
        self._exit(self._last_line(), servers)

    def _last_line(self) -> str:
        # The message reads files of the run, one of which may be half written, and may need a half-finished import.
        try:
            return self.message()
        except Exception as error:
            return f"fedsel: interrupted ({type(error).__name__})"

    def _exit(self, line: str, servers: list[psutil.Process]) -> None:
        # The descriptor itself: the signal may have interrupted a write to sys.stderr. The reader may be gone.
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
        with contextlib.suppress(psutil.Error):
            for process in servers or psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        # Not sys.exit: it would wait for threads and exit handlers of Flower and Ray.
        os._exit(self._status)


@contextlib.contextmanager
def keep_sigterm_while_ray_starts() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM within the block, in which Ray starts and would replace it.

    Ray's handler ends the process with the signal's number, before any message can be printed. If the caller has no
    handler, Ray's stays.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    from ray._private import utils

    # Restoring the handler afterwards is not enough: a signal may come while Ray starts, which takes seconds.
    theirs = getattr(utils, "set_sigterm_handler", None)
    if theirs is not None:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        if theirs is not None:
            utils.set_sigterm_handler = theirs
        # For versions of Ray that set it in another way.
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def keep_sigterm_while_ray_ends() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM in force within the block, in which Ray ends.

    Ray's C++ resets the handler to the default without Python's knowledge, and then needs a second or more to end. A
    signal in that time would end the process silently. So another thread restores the handler every few milliseconds,
    as long as the caller has one.
    """
    if os.name == "nt" or not callable(signal.getsignal(signal.SIGTERM)):
        yield
        return
    # The C function: signal.signal works in the main thread only, which is inside Ray.
    sigaction = ctypes.CDLL(None).sigaction
    action = ctypes.create_string_buffer(ACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, action)
    over = threading.Event()

    def restore() -> None:
        # Not after the caller has given up its handler within the block.
        if callable(signal.getsignal(signal.SIGTERM)):
            sigaction(int(signal.SIGTERM), action, None)

    def keep() -> None:
        while not over.wait(RESTORE_S):
            restore()

    keeper = threading.Thread(target=keep, name="sigterm-keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        # Ray may have reset it between the thread's last look and now.
        restore()


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that :func:`end_descendants` finds them (Linux only).

    Ray's workers outlive the raylet that started them, on a busy machine for seconds.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 5.0, keep: Sequence[psutil.Process] = ()) -> int:
    """End every process that this one started, directly or not (Ray's raylet, GCS and workers).

    Args:
        grace_s: Seconds between asking a process to end and killing it.
        keep: Processes that stay.

    Returns:
        How many processes there were.
    """
    there = psutil.Process().children(recursive=True)
    descendants = [process for process in there if process not in keep and not _is_tracker(process)]
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    alive = _wait_for_end(descendants, grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_end(alive, grace_s)
    return len(descendants)


def _wait_for_end(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for the end of processes; return those that still run after the timeout."""
    deadline, alive = time.monotonic() + timeout_s, list(processes)
    while (alive := [process for process in alive if _is_running(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return alive


def _is_running(process: psutil.Process) -> bool:
    """Tell whether a process runs; one that has ended but whose parent is frozen stays a zombie, and does not count."""
    try:
        # Takes a child's exit status, without which it would stay a zombie.
        process.wait(0)
    except psutil.TimeoutExpired:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _is_tracker(process: psutil.Process) -> bool:
    """Tell whether this is Python's resource tracker, or loky's: they end with their parent, which still needs them."""
    with contextlib.suppress(psutil.Error):
        return any(".resource_tracker import main" in part for part in process.cmdline())
    return False


def process_name(process: psutil.Process) -> str:
    """Return a process's name; empty if it is gone."""
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


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
