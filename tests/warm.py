"""Programs, each in a process of its own, forked from one that has imported what takes seconds to import."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

from fedsel_flwr.report.page.document import vega_bundle
from tests.strategies.zygote import Zygote

LIMIT_S = 200
PRELOADED = (
    "altair", "sklearn.datasets", "fedsel_flwr.cli",
    "fedsel_flwr.simulations.comparisons.comparing", "fedsel_flwr.testing",
)  # fmt: skip


class Warm:
    """A process that waits for programs; to be closed.

    A program has a main module of its own, a working directory and a search path, as if Python had been started with
    it; only that modules which this package needs are in memory. Exit statuses are put into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._zygote = Zygote(folder, "tests.warm")

    def run(self, argv: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run a Python file, or "fedsel", in a folder; returns its exit status, and what it wrote to both outputs."""
        out = folder / ".output"
        pid, result = self._zygote.start(play, [*argv], str(folder), str(out))
        status = self._zygote.wait(pid)
        said = out.read_text(encoding="utf-8", errors="replace")
        out.unlink()
        return (pickle.loads(result.read_bytes()) if status == 0 else status), said

    def close(self) -> None:
        """End the process."""
        self._zygote.close()


def warm() -> None:
    """Import what programs need, once for all processes that are forked."""
    for name in PRELOADED:
        importlib.import_module(name)
    vega_bundle()


def play(argv: list[str], folder: str, out: str) -> int:
    """In the process that is forked: run the program; returns its exit status."""
    signal.alarm(LIMIT_S)
    os.setsid()
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
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
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
