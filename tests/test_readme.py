"""The programs in the README do what it says; the commands are run by CI and by ``make``."""

from __future__ import annotations

import ast
import importlib
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.testing import check_selector

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def program(text: str) -> str:
    (found,) = [one for one in PROGRAMS if text in one]
    return found


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_the_programs_import_is_there(number: int) -> None:
    for node in ast.walk(ast.parse(PROGRAMS[number])):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedsel_flwr"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_selector_of_ones_own_keeps_every_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_selector.py").write_text(program("class Fastest"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    fastest = importlib.import_module("readme_selector").Fastest
    check_selector(partial(fastest, clients_per_round=3))


def test_the_selector_without_flower_comes_to_prefer_the_fast() -> None:
    drawn = np.random.default_rng(0)
    names = {"measure": lambda chosen: 0.1 + 0.04 * chosen + drawn.uniform(0, 0.05, len(chosen))}
    exec(program("RoundReport(clients=chosen"), names)
    plays = names["selector"].state_dict()["plays"]  # type: ignore[attr-defined]
    assert plays.sum() == 5000
    assert plays[:5].mean() > 1.5 * 250
    assert plays[-5:].mean() < 250
