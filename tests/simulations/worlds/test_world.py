"""The world of a scenario: who holds which examples, how long clients take, and that it is the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients import torch_client
from fedsel_flwr.clients.device import ClientDropout
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.training import evaluate
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.architectures import build_model
from fedsel_flwr.simulations.worlds.availability import BernoulliAvailability, devices_of
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.world import World, world_of
from tests.simulations.inprocess import play

SMOKE = load_scenario("smoke")
DIRICHLET = {"partition.kind": "dirichlet", "partition.alpha": 0.3}
UNEQUAL = load_scenario("smoke", {**DIRICHLET, "num_clients": 12, "model.name": "cnn", "seed": 5})


@pytest.mark.parametrize("scenario", [SMOKE, UNEQUAL], ids=["iid", "dirichlet"])
def test_clients_share_the_training_examples_and_nothing_else(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def train(model: object, inputs: Any, labels: Any, *rest: object) -> float:
        seen.append((inputs, labels))
        return 1.0

    monkeypatch.setattr(torch_client, "train", train)
    world = World(scenario)
    held = world.dataset.train
    assert sorted(np.concatenate(world.partitions).tolist()) == list(range(len(held)))
    for k, rows in enumerate(world.partitions):
        world.client(k).fit(world.initial_arrays(), {"round": 1})
        np.testing.assert_array_equal(seen[-1][0], held.inputs[rows])
        np.testing.assert_array_equal(seen[-1][1], held.labels[rows])
        assert world.client(k).get_properties({}) == {"client_id": k, "num_examples": len(rows)}
    assert world.num_examples() == {k: len(labels) for k, (_, labels) in enumerate(seen)}
    assert (len(set(world.num_examples().values())) > 6) == (scenario is UNEQUAL)


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


def test_the_first_model_stays() -> None:
    world = World(SMOKE)
    first = world.initial_arrays()
    kept = [array.copy() for array in first]
    first[0][:] = 7.0
    world.client(0).fit(kept, {"round": 1})
    world.test([array + 1 for array in kept])
    np.testing.assert_equal(world.initial_arrays(), kept)


def test_every_seed_is_a_world_of_its_own() -> None:
    one, two = World(SMOKE), World(SMOKE.model_copy(update={"seed": 2}))
    assert one.partitions[0].tolist() != two.partitions[0].tolist()
    assert one.initial_arrays()[0].tobytes() != two.initial_arrays()[0].tobytes()
    assert one.dataset.test.inputs.tobytes() != two.dataset.test.inputs.tobytes()
    assert one.system.draw(0, 1) != two.system.draw(0, 1)


def test_a_world_is_built_once_per_process() -> None:
    assert world_of(SMOKE) is world_of(Scenario.model_validate_json(SMOKE.model_dump_json()))
    other = world_of(SMOKE.model_copy(update={"num_clients": 11}))
    assert len(other.partitions) == 11
    assert other is not world_of(SMOKE)


def test_selectors_of_one_seed_share_data_and_partition_that_nobody_can_write_to() -> None:
    one, other = World(load_scenario("smoke", {"selector": "random"})), World(load_scenario("smoke", {"rounds": 9}))
    assert one.dataset is other.dataset
    assert one.partitions is other.partitions
    assert World(load_scenario("smoke", {"seed": 77})).partitions is not one.partitions
    for array in (one.partitions[0], one.dataset.train.inputs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("partition_id", [-1, 10, 200])
def test_a_node_too_many_is_told_so(partition_id: int) -> None:
    with pytest.raises(ParameterError, match=rf"below num_clients = 10, got {partition_id}"):
        World(SMOKE).client(partition_id)


def test_clients_keep_time_as_the_scenario_says(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(torch_client, "train", lambda *args: 1.0)
    monkeypatch.setattr(torch_client.time, "sleep", naps.append)
    slow = World(load_scenario("smoke", {"clients.delay": "sleep", "wireless.max_latency_s": 0.01}))
    slow.client(0).fit(slow.initial_arrays(), {"round": 1})
    assert len(naps) == 1
    assert 0 < naps[0] <= 0.01
    measured = World(load_scenario("smoke", {"clients.latency_mode": "measured"}))
    metrics = measured.client(0).fit(measured.initial_arrays(), {"round": 1})[2]
    assert metrics["compute_s"] != measured.system.draw(0, 1).compute_s


def test_clients_draw_together_what_each_draws_from_its_own_stream(tmp_path: Path) -> None:
    """To the last bit, for everything that is drawn without creating streams, so that recorded runs stay the same."""
    csv = tmp_path / "kinds.csv"
    csv.write_text(
        "share,seconds_per_example,download_bytes_per_s,upload_bytes_per_s\n3,0.1,1e6,1e6\n1,0.9,1e5,1e4\n", "utf-8"
    )
    keys = {"num_clients": 200, "seed": 2**40 + 9, "clients.energy_score_low": 0.3, "system.kind": "phones"}
    scenario = load_scenario("smoke", {**keys, "system.devices": str(csv)})
    ids, round = range(200), 7

    def own(purpose: str, at: int = 0) -> list[float]:
        return [stream(scenario.seed, purpose, k, at).random() for k in ids]

    uniform = [float(stream(scenario.seed, "energy", k).uniform(0.3, 1.0)) for k in ids]
    assert World(scenario).energy_scores(ids) == uniform
    drawn = devices_of(scenario)
    assert drawn is not None
    assert (drawn[:, 0] == 0.1).tolist() == [number < 0.75 for number in own("device-kind")]
    there = BernoulliAvailability(probability=0.6, seed=scenario.seed).at([str(k) for k in ids], round, 0.0)
    assert there.tolist() == [number < 0.6 for number in own("availability", round)]
    dropout = ClientDropout(seed=scenario.seed, failure_probability=0.4)
    assert [outcome > 0 for outcome in dropout.outcomes(ids, round)] == [n < 0.4 for n in own("failure", round)]


def test_phones_take_their_times_from_the_model_and_the_clients_examples() -> None:
    """Logistic regression on 8x8 pixels: 650 parameters of 4 bytes. Two epochs: every example twice."""
    world = World(load_scenario("smoke", {**DIRICHLET, "system.kind": "phones", "training.local_epochs": 2}))
    assert isinstance(world.system, PhoneModel)
    assert world.system.payload_bits == 650 * 32
    assert world.system.examples == tuple(2.0 * n for n in world.num_examples().values())


def test_times_of_phones_are_those_that_the_file_claims() -> None:
    """Medians of 3, 5 and 4 s, one of 20 above 35 s, one of 100 late; means over five seeds of 200 phones."""
    draws = []
    for seed in range(5):
        system = World(load_scenario("phones", {"seed": seed})).system
        draws += [system.draw(k, r) for k in range(200) for r in (1, 2)]
    assert np.median([one.download_s for one in draws]) == pytest.approx(14 / 4.3, rel=0.1)
    assert np.median([one.upload_s for one in draws]) == pytest.approx(14 / 3.3, rel=0.1)
    assert 4 < np.median([one.compute_s for one in draws]) < 6
    total = np.array([one.download_s + one.compute_s + one.upload_s for one in draws])
    assert 0.03 < (total > 35).mean() < 0.08
    assert 0.003 < (total > 60).mean() < 0.025
