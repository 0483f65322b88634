"""The commands of examples/deployment/README.md, in a copy of its folder."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.deployment.deployment import Deployment, free_port
from tests.processes import ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def test_the_example_runs_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    here = shutil.copytree(ROOT / "examples" / "deployment", tmp_path / "example")
    port = free_port()

    def told(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "deployment.py", *words], cwd=here, env=environment(), text=True, timeout=280,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    try:
        told("start", f"--port={port}")
        for rounds in (2, 4):
            said = told("run", "app", "--run-config", f"rounds={rounds} checkpoint-dir='{here}/deployment/checkpoints'")
            assert re.findall(r"^round (\d): node-\d [\d.]+ s $", said, re.MULTILINE) == [
                str(number) for number in range(1, rounds + 1) for _ in range(2)
            ]
    finally:
        told("stop")
    assert Deployment(here / "deployment", port).processes() == []
    with socket.create_server(("127.0.0.1", port)):
        pass
