"""Commands in sessions of their own, with a record of every process that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parent.parent
MARK = "FEDSEL_TEST_MARK"


class Command:
    """A running command, in a session of its own.

    What it started is known by three signs, as Ray's processes leave sessions, change titles and lose their parents:
    it was a descendant at one of the looks taken all the time, it is of the command's session, or it has the
    command's mark in its environment.

    Args:
        argv: The command; its output goes to files in ``folder``.
        folder: Where the output goes.
        cwd: Where it runs.
        env: Changes to this process's environment.
    """

    def __init__(self, *argv: str, folder: Path, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        self.seconds = 0.0
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._popen = subprocess.Popen(
                argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                env=environment() | dict(env or {}) | {MARK: self._mark},
            )  # fmt: skip
        self.pid = self._popen.pid
        self._started: set[psutil.Process] = {psutil.Process(self.pid)}
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """What it has complained about so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout: float) -> int:
        """Wait for the end of the command itself; returns its exit status."""
        try:
            status = self._popen.wait(timeout)
        except subprocess.TimeoutExpired as late:
            said = f"{self.stdout[-3000:]}{self.stderr[-3000:]}"
            raise AssertionError(f"still running after {timeout} s:\n{said}") from late
        self.seconds = time.monotonic() - self._began
        return status

    def wait_for(self, text: str, timeout: float) -> None:
        """Wait until ``text`` is in its output."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout:
            said = f"{self.stdout[-3000:]}{self.stderr[-3000:]}"
            assert self._popen.poll() is None, f"ended with {self._popen.returncode} before {text!r}:\n{said}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{said}"
            time.sleep(0.05)

    def poll(self) -> int | None:
        """The exit status of the command itself; None while it runs."""
        return self._popen.poll()

    def interrupt(self) -> None:
        """What a terminal does at Ctrl-C: SIGINT to the foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def left(self, grace: float = 3.0) -> list[str]:
        """Processes that it started and that still run ``grace`` seconds later."""
        deadline = time.monotonic() + grace
        while (alive := list(self._alive())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{process.pid} {' '.join(command_line(process))[:200]}" for process in alive]

    @property
    def number_started(self) -> int:
        """How many processes were seen at work, itself included."""
        return len(self._started)

    def kill(self) -> None:
        """End the command and all that it started."""
        self._over.set()
        self._watcher.join()
        for process in list(self._alive()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait(30)

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._started |= set(psutil.Process(self.pid).children(recursive=True))

    def _alive(self) -> Iterator[psutil.Process]:
        for process in self._started.copy() | {other for other in psutil.process_iter() if self._is_ours(other)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self.pid or process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):
            return False


def environment() -> dict[str, str]:
    """This process's environment, in which the package and the tools beside Python are found."""
    tools, path = Path(sys.executable).parent, os.environ.get("PATH", "")
    return dict(os.environ) | {"PATH": f"{tools}{os.pathsep}{path}", "PYTHONPATH": str(ROOT)}


def run_python(
    *argv: object, cwd: Path = ROOT, status: int = 0, script: str = "", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, which must have this status; ``changes`` are those of the environment."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=cwd, env=environment() | changes, input=script, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def command_line(process: psutil.Process) -> list[str]:
    """What a process is called, whether or not it still runs."""
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return ["(ended)"]
