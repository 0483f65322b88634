"""The largest of many scores are those that sorting all of them finds, in the same order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsel_flwr.selectors._draws import top

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(SPECIAL | st.floats(min_value=-3.0, max_value=3.0), max_size=40),
    st.none() | st.integers(min_value=1, max_value=45),
)
def test_as_sorting_everything(scores: list[float], count: int | None) -> None:
    score = np.array(scores, dtype=np.float64)
    assert top(score, count).tolist() == np.argsort(-score, kind="stable")[:count].tolist()


@pytest.mark.parametrize("values", [2, 7, 100_000])
def test_as_sorting_everything_in_a_large_fleet(values: int) -> None:
    """With many ties, with some, and with next to none; NumPy takes other ways for large arrays."""
    score = np.random.default_rng(values).integers(0, values, 20_000).astype(np.float64)
    for count in (1, 10, 5_000, 19_999, 20_000):
        assert top(score, count).tolist() == np.argsort(-score, kind="stable")[:count].tolist()
