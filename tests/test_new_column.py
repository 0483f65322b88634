"""A column is declared once, and so are an option and a selector: a package with one more of each."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.clients.answering import fit_metrics
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.selectors.columns import COLUMNS
from fedsel_flwr.strategies import MetricKeys
from tests.processes import ROOT, run_python

ROW = """    Column(name="battery", key="battery_share", source="reply", low=0.0, high=1.0, recorded=True,
           meaning="charge of the client's battery, a share"),
"""
NEWEST = '''"""Newest: a new selector of ours."""

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
MINE = 'selector = "newest"\nengine = "vectorized"\nrounds = 2\nnum_clients = 8\nclients_per_round = 2\n'
OPTION = '    patience: int = _option(3, _count, key="patience")\n'
FOLLOWED = '''
import inspect, json, pickle, sys
from functools import partial
from pathlib import Path

import numpy as np

import fedsel_flwr
from fedsel_flwr.report.run_folder import read_history, read_journal, write_history
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.cli import main
from fedsel_flwr.selectors import Newest, Random, Selector, create, names
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import BSFL, MetricKeys, SelectionStrategy, message
from fedsel_flwr.testing import CHECKS
from tests.strategies.helpers import FakeProxy, Federation, fedavg


class Charged(Selector):
    """Reads the new column."""

    name = "charged"
    needs = frozenset({"battery"})
    client_state = {"_charge": 0.0}

    def _select(self, available):
        return available[: self.clients_per_round]

    def _observe(self, report):
        self._charge[report.clients[report.completed]] = report.battery[report.completed]


def play(folder, key, **options):
    # The first client reports a share, the second nonsense, the third nothing.
    proxies = [FakeProxy(f"n{k}", k, number=k, extra=extra) for k, extra in enumerate([{key: 0.75}, {key: 7.0}, {}])]
    strategy = SelectionStrategy(Charged(clients_per_round=3, seed=0), fedavg(), max_latency=10.0, **options)
    strategy.history.write_to(Journal(folder / "journal.jsonl"))
    Federation(strategy, proxies).play(2)
    strategy.history.close_round()
    return strategy


folder = Path(sys.argv[1])
strategy = play(folder, "battery_share")
history = strategy.history
state = history.state_dict()
pickled = pickle.loads(pickle.dumps(history))
from_journal = read_journal(folder)
paths = write_history(folder, history)
import pyarrow.parquet as parquet
(folder / "other").mkdir()
renamed = play(folder / "other", "charge", metric_keys=MetricKeys(battery="charge"))
shares = lambda history: [row.battery_share for row in history.clients]
def patience(strategy):
    return strategy.core.settings.patience


def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ParameterError as error:
        return str(error)


assert "newest" in names()
assert isinstance(create("newest", clients_per_round=2, shift=1), Newest)
for check in CHECKS[:6]:
    check(partial(create, "newest", clients_per_round=3))
assert main(["list"]) == 0
assert main(["run", "mine.toml", "--set", "selectors.newest.shift=3", "--quiet"]) == 0

apis = (SelectionStrategy, message.SelectionStrategy, BSFL)
print(json.dumps({
    "defaults": [inspect.signature(cls).parameters["patience"].default for cls in apis],
    "patience": [
        patience(SelectionStrategy(Random(clients_per_round=1))),
        patience(BSFL(clients_per_round=1, min_latency=1.0, patience=4)),
        patience(make_strategy(world_of(load_scenario("smoke", {"aggregation.patience": 5})))),
    ],
    "refused": [
        refused(SelectionStrategy, Random(clients_per_round=1), patience=0),
        refused(load_scenario, "smoke", {"aggregation.patience": 0}),
    ],
    "package": fedsel_flwr.__file__,
    "selector": strategy.selector._charge.tolist(),
    "history": shares(history),
    "same": {repr(one.clients) for one in (from_journal, read_history(folder), pickled)} == {repr(history.clients)},
    "problems": [row.problem for row in history.clients][:3],
    "journal": [row["battery_share"] for row in json.loads((folder / "journal.jsonl").open().readline())["clients"]],
    "parquet": parquet.read_table(paths[1]).column("battery_share").to_pylist(),
    "state": [row["battery_share"] for row in state["last"]["clients"]],
    "renamed": shares(renamed.history),
    "own": "battery_share" in MetricKeys().own_keys(),
}))
'''


@pytest.fixture
def followed(tmp_path: Path) -> Any:
    """What a process saw whose package has one more row in its table, and one more option."""
    folder = tmp_path
    shutil.copytree(ROOT / "fedsel_flwr", folder / "fedsel_flwr", ignore=shutil.ignore_patterns("__pycache__"))
    table = folder / "fedsel_flwr" / "selectors" / "columns.py"
    before, mark, after = table.read_text("utf-8").partition(")  # fmt: skip\n\nCOLUMNS")
    assert mark
    table.write_text(before + ROW + mark + after, "utf-8")
    options = folder / "fedsel_flwr" / "rounds" / "settings.py"
    before, mark, after = options.read_text("utf-8").partition("    min_completed: int = ")
    assert mark
    options.write_text(before + OPTION + mark + after, "utf-8")
    (folder / "fedsel_flwr" / "selectors" / "newest.py").write_text(NEWEST)
    with (folder / "fedsel_flwr" / "selectors" / "catalogue.py").open("a") as file:
        file.write(LINE)
    (folder / "mine.toml").write_text(MINE)
    (folder / "followed.py").write_text(FOLLOWED)
    (folder / "run").mkdir()
    done = run_python(folder / "followed.py", folder / "run", cwd=folder)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert Path(seen.pop("package")).is_relative_to(folder)
    listed = " ".join(done.stdout.split())
    assert " newest Chooses the clients of the largest indices, from a shifted start. " in listed
    assert re.search(r"^newest +[\d.]+ ", done.stdout, re.MULTILINE)
    return seen


def test_a_row_in_the_table_carries_a_number_from_the_client_to_the_selector_and_every_record(followed: Any) -> None:
    assert followed["selector"][0] == 0.75
    assert followed["problems"] == ["", "battery: 7.0 cannot be used", "battery: not reported"]
    for place, rounds in (("history", 2), ("journal", 1), ("parquet", 2), ("state", 1), ("renamed", 2)):
        assert str(followed[place]) == str([0.75, float("nan"), float("nan")] * rounds), place
    assert followed["same"], "files and copies"
    assert followed["own"]
    # and a line among the options makes one of strategies, settings and scenarios
    assert (followed["defaults"], followed["patience"]) == ([3, 3, 3], [3, 4, 5])
    refusal = "patience must be a whole number of at least 1, got 0"
    assert followed["refused"] == [refusal, f"scenario 'smoke': aggregation.patience = 0: {refusal}"]


def test_simulated_clients_report_the_tables_names() -> None:
    system = SystemModel(num_clients=1, seed=0)
    reported = fit_metrics(system, 0, system.draw(0, 1), train_loss=1.0, energy_score=0.5)
    assert set(reported) - {row.key for row in COLUMNS.values()} == {"client_id", "energy_modelled"}
    ours = {"client_id", "latency_s", "download_s", "compute_s", "upload_s"}
    ours |= {"energy_j", "energy_modelled", "energy_score"}
    assert set(reported) == ours | {"train_loss"}
    assert ours <= MetricKeys().own_keys()
