"""What waiting for the answers of many nodes costs a SuperLink: ``python benchmarks/polling.py``.

A real SuperLink process, with its state in memory and in a database file, as many nodes as asked for, registered and
online through Flower's own Fleet client, and a real run whose ServerApp sends each of them a message that nobody ever
answers. The ServerApp waits for the answers by ``TimedGrid`` and by Flower's own grid. Printed are, for each number of
messages, how long a pull took, how many there were in a second, and the SuperLink's processor time in a second, less
that of a SuperLink whom nobody asks anything.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsel_flwr.strategies.wrapping.grids import TimedGrid

APP = """\
[project]
name = "polling"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "benchmark"
[tool.flwr.app.components]
serverapp = "polling_app:server_app"
clientapp = "polling_app:client_app"
[tool.flwr.app.config]
superlink = 0
nodes = 0
seconds = 0
out = ""
"""
MODULE = """\
from benchmarks import polling
server_app = polling.server_app
client_app = polling.client_app
"""
AWAY_S = 1800.0
"""The nodes' heartbeat: so long are they online without another word."""
server_app, client_app = ServerApp(), ClientApp()


def main() -> None:
    """Measure, and print a line for each grid, number of messages and kind of state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500, help="(default: 500)")
    parser.add_argument("--seconds", type=int, default=20, help="of each measurement (default: 20)")
    parser.add_argument("--states", nargs="*", default=["memory", "file"], choices=["memory", "file"])
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {args.nodes} nodes", flush=True)
    for state in args.states:
        with tempfile.TemporaryDirectory(prefix="polling") as folder:
            for line in measured(Path(folder), state, args.nodes, args.seconds):
                print(line, flush=True)


def measured(folder: Path, state: str, nodes: int, seconds: int) -> list[str]:
    """The lines of one SuperLink."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    write_app(folder, address)
    environment = surroundings(folder)
    argv = ["flower-superlink", "--insecure", "--host=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    argv += [f"--database={folder / 'state.db'}"] if state == "file" else []
    with (folder / "superlink.log").open("wb") as log, subprocess.Popen(
        argv, cwd=folder, env=environment, stdout=log, stderr=log
    ) as superlink:  # fmt: skip
        try:
            listening(address, superlink)
            register(address, nodes)
            config = f"superlink={superlink.pid} nodes={nodes} seconds={seconds} out='{folder / 'out'}'"
            run = ["flwr", "run", str(folder), "here", "--stream", "--run-config", config]
            said = subprocess.run(run, env=environment, cwd=folder, capture_output=True, text=True, timeout=1800)
            if not (folder / "out").exists():
                raise SystemExit(said.stdout[-3000:] + said.stderr[-3000:])
        finally:
            superlink.terminate()
    return [f"state in {state:6}  {line}" for line in (folder / "out").read_text(encoding="utf-8").splitlines()]


def write_app(folder: Path, address: str) -> None:
    """The app whose ServerApp measures, and the connection that ``flwr`` is told."""
    (folder / "pyproject.toml").write_text(APP, encoding="utf-8")
    (folder / "polling_app.py").write_text(MODULE, encoding="utf-8")
    (folder / "home").mkdir()
    connection = f'[superlink.here]\naddress = "{address}"\ninsecure = true\n'
    (folder / "home" / "config.toml").write_text(connection, encoding="utf-8")


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of Flower's commands."""
    quiet = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    root = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ, **dict.fromkeys(quiet, "1"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / "home"),
        "PATH": path, "PYTHONPATH": root,
    }  # fmt: skip


def listening(address: str, superlink: subprocess.Popen[bytes]) -> None:
    """Wait until the SuperLink listens."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            if superlink.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the SuperLink does not start") from None
            time.sleep(0.2)


def register(address: str, nodes: int) -> None:
    """Have so many nodes register and say that they are there, as SuperNodes without keys of their own do."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    for _ in range(nodes):
        keys = generate_key_pairs()
        named = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        interceptors = [named, NodeAuthHttpInterceptor(*keys)]
        public = public_key_to_bytes(keys[1])
        with FleetHttpClient.from_server_address(address, True, None, interceptors=interceptors) as client:
            client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=AWAY_S))


class Pulls:
    """What a grid's pulls take, from the moment when its messages are pushed; changes the grid.

    Args:
        grid: Flower's.
        superlink: The process that answers it.
    """

    def __init__(self, grid: Any, superlink: psutil.Process) -> None:
        self._push, self._pull, self._superlink = grid.push_messages, grid.pull_messages, superlink
        grid.push_messages, grid.pull_messages = self.push, self.pull
        self.took: list[float] = []
        self._began = self._spent = 0.0

    def push(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push, and begin anew."""
        ids = self._push(messages)
        self.took, self._began, self._spent = [], time.monotonic(), processor_s(self._superlink)
        return ids

    def pull(self, ids: Iterable[str]) -> Iterable[Message]:
        """Pull, and note the time."""
        began = time.monotonic()
        replies = self._pull(ids)
        self.took.append(time.monotonic() - began)
        return replies

    def line(self, idle: float) -> str:
        """What there was since the push; ``idle`` is the SuperLink's processor time a second without pulls."""
        elapsed = time.monotonic() - self._began
        load = (processor_s(self._superlink) - self._spent) / elapsed - idle
        return (
            f"{len(self.took) / elapsed:5.2f} pulls a second, median {1000 * statistics.median(self.took):6.1f} ms, "
            f"longest {1000 * max(self.took):6.1f} ms; SuperLink {load:6.3f} s of processor time a second"
        )


@server_app.main()
def measure(grid: Grid, context: Context) -> None:
    """Wait for answers that never come, by either grid, and write what that cost."""
    config: dict[str, Any] = dict(context.run_config)
    superlink, seconds = psutil.Process(config["superlink"]), config["seconds"]
    nodes = sorted(grid.get_node_ids())
    if len(nodes) != config["nodes"]:
        raise SystemExit(f"{len(nodes)} of {config['nodes']} nodes are online")
    began = processor_s(superlink)
    time.sleep(seconds)
    idle = (processor_s(superlink) - began) / seconds
    lines = [f"nobody waits: SuperLink {idle:.3f} s of processor time a second"]
    pulls = Pulls(grid, superlink)
    for pending in sorted({min(len(nodes), number) for number in (10, 100, len(nodes))}):
        for name, waiting in (("TimedGrid", TimedGrid(grid)), ("Flower's grid", grid)):
            content = RecordDict({"config": ConfigRecord({"nothing": f"{name} {pending}"})})
            messages = [Message(content, dst_node_id=node, message_type="train") for node in nodes[:pending]]
            if list(waiting.send_and_receive(messages, timeout=seconds)):
                raise SystemExit("a node that is not there has answered")
            lines.append(f"{pending:4} messages, {name:13}: {pulls.line(idle)}")
    Path(config["out"]).write_text("\n".join(lines) + "\n", encoding="utf-8")


def processor_s(process: psutil.Process) -> float:
    """User and system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
