"""This package's engines: "vectorized" and "ray", driven as anyone drives them, by `simulate`."""

from __future__ import annotations

import time
from typing import Any

import torch
from turns import Task, Turns

from fedsel_flwr.clients.batched import BatchedTrainer
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import world_of


def main() -> None:
    """Take rounds."""
    turns = Turns()
    plan, task = turns.plan, Task(turns.plan["task"])
    torch.set_num_threads(plan["threads"])
    own = {"rounds": plan["rounds"], "engine": plan["engine"]}
    scenario = Scenario.model_validate(task.settings["scenario"] | own)  # one and the same for world_of and simulate
    world = world_of(scenario)
    # "sampled" draws a share whenever it is asked for; a list, as the other kinds of partitions have, is drawn once
    world.partitions = [world.partitions[k] for k in range(scenario.num_clients)]
    if task.settings["own_model"]:  # not among the scenarios' models
        world.model, given = task.model(), get_arrays(task.model())
        world.initial_arrays = lambda: [array.copy() for array in given]
    trained: list[tuple[float, str]] = []
    _time_training(trained)
    strategy = make_strategy(world, on_round=lambda record: turns.next(**_last(trained)))
    strategy.evaluation_due = lambda server_round: False  # the driver measures the model in the end
    if plan["engine"] == "ray":
        first = strategy.initialize_parameters

        def initialize(*args: Any, **kwargs: Any) -> Any:  # Flower's server begins: Ray is up, nobody was asked yet
            turns.next()
            return first(*args, **kwargs)

        strategy.initialize_parameters = initialize
        result = simulate(scenario, strategy=strategy, num_cpus=plan["processes"])
    else:
        turns.next()
        result = simulate(scenario, strategy=strategy, device=plan["device"], backend=plan["backend"])
    turns.end(result.arrays)


def _time_training(into: list[tuple[float, str]]) -> None:
    """Note the seconds of each round's training, and which backend it took."""
    train = BatchedTrainer.train

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = train(self, *args, **kwargs)
        into.append((time.perf_counter() - begin, self.backend))
        return out

    BatchedTrainer.train = timed  # type: ignore[method-assign]


def _last(trained: list[tuple[float, str]]) -> dict[str, object]:
    return {"training": trained[-1][0], "backend": trained[-1][1]} if trained else {}


if __name__ == "__main__":
    main()
