"""Folders with random faults: a result, or one line; more of them with ``python -m tests.mutated_folders``."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.house import ROOT
from tests.processes import environment


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_folders_with_random_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutated_folders", "60", "2"],
        cwd=ROOT, env=environment() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {"commands": 180, "folders": 60}, done.stdout
