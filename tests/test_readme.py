"""The programs in the README do what it says; the commands are run by CI and by ``make``."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
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


def test_the_comparison_on_ones_own_model_and_data_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program("load_breast_cancer"), "README", "exec"), {"__name__": "readme"})
    assert "on the same 3 seeds and partitions" in capsys.readouterr().out


def test_the_selector_of_ones_own_is_compared_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = program("class Fastest").replace('"digits")', '"digits", {"rounds": 8, "num_clients": 30})')
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("Fastest") >= 4  # three rows and a clause
    assert (tmp_path / "runs" / "fastest" / "comparison.png").exists()
