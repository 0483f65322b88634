"""Programs, each in a process of its own, forked from one that has imported what takes seconds to import.

``python -m tests.warm`` reads a request a line from standard input and answers each with the exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

from fedsel_flwr.report.page.document import vega_bundle

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 200
PRELOADED = (
    "altair", "sklearn.datasets", "fedsel_flwr.cli",
    "fedsel_flwr.simulations.comparisons.comparing", "fedsel_flwr.testing",
)  # fmt: skip


class Warm:
    """A process that waits for programs; to be closed.

    A program has a main module of its own, a working directory and a search path, as if Python had been started with
    it; only that modules which this package needs are in memory.
    """

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, argv: Sequence[str], folder: Path, path: Sequence[str] = ()) -> tuple[int, str]:
        """Run a program and wait for it.

        Args:
            argv: A Python file and its arguments, or "fedsel" and its arguments.
            folder: The working directory.
            path: Folders in front of the search path.

        Returns:
            Exit status, and what it wrote to standard output and error.
        """
        out = folder / ".output"
        request = {"argv": list(argv), "folder": str(folder), "path": list(path), "out": str(out)}
        assert self._popen.stdin
        assert self._popen.stdout
        self._popen.stdin.write(json.dumps(request) + "\n")
        self._popen.stdin.flush()
        status = int(self._popen.stdout.readline())
        said = out.read_text(encoding="utf-8", errors="replace")
        out.unlink()
        return status, said

    def close(self) -> None:
        """End the process."""
        self._popen.communicate(timeout=30)


def serve() -> None:
    """Fork a process for each request."""
    for name in PRELOADED:
        importlib.import_module(name)
    vega_bundle()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            status = 1
            try:
                status = _play(**request)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _play(argv: list[str], folder: str, path: list[str], out: str) -> int:
    """In the child: run the program; returns its exit status."""
    signal.alarm(LIMIT_S)
    os.setsid()
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.path[:] = [*path, *sys.path]
    sys.argv = argv
    try:
        if argv[0] == "fedsel":
            return int(importlib.import_module("fedsel_flwr.cli").main(argv[1:]))
        sys.path.insert(0, folder)
        module = types.ModuleType("__main__")
        module.__file__ = str(Path(folder) / argv[0])
        sys.modules["__main__"] = module
        exec(compile(Path(module.__file__).read_text(encoding="utf-8"), module.__file__, "exec"), vars(module))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve()
