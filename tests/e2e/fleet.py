"""A real deployment on this machine, whose SuperNodes behave as a test orders, and runs of the app on it.

It is started with the commands of ``examples/deployment``. Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.deployment.deployment import CONNECTION, Deployment, free_port
from tests.processes import ROOT

APP = Path(__file__).parent / "app"


def wait_until(done: Callable[[], object], timeout: float, what: Callable[[], str] | str) -> None:
    """Look four times a second until ``done`` is true; ``what`` says what was waited for."""
    deadline = time.monotonic() + timeout
    while not done():
        said = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {said}"
        time.sleep(0.25)


class Fleet:
    """A SuperLink and SuperNodes, with everything in one folder."""

    def __init__(self, folder: Path) -> None:
        self.deployment = Deployment(folder, free_port())
        self.deployment.prepare()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}  # that was started last under each name
        self.runs: list[subprocess.Popen[bytes]] = []
        self.start_superlink()

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again; its server apps import the package from this repository."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))
            self.superlink = self.deployment.start_superlink()

    def node(self, name: str, *, key: bool = True, **orders: Any) -> None:
        """Register a SuperNode, unless ``key`` is False, and start it with its orders."""
        self.order(name, **orders)
        if key:
            self.deployment.register(name)
        self.nodes[name] = self.deployment.start_supernode(name, f"orders='{self._orders(name)}'", key=key)

    def order(self, name: str, **orders: Any) -> None:
        """Tell a SuperNode's clients how to behave from now on."""
        path = self._orders(name)
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(orders), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def trainings(self, name: str) -> list[tuple[int, int]]:
        """Round and process id of each training that a SuperNode's client has begun since the last run began."""
        seen = self._orders(name).with_suffix(".seen")
        lines = seen.read_text(encoding="utf-8").splitlines() if seen.exists() else []
        return [(int(round), int(pid)) for round, pid in (line.split() for line in lines)]

    def restore(self, *names: str) -> None:
        """Have SuperNodes run and behave well again; the SuperLink may take a minute to see that one was killed."""
        for name in names:
            self.order(name)
        deadline = time.monotonic() + 250
        while missing := [name for name in names if not self._is_up(name)]:
            assert time.monotonic() < deadline, f"not up again: {missing}\n{self.log(missing[0])[-2000:]}"
            for name in missing:
                if name not in self.nodes or self.nodes[name].poll() is not None:
                    self.node(name)
            time.sleep(0.5)

    def _is_up(self, name: str) -> bool:
        """Whether a SuperNode runs and has said its id since it was started."""
        if name not in self.nodes or self.nodes[name].poll() is not None:
            return False
        return "SuperNode ID:" in self.log(name).rpartition("Starting Flower SuperNode")[2]

    def wait_for_training(self, name: str, round: int, timeout: float = 400.0) -> int:
        """Wait until a SuperNode's client trains in a round; returns its process id."""
        wait_until(lambda: round in dict(self.trainings(name)), timeout, f"{name}'s training in round {round}")
        return dict(self.trainings(name))[round]

    def kill(self, name: str, sign: signal.Signals = signal.SIGKILL) -> None:
        self.nodes[name].send_signal(sign)
        self.nodes[name].wait(60)

    def end(self, name: str) -> None:
        """Stop a SuperNode in good order, if it runs; it is not restored."""
        process = self.nodes.pop(name)
        process.terminate()
        process.wait(60)

    def processes(self, command: str) -> list[int]:
        """The deployment's processes of a command that Flower has started."""
        found = []
        for pid in self.deployment.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                found += [pid] if any(Path(word).name == command for word in words[:3]) else []
        return found

    def kill_servers(self, number: int = 1) -> None:
        """Kill the processes of the runs' servers; there must be so many."""
        found = self.processes("flwr-serverapp")
        assert len(found) == number
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def log(self, name: str) -> str:
        return (self.deployment.folder / "log" / name).read_text(encoding="utf-8", errors="replace")

    def run(self, api: str, *, rounds: int = 5, timeout_s: float = 150.0, **options: Any) -> Run:
        for seen in self._orders("any").parent.glob("*.seen"):
            seen.unlink()
        name = f"run-{len(self.runs) + 1}-{api}"
        folder = self.deployment.folder / "runs" / name
        config = {"api": api, "folder": str(folder), "rounds": rounds, "timeout_s": timeout_s}
        return Run(self, name, folder, config, {**options, "checkpoint_dir": str(folder / "checkpoints")})

    def stop(self) -> None:
        """End everything; nothing may be left, and the port must be free."""
        self.deployment.stop()
        for process in (self.superlink, *self.nodes.values(), *self.runs):
            process.wait(10)
        assert self.deployment.processes() == []
        with socket.create_server(("127.0.0.1", self.deployment.port)):
            pass

    def _orders(self, name: str) -> Path:
        return self.deployment.folder / "orders" / f"{name}.json"


class Run:
    """A run of the app: ``flwr run`` in the background, its server writes to ``folder``."""

    def __init__(self, fleet: Fleet, name: str, folder: Path, config: dict[str, Any], options: dict[str, Any]) -> None:
        self._fleet, self._name, self.folder, self._config, self._options = fleet, name, folder, config, options
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "run.toml"
        words = {**config, "options": json.dumps(options)}
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in words.items()), encoding="utf-8")
        self.process = fleet.deployment.start(
            name, "flwr", "run", str(APP), CONNECTION, "--stream", f"--run-config={file}"
        )
        fleet.runs.append(self.process)

    def resumed(self) -> Run:
        """A new run that goes on where this one's checkpoints end."""
        return Run(self._fleet, f"{self._name}-resumed", self.folder, self._config, {**self._options, "resume": True})

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The finished rounds; of one that was told twice, the last word."""
        path = self.folder / "rounds.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # the last one may be half written
        return list({line["round"]: line for line in map(json.loads, lines)}.values())

    @property
    def log(self) -> str:
        return self._fleet.log(self._name)

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        """Wait for the end of the run; returns its rounds."""
        wait_until(lambda: self.process.poll() is not None, timeout, lambda: f"the run's end\n{self.log[-4000:]}")
        return self.rounds

    def wait_for_round(self, number: int, timeout: float) -> dict[str, Any]:
        wait_until(
            lambda: len(self.rounds) >= number or self.process.poll() is not None,
            timeout,
            lambda: f"round {number}\n{self.log[-4000:]}",
        )
        assert len(self.rounds) >= number, self.log[-4000:]
        return self.rounds[number - 1]
