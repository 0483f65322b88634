"""The command ``flwr`` with a local SuperLink of its own, which ends with the tests."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.processes import ROOT, Command

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Flwr = Callable[..., Command]
"""From arguments to a running ``flwr run . --stream``."""
PATIENT = """
from flwr.cli import local_superlink
from flwr.cli.app import app

local_superlink.LOCAL_SUPERLINK_STARTUP_TIMEOUT = 150.0
app()
"""
"""The command ``flwr``, which by itself gives its SuperLink 15 seconds to start: on a busy machine too few."""


class LocalSuperLink:
    """The SuperLink that the first ``flwr run`` starts, on a port of its own; it is ended with the block.

    Flower's things, and the commands' output, go into the folder.
    """

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = int(probe.getsockname()[1])
        self._folder, self._commands = folder, list[Command]()

    def __enter__(self) -> LocalSuperLink:
        return self

    def __exit__(self, *error: object) -> None:
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        for command in self._commands:
            command.kill()
        assert self._listener() is None

    def run(self, *arguments: str, verb: tuple[str, ...] = ("run", str(ROOT), "--stream")) -> Command:
        """``flwr`` with a verb and further arguments."""
        folder = self._folder / f"command-{len(self._commands)}"
        environment = {"FLWR_HOME": str(self._folder), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(self._port)}
        folder.mkdir(parents=True)
        argv = (sys.executable, "-c", PATIENT, *verb, *arguments)
        self._commands.append(Command(*argv, folder=folder, cwd=folder, env=environment))
        return self._commands[-1]

    def family(self) -> list[psutil.Process]:
        """The SuperLink and all that it has started: it stays after ``flwr run``, and nothing else stops it."""
        superlink = self._listener()
        return [superlink, *superlink.children(recursive=True)] if superlink else []

    def _listener(self) -> psutil.Process | None:
        for connection in psutil.net_connections(kind="tcp"):
            here = connection.status == psutil.CONN_LISTEN and connection.laddr.port == self._port
            if here and connection.pid:
                return psutil.Process(connection.pid)
        return None
