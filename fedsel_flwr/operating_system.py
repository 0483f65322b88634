"""Differences between Linux, macOS and Windows: each has one function here, and no other file asks for the system.

The tests run here on Linux. They replace what Python offers on the other systems, and check what reaches the system.

Two differences remain. On Windows, a file that is open can be neither moved nor removed, so a run folder stays until
its run's objects are gone. Ctrl-C ends a run on Windows only when the library that is working returns to Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

REPLACE_LIMIT_S = 1.0
"""Seconds for which a file is replaced again and again on Windows, while another program has it open."""
_PR_SET_CHILD_SUBREAPER = 36
"""Linux's number for this option in <sys/prctl.h>, for which Python has no name."""
_SEEKING = threading.Lock()
"""Held while a thread moves the position of a file."""


def open_descriptor(path: str | os.PathLike[str], flags: int, *, follow: bool) -> int:
    """Open a file, without a translation of its bytes and without a wait for the other end of a pipe.

    Args:
        path: The file.
        flags: Flags of :func:`os.open` that every system has.
        follow: Whether the file may be a link.

    Returns:
        The descriptor.

    Raises:
        OSError: The file cannot be opened. The number is ``ELOOP`` if it is a link that may not be followed.
    """
    # Windows writes CR LF for LF unless O_BINARY is set. It has neither O_NONBLOCK nor O_CLOEXEC.
    for name in ("O_BINARY", "O_NONBLOCK", "O_CLOEXEC", "" if follow else "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)
    checked = follow or hasattr(os, "O_NOFOLLOW")
    if not checked and os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    descriptor = os.open(path, flags, 0o666)
    # A link that another process has just put there is not the opened file.
    if not checked and not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return descriptor


def sync(descriptor: int) -> None:
    """Sync the content of an open file to the disk."""
    if sys.platform == "darwin":
        import fcntl

        # On macOS, fsync leaves the content in the memory of the disk. Not every file system has F_FULLFSYNC.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk; Windows opens no folders, and does this by itself."""
    if sys.platform == "win32":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        sync(file)
    finally:
        os.close(file)


def replace(source: Path, target: Path) -> None:
    """Give a file the name of another one, which it replaces.

    Raises:
        OSError: The file cannot be replaced; on Windows, another program has had it open for a second.
    """
    deadline = time.monotonic() + REPLACE_LIMIT_S
    while True:
        try:
            os.replace(source, target)
        except PermissionError:
            # A program that reads the file on Windows, such as a virus scanner, prevents this for a moment.
            if sys.platform != "win32" or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            return


def remove_open_file(path: Path) -> None:
    """Remove a locked file before its lock is released; filelock does this on Windows after the release."""
    if sys.platform != "win32":
        path.unlink(missing_ok=True)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read bytes at a place in a file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def write_at(descriptor: int, data: bytes, offset: int) -> int:
    """Write bytes at a place in a file; return the number of written bytes."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def shell_line(*words: str) -> str:
    """Return words as a command line that can be copied to this system's shell."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def free_descriptors_end(share: float) -> float:
    """Return the number of the last descriptor within a share of this process's limit; infinity without a limit."""
    # On Windows, sockets are not counted as files, and there is no limit.
    if sys.platform == "win32":
        return float("inf")
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if limit < 0 else limit * share


def ports_can_be_reused() -> bool:
    """Return whether SO_REUSEADDR waives only the wait for an ended server's port, and not that for a running one."""
    return sys.platform != "win32"


def signals_reach_pipes() -> bool:
    """Return whether a pipe can be told of signals, and a thread be sent one; Windows has sockets for the former."""
    return sys.platform != "win32"


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that they are found and ended (Linux only).

    Ray's workers outlive the raylet that started them, for seconds on a busy machine.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def has_lost(parent: int) -> bool:
    """Return whether the process that started this one has ended.

    Args:
        parent: The id of that process.
    """
    if sys.platform != "win32":
        return os.getppid() != parent
    # On Windows, the parent's id stays, and a launcher may stand between the two.
    import psutil

    return not psutil.pid_exists(parent)
