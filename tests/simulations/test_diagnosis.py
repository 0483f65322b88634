"""A run that diverged says so, in the log and on the command line; one that learns does not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective
from fedsel_flwr.rounds.history import History
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.diagnosis import chance_level, diagnose
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World

SMOKE = {"engine": "vectorized", "rounds": 6, "selector": "random"}


def history_of(losses: list[float], accuracies: list[float]) -> History:
    history = History()
    for number, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), 1):
        history.append(round=number, num_available=1, round_s=1.0, clients=[])
        history.record_evaluation(number, loss=loss, accuracy=accuracy)
    return history


def test_guessing_is_the_most_frequent_class() -> None:
    """37 of 360 digits are of one class: .1028, and two standard errors of .016."""
    world = World(load_scenario("smoke", SMOKE))
    assert chance_level(world) == pytest.approx(37 / 360 + 2 * math.sqrt(37 / 360 * 323 / 360 / 360))
    assert chance_level(World(load_scenario("ben-ami-unequal", {"engine": "vectorized"}))) == 0
    own = OwnParts(objective=Objective(CLASSIFICATION.loss, CLASSIFICATION.quality))
    assert math.isnan(chance_level(World(load_scenario("smoke", SMOKE), own)))


@pytest.mark.parametrize(
    ("losses", "accuracies", "said"),
    [
        ([2.0] * 4 + [math.inf], [0.9] * 5, "the loss of round 5 is inf"),
        ([2.0, math.nan], [0.9, 0.1], "the loss of round 2 is nan"),
        ([2.0, math.nan], [0.9, math.nan], ""),  # not measured
        ([2.0] * 6, [0.9] + [0.13] * 5, "no better than guessing (at most 0.13)"),
        ([2.0] * 5, [0.13] * 4 + [0.14], ""),
        ([2.0] * 4, [0.1] * 4, ""),  # too few
    ],
)
def test_what_counts(losses: list[float], accuracies: list[float], said: str) -> None:
    world = World(load_scenario("smoke", SMOKE))
    found = diagnose(world, history_of(losses, accuracies))
    assert said in found if said else not found


@pytest.mark.parametrize("name", ["vectorized", "ray"])
@pytest.mark.parametrize(
    ("rate", "said"), [(1e20, "in rounds 2 to 6 no client sent a model of finite size"), (0.05, "")]
)
def test_a_run_says_so(name: str, rate: float, said: str, caplog: Any, without_ray: None) -> None:
    scenario = load_scenario("smoke", {**SMOKE, "training.learning_rate": rate, "api": "message"})
    result = simulate(scenario, engine=name)
    assert said in result.diagnosis if said else not result.diagnosis
    assert (result.diagnosis in caplog.text) if said else ("diverged" not in caplog.text)


def test_a_run_in_which_nobody_delivers_says_why(caplog: Any) -> None:
    result = simulate(load_scenario("smoke", {**SMOKE, "clients.crash_probability": 1.0}))
    assert result.diagnosis.startswith(
        "no update was usable in 6 rounds. Most frequent reason: crashed: the client did not train"
    )
    assert caplog.records[-1].getMessage() == result.diagnosis


def test_on_the_command_line(fedsel: Any, tmp_path: Any) -> None:
    keys = ["--set", "training.learning_rate=5", "--set", "rounds=6", "--quiet", "--runs-dir", str(tmp_path)]
    out = fedsel("run", "digits", "--engine", "vectorized", "--selector", "random", *keys)
    assert "random, seed 1: the run diverged or has learned nothing" in out
