"""Two servers never write into one folder of checkpoints."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.checkpoints import Checkpoint, Checkpoints
from tests.processes import ROOT

OTHER = """
import sys
from pathlib import Path
from fedsel_flwr.rounds.storage import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
HOLDING = r"another process keeps its checkpoints in .*checkpoint_dir"


def checkpoint() -> Checkpoint:
    return Checkpoint(round=1, model=[], names=[], state={}, base={}, fingerprint={})


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        checkpoints = Checkpoints(tmp_path, resume=True)
        with pytest.raises(RunError, match=HOLDING):
            checkpoints.newest(lambda one: None)
        with pytest.raises(RunError, match=HOLDING):
            checkpoints.write(checkpoint())
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        other.kill()
        other.wait(timeout=30)
        assert checkpoints.newest(lambda one: None) is None
        checkpoints.write(checkpoint())


def test_one_process_shares_it_and_lets_it_go(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path, resume=True), Checkpoints(tmp_path, resume=True)
    first.write(checkpoint())
    found = second.newest(lambda one: None)
    assert found is not None
    assert found.round == 1
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, timeout=60)
    assert "RunError: another process keeps its checkpoints" in refused.stderr
    del first, second
    gc.collect()
    assert subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, timeout=60).stdout == "held\n"
