"""Wrong command lines: each is refused in one line that says what was expected and what came, and leaves nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.cli import main

OWN_CODE = """
import numpy as np
import torch
from fedsel_flwr.callbacks import Recorder
from fedsel_flwr.selectors import Random, Selector

class NoSelector: ...

class Bare(Selector):
    name = "bare"

class Needs(Random):
    name = "needs"
    def __init__(self, *, clients_per_round, speed, seed=None): ...

class Unlicensed(Random):
    name = "unlicensed"
    def __init__(self, *, clients_per_round, seed=None):
        raise RuntimeError("no licence")

class Greedy(Random):
    name = "greedy"
    def _select(self, available):
        return [0, 0, 99]

class Fragile(Random):
    name = "fragile"
    def _select(self, available):
        raise KeyError("speed")

class Tracker(Recorder):
    def write(self, round, values): ...
    def end(self, *, failed): ...

def function(): return 3

def model_raises(): raise OSError("no disk")
def model_too_wide(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(65, 10))

x, y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
def data_raises(): raise FileNotFoundError("no camera.csv")
def data_needs(path): return (x, y), (x, y)
"""
RUN, COMPARE = ["run", "smoke", "--engine", "vectorized"], ["compare", "smoke"]
FILES = {
    "deployed/journal.jsonl": "",
    "mine.py": OWN_CODE,
    "broken.py": "def f(:\n",
    "unplugged.py": "raise OSError('no camera')\n",
    "leaves.py": "raise SystemExit('bye')\n",
    "empty.toml": "",
    "number.toml": "data = 3\n",
    "deep.toml": f"x = {'[' * 5000}",
    "folder/scenario.toml": "rounds = 3\n",
    "nothing/read.me": "",
    "begun/run.json": '{"scenario": "smoke", "selector": "random"}',
    "begun/scenario.toml": 'engine = "vectorized"\nrounds = 2\n',
    "moved/run.json": '{"scenario": "smoke", "selector": "fastest"}',
    "moved/scenario.toml": 'selector = "/nowhere/mine.py:Fastest"\n',
    "python/plan.json": '{"scenario": {"name": "x"}, "selectors": [{"label": "Mine", "name": null}], "seeds": [1]}',
    "taken": "",
}
"""What lies in the working directory."""


def _set(*pairs: str) -> list[str]:
    return RUN + [word for pair in pairs for word in ("--set", pair)]


TRACE, TRACK = "availability.kind=trace", ["--track", "./mine.py:Tracker"]
HUGE = ["data.dataset=synthetic-regression", "data.synthetic_examples=1000000000", "data.synthetic_features=1000000"]

USAGE: list[tuple[list[str], list[str]]] = [
    ([], ["arguments are required: COMMAND"]),
    (["fly"], ["invalid choice: 'fly'", "'show', 'cite', 'doctor', 'advise', 'reproduce', 'report'"]),
    (["--vers"], ["arguments are required: COMMAND"]),
    (["list", "smoke"], ["unrecognized arguments: smoke"]),
    (["run", "smoke", "twice"], ["unrecognized arguments: twice"]),
    (["compare", "smoke", "--selector", "bsfl"], ["--selector", "did you mean --selectors?"]),
    (["run", "smoke", "--selectors", "bsfl"], ["--selectors", "did you mean --selector?"]),
    (["run", "smoke", "--round", "3"], ["--round", "did you mean --rounds?"]),
    (["run", "smoke", "--reference", "random"], ["--reference belongs to fedsel compare and report"]),
    (["run", "smoke", "--rounds", "many"], ["--rounds", "int", "'many'"]),
    (["run", "smoke", "--seed", "2.5"], ["--seed", "int", "'2.5'"]),
    (["run", "smoke", "--engine", "gpu"], ["--engine", "'gpu'", "'ray', 'vectorized'"]),
    (["report"], ["FOLDER"]),
]
"""Lines that argparse refuses, and words of what it says after the usage."""

FAULTS: list[tuple[list[str], list[str]]] = [
    (["run", ""], ["scenario must not be empty"]),
    (["run", "smok"], ["unknown scenario 'smok'", "did you mean 'smoke'?", "TOML file"]),
    (["run", "nosuch.toml"], ["no scenario file 'nosuch.toml'", "smoke"]),
    (["run", "empty.toml"], ["'empty.toml' is empty", "rounds = 10"]),
    (["run", "deep.toml"], ["'deep.toml' is not valid TOML", "recursion"]),
    (["run", "number.toml"], ["data = 3", "expected a table"]),
    ([*COMPARE, "--seeds", "many"], ["--seeds", "number", "'many'"]),
    ([*COMPARE, "--seeds", "1,,3"], ["--seeds must be a number, or numbers separated by commas", "'1,,3'"]),
    ([*COMPARE, "--seeds", "1,1"], ["seeds = ", "1 occurs twice"]),
    ([*COMPARE, "--seeds", ""], ["--seeds must not be empty"]),
    ([*COMPARE, "--seeds", "0"], ["seeds must be", "got 0"]),
    ([*COMPARE, "--selectors", "bsfl,nosuch"], ["'nosuch'", "random"]),
    ([*COMPARE, "--selectors", "bsfl,bsfl"], ["--selectors", "'bsfl,bsfl'"]),
    ([*COMPARE, "--selectors", " , "], ["--selectors"]),
    ([*COMPARE, "--reference", "oracle"], ["got 'oracle'", "bsfl, cs-ucb, random"]),
    ([*COMPARE, "--selectors", "bsfl", "--reference", "bsfl"], ["reference 'bsfl'", "needs another selector"]),
    ([*COMPARE, "--rounds-on-flower", "-1"], ["rounds_on_flower", "-1"]),
    (["compare", "folder/scenario.toml", "--selectors", "random,bsfl"], ["'bsfl' needs the parameter min_latency"]),
    (["run", "smoke", "--selector", "bsfll"], ["'bsfll'", "did you mean 'bsfl'", "random"]),
    (["run", "smoke", "--selector", ""], ["--selector must not be empty"]),
    (["run", "smoke", "--selector", "nomodule:Class"], ["'nomodule:Class'", "No module named 'nomodule'\n"]),
    (["run", "smoke", "--selector", "./nofile.py:Class"], ["selector", "there is no file", "nofile.py"]),
    (["run", "smoke", "--selector", "./mine.py:Fastest"], ["no 'Fastest'. It has Bare, Fragile, Greedy, Needs"]),
    (["run", "smoke", "--selector", "./mine.py"], ["lacks the name of a class", "'./mine.py:MyClass'"]),
    (["run", "smoke", "--selector", "./mine.py:"], ["must have the form package.module:name or ./file.py:name"]),
    (["run", "smoke", "--selector", ":x"], ["must have the form package.module:name"]),
    (["run", "smoke", "--selector", "./mine.py:NoSelector"], ["subclass of", "Selector, got the class NoSelector"]),
    (["run", "smoke", "--selector", "./mine.py:function"], ["subclass of", "got function"]),
    (["run", "smoke", "--selector", "./broken.py:X"], ["broken.py failed: SyntaxError", "line 1"]),
    (["run", "smoke", "--selector", "./unplugged.py:X"], ["failed: OSError: no camera (unplugged.py, line 1)"]),
    (["run", "smoke", "--selector", "./leaves.py:X"], ["leaves.py failed: SystemExit: bye"]),
    ([*RUN, "--selector", "./mine.py:Bare"], ["the class Bare does not define _select"]),
    ([*RUN, "--selector", "./mine.py:Needs"], ["needs the parameter speed. All its parameters are clients_per_round"]),
    ([*COMPARE, "--selectors", "./mine.py:Unlicensed,random"], ["created: RuntimeError: no licence (mine.py"]),
    ([*COMPARE, "--selectors", "bsfl;random"], ["unknown selector 'bsfl;random'", "did you mean 'random'?"]),
    ([*COMPARE, "--selectors", "gpfl", "--set", "selectors.gpfl.rho=-1"], ["selector 'gpfl': rho", "at least 0"]),
    (_set("rounds"), ["KEY=VALUE", "'rounds'"]),
    (_set("=3"), ["KEY=VALUE", "'=3'"]),
    (_set("clients_per_round=30"), ["clients_per_round = 30", "num_clients = 10"]),
    (_set("data.test_fraction=0.9999"), ["test_fraction = 0.9999"]),
    ([*_set("data.dataset=mnist"), "--data-dir", "nowhere"], ["nowhere", "--data-dir"]),
    (_set("wireless.radius_km=0.0001"), ["radius_km", "0.0001"]),
    (_set("learning_rate="), ["--set learning_rate= lacks a value"]),
    (_set("num_clients=100000000"), ["num_clients = 100000000", "less than or equal to 10000000"]),
    (_set(*HUGE), ["there is not enough memory for this run: Unable to allocate"]),
    (_set("training=1"), ["training = 1: expected a table"]),
    (_set("aggregation.warmup_rounds=10"), ["warmup_rounds = 10 leaves no round for the selector, because rounds = 3"]),
    (_set("partition.sizes=1,x"), ["partition.sizes = '1,x': expected a list of numbers"]),
    (_set(TRACE), ["needs availability.trace", "CSV"]),
    (_set(TRACE, "availability.trace=."), ["'.' is a folder", "CSV"]),
    (_set("data.dataset=./mine.py"), ["'./mine.py'", "./file.py:function"]),
    (_set("data.dataset=./mine.py:data_raises"), ["FileNotFoundError: no camera.csv (mine.py, line"]),
    (_set("data.dataset=./mine.py:data_needs"), ["cannot be created: TypeError", "'path'"]),
    (_set("model.name=./mine.py:model_raises"), ["cannot be created: OSError: no disk (mine.py, line"]),
    (_set("model.name=./mine.py:model_too_wide"), ["cannot read examples of shape (1, 8, 8)", "65x10"]),
    (["report", "nosuch"], ["'nosuch' does not exist", "folder of a run"]),
    (["report", "taken"], ["'taken' is a file", "folder of a run"]),
    (["report", "nothing"], ["'nothing' holds no run", "folder of a run"]),
    (["report", "folder"], ["'folder' is not a run: it has no run.json"]),
    (["report", "deployed"], ["'deployed' holds no finished round", "again after the second round"]),
    (["report", "deployed", "--reference", "random"], ["'deployed' is the folder of a deployment", "--reference"]),
    (["advise", ""], ["source must not be empty"]),
    (["advise", "nosuch"], ["'nosuch' does not exist", "a CSV file"]),
    (["run", "--resume", "nosuch"], ["'nosuch' does not exist", "folder of the run, or of the comparison"]),
    (["run", "--resume", "taken"], ["'taken' is a file", "folder of the run"]),
    (["run", "--resume", "nothing"], ["'nothing' holds nothing", "plan.json", "run.json"]),
    (["run", "--resume", ""], ["--resume must not be empty"]),
    (["run", "--resume", "moved"], ["'/nowhere/mine.py:Fastest'", "enter: fedsel run --resume moved --trust"]),
    (["run", "--resume", "moved", "--trust"], ["'/nowhere/mine.py:Fastest'", "there is no file"]),
    (["show", "smoke", "--set", "learning_rate=1"], ["'learning_rate' (did you mean 'training.learning_rate'?)"]),
    ([*COMPARE, "--track", ""], ["--track must not be empty"]),
    ([*COMPARE, "--track-clients", "3"], ["--track-clients is for a tracker. Give --track too"]),
    ([*COMPARE, *TRACK, "--track-clients", "many"], ["--track-clients must be a number, or numbers separated by comm"]),
    ([*RUN, "--replay"], ["--replay needs --resume"]),
    ([*RUN, "--trust"], ["--trust only applies to --resume", "--resume FOLDER"]),
    (["compare", "--resume", "python"], ["'Mine' in 'python' was passed in Python", "compare(..., resume=True)"]),
    (["run", "smoke", "--resume", "begun"], ["--resume begun keeps the settings", "the scenario 'smoke'", "--rounds"]),
    (["run", "--resume", "begun", "--selector", "bsfl"], ["--selector"]),
    (["run", "--resume", "begun", "--set", "seed=3"], ["--set"]),
    (["compare", "--resume", "begun", "--seeds", "3"], ["--seeds"]),
    (["run", "--resume", "begun", "--rounds", "0"], ["rounds = 0", "greater than or equal to 1"]),
    (["run", "--resume", "smoke", "--checkpoint-dir", "x"], ["already sets where", "Leave out --checkpoint-dir"]),
    ([*RUN, "--resume"], ["no run in 'runs' was started with these arguments", "--resume runs/NAME"]),
    ([*RUN, "--checkpoint-dir", "x", "--no-checkpoints"], ["--checkpoint-dir", "contradict each other"]),
    ([*RUN, "--checkpoint-dir", ""], ["--checkpoint-dir must not be empty"]),
    ([*RUN, "--runs-dir", "taken"], ["'taken'", "Not a directory"]),
    ([*RUN, "--runs-dir", "/proc/runs"], ["no run folder can be created in '/proc/runs'"]),
    ([*RUN, "--runs-dir", ""], ["--runs-dir must not be empty"]),
]
"""Lines that are read, and then refused; words of the one line in which that is said."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with everything in it that can be wrong."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a reference adds the working directory
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("fedsel_own_mine")]:
        del sys.modules[name]


def _lacking(said: str, words: list[str]) -> list[str]:
    return [part for part in words if part not in said]


@pytest.mark.parametrize(("argv", "words"), USAGE, ids=[" ".join(argv) or "nothing" for argv, _ in USAGE])
def test_a_line_that_cannot_be_read(argv: list[str], words: list[str], own_folder: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("usage: fedsel")
    assert _lacking(err.splitlines()[-1], words) == []


@pytest.mark.parametrize(("argv", "words"), FAULTS, ids=[" ".join(argv) for argv, _ in FAULTS])
def test_wrong_input_is_refused_in_one_line(argv: list[str], words: list[str], own_folder: Path, refused: Any) -> None:
    before = {*own_folder.iterdir()}
    assert _lacking(f"{refused(*argv)}\n", words) == []
    assert not [name for name in sys.modules if name.startswith("fedsel_own_broken")]  # it can be mended
    assert {*own_folder.iterdir()} - before - {own_folder / "__pycache__"} == set()


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("Greedy", ["Greedy._select must return an array of different indices", "[0, 0, 99]"]),
        ("Fragile", ["the run failed: KeyError: 'speed' (mine.py, line", "The traceback is in ", "flower.log"]),
    ],
)
def test_a_selector_that_fails_in_a_round(selector: str, words: list[str], own_folder: Path, refused: Any) -> None:
    assert _lacking(refused(*RUN, "--selector", f"./mine.py:{selector}"), words) == []
    (log,) = own_folder.glob("runs/*/flower.log")
    assert ("Traceback" in log.read_text()) == (selector == "Fragile")
