"""Each selector repeats its golden trace: 60 rounds with failures, availability and a dead client."""

import json

import numpy as np
import pytest

from fedsel_flwr.selectors import names
from tests.golden.make_traces import FOLDER, trace


@pytest.mark.parametrize("name", names())
def test_the_trace_is_repeated(name: str) -> None:
    expected = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    got = trace(name)
    assert got.keys() == expected.keys()
    assert got["choices"] == expected["choices"]
    for key in expected.keys() - {"selector", "choices"}:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-12, err_msg=key)
