"""The page about smoke tests: its pytest file and its workflow do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedsel_flwr.testing import STRATEGY_CHECKS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "smoke-tests.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def commands() -> list[str]:
    """What the workflow's one job runs."""
    yaml = pytest.importorskip("yaml", reason="comes with Flower")
    workflow = yaml.safe_load(block("yaml"))
    assert workflow[True] == ["push", "pull_request"]  # YAML 1.1 reads "on" so
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == "ubuntu-latest"
    assert [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step] == [
        "actions/checkout",
        "actions/setup-python",
    ]
    return [step["run"] for step in job["steps"] if "run" in step]


def run_in(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow's last command on the pytest file, in a folder of its own, with this Python."""
    install, test = commands()
    assert install.startswith("python -m pip install pytest ")
    (folder / "test_selection.py").write_text(program, encoding="utf-8")
    paths = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    return subprocess.run(
        test, shell=True, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True, timeout=240
    )


def test_the_workflow_runs_the_tests(tmp_path: Path) -> None:
    done = run_in(tmp_path, block("python"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE), done.stdout


def test_a_strategy_without_its_promises_fails_there(tmp_path: Path) -> None:
    good = "        self._total[report.clients] += report.latency\n"
    program = block("python").partition("def test_ten_simulated")[0]
    assert good in program
    done = run_in(tmp_path, program.replace(good, f"{good}        raise RuntimeError('not today')\n"))
    assert done.returncode == 1
    assert "broken promise: no client breaks a round; in round 1" in done.stdout, done.stdout[-3000:]
    assert re.search(r"^2 failed", done.stdout, re.MULTILINE), done.stdout


def test_every_promise_has_its_line() -> None:
    named = re.findall(r"^\| .* \| `(check_\w+)` \|$", PAGE, re.MULTILINE)
    assert named == [check.__name__ for check in STRATEGY_CHECKS]


def test_the_readme_leads_there() -> None:
    assert "(docs/smoke-tests.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
