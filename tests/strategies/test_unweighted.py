"""Papers whose public codes average without weights: Power-of-Choice and its variants, Active FL, FedCor, GPFL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.strategies.either_api import BOTH, Server, close, selection
from tests.strategies.helpers import model, update
from tests.strategies.message.helpers import ProbeProxy

UNWEIGHTED = ("power-of-choice", "cpow-d", "rpow-d", "active-fl", "fedcor")
FLEET = 4


def after_a_round(api: str, name: str, **options: Any) -> list[np.ndarray]:
    """The global model after a round in which all four clients, with 10 to 19 examples, train."""
    extra = {"loss": 1.0, "train_loss": 1.0}
    clients = [ProbeProxy(f"node-{k}", k, number=k, extra=extra) for k in range(FLEET)]
    strategy = selection(api, create(name, clients_per_round=FLEET, seed=0), **options)
    return Server(api, strategy, clients).play(1).models[0]


@BOTH
@pytest.mark.parametrize("name", UNWEIGHTED)
def test_the_new_model_is_the_plain_mean_and_fedpdp_brings_the_weights_back(api: str, name: str) -> None:
    plain, weighted = after_a_round(api, name), after_a_round(api, name, averaging="fedpdp")
    trained = [list(layer) for layer in zip(*(update(k, model(), 1) for k in range(FLEET)), strict=True)]
    close(plain, [np.mean(layer, axis=0) for layer in trained])
    close(weighted, [np.average(layer, axis=0, weights=[10, 13, 16, 19]) for layer in trained])
    assert all(np.abs(mean - by_size).max() > 1e-3 for mean, by_size in zip(plain, weighted, strict=True))


def test_a_scenario_s_own_averaging_overrules_the_paper_s() -> None:
    selector = create("rpow-d", clients_per_round=3)
    for given, expected in (
        ({}, ("mean", True)), ({"averaging": "fedpdp"}, ("fedpdp", False)), ({"averaging": "mean"}, ("mean", False)),
    ):  # fmt: skip
        resolved = resolve_settings(selector, **given)
        assert (resolved.averaging, resolved.averaging_is_papers) == expected
    assert resolve_settings(Random(clients_per_round=3)).averaging is None


@pytest.mark.parametrize("name", ["rpow-d", "cpow-d", "fedcor"])
def test_the_vectorized_engine_averages_so_too(name: str) -> None:
    """Ten clients of unequal sizes, all of whom train: with the weights the model is FedAvg's of random."""
    keys = {"num_clients": 10, "clients_per_round": 10, "rounds": 1, "partition.alpha": 0.3}

    def trained(selector: str, **more: Any) -> list[np.ndarray]:
        scenario = load_scenario("smoke", {**keys, "partition.kind": "dirichlet", "selector": selector, **more})
        return list(simulate(scenario, engine="vectorized").arrays)

    usual, plain = trained("random"), trained(name)
    close(usual, trained(name, **{"aggregation.averaging": "fedpdp"}))
    close(plain, trained("random", **{"aggregation.averaging": "mean"}))
    assert max(np.abs(a - c).max() for a, c in zip(usual, plain, strict=True)) > 1e-4
