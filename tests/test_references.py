"""Objects by reference: packages and files; tests/test_wrong_inputs.py has what is said when something is not there."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.references import absolute_reference, is_reference, load_reference


def test_a_package_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("class A:\n    class B:\n        x = 3\n\n\ndef f():\n    return A()\n")
    monkeypatch.chdir(tmp_path)
    assert load_reference("numpy.linalg:norm", "model") is np.linalg.norm
    assert load_reference("./mine.py:A.B", "model").x == 3
    assert load_reference(str(tmp_path / "mine.py:A"), "model") is load_reference("mine.py:A", "model")  # read once
    made = load_reference("mine.py:f", "model")()
    assert type(pickle.loads(pickle.dumps(made))) is type(made)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("A = 2\n")
    assert load_reference(f"{tmp_path}/other/mine.py:A", "data") == 2


@pytest.mark.parametrize(
    ("text", "absolute"),
    [
        ("./mine.py:A", "/x/y/mine.py:A"), ("../mine.py:A", "/x/mine.py:A"), ("package.mine:A", "package.mine:A"),
        ("bsfl", "bsfl"),
    ],
)  # fmt: skip
def test_a_file_is_located_from_a_folder_and_a_package_is_left_alone(text: str, absolute: str) -> None:
    assert absolute_reference(text, Path("/x/y")) == absolute
    assert is_reference(text) == (text != "bsfl")
