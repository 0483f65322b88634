"""Wrong arguments in Python: each is refused before anything runs, with what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.simulations import Comparison, OwnData, compare, load_scenario, simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.world import world_of

SMOKE = load_scenario("smoke", {"engine": "vectorized", "rounds": 2})
X, Y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
ROWS = [list(range(10 * k, 10 * k + 10)) for k in range(10)]


class Ragged(torch.utils.data.Dataset[Any]):
    """Examples of several shapes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(i + 1), 0


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Examples without a length."""

    def __iter__(self) -> Any:
        yield torch.zeros(3), 0


class Deaf(nn.Linear):
    """A model whose forward pass fails."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise KeyError("inputs")


def unplugged(**params: Any) -> Any:
    raise KeyError("camera")


def _simulated(**arguments: Any) -> Callable[[], Any]:
    return lambda: simulate(SMOKE, **arguments)


def _data(**parts: Any) -> Callable[[], Any]:
    return lambda: simulate(SMOKE, data=OwnData(**{"train": (X, Y), "test": (X, Y), **parts}))


def _model(make: Any) -> Callable[[], Any]:
    return _simulated(model=make)


def _compared(selectors: Any, **options: Any) -> Callable[[], Any]:
    return lambda: compare(SMOKE, selectors, **{"seeds": 1, **options})


def _own_strategy(**options: Any) -> Callable[[], Any]:
    return lambda: simulate(SMOKE, strategy=make_strategy(world_of(SMOKE)), **options)


def _again(place: str, *, resume: bool = True, **changes: Any) -> Callable[[], Any]:
    """Run a scenario, and go on there with one that differs."""

    def call() -> None:
        simulate(SMOKE, **{place: "kept"})
        simulate(SMOKE.model_copy(update=changes), **{place: "kept"}, resume=resume)

    return call


def _rows(last: Any) -> Callable[[], Any]:
    return _data(partition=[*ROWS[:9], last])


WRONG: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a scenario's name": (lambda: compare("smoke", ["random"]), ["scenario must be a Scenario", "got str"]),
    "no selectors": (_compared([]), ["at least one selector"]),
    "None as selectors": (_compared(None), ["selectors must be names", "NoneType"]),
    "a selector made already": (_compared([Random(clients_per_round=3)]), ["every seed needs a new one"]),
    "a class that is no selector": (_compared([dict]), ["class dict must be a subclass of"]),
    "a callable without a name": (_compared([lambda seed: None]), ["needs a label", "{'label': callable}"]),
    "a label with a slash": (_compared({"a/b": Random}), ["'a/b'", "no slash"]),
    "one that makes no selector": (_compared({"a": lambda: 3}), ["'a' must be", "made a int"]),
    "one that raises": (_compared({"a": unplugged}), ["'a' cannot be made: KeyError: 'camera' (test_wrong_inputs_in"]),
    "one that needs more": (_compared({"a": lambda speed: None}), ["'a' cannot be made: TypeError", "'speed'"]),
    "two of one name": (_compared([Random, "random"]), ["two selectors", "'random'"]),
    "no seeds": (_compared(["random"], seeds=[]), ["at least one seed", "got []"]),
    "zero seeds": (_compared(["random"], seeds=0), ["at least 1, got 0"]),
    "seeds as text": (_compared(["random"], seeds="5"), ["a list of seeds", "the text '5'"]),
    "a seed twice": (_compared(["random"], seeds=[1, 1]), ["none twice", "[1, 1]"]),
    "half a seed": (_compared(["random"], seeds=2.5), ["whole number", "2.5"]),
    "an engine": (_compared(["random"], engine="gpu"), ["ray, vectorized", "'gpu'"]),
    "a reference": (_compared(["random", "bsfl"], reference="x"), ["'x' must be one of", "random, bsfl"]),
    "a file as folder": (_compared(["random"], folder="taken"), ["'taken'", "File exists"]),
    "a selector's class": (_simulated(selector=Random), ["clients_per_round=3", "got Random"]),
    "a selector's name": (_simulated(selector="random"), ["selector must be", "got 'random'"]),
    "a selector as strategy": (_simulated(strategy=Random(clients_per_round=3)), ["API 'legacy'", "got"]),
    "a loss as objective": (_simulated(objective=nn.MSELoss()), ["Objective(loss=", "got MSELoss"]),
    "on_round": (_simulated(on_round=3), ["on_round must be a function", "got int"]),
    "a module as model": (_model(nn.Flatten()), ["function or class that makes", "got Flatten itself"]),
    "a model's name": (_model("mlp"), ["function or class that makes", "got str"]),
    "a model of NumPy": (_model(lambda: np.eye(3)), ["torch module, got ndarray"]),
    "a dict as model": (_model(dict), ["torch module, got dict"]),
    "a model that raises": (_model(unplugged), ["cannot be made: KeyError: 'camera' (test_wrong_inputs_in"]),
    "a model that needs more": (_model(lambda width: None), ["needs width", "functools.partial"]),
    "a model of ten too few": (_model(lambda: nn.Linear(8, 3)), ["(2, 10), for 10 classes", "gave (2, 1, 8, 3)"]),
    "a model that fails": (_model(lambda: Deaf(8, 10)), ["cannot read examples of shape (1, 8, 8): KeyError"]),
    "a model without parameters": (_model(nn.Flatten), ["parameters to train, but Flatten has none"]),
    "data of one part": (_simulated(data=X), ["OwnData, or a pair (train, test)", "ndarray"]),
    "data of another length": (_data(train=(X, Y[:9])), ["(100, 4) and (9,)"]),
    "NaN": (_data(train=(X * np.nan, Y)), ["train must hold finite numbers, got NaN"]),
    "labels below 0": (_data(train=(X, Y - 1)), ["classes must be 0 … C - 1, got -1"]),
    "labels out of range": (_data(train=(X, Y * 10**9)), ["0 … C - 1", "1000000000", "200 examples"]),
    "labels from 1": (_data(train=(X, Y + 1), test=(X, Y + 1)), ["0 … 1 of 2 classes", "got 1 … 2: subtract 1"]),
    "labels one-hot": (_data(train=(X, np.eye(2)[Y])), ["labels of shape (n,)", "(100, 2)"]),
    "examples of several lengths": (_data(train=([[1, 2], [3]], [0, 1])), ["two arrays", "differ in shape"]),
    "a ragged Dataset": (_data(train=Ragged()), ["torch Dataset must have", "same shape"]),
    "a streamed Dataset": (_data(train=Streamed()), ["of one shape, and a length", "no len()"]),
    "another width of test": (_data(test=(X[:, :2], Y)), ["like train's, (4,)", "got (2,)"]),
    "foreign rows": (_rows([5, 100]), ["client 9", "[0, 100)", "from 5 to 100"]),
    "a row twice": (_rows([5, 7, 5]), ["client 9", "each once; row 5 occurs 2 times"]),
    "a client without rows": (_rows([]), ["client 9", "at least one row"]),
    "rows that are fractions": (_rows([1.5]), ["client 9", "float64"]),
    "nine clients": (_data(partition=ROWS[:9]), ["9 clients, but num_clients = 10"]),
    "clients by name": (_data(partition={"a": [1], 1: [2]}), ["clients 0 … 1, as integers", "'a', 1"]),
    "rows for nobody": (_data(partition={}), ["for each client", "got dict {}"]),
    "one array of rows": (_data(partition=np.arange(100)), ["for each client", "got ndarray"]),
    "resume without a folder": (_simulated(resume=True), ["resume = True needs the folder", "checkpoint_dir"]),
    "resume as a text": (_simulated(resume="yes"), ["False, True or 'must', got 'yes'"]),  # type: ignore
    "nothing to go on with": (_simulated(checkpoint_dir="new", resume="must"), ["'new' holds no checkpoint"]),
    "a comparison without a folder": (_compared(["random"], resume=True), ["resume = True needs the folder"]),
    "no comparison to go on with": (_compared(["random"], folder="new", resume="must"), ["'new' does not exist"]),
    "a checkpoint every -1": (_simulated(folder="new", checkpoint_every=-1), ["checkpoint_every", "-1"]),
    "checkpoints, but none": (_simulated(checkpoint_dir="new", checkpoint_every=0), ["checkpoint_every = 0"]),
    "no checkpoint kept": (_simulated(checkpoint_dir="new", keep_checkpoints=0), ["keep_checkpoints", "0"]),
    "checkpoints of a strategy": (_own_strategy(checkpoint_dir="new"), ["checkpoint_dir cannot be", "to the strategy"]),
    "resume of a strategy": (_own_strategy(resume=True), ["resume cannot be", "to the strategy"]),
    "a file as checkpoint_dir": (_simulated(checkpoint_dir="taken"), ["'taken'", "File exists"]),
    "another scenario's checkpoints": (_again("checkpoint_dir", seed=2), ["scenario.seed = 1, this one has 2"]),
    "another run's folder": (_again("folder", seed=2), ["holds another run", "seed is 1 there and 2 here"]),
    "more rounds of a finished run": (_again("folder", rounds=9), ["finished after 2 rounds", "run with rounds = 9"]),
    "fewer rounds than were done": (_again("checkpoint_dir", rounds=1), ["has done 2 rounds", "at least 2"]),
    "checkpoints of a run": (_again("checkpoint_dir", resume=False), ["of another run", "resume=True"]),
    "no folder to load": (lambda: Comparison.load(), ["at least one folder"]),
    "a folder that is not there": (lambda: Comparison.load("nosuch"), ["'nosuch' does not exist"]),
    "a scenario's number": (lambda: load_scenario(3), ["name or the path of a TOML file, got int"]),  # type: ignore
    "overrides as a list": (lambda: load_scenario("smoke", ["a=1"]), ["map keys to values", "got list"]),  # type: ignore
    "a selector's seed": (lambda: create("random", clients_per_round=3, seed="x"), ["seed", "whole number", "'x'"]),
    "a seed below 0": (lambda: create("random", clients_per_round=3, seed=-1), ["seed", "at least 0, got -1"]),
    "a missing parameter": (lambda: create("bsfl", clients_per_round=3), ["'bsfl' needs min_latency"]),
    "a parameter as text": (lambda: create("random", clients_per_round="3"), ["'random': clients_per_round", "'3'"]),
}
"""What is wrong -> the call, and words of the message."""


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_with_what_was_expected(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    call, words = WRONG[what]
    with pytest.raises(FedSelError) as refused:
        call()
    assert [part for part in words if part not in str(refused.value)] == []
    assert "\n" not in str(refused.value)
