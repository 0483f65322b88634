"""A selector of ours is one file and one line of the catalogue."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedsel_flwr
from fedsel_flwr import selectors
from fedsel_flwr.selectors import catalogue, create, names
from fedsel_flwr.selectors.registry import example, selector_class
from tests.processes import environment

NEWEST = '''"""Newest: a new selector of ours."""

from __future__ import annotations

from typing import ClassVar

from fedsel_flwr.checks import IntArray, whole
from fedsel_flwr.selectors.base import Selector


class Newest(Selector):
    """Chooses the clients of the largest indices, from a shifted start.

    References:
        Nobody, nowhere.
    """

    name: ClassVar[str] = "newest"

    def __init__(self, *, clients_per_round: int, shift: int = 0, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.shift = whole("shift", shift, 0)

    def _select(self, available: IntArray) -> IntArray:
        return self._generator.permutation(available)[: self.asked_per_round]
'''
LINE = "from fedsel_flwr.selectors.newest import Newest as Newest\n"
USE = """
import sys
from functools import partial
import fedsel_flwr
from fedsel_flwr.selectors import Newest, create, names
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.testing import CHECKS
from fedsel_flwr.cli import main

print(fedsel_flwr.__file__)
assert "newest" in names()
assert isinstance(create("newest", clients_per_round=2, shift=1), Newest)
scenario = load_scenario("mine.toml", {"selectors.newest.shift": 2})
assert (scenario.selector, scenario.selectors["newest"]) == ("newest", {"shift": 2})
for check in CHECKS[:6]:
    check(partial(create, "newest", clients_per_round=3))
assert main(["list"]) == 0
sys.exit(main(["run", "mine.toml", "--set", "selectors.newest.shift=3", "--quiet"]))
"""


@pytest.mark.timeout(200)
def test_a_new_selector_is_a_file_and_a_line(tmp_path: Path) -> None:
    """In a copy of the package: by name, in a scenario, on the command line, and in the conformance suite."""
    copy = tmp_path / "fedsel_flwr"
    shutil.copytree(Path(fedsel_flwr.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    (copy / "selectors" / "newest.py").write_text(NEWEST)
    with (copy / "selectors" / "catalogue.py").open("a") as file:
        file.write(LINE)
    (tmp_path / "mine.toml").write_text(
        'selector = "newest"\nengine = "vectorized"\nrounds = 2\nnum_clients = 8\nclients_per_round = 2\n'
    )
    (tmp_path / "use.py").write_text(USE)
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == str(copy / "__init__.py")
    listed = " ".join(done.stdout.split())
    assert " newest Chooses the clients of the largest indices, from a shifted start. " in listed
    assert any(re.match(r"newest +[\d.]+ ", line) for line in lines)


def test_every_class_of_the_catalogue_is_exported_and_has_a_name() -> None:
    ours = {key: cls for key, cls in vars(catalogue).items() if isinstance(cls, type)}
    assert {cls.name: getattr(selectors, key) for key, cls in ours.items()} == {
        name: selector_class(name) for name in names()
    }


def test_examples_are_of_our_selectors_and_are_all_that_they_need() -> None:
    assert catalogue.EXAMPLES.keys() <= set(names())
    for name in names():
        create(name, clients_per_round=1, **example(name))
