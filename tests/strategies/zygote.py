"""A process that has everything imported and forks another for each play, so that plays can die.

``python -m tests.strategies.zygote MODULE``: reads jobs from standard input, each a pickled (function, arguments,
file); the process that is forked calls the function and pickles what it returns into the file. Answers with its id, and
with how it ended when asked.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from tests.processes import ROOT

DIED = 77
"""Exit status of a process that a failpoint ended."""


@contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: kills are not power cuts, and a disk's syncs take most of the time."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


CALLS = (
    "open", "write", "pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "remove", "truncate", "ftruncate",
    "mkdir",
)  # fmt: skip


class Failpoints:
    """Counts the calls of :mod:`os` that change something under a folder; ``points`` has their and the files' names.

    Args:
        folder: The folder.
        die_at: The number of the call at which the process dies, from 1; None counts only.
        torn: Whether a write that dies has written half of its bytes before.
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


class Zygote:
    """The process, from outside.

    Args:
        folder: Where results are put.
        module: What is imported before anything is forked; a function ``warm`` in it is called.
    """

    def __init__(self, folder: Path, module: str = "tests.strategies.flower_world") -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.strategies.zygote", module]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._in, self._out = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def start(self, function: Callable[..., Any], *args: Any) -> tuple[int, Path]:
        """Fork a process that calls ``function``; returns its id and the file of its result."""
        handle, name = tempfile.mkstemp(dir=self._folder)
        os.close(handle)
        return self._ask((function, args, name)), Path(name)

    def wait(self, pid: int) -> int:
        """The exit status of a process, negative where a signal ended it."""
        return int(self._ask(pid))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function`` returns in a process of its own; None where a failpoint ended it."""
        pid, path = self.start(function, *args)
        status, content = self.wait(pid), path.read_bytes()
        path.unlink()
        if status not in (0, DIED):
            raise AssertionError(f"exit status {status}: {content.decode(errors='replace')}")
        return pickle.loads(content) if status == 0 else None

    def close(self) -> None:
        """End it."""
        self._in.close()
        self._process.wait(30)
        self._out.close()

    def _ask(self, question: Any) -> Any:
        pickle.dump(question, self._in)
        self._in.flush()
        return pickle.load(self._out)


def main() -> None:
    """Fork and wait until nobody asks any more."""
    getattr(importlib.import_module(sys.argv[1]), "warm", lambda: None)()  # once, for all
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # nothing of what was imported needs an orderly end
        if isinstance(question, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(question, 0)[1])
        elif not (answer := os.fork()):
            _play(*question)
        pickle.dump(answer, answers)
        answers.flush()


def _play(function: Callable[..., Any], args: tuple[Any, ...], path: str) -> None:
    status = 0
    try:
        content = pickle.dumps(function(*args))
    except BaseException:
        content, status = traceback.format_exc().encode(), 1
    Path(path).write_bytes(content)
    os._exit(status)


if __name__ == "__main__":
    main()
