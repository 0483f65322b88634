"""Every base strategy that Flower ships, alone and wrapped by a selector that chooses everybody: the same results."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flwr.server.strategy as legacy
import flwr.serverapp.strategy as message
import numpy as np
import pytest
from flwr.common import FitIns, FitRes, Parameters

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.both_ways import Course, legacy_function, message_function, play_legacy, play_messages
from tests.strategies.helpers import OK, FakeProxy, initial, model
from tests.strategies.message.helpers import FakeNode, node_id
from tests.strategies.message.models import arrays_of
from tests.strategies.trees import TreeNode, TreeProxy, as_record, booster, grown

pytestmark = pytest.mark.timeout(60)
CLIENTS = 5
Make = Callable[..., Any]
FLOAT32 = initial().tensors


def _extra(k: int) -> dict[str, Any]:
    """What client ``k`` reports beside latency, energy and its id: the keys of Flower's quickstarts and its mods."""
    return {
        "train_loss": 0.25 + 0.125 * k, "acc": 0.5 + 0.0625 * k, "norm_bit": k % 2, "dpfedavg_norm_bit": k % 2,
        "client_id": k,
    }  # fmt: skip


# ---- legacy API ------------------------------------------------------------------------------------------------------


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
        result = super().fit(FitIns(network, ins.config), timeout, group_id)
        trees = (booster(self.number, group_id).decode(), self.number)
        result.parameters = [SimpleNamespace(parameters=result.parameters), trees]  # type: ignore[assignment]
        return result


def _raw() -> Parameters:
    return Parameters([array.tobytes() for array in model(0.5)], "numpy.nda")


def _none() -> Parameters:
    return Parameters([], "")


def _plain(
    name: str, proxy: type[FakeProxy] = FakeProxy, start: Callable[[], Parameters] = initial, **more: Any
) -> Any:
    return lambda **kw: getattr(legacy, name)(initial_parameters=start(), **more, **kw), proxy


def _around(name: str, *args: Any, **more: Any) -> Any:
    def make(**kw: Any) -> Any:
        return getattr(legacy, name)(legacy.FedAvg(initial_parameters=initial(), **kw), *args, **more)

    return make, FakeProxy


LEGACY: dict[str, tuple[Make, type[FakeProxy]]] = {
    "Bulyan": _plain("Bulyan", to_keep=0),
    "DPFedAvgAdaptive": _around("DPFedAvgAdaptive", CLIENTS, noise_multiplier=0.1),
    "DPFedAvgFixed": _around("DPFedAvgFixed", CLIENTS, 1.0),
    "DifferentialPrivacyClientSideAdaptiveClipping": _around(
        "DifferentialPrivacyClientSideAdaptiveClipping", 0.1, CLIENTS
    ),
    "DifferentialPrivacyClientSideFixedClipping": _around(
        "DifferentialPrivacyClientSideFixedClipping", 0.1, 1.0, CLIENTS
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": _around(
        "DifferentialPrivacyServerSideAdaptiveClipping", 0.1, CLIENTS
    ),
    "DifferentialPrivacyServerSideFixedClipping": _around(
        "DifferentialPrivacyServerSideFixedClipping", 0.1, 1.0, CLIENTS
    ),
    "FaultTolerantFedAvg": _plain("FaultTolerantFedAvg"),
    "FedAdagrad": _plain("FedAdagrad"),
    "FedAdam": _plain("FedAdam"),
    "FedAvg": _plain("FedAvg"),
    "FedAvgAndroid": _plain("FedAvgAndroid", RawProxy, _raw),
    "FedAvgM": _plain("FedAvgM", server_momentum=0.5),
    "FedMedian": _plain("FedMedian"),
    "FedOpt": _plain("FedOpt"),
    "FedProx": _plain("FedProx", proximal_mu=0.1),
    "FedTrimmedAvg": _plain("FedTrimmedAvg"),
    "FedXgbBagging": _plain("FedXgbBagging", TreeProxy, _none),
    "FedXgbNnAvg": _plain("FedXgbNnAvg", NetworkAndTreesProxy),
    "FedYogi": _plain("FedYogi"),
    "Krum": _plain("Krum"),
    "QFedAvg": _plain("QFedAvg", evaluate_fn=lambda server_round, arrays, config: (0.5 + server_round, {})),
}
DECIDE_THEMSELVES = {"FedXgbCyclic"}
NO_FUNCTION = {"FedAvgAndroid", "FedXgbBagging"}
"""Have no aggregation function of a user's, or do not call it."""


def _legacy_course(name: str, *, wrap: bool, own_function: bool = False, broken: tuple[int, ...] = ()) -> Course:
    course = Course()
    make, proxy = LEGACY[name]
    function = {"fit_metrics_aggregation_fn": legacy_function(course)} if own_function else {}
    strategy = make(**function, fraction_evaluate=1.0)
    if wrap:
        strategy = LegacyStrategy(Random(clients_per_round=CLIENTS, seed=0), strategy, max_latency=9.0)
    proxies = [
        proxy(f"node-{k}", k, number=k, extra=_extra(k), fault="raises" if k in broken else None)
        for k in range(CLIENTS)
    ]  # fmt: skip
    play_legacy(strategy, proxies, course)
    if wrap and not broken:
        assert strategy.history.problem_counts() == {}
    return course


def test_every_legacy_strategy_is_here() -> None:
    assert LEGACY.keys() | DECIDE_THEMSELVES == set(legacy.__all__) - {"Strategy"}


@pytest.mark.parametrize("name", sorted(LEGACY))
def test_a_wrapped_legacy_base_ends_where_it_ends_alone(name: str) -> None:
    alone, wrapped = _legacy_course(name, wrap=False), _legacy_course(name, wrap=True)
    assert alone.models[0] != alone.models[-1]
    assert wrapped.models == alone.models
    assert wrapped.metrics == alone.metrics
    assert wrapped.evaluated == alone.evaluated


@pytest.mark.parametrize("name", sorted(LEGACY.keys() - NO_FUNCTION))
def test_a_users_function_gets_the_same_metrics_from_a_wrapped_legacy_base(name: str) -> None:
    alone, wrapped = [_legacy_course(name, wrap=wrap, own_function=True) for wrap in (False, True)]
    assert len(alone.given) == 3
    assert wrapped.given == alone.given
    assert wrapped.metrics == alone.metrics


@pytest.mark.parametrize(
    "name", ["FedAvg", "FaultTolerantFedAvg", "FedMedian", "DifferentialPrivacyServerSideFixedClipping"]
)
def test_a_wrapped_legacy_base_treats_a_failure_as_it_does_alone(name: str) -> None:
    alone, wrapped = [_legacy_course(name, wrap=wrap, broken=(2,)) for wrap in (False, True)]
    assert (wrapped.models, wrapped.metrics) == (alone.models, alone.metrics)


def test_a_legacy_base_that_decides_itself_who_trains_works_with_one_client_and_is_refused_with_more() -> None:
    def strategy(cohort: int) -> LegacyStrategy:
        base = legacy.FedXgbCyclic(initial_parameters=_none(), fraction_evaluate=0.0)
        return LegacyStrategy(Random(clients_per_round=cohort, seed=0), base, max_latency=9.0)

    proxies = [TreeProxy(f"node-{k}", k, number=k) for k in range(2)]
    with pytest.raises(RunError, match="FedXgbCyclic dispatched 1 instructions, but the selector chose 2"):
        play_legacy(strategy(2), proxies, Course())
    course = play_legacy(strategy(1), proxies, Course())
    assert [len(one) for one in course.models] == [1, 1, 1]


# ---- Message API -----------------------------------------------------------------------------------------------------


def _messages(name: str, *args: Any, **more: Any) -> Make:
    return lambda **kw: getattr(message, name)(*args, **more, **kw)


def _messages_around(name: str, *args: Any, **more: Any) -> Make:
    return lambda **kw: getattr(message, name)(message.FedAvg(**kw), *args, **more)


MESSAGE: dict[str, Make] = {
    "Bulyan": _messages("Bulyan"),
    "DifferentialPrivacyClientSideAdaptiveClipping": _messages_around(
        "DifferentialPrivacyClientSideAdaptiveClipping", 0.1, CLIENTS
    ),
    "DifferentialPrivacyClientSideFixedClipping": _messages_around(
        "DifferentialPrivacyClientSideFixedClipping", 0.1, 1.0, CLIENTS
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": _messages_around(
        "DifferentialPrivacyServerSideAdaptiveClipping", 0.1, CLIENTS
    ),
    "DifferentialPrivacyServerSideFixedClipping": _messages_around(
        "DifferentialPrivacyServerSideFixedClipping", 0.1, 1.0, CLIENTS
    ),
    "FedAdagrad": _messages("FedAdagrad"),
    "FedAdam": _messages("FedAdam"),
    "FedAvg": _messages("FedAvg"),
    "FedAvgM": _messages("FedAvgM", server_momentum=0.5),
    "FedMedian": _messages("FedMedian"),
    "FedProx": _messages("FedProx", proximal_mu=0.1),
    "FedTrimmedAvg": _messages("FedTrimmedAvg"),
    "FedXgbBagging": _messages("FedXgbBagging"),
    "FedYogi": _messages("FedYogi"),
    "Krum": _messages("Krum"),
    "MultiKrum": _messages("MultiKrum", num_nodes_to_select=3),
    "QFedAvg": _messages("QFedAvg", client_learning_rate=0.1),
}


def _message_course(
    name: str, *, wrap: bool, own_function: bool = False, broken: tuple[int, ...] = (),
    extra: Callable[[int], dict[str, Any]] = _extra,
) -> Course:  # fmt: skip
    course = Course()
    function = {"train_metrics_aggr_fn": message_function(course)} if own_function else {}
    strategy = MESSAGE[name](**function)
    if wrap:
        strategy = MessageStrategy(Random(clients_per_round=CLIENTS, seed=0), strategy, max_latency=9.0)
    trees = name == "FedXgbBagging"
    nodes: dict[int, FakeNode] = {
        node_id(k): (TreeNode if trees else FakeNode)(
            FakeProxy(str(node_id(k)), k, number=k), fault="error" if k in broken else None,
            extra={**extra(k), "per_class": [0.5, 0.25 * k]},
        )
        for k in range(CLIENTS)
    }  # fmt: skip
    play_messages(strategy, nodes, course, as_record(b"") if trees else arrays_of())
    if wrap and not broken:
        assert strategy.history.problem_counts() == {}
    return course


def test_every_message_strategy_is_here() -> None:
    assert MESSAGE.keys() | DECIDE_THEMSELVES == set(message.__all__) - {"Strategy", "Result"}


@pytest.mark.parametrize("name", sorted(MESSAGE))
def test_a_wrapped_message_base_ends_where_it_ends_alone(name: str) -> None:
    alone, wrapped = _message_course(name, wrap=False), _message_course(name, wrap=True)
    assert len(alone.models) == 3
    assert alone.models[0] != alone.models[-1]
    assert wrapped.models == alone.models
    assert {"train_loss", "acc", "per_class", "latency_s"} <= alone.metrics[0].keys()
    assert wrapped.metrics == alone.metrics
    assert alone.evaluated[0].keys() == {"loss"}
    assert wrapped.evaluated == alone.evaluated


@pytest.mark.parametrize("name", sorted(MESSAGE))
def test_a_users_function_gets_the_same_records_from_a_wrapped_message_base(name: str) -> None:
    alone, wrapped = [_message_course(name, wrap=wrap, own_function=True) for wrap in (False, True)]
    assert len(alone.given) == 3
    assert wrapped.given == alone.given
    assert wrapped.metrics == alone.metrics


@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "DifferentialPrivacyServerSideFixedClipping"])
def test_a_wrapped_message_base_treats_a_failure_as_it_does_alone(name: str) -> None:
    alone, wrapped = [_message_course(name, wrap=wrap, broken=(2,)) for wrap in (False, True)]
    assert (wrapped.models, wrapped.metrics) == (alone.models, alone.metrics)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_an_unusable_value_of_ours_reaches_the_base_as_it_came(value: float) -> None:
    """Key sets agree: nothing is dropped, and nothing is mended."""

    def extra(k: int) -> dict[str, Any]:
        return {**_extra(k), "train_loss": value, "compute_s": value}

    alone, wrapped = [
        _written_out(_message_course, "FedAvg", wrap=wrap, extra=extra) for wrap in (False, True)
    ]  # fmt: skip
    assert wrapped == alone


def _written_out(course: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """NaN is not equal to itself, but its text is."""
    strategy_problems_allowed = course(*args, own_function=True, broken=(4,), **kwargs)
    return repr((strategy_problems_allowed.given, strategy_problems_allowed.metrics))


def test_a_message_base_that_decides_itself_who_trains_is_refused() -> None:
    strategy = MessageStrategy(Random(clients_per_round=1, seed=0), message.FedXgbCyclic(), max_latency=9.0)
    nodes: dict[int, FakeNode] = {node_id(k): TreeNode(FakeProxy(str(k), k, number=k)) for k in range(2)}
    with pytest.raises(RunError, match="FedXgbCyclic decides itself who trains"):
        play_messages(strategy, nodes, Course(), as_record(b""))


def test_bagging_keeps_every_tree_of_every_round() -> None:
    """The model changes its size in every round, and starts from nothing."""
    trees = [[0.5 * k, -0.25 * n] for n in (1, 2, 3) for k in range(CLIENTS)]
    assert grown(_legacy_course("FedXgbBagging", wrap=True).models[-1][0]) == trees
    assert grown(_message_course("FedXgbBagging", wrap=True).models[-1][0]) == trees
