"""Both engines over 20 rounds of a network: the choices are the same, and with the same choices the models.

Rounding is all that may differ, and it is small until a rectifier (or the maximum of a window) stands so near its kink
that rounding decides which side it takes. Then single precision jumps, by the step length times that unit's gradient,
on some processors in some runs. Hence two comparisons:

* In double precision both engines run freely. Choices are equal and models agree to 1e-9 after every round.
* In single precision the vectorized engine takes the clients of the other one: the models agree to 1e-4 after every
  round, up to a jump if there is one. And with the other one's model at the beginning of every round, so that no jump
  is carried on, it would choose the same clients.

Clients one by one are those of the Ray engine, in this process; one test has them on Ray itself.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.streams import streams
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.simulations import vectorized
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.processes import ROOT, Command
from tests.simulations.agreement import CUT, Course, differences, in_double, one_by_one, partings, together

pytestmark = pytest.mark.timeout(900)

SELECTORS = ("bsfl", "cs-ucb-q", "gpfl", "fedcm-ts", "pczfl", "local-accuracy", "power-of-choice", "cpow-d",
             "rpow-d", "active-fl", "oort", "fedcs", "tifl", "fedcor", "divfl", "lsh", "nccb")  # fmt: skip
SINGLE, DOUBLE = 1e-4, 1e-9
ROUNDING, JUMP = 1e-6, 5e-2
"""What rounding changes in a round in which no rectifier turns, and what a run in which one turns."""
FEWER = {"num_clients": 40, "clients_per_round": 5}


def _another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vectorized, "streams", lambda seed, purpose, ids, number: streams(seed, purpose, ids, number + 1))


def _equal_weights(patch: pytest.MonkeyPatch) -> None:
    mean = vectorized.stack_mean
    patch.setattr(vectorized, "stack_mean", lambda stack, weights: mean(stack, np.ones_like(weights)))


def _other_delays(patch: pytest.MonkeyPatch) -> None:
    train = vectorized.InProcessClients.train

    def trained_late(clients: vectorized.InProcessClients, nodes: Sequence[str], number: int, asks: str) -> Any:
        draws = SystemModel.draws
        with pytest.MonkeyPatch.context() as inner:  # for this engine alone: clients one by one draw in the same way
            inner.setattr(SystemModel, "draws", lambda system, ids, number: draws(system, ids, number + 1))
            return train(clients, nodes, number, asks)

    patch.setattr(vectorized.InProcessClients, "train", trained_late)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "another order of the data": (_another_order, "models in double precision"),
    "equal weights": (_equal_weights, "models in double precision"),
    "the delays of another round": (_other_delays, "bsfl chose others in round"),
}
"""Each put into the vectorized engine, and what the comparison says of it."""


def scenario(name: str, selector: str, folder: str = "", **overrides: Any) -> Scenario:
    keys = {"selector": selector, "rounds": 20, "clients.energy_score_low": 0.5, "data.local_test_fraction": 0.2}
    return load_scenario(name, {**keys, "data.data_dir": folder, **overrides})


def check_choices(expected: Course, found: Course, selector: str) -> None:
    for number, gap in partings(expected, found):
        assert gap < CUT, f"{selector} chose others in round {number}; the gap of the scores at the cut is {gap:.2e}"
        print(f"{selector} chose others in round {number}: a tie, the gap of the scores at the cut is {gap:.2e}")


def check_models(apart: list[float], selector: str) -> None:
    """Within 1e-4 after every round, unless they jumped before: by more than tenfold in one round, and not far."""
    if max(apart) > SINGLE:
        beyond = next(i for i, difference in enumerate(apart) if difference > SINGLE)
        before = [max(difference, ROUNDING / 10) for difference in (0.0, *apart)]
        jumps = [i + 1 for i, difference in enumerate(apart[: beyond + 1]) if difference > 10 * before[i]]
        assert jumps, f"{selector}: models drift apart, after each round by {apart}"
        assert max(apart) <= JUMP, f"{selector}: models differ by {max(apart):.2e}"
        print(f"{selector}: a rectifier turned in round {jumps[0]}, models differ by {max(apart):.2e} in the end")


def check_agreement(chosen: Scenario) -> None:
    selector = chosen.selector
    double = in_double(chosen)
    expected, found = one_by_one(double), together(double)
    assert len(expected.chosen) == len(expected.ended) == chosen.rounds
    check_choices(expected, found, selector)
    exact = differences(expected, found)
    assert max(exact) <= DOUBLE, f"models in double precision after each round: {exact}"

    single = World(chosen)
    check_replayed(single, one_by_one(single))
    print(f"{chosen.name}, {selector}: in double precision models differ by {max(exact):.1e} at most")


def check_replayed(world: World, expected: Course) -> None:
    """The vectorized engine with the clients of a course, and with its models too."""
    selector, name = world.scenario.selector, world.scenario.name
    apart = differences(expected, together(world, expected))
    check_models(apart, selector)
    each = together(world, expected, models=True)
    check_choices(expected, each, selector)
    afresh = differences(expected, each)
    assert np.median(afresh) <= ROUNDING, f"{selector}: models differ after a round from the same start by {afresh}"
    print(f"{name}, {selector}: models differ by {max(apart):.1e} at most, within one round by {max(afresh):.1e}")


@pytest.mark.parametrize("selector", ["gpfl", "fedcm-ts"])
def test_twenty_rounds(selector: str) -> None:
    check_agreement(scenario("digits", selector, **{"training.local_epochs": 2, **FEWER}))


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_twenty_rounds_of_digits(selector: str) -> None:
    check_agreement(scenario("digits", selector))


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_twenty_rounds_with_every_term_of_the_step(selector: str) -> None:
    """Fewer clients with more examples each, and images cropped and mirrored."""
    steps = {"training.momentum": 0.5, "training.proximal_mu": 0.1, "training.weight_decay": 1e-3}
    check_agreement(scenario("digits", selector, **{**steps, **FEWER, "training.augmentation": "crop-flip"}))


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_twenty_rounds_of_fashion_mnist(selector: str, shared_data: Path) -> None:
    fewer = {"num_clients": 100, "training.local_steps": 10, "data.validation_fraction": 0.01}
    # pczfl trains everybody in many rounds, and measures each model on the validation set
    check_agreement(scenario("fashion-500", selector, str(shared_data), **(fewer if selector == "pczfl" else {})))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "selector"), [("digits", "gpfl"), ("fashion-500", "local-accuracy")])
def test_twenty_rounds_on_ray(name: str, selector: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Also: clients one by one in this process are what Ray's actors are."""
    folder = "" if name == "digits" else str(request.getfixturevalue("shared_data"))
    chosen = scenario(name, selector, folder, **FEWER)
    result = tmp_path / "course"
    argv = (sys.executable, "-m", "tests.simulations.ray_runs", "agreeing", str(result), chosen.model_dump_json())
    command = Command(*argv, folder=tmp_path, cwd=ROOT)
    try:
        assert command.wait(600) == 0, command.stderr[-5000:]
    finally:
        command.kill()
    expected: Course = pickle.loads(result.read_bytes())
    world = World(chosen)
    here = one_by_one(world)
    assert partings(expected, here) == []
    assert max(differences(expected, here)) <= 1e-6  # answers come in other orders, and so do the terms of the mean
    check_replayed(world, expected)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_an_engine_does_otherwise_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"num_clients": 15, "clients_per_round": 5, "rounds": 6}  # after three rounds everybody is known
    chosen = scenario("digits", "bsfl", **few, **{"training.local_epochs": 1})
    FAULTS[fault][0](monkeypatch)
    with pytest.raises(AssertionError, match=FAULTS[fault][1]):
        check_agreement(chosen)


def test_a_parting_is_said_with_its_round_and_gap() -> None:
    scores = [None, np.array([0.5, 0.7, np.inf, 0.5 - 1e-7]), np.array([0.1, 0.2, 0.3, 0.4])]
    expected = Course(chosen=[np.array([0, 1]), np.array([1, 2, 3]), np.array([0, 1])], scores=scores)
    found = Course(chosen=[np.array([0, 1]), np.array([0, 1, 2]), np.array([2, 3])], scores=scores)
    (first, tie), (second, gap) = partings(expected, found)  # 0 in place of 3; then 2 and 3 in place of 0 and 1
    assert (first, second) == (2, 3)
    assert tie == pytest.approx(1e-7)
    assert gap == pytest.approx(0.3)
    with pytest.raises(AssertionError, match=r"others in round 3; the gap of the scores at the cut is 3\.00e-01"):
        check_choices(expected, found, "x")
    found.scores[2] = None
    assert partings(expected, found)[1] == (3, np.inf)


@pytest.mark.parametrize(
    ("apart", "fits"),
    [
        ([1e-7, 9e-5], True),
        ([1e-7, 8e-5, 9e-5, 2e-4, 2e-3], True),
        ([5e-7, 4e-6, 3e-5, 2e-4], False),  # never tenfold
        ([1e-7, 2e-3, 2e-1], False),
    ],
)
def test_a_jump_is_told_from_a_drift(apart: list[float], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(AssertionError):
        check_models(apart, "x")
