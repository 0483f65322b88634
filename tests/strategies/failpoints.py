"""Whatever is done to the disk under a folder, counted; and a process that dies at one of these points.

All calls of :mod:`os` that change something are watched, so that a new one needs no change here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.strategies.zygote import DIED

CALLS = (
    "open",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "replace",
    "rename",
    "unlink",
    "remove",
    "truncate",
    "ftruncate",
    "mkdir",
)


class Failpoints:
    """Counts the calls that concern a folder.

    Args:
        folder: The folder.
        die_at: The number of the call at which the process dies, from 1; None counts only.
        torn: Whether a write that dies has written half of its bytes before.

    Attributes:
        points: The calls so far, each as its name and the file's.
    """

    def __init__(self, folder: Path, die_at: int | None = None, torn: bool = False) -> None:
        self._folder, self._die_at, self._torn = str(folder), die_at, torn
        self.points: list[str] = []
        for name in CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            reads = name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR)
            if str(path).startswith(self._folder) and not reads:
                self.points.append(f"{name} {Path(path).name}")
                if len(self.points) == self._die_at:
                    if self._torn and "write" in name:
                        call(target, bytes(args[0])[: len(args[0]) // 2], *args[1:])
                    os._exit(DIED)
            return call(target, *args, **kwargs)

        return watched
