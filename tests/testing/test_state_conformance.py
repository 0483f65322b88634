"""The check in another process, from wherever the suite is called: modules, scripts, standard input, sessions."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from fedsel_flwr.selectors import Random, create
from fedsel_flwr.testing.conformance import check_spawned_process
from tests.processes import run_python

DEFINITIONS = """
from functools import partial

import numpy as np

from fedsel_flwr.selectors import Random
from fedsel_flwr.testing import check_selector
from fedsel_flwr.testing.conformance import check_spawned_process


class Mine(Random):
    \"\"\"Chooses at random.\"\"\"


class ByHash(Random):
    \"\"\"Chooses in the order of a set of strings, which differs from process to process.\"\"\"

    def _select(self, available):
        return [int(name[1:]) for name in {f"k{client}" for client in available}][:3]

"""
CALL = """
print("begin")
{call}
print("end")
"""
WHOLE = "check_selector(partial(Mine, clients_per_round=3))"
MINE = "check_spawned_process(partial(Mine, clients_per_round=3))"
AT_IMPORT = f"""
with open("read.txt", "a") as file:
    file.write("once ")
{MINE}
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "call"),
    [(("mine.py",), WHOLE), (("-",), MINE), (("-i", "-q"), MINE), (("-c",), MINE)],
    ids=["script", "stdin", "session", "command"],
)
def test_what_cannot_be_imported_says_what_was_left_out(arguments: tuple[str, ...], call: str, in_folder: Path) -> None:
    """A session with empty lines between its blocks is what a notebook is to Python: a main module without a file."""
    script = DEFINITIONS + CALL.format(call=call)
    (in_folder / "mine.py").write_text(script)
    done = run_python(*arguments, *[script] * (arguments == ("-c",)), cwd=in_folder, script=script)
    assert done.stdout.split() == ["begin", "end"], done.stderr
    assert "check_spawned_process was left out: the selector is defined in a session or in the script" in done.stderr


def test_a_module_is_checked_in_another_process_and_may_call_the_suite_when_it_is_imported(in_folder: Path) -> None:
    """Only another process shows the difference; there the check of the module itself does nothing."""
    (in_folder / "mine.py").write_text(DEFINITIONS + AT_IMPORT)
    call = "import mine; print('begin'); mine.check_spawned_process(mine.partial(mine.ByHash, clients_per_round=3))"
    done = run_python("-W", "error", "-c", call, cwd=in_folder, status=1, PYTHONHASHSEED="0")
    assert done.stdout.split() == ["begin"]
    assert "the same seed gives the same selections in another process" in done.stderr
    # Once here, and once for each of the two calls.
    assert (in_folder / "read.txt").read_text().split() == ["once"] * 3


class Unimportable(Random):
    """Says that it lives where nobody finds it."""


def test_what_cannot_be_pickled_or_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="left out: the factory cannot be pickled .*a functools.partial of one"):
        check_spawned_process(lambda *, seed=None: Random(clients_per_round=3, seed=seed))
    monkeypatch.setattr(Unimportable, "__module__", "nowhere_to_be_found")
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", sys.modules[__name__])
    with pytest.warns(UserWarning, match="left out: the other process cannot import the factory .*nowhere_to_be_found"):
        check_spawned_process(partial(Unimportable, clients_per_round=3))


def test_a_selector_of_the_package_is_checked_without_a_warning() -> None:
    check_spawned_process(partial(create, "random", clients_per_round=3))
