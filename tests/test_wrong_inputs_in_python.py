"""Wrong arguments in Python: each is refused before anything runs, with what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.selectors import BSFL, Random, create
from fedsel_flwr.simulations import Comparison, OwnData, compare, load_scenario, simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.world import world_of

SMOKE = load_scenario("smoke", {"engine": "vectorized", "rounds": 2})
X, Y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2


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
    return lambda: compare(SMOKE, selectors, **{"seeds": 1, "folder": "new", **options})


def _own_strategy(**options: Any) -> Callable[[], Any]:
    return lambda: simulate(SMOKE, strategy=make_strategy(world_of(SMOKE)), **options)


def _swept(sweep: Any) -> Callable[[], Any]:
    return _compared(["bsfl", "random"], sweep=sweep)


WRONG: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a scenario's name": (lambda: compare("smoke", ["random"]), ["scenario must be a Scenario", "got str"]),
    "a scenario's name for one run": (lambda: simulate("smoke"), ["scenario must be a Scenario", "got str"]),
    "no selectors": (_compared([]), ["selectors = ", "at least 1 item"]),
    "None as selectors": (_compared(None), ["selectors must be names", "got None"]),
    "a selector object": (_compared([Random(clients_per_round=3)]), ["a callable that makes one", "got Random"]),
    "a class that is no selector": (_compared([dict]), ["a class or a callable that makes one", "dict"]),
    "a selector twice": (_compared(["bsfl", "bsfl"]), ["'bsfl' occurs twice"]),
    "a class twice": (_compared([partial(BSFL, min_latency=1.0), BSFL]), ["'bsfl' occurs twice"]),
    "a label that leads out": (_compared({"..": "bsfl"}), ["'..'"]),
    "a misspelt selector": (_compared(["bsfk"]), ["did you mean 'bsfl'"]),
    "less than no round on Flower": (_compared(["bsfl"], rounds_on_flower=-1), ["rounds_on_flower"]),
    "rounds on Flower twice": (_compared(["bsfl"], rounds_on_flower=1, engine="ray"), ["rounds_on_flower must be 0"]),
    "a sweep of a scenario's key": (_swept({"clients_per_round": [2, 3]}), ["Run one comparison for each"]),
    "a sweep of a table's key": (_swept({"training.learning_rate": [0.1]}), ["got 'training.learning_rate'. Run one"]),
    "a sweep of another selector": (_swept({"selectors.oort.alpha": [1]}), ["(bsfl, random), got 'selectors.oort.al"]),
    "a sweep of an unknown key": (_swept({"selectors.bsfl.alfa": [1]}), ["(did you mean 'selectors.bsfl.alpha'?)"]),
    "a sweep of seeds": (_swept({"selectors.bsfl.seed": [1]}), ["set 'seed' instead of 'selectors.bsfl.seed'"]),
    "a sweep of a wrong value": (_swept({"selectors.bsfl.alpha": [-1]}), ["alpha"]),
    "a sweep of no value": (_swept({"selectors.bsfl.alpha": []}), ["must be a list of at least one value, got []"]),
    "a sweep of a text": (_swept({"selectors.bsfl.alpha": "0.3"}), ["a list of at least one value, got '0.3'"]),
    "a sweep of a value twice": (_swept({"selectors.bsfl.alpha": [1, 1.0]}), ["holds 1 twice"]),
    "a sweep of None": (_swept({"selectors.bsfl.data_weights": [None]}), ["must hold numbers", "got None"]),
    "a sweep of a path": (_swept({"selectors.bsfl.solver": ["a/b"]}), ["solver"]),
    "a sweep that is a list": (_swept(["selectors.bsfl.alpha"]), ["sweep must map keys to values"]),
    "a callable without a name": (_compared([lambda seed: None]), ["needs a label", "{'label': callable}"]),
    "a callable that returns no selector": (_compared({"a": lambda: 3}), ["'a' must be", "returned 3"]),
    "a callable that raises": (_compared({"a": unplugged}), ["'a' cannot be created: KeyError: 'camera' (test_wrong"]),
    "a callable's argument": (_compared({"a": lambda speed: None}), ["'a' cannot be created: TypeError", "'speed'"]),
    "no seeds": (_compared(["random"], seeds=[]), ["seeds = ", "at least 1 item"]),
    "a text as seeds": (_compared(["random"], seeds="5"), ["seeds must be a whole number", "got '5'"]),
    "an unknown engine": (_compared(["random"], engine="gpu"), ["ray, vectorized", "'gpu'"]),
    "a folder in a file": (_simulated(folder="taken/run"), ["'taken/run' cannot be written: "]),
    "a file instead of a folder": (_compared(["random"], folder="taken"), ["'taken'", "File exists"]),
    "a class instead of a selector": (_simulated(selector=Random), ["clients_per_round=3", "Random'"]),
    "a name instead of a selector": (_simulated(selector="random"), ["selector must be", "got 'random'"]),
    "a selector instead of a strategy": (_simulated(strategy=Random(clients_per_round=3)), ["API 'legacy'", "got"]),
    "a loss instead of an objective": (_simulated(objective=nn.MSELoss()), ["Objective(loss=", "got MSELoss"]),
    "a number instead of a function as on_round": (_simulated(on_round=3), ["on_round must be a function", "got int"]),
    "a name instead of a function as model": (_model("mlp"), ["function or class that makes", "got str"]),
    "a model function that returns an array": (_model(lambda: np.eye(3)), ["torch module, got ndarray"]),
    "a model function that raises": (_model(unplugged), ["cannot be created: KeyError: 'camera' (test_wrong"]),
    "a model's argument": (_model(lambda width: None), ["gets only input_shape and num_classes", "'width'"]),
    "a model itself": (_model(nn.Linear(8, 10)), ["got Linear itself"]),
    "a class that makes no model": (_model(int), ["must make a torch module, got int"]),
    "too few outputs": (_model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7))), ["(2, 10)", "got (2, 7)"]),
    "a failing forward pass": (_model(lambda: Deaf(8, 10)), ["cannot read examples of shape (1, 8, 8): KeyError"]),
    "a model without parameters": (_model(nn.Flatten), ["parameters to train, but Flatten has none"]),
    "a number as data": (_simulated(data=3), ["data must be fedsel_flwr.simulations.OwnData, or a pair", "got int"]),
    "numbers as data": (_simulated(data=(1, 2)), ["train must be a pair (inputs, labels)"]),
    "a label above the number of examples": (_data(train=(X, Y * 10**9)), ["0 … C - 1", "1000000000", "200 examples"]),
    "one-hot labels": (_data(train=(X, np.eye(2)[Y])), ["labels of shape (n,)", "(100, 2)"]),
    "examples of different lengths": (_data(train=([[1, 2], [3]], [0, 1])), ["two arrays", "differ in shape"]),
    "a ragged Dataset": (_data(train=Ragged()), ["torch Dataset must have", "same shape"]),
    "a Dataset without a length": (_data(train=Streamed()), ["of one shape, and a length", "no len()"]),
    "an empty partition": (_data(partition={}), ["for each client", "got dict {}"]),
    "an array as partition": (_data(partition=np.arange(100)), ["for each client", "got ndarray"]),
    "resume without a folder": (_simulated(resume=True), ["resume = True needs the folder", "checkpoint_dir"]),
    "a text instead of True or False as resume": (_simulated(resume="yes"), ["False, True or 'must', got 'yes'"]),  # type: ignore
    "must without a checkpoint": (_simulated(checkpoint_dir="new", resume="must"), ["'new' holds no checkpoint"]),
    "compare with resume, but no folder": (_compared("bsfl", folder=None, resume=True), ["= True needs the folder"]),
    "must without a comparison": (_compared(["random"], resume="must"), ["'new' does not exist"]),
    "checkpoint_every=-1": (_simulated(folder="new", checkpoint_every=-1), ["checkpoint_every", "-1"]),
    "checkpoint_every=0": (_simulated(checkpoint_dir="new", checkpoint_every=0), ["checkpoint_every = 0"]),
    "keep_checkpoints=0": (_simulated(checkpoint_dir="new", keep_checkpoints=0), ["keep_checkpoints", "0"]),
    "on_round, strategy=": (_own_strategy(on_round=print), ["on_round cannot be combined with strategy="]),
    "selector, strategy=": (_own_strategy(selector=Random(clients_per_round=3)), ["selector cannot be combined with"]),
    "track, strategy=": (_own_strategy(track="tensorboard"), ["track cannot be combined with strategy="]),
    "should_stop, strategy=": (_own_strategy(should_stop=print), ["should_stop cannot be combined with strategy="]),
    "a number as should_stop": (_simulated(should_stop=3), ["should_stop must be a function"]),
    "replay without resume": (_simulated(folder="new", replay=True), ["replay = True"]),
    "replay of a comparison without resume": (_compared(["random"], replay=True), ["replay = True"]),
    "checkpoint_dir, strategy=": (_own_strategy(checkpoint_dir="new"), ["checkpoint_dir cannot be", "in the strategy"]),
    "resume, strategy=": (_own_strategy(resume=True), ["resume cannot be", "in the strategy"]),
    "a file instead of a folder as checkpoint_dir": (_simulated(checkpoint_dir="taken"), ["'taken'", "File exists"]),
    "Comparison.load without a folder": (lambda: Comparison.load(), ["at least one folder"]),
    "a folder that does not exist": (lambda: Comparison.load("nosuch"), ["'nosuch' does not exist"]),
    "a number as scenario": (lambda: load_scenario(3), ["name or the path of a TOML file, got int"]),  # type: ignore
    "overrides that are a list": (lambda: load_scenario("smoke", ["a=1"]), ["map keys to values", "got ['a=1']"]),  # type: ignore
    "a negative seed": (lambda: create("random", clients_per_round=3, seed=-1), ["seed", "at least 0, got -1"]),
    "a text as parameter": (lambda: create("random", clients_per_round="3"), ["'random': clients_per_round", "'3'"]),
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
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
