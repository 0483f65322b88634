"""Leaving at once after Ctrl-C or SIGTERM: nothing is left but what a run can be resumed from.

Leaving no process behind.
"""

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


SIGNALS = (signal.SIGINT, signal.SIGTERM)
ACTION_BYTES = 1024
"""More than any system's ``struct sigaction`` has."""
KEEPING_S = 0.005
"""Seconds after which the action on SIGTERM is put back."""
PATIENCE_S = 1.5
"""So long may the main thread take to see a signal; then another thread leaves."""
LONGEST_S = 7.0
"""So long may leaving take; then everything is killed without further words."""
UNFINISHED = re.compile(r"\..+-[a-z0-9_]{8}")
"""Folders in which :func:`fedsel_flwr.report.run_folder.atomic_write` writes a file."""


class Leaving:
    """Ends the processes that this one started, then this one, when a signal comes.

    In the signal's handler, for an exception would first have to pass Flower's orderly end, which on a busy machine
    waits long for Ray's dead workers; and Flower's server thread cannot be asked to stop.

    Python runs handlers in the main thread, which sees a signal only if the system gives it to this thread, and not
    while a library works. So a second thread hears of each signal at once, wakes the main thread, and leaves in its
    place when that does not help.

    Ray's threads in this process end it with a status of their own as soon as the raylet is gone. So the raylet and the
    GCS are frozen first, and end last, when everything is said and this process leaves.

    Args:
        last: As the attribute.
        message: As the attribute.
        status: The exit status.

    Attributes:
        last: Called first; a second signal does not disturb it.
        message: Says, when it is over, the last line on standard error.
        folder: Where unfinished files are removed; None: nowhere.
    """

    def __init__(self, last: Callable[[], None], message: Callable[[], str], status: int) -> None:
        self.last, self.message = last, message
        self.folder: Path | None = None
        self._status, self._turn, self._begun = status, threading.Lock(), threading.Event()
        self._over = self._seen = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[Leaving]:
        """Listen while the block lasts; only the main thread can."""
        before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        try:
            with contextlib.nullcontext() if os.name == "nt" else self._helped():
                yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextlib.contextmanager
    def _helped(self) -> Iterator[None]:
        """With the second thread."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        earlier = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read,), name="leaving", daemon=True).start()
        try:
            yield
        finally:
            self._over = True
            signal.set_wakeup_fd(earlier)
            os.close(write)  # the thread closes the other end

    def _handle(self, *_: object) -> None:
        """In the main thread; a further signal comes in the midst of it."""
        if self._seen:
            return
        self._seen = True
        self._leave()
        while True:  # another thread leaves
            time.sleep(1.0)

    def _listen(self, read: int) -> None:
        """In a thread that waits for nothing else."""
        while heard := os.read(read, 1):
            if heard[0] in map(int, SIGNALS):
                break
        if not heard or self._over:
            os.close(read)
            return
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not self._begun.wait(0.1):
            main = threading.main_thread().ident
            if main is not None and not self._begun.is_set():
                signal.pthread_kill(main, heard[0])
        if not self._begun.is_set():
            threading.Thread(target=self._leave, name="left", daemon=True).start()
        time.sleep(LONGEST_S)
        self._end("fedsel: interrupted; what was left has been killed", [])

    def _leave(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        self._begun.set()
        pillars = [child for child in psutil.Process().children() if name_of(child) in PILLARS]
        for pillar in pillars:
            with contextlib.suppress(psutil.Error):
                pillar.suspend()
        with contextlib.suppress(Exception):  # nothing keeps this process; a display that breaks does not either
            self.last()
        with contextlib.suppress(RuntimeError, OSError):  # the signal came while it was being written to
            sys.stdout.flush()
        end_descendants(grace_s=2.0, but=pillars)
        if self.folder is not None:
            remove_unfinished(self.folder)
        self._end(self._said(), pillars)

    def _said(self) -> str:
        try:
            return self.message()
        except Exception as error:  # a file that is being written
            return f"fedsel: interrupted ({type(error).__name__})"

    def _end(self, said: str, pillars: list[psutil.Process]) -> None:
        with contextlib.suppress(OSError):  # nobody listens
            os.write(2, f"{said}\n".encode())
        with contextlib.suppress(psutil.Error):
            for process in pillars or psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        os._exit(self._status)


@contextlib.contextmanager
def leaving_at_once(last: Callable[[], None], message: Callable[[], str], status: int) -> Iterator[Leaving]:
    """After Ctrl-C or SIGTERM within the block: end the processes that this one started, then this one.

    Args:
        last: Called first; a second signal does not disturb it.
        message: Says, when it is over, the last line on standard error.
        status: The exit status.

    Yields:
        What may be changed on the way: :class:`Leaving`.
    """
    leaving = Leaving(last, message, status)
    if threading.current_thread() is not threading.main_thread():
        yield leaving
        return
    with leaving.listening():
        yield leaving


@contextlib.contextmanager
def own_handlers() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM within the block, in which Ray starts and would replace it.

    Ray's handler ends the process with the signal's number, before anything can be said. If the caller has none, Ray's
    stays.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    from ray._private import utils

    theirs = getattr(utils, "set_sigterm_handler", None)
    if theirs is not None:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        if theirs is not None:
            utils.set_sigterm_handler = theirs
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM in force within the block, in which Ray ends.

    Ray's C++ resets it to the default without Python's knowledge, and then needs a second or more to end. A signal that
    came meanwhile would end the process in silence. So another thread puts it back every few milliseconds, as long as
    the caller has a handler.
    """
    if os.name == "nt" or not callable(signal.getsignal(signal.SIGTERM)):
        yield
        return
    sigaction = ctypes.CDLL(None).sigaction
    action = ctypes.create_string_buffer(ACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, action)
    over = threading.Event()

    def put_back() -> None:
        if callable(signal.getsignal(signal.SIGTERM)):
            sigaction(int(signal.SIGTERM), action, None)

    def keep() -> None:
        while not over.wait(KEEPING_S):
            put_back()

    keeper = threading.Thread(target=keep, name="keeping", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        put_back()


def remove_unfinished(folder: Path) -> None:
    """Remove the files in a run's folder that were being written."""
    for place, folders, files in os.walk(folder):
        for name in [name for name in folders if UNFINISHED.fullmatch(name)]:
            shutil.rmtree(Path(place, name), ignore_errors=True)
            folders.remove(name)
        for name in files:
            if name.endswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    Path(place, name).unlink()
