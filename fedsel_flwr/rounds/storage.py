"""Storage on disk: atomic writes, and folders locked by the process that writes to them.

A file is complete or absent, whenever the process dies or the power fails. Each step on the disk is one call of a
function of :mod:`os`.

A folder has one writing process: a second server, started by mistake, must not mix its run with the first one's. The
lock is the system's own (``flock`` on the folder). It leaves no file behind and ends with the process, however that
ends. Objects of one process share it. If folders cannot be locked (Windows, some network file systems), nothing is
checked.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from fedsel_flwr.errors import RunError

# Windows has no fcntl.
try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

CHECKPOINTS_IN_USE = (
    "another process keeps its checkpoints in {!r}, perhaps a server that is still running. End it first, or give this "
    "run another checkpoint_dir"
)
"""Error for a folder of checkpoints that another process has locked."""
RUN_IN_USE = (
    "another process writes to {!r}, perhaps a run or comparison that is still running; nothing there was changed. "
    "Wait for it or end it first, or give this run another folder"
)
"""Error for the folder of a run or comparison that another process has locked."""
TEMPORARY = ".tmp"
"""Suffix of a file that is being written."""
# Weak: a lock without an owner must not keep its folder locked.
_locks: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents.

    Raises:
        RunError: It cannot be made, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the folder {str(folder)!r} cannot be made: {error.strerror}. Give one that can be written to"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"the folder {str(folder)!r} cannot be written to. Give another, or change its permissions")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely, or leave it unchanged.

    The content is on the disk before the file takes its name. :func:`sync_folder` then syncs the name.

    Args:
        path: The file to make or replace, in a folder that exists.
        content: Everything that the file shall hold.

    Raises:
        OSError: The disk is full, or otherwise refuses; the temporary file is removed.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        file = os.open(temporary, flags, 0o666)
        try:
            # A system call may write less than it was given.
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file, rest) :]
            # Before the rename: otherwise a power failure can leave the new name with old or no content.
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    # Windows cannot open a folder; it writes the names by itself.
    if os.name == "nt":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class FolderLock:
    """Locks a folder for this process, for as long as the object lives.

    Args:
        folder: A folder that exists.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: Folders cannot be locked there.
    """

    def __init__(self, folder: Path) -> None:
        # O_CLOEXEC: a child process that outlives this one must not inherit the lock.
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        weakref.finalize(self, os.close, file)


def lock_folder(folder: Path, refusal: str = CHECKPOINTS_IN_USE) -> FolderLock | None:
    """Lock a folder for this process; None if folders cannot be locked.

    Args:
        folder: A folder that exists.
        refusal: The error if another process has locked it, with a place for the folder.

    Returns:
        The lock, to be kept for as long as the process writes there.

    Raises:
        RunError: Another process has locked it.
    """
    if fcntl is None:
        return None
    try:
        # By device and inode: one folder may have several paths, and a second flock of this process would fail.
        status = os.stat(folder)
        which = status.st_dev, status.st_ino
        if (lock := _locks.get(which)) is None:
            lock = _locks[which] = FolderLock(folder)
        return lock
    except BlockingIOError as error:
        raise RunError(refusal.format(str(folder))) from error
    except OSError:
        return None
