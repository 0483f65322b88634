"""Papers whose public codes average without weights: Power-of-Choice and its variants, Active FL, FedCor, GPFL."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.common import Parameters

from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.strategies.both_ways import Course, play_legacy, play_messages
from tests.strategies.either_api import BOTH, Server, base_of, close, private, selection
from tests.strategies.helpers import FakeProxy, model, update
from tests.strategies.message.helpers import FakeNode, ProbeProxy, node_id
from tests.strategies.message.models import arrays_of
from tests.strategies.trees import TreeNode, TreeProxy, as_record

pytestmark = pytest.mark.timeout(60)
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


class Plain(Random):
    """Its paper averages without weights."""

    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}


@BOTH
@pytest.mark.parametrize(
    "name", ["FedAvg", "FedProx", "FedAdam", "FedAvgM", "FedMedian", "Krum", "QFedAvg", "FedXgbBagging", "private"]
)
def test_every_kind_of_base(api: str, name: str) -> None:
    own: dict[str, Any] = {"FedProx": {"proximal_mu": 0.1}, "FedAvgM": {"server_momentum": 0.5}}.get(name, {})
    trees = name == "FedXgbBagging"
    if api == "legacy":
        own |= {"initial_parameters": Parameters([], "")} if trees else {}
        own |= {"evaluate_fn": lambda n, arrays, config: (0.5 + n, {})} if name == "QFedAvg" else {}
    elif name == "QFedAvg":
        own |= {"client_learning_rate": 0.1}
    courses = []
    for wrapped in (False, True):
        base = private(api, base_of(api), clients=5) if name == "private" else base_of(api, name, **own)
        strategy = selection(api, Plain(clients_per_round=5, seed=0), base) if wrapped else base
        kind = TreeProxy if trees and api == "legacy" else FakeProxy
        proxies = [kind(f"node-{k}", k, number=k, extra={"train_loss": 0.25 + 0.125 * k}) for k in range(5)]
        for proxy in [] if wrapped else proxies:
            proxy.num_examples = 1
        if api == "legacy":
            courses.append(play_legacy(strategy, proxies, Course()).models)
        else:
            make = TreeNode if trees else FakeNode
            nodes = {node_id(k): make(proxy, extra=proxy.extra) for k, proxy in enumerate(proxies)}
            start = as_record(b"") if trees else arrays_of()
            courses.append(play_messages(strategy, nodes, Course(), start).models)
    assert courses[0] == courses[1]


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
