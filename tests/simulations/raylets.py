"""A Ray cluster of two raylets on this machine, each with one core, as on two machines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import ROOT, Command, command_line
from tests.simulations.ray_runs import at_work

MARKS = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="process ids and titles as on Linux")]
CLEAN = {"RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "400"}
# Prints the nodes that are alive and the actors there were.
ASKING = """
import json, sys
import ray
from ray._private import state

ray.init(address=sys.argv[1], log_to_driver=False)
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
actors = [
    {"pid": actor["Pid"], "node": actor["Address"]["NodeID"], "state": actor["State"]}
    for actor in state.actors().values()
]
print(json.dumps({"nodes": nodes, "actors": actors}))
"""


class Cluster:
    """Two raylets, each a command in a session of its own, started as on two machines.

    Never ``ray stop``: it ends every Ray process of the machine, whoever started it.

    Args:
        folder: Where their output goes.
        env: Changes to their environment.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._env = CLEAN | dict(env or {})
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._folder, self._sessions = folder, Path(tempfile.mkdtemp(prefix="ray"))  # sockets' paths must be short
        self.commands: list[Command] = []
        try:
            self._start("--head", f"--port={port}", f"--temp-dir={self._sessions}", "--include-dashboard=false")
            self.address = self.commands[0].stdout.split("--address='")[1].split("'")[0]
            self._start(f"--address={self.address}")
        except BaseException:
            self.close()
            raise

    def _start(self, *options: str) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        argv = (ray, "start", "--block", "--num-cpus=1", "--object-store-memory=300000000", "--disable-usage-stats")
        name = f"raylet-{len(self.commands)}"
        self._folder.mkdir(parents=True, exist_ok=True)
        command = Command(*argv, *options, folder=self._folder / name, cwd=self._folder, env=self._env)
        self.commands.append(command)
        command.wait_for("Ray runtime started", 400)

    def told(self) -> dict[str, Any]:
        """What the cluster says of its nodes and actors."""
        with Command(
            sys.executable, "-c", ASKING, self.address, folder=self._folder / "told", cwd=ROOT, env=CLEAN
        ) as asking:
            assert asking.wait(60) == 0, asking.stderr
            return json.loads(asking.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def watched(self, look: Callable[[int], Iterable[Any]]) -> Iterator[set[Any]]:
        """While the block runs: all that was found by looking at each raylet, again and again."""
        seen: set[Any] = set()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                for number in range(len(self.commands)):
                    seen.update(look(number))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield seen
        finally:
            over.set()
            watcher.join()

    def children(self, number: int) -> list[psutil.Process]:
        """The processes of a raylet, itself included; none if its command has ended."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.commands[number].pid).children(recursive=True)
        return []

    def actors(self, number: int) -> set[int]:
        """The process ids of a raylet's actors that are answering a message."""
        return {child.pid for child in self.children(number) if at_work(child)}

    def tasks(self, number: int) -> set[str]:
        """The names of the tasks that processes of a raylet are playing now, as their titles say."""
        titles = (" ".join(command_line(child)) for child in self.children(number))
        return {found[1] for title in titles if (found := re.match(r"ray::(.+, seed \d+)", title))}

    def stop(self) -> list[str]:
        """End both as Ctrl-C would; returns what is left of them."""
        for command in reversed(self.commands):
            os.kill(command.pid, signal.SIGTERM)
        for command in self.commands:
            command.wait(60)
        return [line for command in self.commands for line in command.left(10.0)]

    def close(self) -> None:
        for command in self.commands:
            command.kill()
        shutil.rmtree(self._sessions, ignore_errors=True)
