"""One process writes into a folder: a second server that is started by mistake must not mix its run with the first's.

The lock is the system's own (``flock`` on the folder itself): it leaves no file behind and ends with the process,
however that ends. Objects of one process share it. Where folders cannot be locked (Windows, some network file systems),
nothing is checked.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from fedsel_flwr.errors import RunError

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


KEEPS = (
    "another process keeps its checkpoints in {!r}: a server that is still running? End it first, or give this run a "
    "checkpoint_dir of its own"
)
"""Of a folder of checkpoints that is held."""
WRITES = (
    "another process writes to {!r}: a run or comparison that is still running? Nothing there was changed. Wait for "
    "it or end it first, or give this run another folder"
)
"""Of the folder of a run or comparison that is held."""


def hold(folder: Path, refusal: str = KEEPS) -> FolderLock | None:
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
