"""A benchmark's folder comes first where Python looks for modules: none there takes the name of another's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedsel_flwr.clients.batched import numba_kernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (no wheel for this platform)")
def test_numba_and_torch_can_be_imported_beside_the_benchmarks() -> None:
    folders = [BENCHMARKS, *(path for path in BENCHMARKS.iterdir() if path.is_dir())]
    looking = f"import sys; sys.path[:0] = {[str(path) for path in folders]}; import numba, torch, flwr, sklearn"
    ran = subprocess.run([sys.executable, "-c", looking], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
