"""Objects by reference: packages, files, and what is said when something is not there."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
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
    ("text", "said"),
    [
        ("mine.py:Missing", ["model 'mine.py:Missing'", "has no 'Missing'", "It has x"]),
        ("nofile.py:x", ["there is no file", "nofile.py"]),
        ("no.such.package:x", ["importing no.such.package failed", "No module named 'no'"]),
        ("broken.py:x", ["importing broken.py failed: ZeroDivisionError"]),
        ("mine.py:", ["must have the form package.module:name or ./file.py:name"]),
        (":x", ["must have the form package.module:name"]),
    ],
)
def test_what_is_not_there_is_said(text: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError) as error:
        load_reference(text, "model")
    assert all(part in str(error.value) for part in said), error.value
    # it can be mended and tried again
    assert not [name for name in sys.modules if name.startswith("fedsel_own_broken")]


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
