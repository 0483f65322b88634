"""The user's own model, data and objective in a scenario: given in Python or named in it, in both engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.objectives import Objective, cross_entropy
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import load_reference
from fedsel_flwr.simulations import OwnData, compare, load_scenario, simulate
from fedsel_flwr.simulations.comparisons.contenders import runnable_selectors
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of
from tests.simulations.inprocess import distance

FILE = '''
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """No plain Sequential: trained by torch.func."""

    def __init__(self, input_shape, num_classes, hidden=8):
        super().__init__()
        self.a, self.b = nn.Linear(input_shape[0], hidden), nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def data():
    draw = np.random.default_rng(5)
    labels = draw.integers(3, size=400)
    inputs = draw.normal(size=(400, 6)) + 2 * np.eye(3)[labels].repeat(2, axis=1)
    return (inputs[:300], labels[:300]), (inputs[300:], labels[300:])
'''


@pytest.fixture
def mine(here: Path) -> Any:
    (here / "mine.py").write_text(FILE)
    return sys.modules[load_reference("./mine.py:Net", "model").__module__]


NAMED = {"model.name": "./mine.py:Net", "data.dataset": "mine.py:data"}


def smoke(**overrides: Any) -> Any:
    return load_scenario("smoke", {"rounds": 5, "engine": "vectorized", "api": "message", **overrides})


def own(mine: Any, **changed: Any) -> OwnData:
    train, test = mine.data()
    return OwnData(**{"train": train, "test": test, "name": "blobs"} | changed)


def test_the_same_run_however_it_is_named_and_in_both_engines(mine: Any, without_ray: None) -> None:
    named = simulate(smoke(**NAMED))
    assert named.history.rounds[-1].accuracy > 0.8
    given = simulate(smoke(), model=mine.Net, data=mine.data())
    for other in (given, simulate(smoke(), engine="ray", model=mine.Net, data=mine.data())):
        assert [row.client_id for row in other.history.clients] == [row.client_id for row in named.history.clients]
        assert distance(other, named) <= 1e-5


def test_each_seed_starts_from_its_own_parameters_and_torchs_state_stays(mine: Any) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, again, other = (world_of(smoke(**NAMED, seed=seed)).initial_arrays() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first[0], again[0])
    assert (first[0] != other[0]).any()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_partition_of_ones_own(mine: Any) -> None:
    partition = [list(range(30 * k, 30 * k + 1 + k)) for k in range(10)]
    result = simulate(smoke(), model=mine.Net, data=own(mine, partition=partition))
    assert {(row.client, row.num_examples) for row in result.history.clients} <= {(k, k + 1) for k in range(10)}
    with pytest.raises(ParameterError, match="the partition of data 'blobs' has 9 clients, but num_clients = 10"):
        simulate(smoke(), model=mine.Net, data=own(mine, partition=partition[:9]))


def test_a_partition_of_every_row_leaves_no_validation_set(mine: Any) -> None:
    """Selectors that measure nothing on the server run; those that do are refused by name."""
    data = own(mine, partition=[range(30 * k, 30 * k + 30) for k in range(10)])
    for selector in ("random", "bsfl"):
        assert simulate(smoke(selector=selector), model=mine.Net, data=data).history.rounds[-1].num_completed
    for keys, said in (
        ({"selector": "pczfl"}, "pczfl (accuracy) needs a validation set on the server"),
        ({"selector": "fedcm-ucb"}, "fedcm-ucb (kept) needs a validation set"),
        ({"selector": "bsfl", "aggregation.filter": "loss"}, "FedCA's filter (aggregation.filter) needs a validation"),
    ):
        with pytest.raises(ParameterError, match="holds every row of train") as error:
            simulate(smoke(**keys), model=mine.Net, data=data)
        assert str(error.value).startswith(said)
    left_out = runnable_selectors(smoke(), OwnParts(model=mine.Net, data=data))[1]
    refused = {name for name, why in left_out.items() if "holds every row of train" in why}
    assert refused == {"pczfl", "gpfl", "fedcm-ucb", "fedcm-ts", "lsh", "nccb"}


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [("batch_size", 10, True), ("batch_size", 12, False), ("local_steps", 3, True), ("local_steps", 2, False)],
)
def test_batch_normalization_of_a_batch_of_one_names_client_and_cure(
    mine: Any, key: str, value: int, refused: bool
) -> None:
    """Client 4 has 21 examples: two batches of 10, and one of 1."""
    data = own(mine, partition=[range(30 * k, 30 * k + (21 if k == 4 else 20)) for k in range(10)])
    keys = {"training.batch_size": 10, "rounds": 1, "clients_per_round": 10, f"training.{key}": value}
    if not refused:
        assert simulate(smoke(**keys), model=Normed, data=data).history.rounds[0].num_completed == 10
        return
    with pytest.raises(ParameterError, match=r"client 4 has 21 .*BatchNorm1d at '1' cannot normalize. Choose another"):
        simulate(smoke(**keys), model=Normed, data=data)


class Counting(nn.Module):
    """Counts its forward passes outside of its state dictionary, and depends on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls)


def test_a_forward_pass_of_a_client_or_the_server_changes_no_other(mine: Any, without_ray: None) -> None:
    """The same models and accuracies in both engines, which run other passes in another order."""
    keys = {"selector": "power-of-choice", "selectors.power-of-choice.candidates": 4, "rounds": 3}
    together = simulate(smoke(**keys), model=Counting, data=mine.data())
    one_by_one = simulate(smoke(**keys), engine="ray", model=Counting, data=mine.data())
    assert distance(together, one_by_one) <= 1e-5
    assert [row.accuracy for row in together.history.rounds] == [row.accuracy for row in one_by_one.history.rounds]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.phase).real


class Uncopied(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.held = 2 * self.weight  # torch copies no result of a computation


def test_models_that_clients_cannot_hold_are_refused(mine: Any) -> None:
    with pytest.raises(ParameterError, match=r"must have real parameters, got torch\.complex64 at 'phase'\. Hold the"):
        simulate(smoke(), model=Complex, data=mine.data())
    with pytest.raises(
        ParameterError, match=r"the model cannot be copied, but each client trains a copy: RuntimeError"
    ):
        simulate(smoke(), model=Uncopied, data=mine.data())


def test_a_lazy_model_gets_its_shapes(mine: Any) -> None:
    result = simulate(
        smoke(rounds=1), model=lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3)), data=mine.data()
    )
    assert [array.shape for array in result.arrays] == [(4, 6), (4,), (3, 4), (3,)]


def test_another_loss_and_another_metric(mine: Any) -> None:
    def least_confidence(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(outputs.softmax(1).amax(1).min())

    def doubled(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
        return 2 * cross_entropy(outputs, targets, reduction=reduction)

    plain = simulate(smoke(**{"training.learning_rate": 0.2}), model=mine.Net, data=mine.data())
    result = simulate(
        smoke(**{"training.learning_rate": 0.1}), model=mine.Net, data=mine.data(),
        objective=Objective(doubled, least_confidence),
    )  # fmt: skip
    assert distance(plain, result) <= 1e-5  # twice the loss at half the rate
    assert 0.3 < result.history.rounds[-1].accuracy < 0.6
    assert result.history.rounds[-1].loss == pytest.approx(2 * plain.history.rounds[-1].loss, rel=1e-4)


def test_a_comparison_on_ones_own(mine: Any, tmp_path: Path) -> None:
    given = compare(smoke(), ["bsfl", "random"], seeds=1, model=mine.Net, data=own(mine), folder=tmp_path / "given")
    assert compare(smoke(**NAMED), ["bsfl", "random"], seeds=1).table().equals(given.table())
    scenario = tmp_path / "given" / "bsfl-seed1" / "scenario.toml"
    assert 'dataset = "python blobs"' in scenario.read_text()
    with pytest.raises(ParameterError, match=r"data.dataset = 'python blobs' was passed in Python"):
        simulate(load_scenario(str(scenario)))
