"""The check in another process, from wherever the suite is called: modules, scripts, standard input, sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fedsel_flwr.selectors import Random, create
from fedsel_flwr.testing.state_conformance import check_spawned_process

DEFINITIONS = """
from functools import partial

import numpy as np

from fedsel_flwr.selectors import Random
from fedsel_flwr.testing import check_selector
from fedsel_flwr.testing.state_conformance import check_spawned_process


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
HASH = "check_spawned_process(partial(ByHash, clients_per_round=3))"


def guarded(call: str) -> str:
    """A script whose work is guarded."""
    return DEFINITIONS + 'if __name__ == "__main__":' + CALL.format(call=call).replace("\n", "\n    ")


def run(*arguments: str, script: str = "", **environment: str) -> tuple[int, str, str]:
    """Run Python; returns status, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=script,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_script_without_a_guard_runs_once_and_says_what_was_left_out(tmp_path: Path) -> None:
    """Every other check is made."""
    path = tmp_path / "mine.py"
    path.write_text(DEFINITIONS + CALL.format(call=WHOLE))
    status, out, err = run(str(path))
    assert (status, out.split()) == (0, ["begin", "end"]), err
    assert "check_spawned_process was left out: the selector is defined in a session, or in a script" in err


@pytest.mark.parametrize("arguments", [("-",), ("-i", "-q"), ("-c",)], ids=["stdin", "session", "command"])
def test_without_a_file_it_says_what_was_left_out(arguments: tuple[str, ...]) -> None:
    """A session with empty lines between its blocks is what a notebook is to Python: a main module without a file."""
    script = DEFINITIONS + CALL.format(call=WHOLE)
    status, out, err = run(*arguments, script) if arguments == ("-c",) else run(*arguments, script=script)
    assert (status, out.split()) == (0, ["begin", "end"]), err
    assert "check_spawned_process was left out: the selector is defined in a session" in err


def test_a_script_with_a_guard_is_checked_in_another_process(tmp_path: Path) -> None:
    """As the difference shows that only another process has; a selector without one passes, with no warning."""
    path = tmp_path / "mine.py"
    path.write_text(guarded(HASH))
    for environment in {}, {"PYTHONHASHSEED": "0"}:
        status, out, err = run(str(path), **environment)
        assert (status, out.split()) == (1, ["begin"])
        assert "the same seed gives the same choices in another process" in err
    path.write_text(guarded("check_spawned_process(partial(Mine, clients_per_round=3))"))
    status, out, err = run("-W", "error", str(path))
    assert (status, out.split(), err) == (0, ["begin", "end"], "")


def test_a_script_run_as_a_module_is_checked_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(guarded(HASH))
    monkeypatch.chdir(tmp_path)
    status, _, err = run("-m", "mine")
    assert status == 1
    assert "the same seed gives the same choices in another process" in err


def test_a_guarded_script_that_calls_outside_of_its_guard_does_not_run_for_ever(tmp_path: Path) -> None:
    """As with multiprocessing the rest is read again in the other process, where the check does nothing."""
    path, read = tmp_path / "mine.py", tmp_path / "read.txt"
    path.write_text(
        guarded("check_spawned_process(partial(Mine, clients_per_round=3))\n")
        + f"""
open({str(read)!r}, 'a').write('once\\n')
check_spawned_process(partial(Mine, clients_per_round=3))
"""
    )
    status, _, err = run(str(path))
    assert status == 0, err
    # Once here, and once for each of the two calls.
    assert read.read_text().split() == ["once"] * 3


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


def test_importing_the_suite_loads_no_hypothesis_and_without_it_the_machine_says_so() -> None:
    code = (
        "import sys; import fedsel_flwr.testing as t; print('hypothesis' in sys.modules)\n"
        "sys.modules['hypothesis'] = None\n"
        "from functools import partial; from fedsel_flwr.selectors import Random\n"
        "t.check_stateful(partial(Random, clients_per_round=3))"
    )
    status, out, err = run("-c", code)
    assert (status, out.split()) == (1, ["False"])
    assert "RunError: check_stateful needs Hypothesis: pip install hypothesis" in err
