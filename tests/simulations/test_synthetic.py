"""Synthetic regression: what is drawn, its splits, and scenarios that learn it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.objectives import REGRESSION
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.scenario_tables import Synthetic
from fedsel_flwr.simulations.worlds.data import load_dataset
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import in_process, play

LARGE = Synthetic(num_examples=20_000, num_features=5, noise=0.5)


def fitted(inputs: Any, numbers: Any) -> tuple[Any, Any]:
    """Least squares by NumPy: weights and bias, and the residuals."""
    design = np.column_stack([inputs, np.ones(len(inputs))]).astype(np.float64)
    weights = np.linalg.lstsq(design, numbers.astype(np.float64), rcond=None)[0]
    return weights, numbers - design @ weights


def test_numbers_are_a_line_of_standard_normal_features_and_noise() -> None:
    inputs, numbers = LARGE.draw(seed=4)
    assert (inputs.shape, inputs.dtype, numbers.shape, numbers.dtype) == (
        (20_000, 5),
        np.float32,
        (20_000,),
        np.float32,
    )
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=4 / np.sqrt(20_000))
    np.testing.assert_allclose(np.cov(inputs.T), np.eye(5), atol=0.05)
    weights, residuals = fitted(inputs, numbers)
    assert residuals.std() == pytest.approx(0.5, rel=4 / np.sqrt(40_000))
    assert np.abs(weights).min() > 0.005


def test_without_noise_the_line_is_exact() -> None:
    inputs, numbers = Synthetic(num_examples=100, num_features=5, noise=0).draw(seed=4)
    assert np.abs(fitted(inputs, numbers)[1]).max() < 1e-5


def test_weights_have_variance_one_over_the_features() -> None:
    """300 seeds of 4 features: 1,200 weights of standard deviation 1/2, 300 biases of 1."""
    drawn = np.array([fitted(*Synthetic(num_examples=9, num_features=4, noise=0).draw(seed))[0] for seed in range(300)])
    assert drawn[:, :4].std() == pytest.approx(0.5, rel=4 / np.sqrt(2400))
    assert drawn[:, 4].std() == pytest.approx(1.0, rel=4 / np.sqrt(600))


def test_seed_decides() -> None:
    for first, again, other in zip(LARGE.draw(1), LARGE.draw(1), LARGE.draw(2), strict=True):
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


def test_splits_are_disjoint_and_keep_rows_together() -> None:
    given = Synthetic(num_examples=1000, num_features=3, noise=0)
    data = load_dataset("synthetic-regression", seed=6, synthetic=given)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [720, 80, 200]
    assert (data.num_classes, data.input_shape, data.task) == (1, (3,), "regression")
    together = np.concatenate([part.inputs for part in (data.train, data.validation, data.test)])
    numbers = np.concatenate([part.labels for part in (data.train, data.validation, data.test)])
    assert len(np.unique(together, axis=0)) == 1000
    assert np.abs(fitted(together, numbers)[1]).max() < 1e-5


# ---- scenarios ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ben-ami-linear", "ben-ami-unequal"])
def test_ben_amis_scenarios_learn_the_line(name: str) -> None:
    """20 clients, 5 a round, and R² near the best there is, 1 / (1 + .5²) = .8 where w·x has variance 1."""
    scenario = load_scenario(name, {"rounds": 60})
    assert (scenario.num_clients, scenario.clients_per_round, scenario.selector) == (20, 5, "bsfl")
    world = World(scenario)
    assert world.objective is REGRESSION
    test = world.dataset.test
    _, residuals = fitted(test.inputs, test.labels)
    best = 1 - float((residuals**2).mean()) / float(test.labels.var())
    rounds = play(scenario, world).history.rounds
    assert rounds[0].accuracy < best - 0.1
    assert rounds[-1].accuracy == pytest.approx(best, abs=0.02)
    assert rounds[-1].accuracy >= scenario.target_accuracy
    sizes = set(world.num_examples().values())
    assert len(sizes) == (1 if name == "ben-ami-linear" else 20)


@pytest.mark.parametrize("selector", ["random", "cs-ucb", "cs-ucb-q", "random-by-size", "local-accuracy", "bsfl"])
def test_selectors_without_a_validation_set_run_on_numbers(selector: str) -> None:
    rounds = play(load_scenario("ben-ami-unequal", {"selector": selector, "rounds": 4})).history
    assert [r.num_completed for r in rounds.rounds] == [5] * 4
    assert rounds.problem_counts() == {}


def test_the_message_api_runs_on_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsel_flwr.simulations import engine

    monkeypatch.setattr(engine, "run_simulation", in_process)
    short = load_scenario("ben-ami-linear", {"rounds": 3, "api": "message"})
    ours = engine.simulate(short).history.rounds
    theirs = play(short.model_copy(update={"api": "legacy"})).history.rounds
    assert [r.accuracy for r in ours] == pytest.approx([r.accuracy for r in theirs], abs=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"selector": "gpfl"}, r"gpfl \(global_accuracy, global_loss\) measures classifiers"),
        ({"selector": "pczfl"}, r"pczfl \(accuracy\) measures classifiers"),
        ({"aggregation.filter": "loss"}, r"FedCA's filter \(aggregation.filter\) measures classifiers"),
        ({"selector": "fedcm-ts"}, r"fedcm-ts \(kept\) measures classifiers"),
        ({"model.name": "mlp"}, "model.name = 'mlp' does not fit .*'synthetic-regression', which has numbers to"),
        ({"partition.kind": "dirichlet"}, "partition.kind = 'dirichlet' .*iid, sizes, sampled"),
        ({"data.dataset": "digits"}, "model.name = 'linear' does not fit data.dataset = 'digits', which has classes"),
    ],
)  # fmt: skip
def test_what_a_regression_cannot_do_is_said_before_round_1(overrides: dict[str, Any], message: str) -> None:
    scenario = load_scenario("ben-ami-linear", {"rounds": 2} | overrides)
    with pytest.raises(ParameterError, match=message):
        play(scenario)
