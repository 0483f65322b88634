"""Each selector repeats its golden trace: 60 rounds with failures, availability and a dead client."""

import json
import os

import numpy as np
import pytest

from fedsel_flwr.selectors import names
from tests.golden.make_traces import FOLDER, trace, write


@pytest.mark.parametrize("name", names())
def test_the_trace_is_repeated(name: str) -> None:
    file = FOLDER / f"{name}.json"
    if not file.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{file.name} is missing in tests/golden. Run this test on your machine, which writes the file")
        write(name)
        pytest.fail(f"{file.name} was missing in tests/golden and is now written. Check its choices and commit it")
    expected = json.loads(file.read_text(encoding="utf-8"))
    got = trace(name)
    assert got.keys() == expected.keys()
    assert got["choices"] == expected["choices"]
    for key in expected.keys() - {"selector", "choices"}:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-12, err_msg=key)
