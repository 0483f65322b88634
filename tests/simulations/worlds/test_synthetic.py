"""The drawn regression: its line, its splits, selectors that can learn it, and what it cannot do."""

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
from tests.simulations.inprocess import play
from tests.simulations.worlds.test_data import lengths, together

LARGE = Synthetic(num_examples=20_000, num_features=5, noise=0.5)


def fitted(inputs: Any, numbers: Any) -> tuple[Any, Any]:
    """Least squares by NumPy: weights and bias, and the residuals."""
    design = np.column_stack([inputs, np.ones(len(inputs))]).astype(np.float64)
    weights = np.linalg.lstsq(design, numbers.astype(np.float64), rcond=None)[0]
    return weights, numbers - design @ weights


def test_numbers_are_a_line_of_standard_normal_features_and_noise() -> None:
    inputs, numbers = LARGE.draw(seed=4)
    assert (inputs.shape, inputs.dtype) == ((20_000, 5), np.float32)
    assert (numbers.shape, numbers.dtype) == ((20_000,), np.float32)
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=4 / np.sqrt(20_000))
    np.testing.assert_allclose(np.cov(inputs.T), np.eye(5), atol=0.05)
    weights, residuals = fitted(inputs, numbers)
    assert residuals.std() == pytest.approx(0.5, rel=4 / np.sqrt(40_000))
    assert np.abs(weights).min() > 0.005
    for first, again, other in zip((inputs, numbers), LARGE.draw(4), LARGE.draw(2), strict=True):
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


def test_weights_have_variance_one_over_the_features() -> None:
    """300 seeds of 4 features: 1,200 weights of standard deviation 1/2, 300 biases of 1."""
    drawn = np.array([fitted(*Synthetic(num_examples=9, num_features=4, noise=0).draw(seed))[0] for seed in range(300)])
    assert drawn[:, :4].std() == pytest.approx(0.5, rel=4 / np.sqrt(2400))
    assert drawn[:, 4].std() == pytest.approx(1.0, rel=4 / np.sqrt(600))


def test_splits_are_disjoint_and_keep_rows_together() -> None:
    """Without noise the line is exact, and so it is after splitting."""
    data = load_dataset("synthetic-regression", seed=6, synthetic=Synthetic(num_examples=1000, num_features=3, noise=0))
    assert lengths(data) == [720, 80, 200]
    assert (data.num_classes, data.input_shape, data.task) == (1, (3,), "regression")
    inputs, numbers = together(data)
    assert len(np.unique(inputs, axis=0)) == 1000
    assert np.abs(fitted(inputs, numbers)[1]).max() < 1e-5


@pytest.mark.parametrize("name", ["ben-ami-linear", "ben-ami-unequal"])
def test_ben_amis_scenarios_learn_the_line(name: str) -> None:
    """20 clients, 5 a round, and R² near the best there is, 1 / (1 + .5²) = .8 where w·x has variance 1."""
    scenario = load_scenario(name, {"rounds": 40})
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
    assert len(set(world.num_examples().values())) == (1 if name == "ben-ami-linear" else 20)


@pytest.mark.parametrize("selector", ["random-by-size", "local-accuracy", "bsfl"])
def test_selectors_without_a_validation_set_run_on_numbers(selector: str) -> None:
    history = play(load_scenario("ben-ami-unequal", {"selector": selector, "rounds": 4})).history
    assert [r.num_completed for r in history.rounds] == [5] * 4
    assert history.problem_counts() == {}


def test_an_option_that_a_regression_cannot_have_is_refused_before_round_1() -> None:
    """The class of the selector needs no validation set; the object with this option does."""
    keys = {"rounds": 2, "selector": "active-fl"}
    assert play(load_scenario("ben-ami-linear", keys)).history.problem_counts() == {}
    with pytest.raises(ParameterError, match=r"active-fl \(accuracy\) measures classifiers"):
        play(load_scenario("ben-ami-linear", {**keys, "selectors.active-fl.accuracy_weight": 0.5}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("selector", "gpfl", r"gpfl \(global_accuracy, global_loss\) measures classifiers"),
        ("selector", "pczfl", r"pczfl \(accuracy\) measures classifiers"),
        ("selector", "fedcm-ts", r"fedcm-ts \(kept\) measures classifiers"),
        ("aggregation.filter", "loss", r"FedCA's filter \(aggregation.filter\) measures classifiers"),
        ("per_class_accuracy", True, "per_class_accuracy needs classes"),
        ("model.name", "mlp", "model.name = 'mlp' does not fit .*'synthetic-regression', which has numbers to"),
        ("partition.kind", "dirichlet", "partition.kind = 'dirichlet' .*iid, sizes, sampled"),
        ("data.dataset", "digits", "model.name = 'linear' does not fit data.dataset = 'digits', which has classes"),
    ],
)
def test_what_a_regression_cannot_do_is_said_before_round_1(key: str, value: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        play(load_scenario("ben-ami-linear", {"rounds": 2, key: value}))
