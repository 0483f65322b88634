"""docs/smoke-tests.md: its pytest file and its workflow do what it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.processes import environment

pytestmark = pytest.mark.pages
SMOKE = ROOT / "docs" / "smoke-tests.md"


def smoke(language: str) -> str:
    (found,) = [block.text for block in blocks(SMOKE) if block.language == language]
    return found


def run_in(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run the last command of the workflow's one job on the pytest file, with this Python."""
    yaml = pytest.importorskip("yaml", reason="comes with Flower")
    workflow = yaml.safe_load(smoke("yaml"))
    (job,) = workflow["jobs"].values()
    *_, test = [step["run"] for step in job["steps"] if "run" in step]
    (folder / "test_selection.py").write_text(program, encoding="utf-8")
    env = {**environment(), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return subprocess.run(test, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_the_workflow_runs_the_tests(tmp_path: Path) -> None:
    done = run_in(tmp_path, smoke("python"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE), done.stdout
