"""Storage on disk: atomic writes, and folders locked by the process that writes to them.

A file is complete or absent, even if the process dies or the power fails. Each step on the disk is one call of a
function of :mod:`os`.

Only one process writes to a folder, so that a second server, started by mistake, cannot mix its run with the first
one's. The lock is on the hidden, empty file ``.lock``. The lock ends with the process, however the process ends. A
process that was not killed removes the file too. Objects of one process share the lock. Reading needs no lock. If a
folder cannot be locked (a read-only disk, some network file systems), nothing is checked.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from filelock import FileLock, Timeout

from fedsel_flwr.errors import RunError

CHECKPOINTS_IN_USE = (
    "another process writes checkpoints to {!r}, perhaps a server that is still running. Stop it first, or give "
    "this run another checkpoint_dir"
)
"""Error for a folder of checkpoints that another process has locked."""
RUN_IN_USE = (
    "another process writes to {!r}, perhaps a run or comparison that is still running. Nothing there was changed. "
    "Wait for it or stop it first, or give this run another folder"
)
"""Error for the folder of a run or comparison that another process has locked."""
TEMPORARY = ".tmp"
"""Suffix of a file that is being written."""
LOCK = ".lock"
"""Name of the file that a process locks in the folder to which it writes."""
WRITING = threading.RLock()
"""Held during each write of a round or a checkpoint. A shutdown acquires this lock and never releases it, so that no
round is written after the shutdown has killed the clients."""


def make_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        RunError: The folder cannot be created, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the folder {str(folder)!r} cannot be created: {error.strerror}. Choose one that can be written to"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"the folder {str(folder)!r} cannot be written to. Choose another, or change its permissions")


def write_atomically(path: Path, *content: bytes | memoryview) -> None:
    """Write a file completely, or leave it unchanged.

    The content is on the disk before the file takes its name. :func:`sync_folder` then syncs the name.

    Args:
        path: The file to create or replace, in a folder that exists.
        content: The whole content of the file, in one or several parts.

    Raises:
        OSError: The disk is full, or the write fails for another reason; the temporary file is removed.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with WRITING:
        _write(temporary, path, content)


def _write(temporary: Path, path: Path, content: tuple[bytes | memoryview, ...]) -> None:
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for part in content:
                rest = memoryview(part)
                # A system call may write less than the given data.
                while rest:
                    rest = rest[os.write(file, rest) :]
            # Before the rename, because otherwise a power failure can leave the new name with old or no content.
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
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class FolderLock(FileLock):
    """Locks a folder for this process, as long as the object lives; the last release removes the file."""

    def release(self, force: bool = False) -> None:
        """Release the lock; see :meth:`filelock.BaseFileLock.release`."""
        if self.is_locked and (force or self.lock_counter == 1):
            # Before the release: a process that already has the file open sees that it is gone, and tries again.
            Path(self.lock_file).unlink(missing_ok=True)
        super().release(force)


def lock_folder(folder: Path, refusal: str = CHECKPOINTS_IN_USE) -> FolderLock | None:
    """Lock a folder for this process; None if folders cannot be locked.

    Args:
        folder: A folder that exists.
        refusal: The error if another process has locked the folder, with a placeholder for the folder.

    Returns:
        The lock. Keep it as long as the process writes to the folder.

    Raises:
        RunError: Another process has locked the folder.
    """
    # One lock per folder and process, for every path and thread. It ends with its last reference.
    lock = FolderLock(folder.resolve() / LOCK, timeout=0, thread_local=False, is_singleton=True)
    try:
        if not lock.is_locked:
            lock.acquire()
    except Timeout as error:
        raise RunError(refusal.format(str(folder))) from error
    except OSError:
        return None
    return lock
