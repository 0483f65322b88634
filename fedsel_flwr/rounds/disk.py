"""Files that are there whole or not at all, whenever the process dies or the power fails.

Everything here goes through functions of :mod:`os`, one call for each thing that happens to the disk.
"""

from __future__ import annotations

import contextlib
import os
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


def write_whole(path: Path, content: bytes) -> None:
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
