"""A long run does not grow: 10,000 rounds with 1,000 clients in the vectorized engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_run.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resident_memory_after_a_tenth_of_the_rounds_is_that_at_the_end() -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.search(
        r"after round 1000 .*after round 10000 \S+ MB \((\S+) %\), after the run .* \((\S+) %\)", done.stdout
    )
    assert said, done.stdout
    grown, at_last = map(float, said.groups())
    assert abs(grown) < 1.5, done.stdout  # with the history in memory about 6
    assert abs(at_last) < 5, done.stdout
    assert "10000 rounds, 100000 clients' records, selected 100000 times" in done.stdout
