"""Several processes under the vectorized engine: the same run, refusals, and when there are how many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from fedsel_flwr.cli import main
from fedsel_flwr.clients.batched import BatchedTrainer, Examples, numba_kernels
from fedsel_flwr.clients.batched.backends import Backend, Choice, choose_backend
from fedsel_flwr.clients.threads import using_threads
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.simulations import compare, load_scenario, simulate
from fedsel_flwr.simulations.parallelism import TrainerPool, run_size, threads_for
from fedsel_flwr.simulations.worlds.world import World

SMOKE = {"engine": "vectorized", "rounds": 4}


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def test_a_run_is_the_same_with_workers_from_its_second_round() -> None:
    scenario = load_scenario("smoke", SMOKE)
    alone = simulate(scenario, processes=1)
    with TrainerPool(2) as staff:
        workers = staff.workers(2)
        helped = simulate(scenario, processes=staff, on_round=lambda record: workers.wait())
        assert workers.tasks >= 2
        pids = workers.pids
        again = simulate(scenario, processes=staff)
        assert staff.workers(2).pids == pids  # they stay for the next run
        tables = compare(scenario, ["bsfl", "random"], seeds=1, processes=2).table()
    for layer, expected, repeated in zip(helped.arrays, alone.arrays, again.arrays, strict=True):
        np.testing.assert_allclose(layer, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(layer, repeated)
    chosen, expected_chosen = ([(row.round, row.client_id) for row in run.history.clients] for run in (helped, alone))
    assert chosen == expected_chosen
    assert len(tables) == 2


def test_workers_end_with_a_run_that_breaks_off() -> None:
    seen: list[set[int]] = []

    def break_off(record: RoundRecord) -> None:
        seen.append(children())
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt):
        simulate(load_scenario("smoke", SMOKE), processes=2, on_round=break_off)
    assert len(seen[0] - before) == 1
    assert children() == before


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({}, {"processes": 0}, "processes must be a whole number of at least 1, got 0"),
        ({}, {"processes": 2.5}, "processes must be a whole number of at least 1, got 2.5"),
        ({"engine": "ray"}, {"processes": 2}, "processes = 2 is for the vectorized engine, but the engine is 'ray'"),
        ({}, {"processes": 2, "device": "cuda"}, "processes = 2 train on the CPU, but the device is 'cuda'"),
    ],
)
def test_what_cannot_be(keys: dict[str, Any], options: dict[str, Any], said: str) -> None:
    scenario = load_scenario("smoke", SMOKE | keys)
    for run in (
        lambda: simulate(scenario, **options),
        lambda: compare(scenario, ["random"], engine=scenario.engine, seeds=1, **options),
    ):
        with pytest.raises(ParameterError) as caught:
            run()
        assert str(caught.value).startswith(said)


def test_the_command_says_it_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        (["compare", "smoke", "--processes", "0"], "processes must be a whole number of at least 1, got 0"),
        (["run", "smoke", "--processes", "2", "--engine", "ray"], "processes = 2 is for the vectorized engine"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def world(rounds: int, cohort: int, model: Any) -> World:
    from fedsel_flwr.simulations.worlds.ingredients import OwnParts

    keys = {"rounds": rounds, "clients_per_round": cohort, "num_clients": 100, "training.batch_size": 10}
    keys |= {"partition.kind": "iid", "training.local_epochs": 1}
    return World(load_scenario("digits", SMOKE | keys), OwnParts(model))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10))


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 800, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800 * 36, 10))


def chosen(world: World, backend: Backend | None, threads: int = 4) -> Choice:
    """What trains a world's clients, and in how many processes."""
    train = world.dataset.train
    data = Examples(train.inputs, train.labels, []).to(torch.device("cpu"))
    settings = world.scenario.training.settings()
    return choose_backend(
        world.model, world.objective.loss, *data, settings,
        backend=backend, size=run_size(world), processes=None, threads=threads,
    )  # fmt: skip


def test_how_many_by_the_sizes_alone() -> None:
    def processes(world: World, threads: int = 4) -> tuple[int, str]:
        choice = chosen(world, "auto", threads)
        return choice.processes, choice.reasons.get("processes", "")

    # 60,010 parameters, 25 clients, batches of 10: a step has 6 x 60,010 x 250 = 90 million operations
    assert processes(world(1000, 25, wide)) == (3, "")  # eight clients each
    assert processes(world(1000, 90, wide)) == (4, "")  # as torch has threads
    few, small = world(1000, 15, wide), world(1000, 25, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    for alone, reason in (
        (processes(few), "15 clients a round, 8 a process"),  # two would have fewer than eight
        (processes(world(20, 25, wide)), "the run has fewer than"),  # 10 examples each: 1.8 thousand million operations
        (processes(small), "a step of the round has fewer than"),
        (processes(world(1000, 25, convolving)), "convolutions"),
        (processes(world(1000, 25, wide), threads=1), "there are 1 threads"),
    ):
        assert alone[0] == 1
        assert reason in alone[1]


@pytest.mark.parametrize(
    ("keys", "threads"),
    [
        ({}, 1),
        ({"model.name": "cnn"}, 2),
        ({"training.batch_size": 4_000, "clients_per_round": 20, "num_clients": 40}, 2),
    ],
)
def test_small_products_take_one_thread(keys: dict[str, Any], threads: int) -> None:
    with using_threads(2):
        assert threads_for(World(load_scenario("digits", keys))) == threads
        assert torch.get_num_threads() == 2


@pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (the extra 'fast')")
def test_numba_by_kind_and_length_alone() -> None:
    # 100 clients of some 10 examples, batches of 10: two steps a round at most
    choice = chosen(world(3000, 25, wide), None)
    assert (choice.backend, choice.processes) == ("numba", 1)
    assert "threads of this process" in choice.reasons["processes"]
    short = chosen(world(300, 25, wide), None)
    assert short.backend == "manual"  # over before the loops are loaded
    assert "25,000" in short.reasons["numba"]
    assert chosen(world(3000, 25, wide), "auto").backend == "manual"
    assert chosen(world(3000, 25, convolving), None).backend == "manual"


@pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (the extra 'fast')")
def test_a_run_with_numba_makes_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load_scenario("smoke", SMOKE | {"selector": "bsfl"})
    alone = simulate(scenario)
    taken: list[str] = []
    train = BatchedTrainer.train

    def watched(self: BatchedTrainer, *arguments: Any) -> Any:
        result = train(self, *arguments)
        taken.append(self.backend)
        return result

    monkeypatch.setattr(BatchedTrainer, "train", watched)
    with TrainerPool(1, backend="numba") as staff:
        runs = [simulate(scenario, processes=staff) for _ in range(2)]
    assert taken == ["numba"] * 8
    for layer, repeated, expected in zip(*(run.arrays for run in (*runs, alone)), strict=True):
        np.testing.assert_allclose(layer, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(layer, repeated)
    chosen, expected_chosen = ([(row.round, row.client_id) for row in run.history.clients] for run in (runs[0], alone))
    assert chosen == expected_chosen
