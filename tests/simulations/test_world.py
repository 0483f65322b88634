"""The world of a scenario: who holds which examples, and that it is the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsel_flwr.clients import torch_client
from fedsel_flwr.clients.device import RoundDelays
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.training import evaluate
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.architectures import build_model
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.world import World, world_of
from tests.simulations.inprocess import play

SMOKE = load_scenario("smoke")
UNEQUAL = load_scenario(
    "smoke",
    {"partition.kind": "dirichlet", "partition.alpha": 0.3, "num_clients": 12, "model.name": "cnn", "seed": 5},
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The examples on which clients trained, in place of training."""
    examples: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []

    def train(model: object, inputs: npt.NDArray[Any], labels: npt.NDArray[Any], *rest: object) -> float:
        examples.append((inputs, labels))
        return 1.0

    monkeypatch.setattr(torch_client, "train", train)
    return examples


@pytest.mark.parametrize("scenario", [SMOKE, UNEQUAL], ids=["iid", "dirichlet"])
def test_clients_share_the_training_examples_and_nothing_else(
    scenario: Scenario, seen: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
) -> None:
    world = World(scenario)
    rows = np.concatenate(world.partitions)
    train = world.dataset.train
    assert sorted(rows.tolist()) == list(range(len(train)))  # every training example once, none of another split
    for k in range(scenario.num_clients):
        world.client(k).fit(world.initial_arrays(), {"round": 1})
        np.testing.assert_array_equal(seen[-1][0], train.inputs[world.partitions[k]])
        np.testing.assert_array_equal(seen[-1][1], train.labels[world.partitions[k]])
    assert sum(len(labels) for _, labels in seen) == len(train)


@pytest.mark.parametrize("selector", ["bsfl", "cs-ucb", "random"])
def test_the_test_set_reaches_no_client_and_no_selector(selector: str) -> None:
    """With other test examples only accuracy and loss differ: not a choice, not a bit of the model."""
    scenario = load_scenario("smoke", {"selector": selector, "rounds": 4, "selectors.bsfl.data_weights": "sizes"})
    honest, other = World(scenario), World(scenario)
    test = other.dataset.test
    other.dataset = replace(other.dataset, test=Split(test.inputs[:50] * 3, (test.labels[:50] + 1) % 10))
    ours, theirs = play(scenario, honest), play(scenario, other)
    assert repr(ours.history.clients) == repr(theirs.history.clients)
    assert [a.tobytes() for a in ours.arrays] == [a.tobytes() for a in theirs.arrays]
    assert [r.accuracy for r in ours.history.rounds] != [r.accuracy for r in theirs.history.rounds]


def test_accuracy_is_measured_on_the_test_set() -> None:
    world = World(SMOKE)
    model = build_model("logistic", (1, 8, 8), 10, seed=99)
    arrays = [tensor.detach().numpy().copy() for tensor in model.state_dict().values()]
    assert len(world.dataset.test) == 360
    assert world.test(arrays) == evaluate(model, world.dataset.test.inputs, world.dataset.test.labels)
    assert world.test(arrays) != world.test(world.initial_arrays())


def test_numbers_of_examples() -> None:
    sizes = World(UNEQUAL).num_examples()
    assert list(sizes) == list(range(12))
    assert sum(sizes.values()) == 1293
    assert len(set(sizes.values())) > 6  # Dirichlet(0.3): unequal
    for k in (0, 11):
        assert World(UNEQUAL).client(k).get_properties({}) == {"client_id": k, "num_examples": sizes[k]}


def test_the_first_model_stays() -> None:
    world = World(SMOKE)
    first = world.initial_arrays()
    kept = [array.copy() for array in first]
    first[0][:] = 7.0
    world.client(0).fit(kept, {"round": 1})
    world.test([array + 1 for array in kept])
    for array, again in zip(kept, world.initial_arrays(), strict=True):
        np.testing.assert_array_equal(array, again)


def test_every_seed_is_a_world_of_its_own() -> None:
    one, two = World(SMOKE), World(SMOKE.model_copy(update={"seed": 2}))
    assert one.partitions[0].tolist() != two.partitions[0].tolist()
    assert one.initial_arrays()[0].tobytes() != two.initial_arrays()[0].tobytes()
    assert one.dataset.test.inputs.tobytes() != two.dataset.test.inputs.tobytes()
    assert one.system.draw(0, 1) != two.system.draw(0, 1)


def test_a_world_is_built_once_per_process() -> None:
    again = Scenario.model_validate_json(SMOKE.model_dump_json())
    assert world_of(SMOKE) is world_of(again)
    other = SMOKE.model_copy(update={"num_clients": 11})
    assert len(world_of(other).partitions) == 11
    assert world_of(other) is not world_of(SMOKE)


@pytest.mark.parametrize("partition_id", [-1, 10, 200])
def test_a_node_too_many_is_told_so(partition_id: int) -> None:
    with pytest.raises(ParameterError, match=rf"below num_clients = 10, got {partition_id}"):
        World(SMOKE).client(partition_id)


def test_more_clients_than_examples() -> None:
    with pytest.raises(ParameterError, match="1294 clients cannot share 1293 examples"):
        World(SMOKE.model_copy(update={"num_clients": 1294}))


def test_phones_take_their_times_from_the_model_and_the_clients_examples() -> None:
    """Logistic regression on 8x8 pixels: 650 parameters of 4 bytes. Two epochs: every example twice."""
    changes = {"system.kind": "phones", "partition.kind": "dirichlet", "training.local_epochs": 2}
    scenario = load_scenario("smoke", changes)
    world = World(scenario)
    phones = world.system
    assert isinstance(phones, PhoneModel)
    assert phones.payload_bits == 650 * 32
    assert phones.examples == tuple(2.0 * n for n in world.num_examples().values())
    rows = play(scenario, world).history.clients
    assert len(rows) == 9
    for row in rows:
        delays = phones.draw(int(row.client_id), row.round)
        assert row.latency_s == min(sum(phones_parts(delays)), 60.0)
        assert row.completed == (sum(phones_parts(delays)) < 60.0)
        assert row.energy_j == phones.energy_j(delays)


def phones_parts(delays: RoundDelays) -> tuple[float, float, float]:
    return delays.download_s, delays.compute_s, delays.upload_s


def test_clients_keep_time_as_the_scenario_says() -> None:
    slow = load_scenario("smoke", {"clients.delay": "sleep", "wireless.max_latency_s": 0.01})
    naps: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_client, "train", lambda *args: 1.0)
        patch.setattr(torch_client.time, "sleep", naps.append)
        World(slow).client(0).fit(World(slow).initial_arrays(), {"round": 1})
    assert len(naps) == 1
    assert 0 < naps[0] <= 0.01
    measured = load_scenario("smoke", {"clients.latency_mode": "measured"})
    world = World(measured)
    metrics = world.client(0).fit(world.initial_arrays(), {"round": 1})[2]
    assert metrics["compute_s"] != world.system.draw(0, 1).compute_s


def test_selectors_of_one_seed_share_data_and_partition_that_nobody_can_write_to() -> None:
    one, other = World(load_scenario("smoke", {"selector": "random"})), World(load_scenario("smoke", {"rounds": 9}))
    assert one.dataset is other.dataset
    assert one.partitions is other.partitions
    assert World(load_scenario("smoke", {"seed": 77})).partitions is not one.partitions
    with pytest.raises(ValueError, match="read-only"):
        one.partitions[0][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        one.dataset.train.inputs[0] = 0.0


def test_a_single_client_has_a_partition() -> None:
    scenario = load_scenario("smoke", {"num_clients": 1, "clients_per_round": 1})
    assert len(World(scenario).partitions) == 1
