"""Files that are there whole or not at all, whenever the process dies or the power fails.

Everything here goes through functions of :mod:`os`, one call for each thing that happens to the disk.

One process writes into a folder: a second server that is started by mistake must not mix its run with the first's.

The lock is the system's own (``flock`` on the folder itself): it leaves no file behind and ends with the process,
however that ends. Objects of one process share it. Where folders cannot be locked (Windows, some network file systems),
nothing is checked.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from fedsel_flwr.errors import RunError

TEMPORARY = ".tmp"
"""How the name of a file ends that is being written."""


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        RunError: It cannot be made, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the folder {str(folder)!r} cannot be made: {error.strerror}; give one that can be written to"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"the folder {str(folder)!r} cannot be written to; give one that can, or change its permissions")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely, or leave what was there.

    The content is on the disk when it takes its name; :func:`sync_folder` makes the name last as well.

    Args:
        path: The file to make or replace, in a folder that exists.
        content: All of it.

    Raises:
        OSError: The disk is full, or otherwise refuses; what was written is removed.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        file = os.open(temporary, flags, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last; where folders cannot be synced (Windows), the system does so in its time."""
    if os.name == "nt":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Holds a folder for this process, for as long as the object lives.

    Args:
        folder: A folder that exists.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: Folders cannot be locked there.
    """

    def __init__(self, folder: Path) -> None:
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        weakref.finalize(self, os.close, file)


_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


CHECKPOINTS_IN_USE = (
    "another process keeps its checkpoints in {!r}: a server that is still running? End it first, or give this run a "
    "checkpoint_dir of its own"
)
"""Of a folder of checkpoints that is held."""
RUN_IN_USE = (
    "another process writes to {!r}: a run or comparison that is still running? Nothing there was changed. Wait for "
    "it or end it first, or give this run another folder"
)
"""Of the folder of a run or comparison that is held."""


def lock_folder(folder: Path, refusal: str = CHECKPOINTS_IN_USE) -> FolderLock | None:
    """Hold a folder for this process; None where folders cannot be locked.

    Args:
        folder: A folder that exists.
        refusal: What is said if another process holds it, with a place for the folder.

    Returns:
        To be kept for as long as the process writes there.

    Raises:
        RunError: Another process holds it.
    """
    if fcntl is None:
        return None
    try:
        status = os.stat(folder)
        which = status.st_dev, status.st_ino
        if (lock := _held.get(which)) is None:
            lock = _held[which] = FolderLock(folder)
        return lock
    except BlockingIOError as error:
        raise RunError(refusal.format(str(folder))) from error
    except OSError:
        return None
