"""Papers whose public codes average without weights: Power-of-Choice and its variants, Active FL, FedCor, GPFL."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.serverapp import strategy as message_bases

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.strategies import message as message_api
from tests.strategies import helpers
from tests.strategies.both_ways import Course, play_legacy, play_messages
from tests.strategies.helpers import Federation, model, update
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, node_id, play
from tests.strategies.message.models import arrays_of
from tests.strategies.test_wrapped_bases import CLIENTS, LEGACY, MESSAGE, _extra
from tests.strategies.trees import TreeNode, as_record

pytestmark = pytest.mark.timeout(60)
UNWEIGHTED: dict[str, dict[str, Any]] = {
    "power-of-choice": {}, "cpow-d": {}, "rpow-d": {}, "active-fl": {}, "fedcor": {},
}  # fmt: skip
FLEET = 4
SIZES = [10 + 3 * k for k in range(FLEET)]


def clients() -> list[ProbeProxy]:
    """Four clients with 10, 13, 16 and 19 examples."""
    extra = {"loss": 1.0, "train_loss": 1.0}
    return [ProbeProxy(f"node-{k}", k, number=k, extra=extra) for k in range(FLEET)]


def after_a_round(api: str, name: str, **options: Any) -> list[np.ndarray]:
    """The global model after a round in which everybody trains."""
    selector = create(name, clients_per_round=FLEET, seed=0)
    if api == "legacy":
        strategy = legacy_api.SelectionStrategy(selector, helpers.fedavg(), max_latency=9.0, **options)
        return Federation(strategy, clients()).play(1).arrays()
    strategy = message_api.SelectionStrategy(
        selector, message_bases.FedAvg(fraction_evaluate=0.0), max_latency=9.0, **options
    )
    grid = FakeGrid({node_id(k): FakeNode(proxy) for k, proxy in enumerate(clients())})
    return play(strategy, grid, 1, initial_arrays=arrays_of())[0].arrays.to_numpy_ndarrays()


@pytest.mark.parametrize("api", ["legacy", "message"])
@pytest.mark.parametrize("name", UNWEIGHTED)
def test_the_new_model_is_the_plain_mean_and_fedpdp_brings_the_weights_back(api: str, name: str) -> None:
    plain, weighted = after_a_round(api, name), after_a_round(api, name, averaging="fedpdp")
    for layer, (mean, by_size) in enumerate(zip(plain, weighted, strict=True)):
        trained = [update(k, model(), 1)[layer] for k in range(FLEET)]
        np.testing.assert_allclose(mean, np.mean(trained, axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(by_size, np.average(trained, axis=0, weights=SIZES), rtol=1e-5, atol=1e-6)
        assert np.abs(mean - by_size).max() > 1e-3


def test_a_scenario_s_own_averaging_overrules_the_paper_s() -> None:
    selector = create("rpow-d", clients_per_round=3)
    chosen = [
        resolve_settings(selector),
        resolve_settings(selector, averaging="fedpdp"),
        resolve_settings(selector, averaging="mean"),
    ]
    assert [(s.averaging, s.averaging_is_papers) for s in chosen] == [
        ("mean", True), ("fedpdp", False), ("mean", False),
    ]  # fmt: skip
    assert resolve_settings(Random(clients_per_round=3)).averaging is None


@pytest.mark.parametrize("name", ["rpow-d", "cpow-d", "fedcor"])
def test_the_vectorized_engine_averages_so_too(name: str) -> None:
    """Ten clients of unequal sizes, all of whom train: with the weights the model is FedAvg's of random."""
    keys = {
        "num_clients": 10,
        "clients_per_round": 10,
        "rounds": 1,
        "partition.kind": "dirichlet",
        "partition.alpha": 0.3,
    }

    def trained(selector: str, **more: Any) -> list[np.ndarray]:
        scenario = load_scenario("smoke", {**keys, "selector": selector, **more})
        return list(simulate(scenario, engine="vectorized").arrays)

    usual = trained("random")
    plain, weighted = trained(name), trained(name, **{"aggregation.averaging": "fedpdp"})
    mean = trained("random", **{"aggregation.averaging": "mean"})
    for a, b, c, d in zip(usual, weighted, plain, mean, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(c, d, rtol=1e-5, atol=1e-7)
    assert max(np.abs(a - c).max() for a, c in zip(usual, plain, strict=True)) > 1e-4


# ---- no base is refused: each ends where it ends alone with clients of one example each ------------------------------


class Plain(Random):
    """Its paper averages without weights."""

    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}


@pytest.mark.parametrize("name", sorted(LEGACY))
def test_every_legacy_base(name: str) -> None:
    courses = []
    for wrapped in (False, True):
        make, proxy = LEGACY[name]
        strategy = make(fraction_evaluate=0.0)
        proxies = [proxy(f"node-{k}", k, number=k, extra=_extra(k)) for k in range(CLIENTS)]
        if wrapped:
            strategy = legacy_api.SelectionStrategy(Plain(clients_per_round=CLIENTS, seed=0), strategy, max_latency=9.0)
        else:
            for one in proxies:
                one.num_examples = 1
        courses.append(play_legacy(strategy, proxies, Course()).models)
    assert courses[0] == courses[1]


@pytest.mark.parametrize("name", sorted(MESSAGE))
def test_every_message_base(name: str) -> None:
    courses = []
    for wrapped in (False, True):
        strategy, trees = MESSAGE[name](fraction_evaluate=0.0), name == "FedXgbBagging"
        proxies = [helpers.FakeProxy(str(node_id(k)), k, number=k) for k in range(CLIENTS)]
        if wrapped:
            strategy = message_api.SelectionStrategy(
                Plain(clients_per_round=CLIENTS, seed=0), strategy, max_latency=9.0
            )
        else:
            for one in proxies:
                one.num_examples = 1
        nodes = {node_id(k): (TreeNode if trees else FakeNode)(one, extra=_extra(k)) for k, one in enumerate(proxies)}
        initial = as_record(b"") if trees else arrays_of()
        courses.append(play_messages(strategy, nodes, Course(), initial).models)
    assert courses[0] == courses[1]
