"""A Ray cluster of two raylets on this machine, started as on two: ``ray start --head``, ``ray start --address``.

``python -m tests.simulations.raylets ADDRESS`` prints, as JSON, the nodes that are alive and the actors there were.
Never ``ray stop``: it ends every Ray process of the machine, whoever started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.processes import ROOT, Command

CLEAN = {"RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}


class Cluster:
    """Two raylets, each a command in a session of its own.

    Args:
        folder: Where their output goes.
    """

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._folder, self._sessions = folder, Path(tempfile.mkdtemp(prefix="ray"))  # sockets' paths must be short
        self.commands: list[Command] = []
        try:
            self._start("--head", f"--port={port}", f"--temp-dir={self._sessions}", "--include-dashboard=false")
            self.address = self.commands[0].stdout.split("--address='")[1].split("'")[0]
            self._start(f"--address={self.address}")
        except BaseException:
            self.kill()
            raise

    def _start(self, *options: str) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        argv = (ray, "start", "--block", "--num-cpus=1", "--object-store-memory=300000000", "--disable-usage-stats")
        name = f"raylet-{len(self.commands)}"
        command = Command(*argv, *options, folder=self._folder / name, cwd=ROOT, env=CLEAN)
        self.commands.append(command)
        command.wait_for("Ray runtime started", 60)

    def told(self) -> dict[str, Any]:
        """What the cluster says of its nodes and actors."""
        asking = Command(
            sys.executable, "-m", "tests.simulations.raylets", self.address, folder=self._folder / "told", cwd=ROOT,
            env=CLEAN,
        )  # fmt: skip
        try:
            assert asking.wait(60) == 0, asking.stderr
            told: dict[str, Any] = json.loads(asking.stdout.splitlines()[-1])
            return told
        finally:
            asking.kill()

    @contextlib.contextmanager
    def watched(self) -> Iterator[set[int]]:
        """While the block runs: the process ids of actors that were seen answering a message."""
        seen: set[int] = set()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                for command in self.commands:
                    with contextlib.suppress(psutil.Error):
                        children = psutil.Process(command.pid).children(recursive=True)
                        seen.update(child.pid for child in children if _answers(child))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield seen
        finally:
            over.set()
            watcher.join()

    def stop(self) -> list[str]:
        """End both as Ctrl-C would; returns what is left of them."""
        for command in reversed(self.commands):
            os.kill(command.pid, signal.SIGTERM)
        for command in self.commands:
            command.wait(60)
        return [line for command in self.commands for line in command.left(10.0)]

    def kill(self) -> None:
        """End whatever there is."""
        for command in self.commands:
            command.kill()
        shutil.rmtree(self._sessions, ignore_errors=True)


def _answers(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("ray::ClientAppActor.run" in part for part in process.cmdline())
    return False


def main(address: str) -> None:
    """Print the cluster's nodes and actors."""
    import ray
    from ray._private import state

    ray.init(address=address, log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [
        {"pid": actor["Pid"], "node": actor["Address"]["NodeID"], "state": actor["State"]}
        for actor in state.actors().values()
    ]
    print(json.dumps({"nodes": nodes, "actors": actors}))


if __name__ == "__main__":
    main(sys.argv[1])
