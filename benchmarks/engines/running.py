"""The driver's side of one worker: start it, give it a turn, end it with whatever it has started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

LIMIT_S = 300.0
"""A worker that says nothing for so long is given up."""


@dataclass
class Runner:
    """One variant of one framework.

    Args:
        player: Its column.
        variant: What is tried.
        command: Starts the worker; the plan comes as one more argument.
        plan: See `turns.Turns`.
        environ: Of the worker, on top of ours.

    Attributes:
        startup: Seconds until it was ready.
        first: Seconds of its first round.
        turns: Of each turn what the worker said: ``seconds`` and more.
        failure: Why it is out; "" while it is in.
        idle: The share of a core that it takes while it waits.
        trained: Where its model is, once it has ended.
    """

    player: str
    variant: str
    command: Sequence[str]
    plan: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)
    startup: float = float("nan")
    first: float = float("nan")
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    idle: float = float("nan")
    trained: Path | None = None

    def start(self, log: Path) -> None:
        """Start the worker, wait until it is ready, and let it take its first round."""
        begin = time.perf_counter()
        self._log, self._said = log, queue.Queue[str]()
        try:
            with log.open("w") as errors:
                self._process = subprocess.Popen(
                    [*self.command, json.dumps(dict(self.plan))],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                    env=os.environ | dict(self.environ),
                )  # fmt: skip
        except OSError as error:
            self.failure = str(error)
            return
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if self._hear("ready"):
            self.startup = time.perf_counter() - begin
            self.first = (self.take() or {"seconds": float("nan")})["seconds"]

    def take(self) -> dict[str, Any] | None:
        """Let it take a round; what it said of it."""
        self._order("round")
        return self._hear("seconds")

    def end(self) -> None:
        """Let it write its model, and wait until it is gone."""
        if not self.failure:
            self._order("end")
            if self._hear("done"):
                self.trained = Path(self.plan["out"])
        self.stop(wait=30)

    def stop(self, wait: float = 0) -> None:
        """End the worker and whatever it has started."""
        if not hasattr(self, "_process"):
            return
        family = self._family()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(wait)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        for process in psutil.wait_procs(family, timeout=5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._listener.join(5)

    def processor_seconds(self) -> float:
        """What it and its children have taken of the processor so far."""
        total = 0.0
        for process in self._family():
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return total

    def _family(self) -> list[psutil.Process]:
        if self._process.poll() is not None:  # its number may be somebody else's by now
            return []
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._said.put(line)
        self._said.put("")

    def _order(self, what: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone; what it says next is nothing
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()

    def _hear(self, wanted: str) -> dict[str, Any] | None:
        """Its next line, which must hold ``wanted``; without it the worker is out."""
        try:
            line = self._said.get(timeout=LIMIT_S)
        except queue.Empty:
            self.failure = f"said nothing for {LIMIT_S:.0f} s"
            return None
        said: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if wanted in said:
            return said
        words = self._log.read_text(errors="replace").strip().splitlines()
        errors = [word for word in words if "Error" in word] or words
        self.failure = f"ended: {errors[-1][:200]}" if errors else "ended without a word"
        return None

    def median(self) -> float:
        """Of its turns, seconds."""
        return float(np.median([turn["seconds"] for turn in self.turns]))

    def __str__(self) -> str:
        return f"{self.player} {self.variant}".strip()
