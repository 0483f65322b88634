"""Every base strategy that Flower ships, alone and wrapped by a selector that chooses everybody: the same results."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import flwr.server.strategy as legacy
import flwr.serverapp.strategy as message
import numpy as np
import pytest
from flwr.common import FitIns, FitRes, Parameters

from fedsel_flwr.selectors import Random
from tests.strategies.both_ways import Course, legacy_function, message_function, play_legacy, play_messages
from tests.strategies.either_api import BOTH, make
from tests.strategies.helpers import OK, FakeProxy, initial, model
from tests.strategies.message.helpers import FakeNode, node_id
from tests.strategies.message.models import arrays_of
from tests.strategies.trees import TreeNode, TreeProxy, as_record, booster, grown

pytestmark = pytest.mark.timeout(60)
CLIENTS = 5
AROUND: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "DPFedAvgAdaptive": ((CLIENTS,), {"noise_multiplier": 0.1}),
    "DPFedAvgFixed": ((CLIENTS, 1.0), {}),
    "DifferentialPrivacyClientSideAdaptiveClipping": ((0.1, CLIENTS), {}),
    "DifferentialPrivacyClientSideFixedClipping": ((0.1, 1.0, CLIENTS), {}),
    "DifferentialPrivacyServerSideAdaptiveClipping": ((0.1, CLIENTS), {}),
    "DifferentialPrivacyServerSideFixedClipping": ((0.1, 1.0, CLIENTS), {}),
}
"""Wrapper around FedAvg -> its arguments."""
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("legacy", "Bulyan"): {"to_keep": 0},
    ("legacy", "FedAvgM"): {"server_momentum": 0.5},
    ("legacy", "FedProx"): {"proximal_mu": 0.1},
    ("legacy", "QFedAvg"): {"evaluate_fn": lambda server_round, arrays, config: (0.5 + server_round, {})},
    ("message", "FedAvgM"): {"server_momentum": 0.5},
    ("message", "FedProx"): {"proximal_mu": 0.1},
    ("message", "MultiKrum"): {"num_nodes_to_select": 3},
    ("message", "QFedAvg"): {"client_learning_rate": 0.1},
}
DECIDE_THEMSELVES = {"FedXgbCyclic"}
NAMES = {
    "legacy": set(legacy.__all__) - {"Strategy"} - DECIDE_THEMSELVES,
    "message": set(message.__all__) - {"Strategy", "Result"} - DECIDE_THEMSELVES,
}
OWN_FUNCTION = ("FedAvg", "FedAdam", "Krum", "QFedAvg", "DifferentialPrivacyServerSideFixedClipping")
"""Bases of both APIs that are given a user's aggregation function, too."""


class RawProxy(FakeProxy):
    """A client of FedAvgAndroid, which sends the bytes of float32 arrays."""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        arrays = [np.frombuffer(one, dtype=np.float32) * 0.5 + self.number + group_id for one in ins.parameters.tensors]
        metrics = {"latency_s": 1.0, **self.extra}
        return FitRes(OK, Parameters([one.tobytes() for one in arrays], "numpy.nda"), self.num_examples, metrics)


class NetworkAndTreesProxy(FakeProxy):
    """A client of FedXgbNnAvg, which sends a network and its trees."""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        network = ins.parameters[0] if isinstance(ins.parameters, list) else ins.parameters
        result: Any = super().fit(FitIns(network, ins.config), timeout, group_id)
        trees = (booster(self.number, group_id).decode(), self.number)
        result.parameters = [SimpleNamespace(parameters=result.parameters), trees]
        return result


PROXIES = {"FedAvgAndroid": RawProxy, "FedXgbBagging": TreeProxy, "FedXgbNnAvg": NetworkAndTreesProxy}
STARTS = {
    "FedAvgAndroid": Parameters([array.tobytes() for array in model(0.5)], "numpy.nda"),
    "FedXgbBagging": Parameters([], ""),
}


def _extra(k: int) -> dict[str, Any]:
    """What client ``k`` reports beside latency, energy and its id: the keys of Flower's quickstarts and its mods."""
    return {
        "train_loss": 0.25 + 0.125 * k, "acc": 0.5 + 0.0625 * k, "norm_bit": k % 2, "dpfedavg_norm_bit": k % 2,
        "client_id": k,
    }  # fmt: skip


def _course(
    api: str, name: str, *, wrap: bool, own_function: bool = False, broken: tuple[int, ...] = (),
    changes: dict[str, Any] | None = None,
) -> Course:  # fmt: skip
    course = Course()
    package: Any = legacy if api == "legacy" else message
    given: dict[str, Any] = {}
    if own_function:
        key = "fit_metrics_aggregation_fn" if api == "legacy" else "train_metrics_aggr_fn"
        given[key] = legacy_function(course) if api == "legacy" else message_function(course)
    if api == "legacy":
        given |= {"initial_parameters": STARTS.get(name, initial()), "fraction_evaluate": 1.0}
    args, options = AROUND.get(name, ((), OPTIONS.get((api, name), {})))
    make_base = getattr(package, name)
    base = make_base(package.FedAvg(**given), *args, **options) if name in AROUND else make_base(**options, **given)
    strategy = make(api, Random(clients_per_round=CLIENTS, seed=0), base) if wrap else base
    if api == "legacy":
        proxies = [
            PROXIES.get(name, FakeProxy)(
                f"node-{k}", k, number=k, extra=_extra(k), fault="raises" if k in broken else None
            )
            for k in range(CLIENTS)
        ]
        play_legacy(strategy, proxies, course)
    else:
        trees = name == "FedXgbBagging"
        nodes: dict[int, FakeNode] = {
            node_id(k): (TreeNode if trees else FakeNode)(
                FakeProxy(str(node_id(k)), k, number=k), fault="error" if k in broken else None,
                extra={**_extra(k), "per_class": [0.5, 0.25 * k], **(changes or {})},
            )
            for k in range(CLIENTS)
        }  # fmt: skip
        play_messages(strategy, nodes, course, as_record(b"") if trees else arrays_of())
    if wrap and not broken:
        assert strategy.history.problem_counts() == {}
    return course


@pytest.mark.parametrize(
    ("api", "name", "own_function"),
    [
        *[(api, name, False) for api in NAMES for name in sorted(NAMES[api])],
        *[(api, name, True) for api in NAMES for name in OWN_FUNCTION],
    ],
)
def test_a_wrapped_base_ends_where_it_ends_alone(api: str, name: str, own_function: bool) -> None:
    """And a user's own aggregation function gets the same metrics."""
    alone, wrapped = (_course(api, name, wrap=wrap, own_function=own_function) for wrap in (False, True))
    assert len(alone.models) == 3
    assert alone.models[0] != alone.models[-1]
    assert wrapped == alone
    assert len(alone.given) == (3 if own_function else 0)
    if api == "message":
        assert {"train_loss", "acc", "per_class", "latency_s"} <= alone.metrics[0].keys()
        assert alone.evaluated[0].keys() == {"loss"}


@BOTH
@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "DifferentialPrivacyServerSideFixedClipping"])
def test_a_wrapped_base_treats_a_failure_as_it_does_alone(api: str, name: str) -> None:
    alone, wrapped = (_course(api, name, wrap=wrap, broken=(2,)) for wrap in (False, True))
    assert (wrapped.models, wrapped.metrics) == (alone.models, alone.metrics)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_without_a_finite_number_reaches_no_average(value: float) -> None:
    alone, wrapped = (_unusable(wrap, value) for wrap in (False, True))
    expected = [{key: one for key, one in metrics.items() if math.isfinite(one)} for metrics in _numbers(alone)]
    assert _numbers(wrapped) == expected
    assert [one.keys() - other.keys() for one, other in zip(_numbers(alone), expected, strict=True)] == [
        {"train_loss", "compute_s"}
    ] * 3


def _unusable(wrap: bool, value: float) -> Course:
    changes = {"train_loss": value, "compute_s": value}
    return _course("message", "FedAvg", wrap=wrap, own_function=True, broken=(4,), changes=changes)


def _numbers(course: Course) -> list[dict[str, float]]:
    return [{key: one for key, one in metrics.items() if not isinstance(one, list)} for metrics in course.metrics]


@BOTH
def test_bagging_keeps_every_tree_of_every_round(api: str) -> None:
    """The model changes its size in every round, and starts from nothing."""
    trees = [[0.5 * k, -0.25 * n] for n in (1, 2, 3) for k in range(CLIENTS)]
    assert grown(_course(api, "FedXgbBagging", wrap=True).models[-1][0]) == trees
