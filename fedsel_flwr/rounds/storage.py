"""Storage on disk: atomic writes, locked folders, and the one door through which folders of other people are read.

A file is complete or absent, even if the process dies or the power fails. Each step on the disk is one call of a
function of :mod:`os`.

Reading: :func:`open_file` accepts only regular files, and checks the opened file, not its name. Links, pipes and
devices are refused.

Only one process writes to a folder, so that a second server, started by mistake, cannot mix its run with the first
one's. The lock is on the hidden, empty file ``.lock``. The lock ends with the process, however the process ends. A
process that was not killed removes the file too. Objects of one process share the lock. Reading needs no lock. If a
folder cannot be locked (a read-only disk, some network file systems), nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from fedsel_flwr import operating_system
from fedsel_flwr.errors import ParameterError, RunError

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
WRITTEN = (".safetensors", ".parquet", ".jsonl", ".json", ".toml")
"""Suffixes of files that are written under a temporary name."""
LOCK = ".lock"
"""Name of the file that a process locks in the folder to which it writes."""
UNFINISHED = re.compile(r"\.(.+)-[a-z0-9_]{8}")
"""Names of the temporary folders of :func:`~fedsel_flwr.report.run_folder.atomic_write`, each with one file's name."""
MOST_BYTES = 2**28
"""Largest number of bytes of a file that is read as a whole, unless the caller names another number."""
LINK = "is a link, and runs are never read or written through links. Delete it, or replace it with what it points to"
NOT_A_FILE = "is neither a file nor a folder. Delete it"
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
        raise RunError(f"the folder {str(folder)!r} cannot be created: {error.strerror}. Choose another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"the folder {str(folder)!r} cannot be written to. Choose another, or change its permissions")


def write_atomically(path: Path, *content: bytes | memoryview) -> None:
    """Write a file completely, or leave it unchanged.

    The content is on the disk before the file takes its name. ``operating_system.sync_folder`` then syncs the name.

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
        file = operating_system.open_descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, follow=True)
        try:
            for part in content:
                rest = memoryview(part)
                # A system call may write less than the given data.
                while rest:
                    rest = rest[os.write(file, rest) :]
            # Before the rename, because otherwise a power failure can leave the new name with old or no content.
            operating_system.sync(file)
        finally:
            os.close(file)
        operating_system.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class FolderLock(FileLock):
    """Locks a folder for this process, as long as the object lives; the last release removes the file."""

    def release(self, force: bool = False) -> None:
        """Release the lock; see :meth:`filelock.BaseFileLock.release`."""
        if self.is_locked and (force or self.lock_counter == 1):
            # Before the release: a process that already has the file open sees that it is gone, and tries again.
            operating_system.remove_open_file(Path(self.lock_file))
        super().release(force)


def lock_folder(folder: Path, refusal: str = CHECKPOINTS_IN_USE) -> FolderLock | None:
    """Lock a folder for this process; None if folders cannot be locked.

    A lock that is new removes what a killed process has left in the folder.

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
            remove_unfinished(folder)
    except Timeout as error:
        raise RunError(refusal.format(str(folder))) from error
    except OSError:
        return None
    return lock


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files directly in a folder to which no other process writes."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if (match := UNFINISHED.fullmatch(path.name)) and not path.is_symlink():
                # Not more than this file, so that a folder of the user with such a name stays.
                (path / match[1]).unlink(missing_ok=True)
                path.rmdir()
            elif path.suffix == TEMPORARY and path.with_suffix("").suffix in WRITTEN:
                path.unlink()


def open_file(path: Path, most: int | None = None, *, follow: bool = False, append: bool = False) -> BinaryIO:
    """Open a regular file.

    Args:
        path: The file.
        most: Largest number of bytes of the file; None for no limit.
        follow: Whether the file may be a link, because the user has named it.
        append: Whether the file is also written at its end, and created if needed. If not, it is only read.

    Returns:
        The file, in binary mode.

    Raises:
        OSError: The file cannot be opened, is a link, a folder, a pipe or a device, or is too large. ``strerror`` says
            which.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if append else os.O_RDONLY
    try:
        descriptor = operating_system.open_descriptor(path, flags, follow=follow)
    except OSError as error:
        problem = f"it {LINK}" if error.errno == errno.ELOOP and not follow else error.strerror
        raise OSError(error.errno, problem, str(path)) from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and (most is None or found.st_size <= most):
        return os.fdopen(descriptor, "a+b" if append else "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {most:,}", str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_file(path: Path, most: int = MOST_BYTES, *, follow: bool = False) -> bytes:
    """Return the content of a regular file; arguments and errors are those of :func:`open_file`."""
    with open_file(path, most, follow=follow) as file:
        # The size of a file may not be that of its content, as in /proc. None: there is no content yet.
        content = file.read(most + 1)
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, or no end", str(path))
    return content


def check_links(folder: Path) -> None:
    """Refuse links, pipes and devices anywhere inside a folder before it is read or written.

    The folder itself and its parents may be links, because the user chose them. A file that is exchanged later is
    refused when it is opened (:func:`open_file`).

    Args:
        folder: Folder of a comparison or a run. It need not exist.

    Raises:
        ParameterError: There is a link, a pipe or a device. The error names the first one.
    """
    # os.walk lists links to folders among the folders, but does not follow them.
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            check_plain(Path(place) / name)


def check_entries(folder: Path) -> None:
    """Refuse links, pipes and devices directly in a folder, as :func:`check_links` does."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        check_plain(path)


def check_plain(path: Path) -> None:
    """Refuse a link, a pipe or a device, as :func:`check_links` does."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        # Another process has just removed the file, as a run does with its old checkpoints.
        return
    if stat.S_ISLNK(mode):
        raise ParameterError(f"{str(path)!r} {LINK}")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ParameterError(f"{str(path)!r} {NOT_A_FILE}")
