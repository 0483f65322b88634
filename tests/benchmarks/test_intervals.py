"""The tables of docs/statistics.md: limma's figures, a small coverage, and what the page promises."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
LOGS = np.array([
    [-0.31, -0.22, -0.40, -0.18, -0.29], [-0.25, -0.35, -0.21, -0.44, -0.10], [0.02, -0.05, 0.08, 0.01, -0.04],
    [0.30, -0.60, 0.45, 0.10, -0.35],
])  # fmt: skip
ALIKE = np.array([[1.1, 0.9, 1.3, 1.2], [0.5, 0.7, 0.4, 0.2], [0.9, 1.2, 1.0, 0.8]])


@pytest.fixture(scope="module")
def intervals() -> ModuleType:
    spec = importlib.util.spec_from_file_location("intervals", ROOT / "benchmarks" / "intervals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.import_module("sys").modules, "intervals", module)
        spec.loader.exec_module(module)
    return module


def test_moderation_is_limmas(intervals: ModuleType) -> None:
    """R 4.2.2, limma 3.54.1: eBayes(lmFit(LOGS, matrix(1, 5, 1))); the second set has no more spread than chance."""
    found = intervals.moderate(LOGS.var(axis=1, ddof=1)[np.newaxis], 4)
    assert found.prior_df == pytest.approx([1.44417483886612])
    assert found.prior == pytest.approx([0.00913025398036832])
    expected = [0.00774877448272608, 0.01494913104000454, 0.00442779370324663, 0.14624542867119431]
    assert found.variances[0] == pytest.approx(expected)
    t = LOGS.mean(axis=1) / np.sqrt(found.variances[0] / 5)
    p = 2 * stats.t.sf(np.abs(t), found.df[0])
    assert p == pytest.approx([0.00059439567323302, 0.00342614161095128, 0.89790322540421075, 0.91109846253040860])

    alike = intervals.moderate(ALIKE.var(axis=1, ddof=1)[np.newaxis], 3)
    assert (alike.prior_df[0], alike.df[0, 0]) == (math.inf, 9)
    assert alike.variances[0] == pytest.approx([0.0338888888888889] * 3)


def test_own_spreads_cover_and_moderated_ones_do_not(intervals: ModuleType) -> None:
    rng = np.random.default_rng(5)
    spreads = np.array([2.5, 1.0, 1.0, 1.0])
    means, variances = intervals.draw(rng, 4000, 5, spreads, np.zeros(4))
    assert np.sqrt(variances.mean(axis=0)) == pytest.approx(spreads, rel=0.05)
    own = np.abs(means) <= stats.t.ppf(0.975, 4) * np.sqrt(variances / 5)
    assert own.mean(axis=0) == pytest.approx([0.95] * 4, abs=0.014)  # four standard errors
    found = intervals.moderate(variances, 4)
    moderated = np.abs(means) <= stats.t.ppf(0.975, found.df) * np.sqrt(found.variances / 5)
    assert moderated.mean(axis=0)[0] < 0.9


def test_the_page_has_a_coverage_within_its_bounds() -> None:
    """Own spreads: .94 to .965 for each selector at each number of seeds, as the verdict uses them."""
    page = (ROOT / "docs" / "statistics.md").read_text("utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if "equal |" in line or "first 2.5 times |" in line]
    assert {(int(row[0]), int(row[1])) for row in rows} == {(k, n) for k in (2, 4, 19) for n in (3, 5, 10, 20)}
    ends = [float(end) for row in rows for cell in row[3:5] for end in cell.split(" to ")]
    assert min(ends) >= 0.94
    assert max(ends) <= 0.965
