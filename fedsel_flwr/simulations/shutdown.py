"""Shutdown after Ctrl-C or SIGTERM: kill all child processes at once, and keep the files that a resumed run needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from fedsel_flwr.operating_system import signals_reach_pipes
from fedsel_flwr.rounds.storage import WRITING, remove_unfinished

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAIN_THREAD_S = 1.5
"""Seconds that the main thread has to notice a signal. After that, another thread shuts down in its place."""
SHUTDOWN_LIMIT_S = 7.0
"""Longest shutdown, in seconds. After that, every process is killed without the caller's message."""
KILL_LIMIT_S = 2.0
"""Longest wait for killed processes to end, in seconds."""
WRITE_LIMIT_S = 1.0
"""Longest wait for a write that has begun, in seconds."""
POLL_S = 0.05
"""Seconds between two checks of processes that are ending."""
RESTORE_S = 0.01
"""Seconds between two restorations of the system's action on SIGTERM."""
ACTION_BYTES = 1024
"""Size of a buffer for ``struct sigaction``, larger than on any system."""
_ENDING = threading.Lock()
"""Held by the thread that ends this process."""


class SignalShutdown:
    """Handler of Ctrl-C and SIGTERM: it kills all child processes and then ends this process.

    The signal's handler does everything. An exception would first have to pass through Flower's own shutdown. On a busy
    machine that waits long for Ray's dead workers. Flower's server thread has no way to stop it from outside.

    Python runs handlers in the main thread, but not while a library works there. Therefore a listener thread receives
    each signal at once. If the main thread does not react in time, the listener shuts down in its place.

    Args:
        on_signal: Function called first. A second signal does not interrupt it.
        message: Function that returns the last line on standard error.
        status: The exit status.

    Attributes:
        folder: Folder from which unfinished files are removed. If None, no files are removed.
    """

    def __init__(self, on_signal: Callable[[], None], message: Callable[[], str], status: int) -> None:
        self.on_signal, self.message = on_signal, message
        self.folder: Path | None = None
        self._status, self._seen = status, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[SignalShutdown]:
        """Yield this handler, whose attributes may be changed, and listen for signals within the block."""
        # Python allows only the main thread to set handlers.
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        try:
            with self._listener_thread() if signals_reach_pipes() else contextlib.nullcontext():
                yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextlib.contextmanager
    def _listener_thread(self) -> Iterator[None]:
        """Run the listener thread. Python's C handler writes the number of each signal to its pipe."""
        read, write = os.pipe()
        # The C handler must never wait, so Python refuses a wake-up descriptor that blocks.
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
            # The listener stops at the end of the pipe. If it finds a signal before that, it ends this process.
            listener.join()
            os.close(read)

    def _handle(self, *_: object) -> None:
        """Handle a signal in the main thread."""
        # A second signal interrupts this function. Returning continues the shutdown that has begun.
        if self._seen:
            return
        self._seen = True
        self._shut_down()
        # The listener is already shutting down. This thread waits, because returning would let the program continue.
        while True:
            time.sleep(1.0)

    def _listen(self, read: int, restore: Callable[[], object]) -> None:
        """Wait for a signal in the listener thread, and make sure that it is handled."""
        heard = b""
        # Other signals, such as the resizing of a terminal, pass through the same pipe.
        while not heard or heard[0] not in map(int, SIGNALS):
            # Only Ray resets the action on SIGTERM.
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
            # The system may have delivered the signal to any thread. A signal to the main thread interrupts a system
            # call there, and Python then runs the handler. It is SIGINT, because Ray may just have reset SIGTERM.
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        # The main thread is inside a library, or is already shutting down.
        self._shut_down()
        limit.join()

    def _shut_down(self) -> None:
        end_process(self.message, self._status, self.on_signal, self.folder)


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
    stderr = os.dup(2)
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


def _keeper_of_sigterm() -> Callable[[], object]:
    """Return a function that restores the system's current action on SIGTERM.

    When Ray ends, its C++ code resets the action to the default without Python's knowledge, and then takes a second or
    more. A signal in that time would end the process silently.
    """
    # The C function is called, because signal.signal works only in the main thread, which is inside Ray.
    sigaction = ctypes.CDLL(None).sigaction
    action = ctypes.create_string_buffer(ACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, action)
    return lambda: sigaction(int(signal.SIGTERM), action, None)


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
            # The resource trackers of Python and loky end with their parent, which needs them.
            elif not any(".resource_tracker import main" in part for part in process.cmdline()):
                process.kill()
                count += 1
    return count
