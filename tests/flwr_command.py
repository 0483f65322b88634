"""The command ``flwr`` with a local SuperLink of its own, which ends with the tests."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.processes import ROOT, Command

ANSI = re.compile(r"\x1b\[[0-9;]*m")

Flwr = Callable[..., Command]
PATIENT = """
from flwr.cli import local_superlink
from flwr.cli.app import app

local_superlink.LOCAL_SUPERLINK_STARTUP_TIMEOUT = 150.0
app()
"""
"""The command ``flwr``, which by itself gives its SuperLink 15 seconds to start: on a busy machine too few."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listener(port: int) -> psutil.Process | None:
    """The process that listens on a port: Flower's SuperLink stays after ``flwr run``, and nothing else stops it."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None


@contextlib.contextmanager
def flwr_commands(folders: pytest.TempPathFactory) -> Iterator[Flwr]:
    """``flwr run . --stream`` with further arguments; all runs share one SuperLink, started by the first."""
    home, port = folders.mktemp("home"), free_port()
    environment = {"FLWR_HOME": str(home), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port)}
    commands: list[Command] = []

    def start(*arguments: str, verb: tuple[str, ...] = ("run", str(ROOT), "--stream")) -> Command:
        folder = folders.mktemp("flwr")
        argv = (sys.executable, "-c", PATIENT, *verb, *arguments)
        commands.append(Command(*argv, folder=folder, cwd=folder, env=environment))
        return commands[-1]

    yield start
    superlink = listener(port)
    family = [superlink, *superlink.children(recursive=True)] if superlink else []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:
        process.kill()
    for command in commands:
        command.kill()
    assert listener(port) is None
