"""Each base that Flower ships, alone and wrapped: the same results; and wrappers that count messages (accountants)."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr import serverapp
from flwr.app import MetricRecord, RecordDict
from flwr.common import FitIns, FitRes, Parameters
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from tests.strategies.either_api import BASES, Server, base_of, selection
from tests.strategies.foreign import world
from tests.strategies.foreign.world import CLIENTS, Case, TreeProxy, as_record, asked, booster, reply
from tests.strategies.helpers import OK, FakeProxy, fleet, initial, model
from tests.strategies.message.helpers import named

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
NAMES = {api: set(bases.__all__) - {"Strategy", "Result"} - DECIDE_THEMSELVES for api, bases in BASES.items()}
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
        "energy_j": 0.25, "client_id": k,
    }  # fmt: skip


def _fit(number: int, arrays: list[np.ndarray], config: dict[str, Any], server_round: int) -> Any:
    new, examples, metrics = world.legacy_honest(number, arrays, config, server_round)
    return new, examples, {**metrics, **_extra(number)}


def _train(number: int, content: RecordDict) -> RecordDict:
    model = named(world.trained(number, content), tuple(asked(content)[0]))
    return reply(number, model, **_extra(number), per_class=[0.5, 0.25 * number])


def _trees(number: int, content: RecordDict) -> RecordDict:
    return reply(number, as_record(booster(number, int(asked(content)[1]["server-round"]))), **_extra(number))


def _keeping(given: list[Any]) -> dict[str, Any]:
    """A user's own aggregation function, which keeps what it was given, in the keyword of either API."""

    def of_metrics(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        given.append(copy.deepcopy(metrics))
        total = sum(count for count, _ in metrics)
        return {"acc": sum(count * m["acc"] for count, m in metrics) / total, "clients": len(metrics)}

    def of_records(records: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        given.append([world.content_of(record) for record in records])
        return aggregate_metricrecords(records, weighted_by_key)

    return {"fit_metrics_aggregation_fn": of_metrics, "train_metrics_aggr_fn": of_records}


def _played(api: str, name: str, folder: Path, wrap: bool, own_function: bool = False, broken: Any = ()) -> Any:
    """What came of three rounds, and what a user's own function was given."""
    given: list[Any] = []
    key = "fit_metrics_aggregation_fn" if api == "legacy" else "train_metrics_aggr_fn"
    options = {key: _keeping(given)[key]} if own_function else {}
    if api == "legacy":
        options |= {"initial_parameters": STARTS.get(name, initial()), "fraction_evaluate": 1.0}
    args, own = AROUND.get(name, ((), OPTIONS.get((api, name), {})))
    cls, inner = getattr(BASES[api], name), BASES[api].FedAvg
    base = cls(inner(**options), *args, **own) if name in AROUND else cls(**own, **options)
    train = _fit if api == "legacy" else _trees if name == "FedXgbBagging" else _train

    def client(number: int, *given: Any) -> Any:
        if number in broken:
            raise TypeError("the battery is empty")
        return train(number, *given)

    special = {} if api == "message" or name not in PROXIES else {
        "proxies": lambda k: PROXIES[name](f"node-{k}", k, number=k, extra=_extra(k))
    }  # fmt: skip
    start = {"arrays": lambda: as_record(b"")} if train is _trees else {}
    played = world.play(api, Case(lambda folder: base, lambda: client, **special, **start), folder, wrap, rounds=3)
    if wrap and not broken:
        assert played.strategy.history.problem_counts() == {}
    return played.outcome, given


@pytest.mark.parametrize(
    ("api", "name", "own_function"),
    [
        *[(api, name, False) for api in NAMES for name in sorted(NAMES[api])],
        *[(api, name, True) for api in NAMES for name in OWN_FUNCTION],
    ],
)
def test_a_wrapped_base_ends_where_it_ends_alone(api: str, name: str, own_function: bool, tmp_path: Path) -> None:
    """And a user's own aggregation function gets the same metrics."""
    (alone, given), (wrapped, given_too) = (_played(api, name, tmp_path, wrap, own_function) for wrap in (False, True))
    models = alone.models or [one for _, one in alone.evaluated[1:]]
    assert len(models) == 3
    assert models[0] != models[-1]
    assert wrapped == alone
    assert given_too == given
    assert len(given) == (3 if own_function else 0)
    if api == "message":
        told = alone.returned["train_metrics_clientapp"][1].keys()
        assert {"train_loss", "acc", "latency_s"} | ({"per_class"} if name != "FedXgbBagging" else set()) <= told
        assert alone.returned["evaluate_metrics_clientapp"][1].keys() == {"eval_loss"}


@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "DifferentialPrivacyServerSideFixedClipping"])
def test_a_wrapped_base_treats_a_failure_as_it_does_alone(api: str, name: str, tmp_path: Path) -> None:
    alone, wrapped = (_played(api, name, tmp_path, wrap, broken=(2,)) for wrap in (False, True))
    assert wrapped == alone


# ---- wrappers that count messages, as differential privacy with an accountant does -----------------------------------

COHORT, FLEET = 3, 10
accounted = pytest.mark.skipif(not hasattr(serverapp, "PrivacyAccountant"), reason="flwr has no privacy accountants")


class Adding:
    """An accountant that adds up; Flower's own needs the package dp-accounting."""

    def __init__(self, limit: int | None = None) -> None:
        self.config = serverapp.PrivacyConfig(
            target_delta=1e-5, population_size=FLEET, max_epsilon=limit and float(limit),
            sampling_method=serverapp.SamplingMethod.NO_AMPLIFICATION,
            neighboring_relation=serverapp.NeighboringRelation.ADD_OR_REMOVE_ONE,
        )  # fmt: skip
        self.sizes: list[int] = []

    @property
    def num_releases(self) -> int:
        return len(self.sizes)

    def compose(self, event: Any, count: int = 1) -> None:
        self.sizes += [event.sample_size] * count

    def would_exceed(self, event: Any, max_epsilon: float | None = None, count: int = 1) -> bool:
        return self.num_releases + count > self.config.max_epsilon

    def get_privacy_spent(self, delta: float | None = None) -> Any:
        releases = self.num_releases
        return serverapp.PrivacySpent(float(releases), delta=1e-5, num_releases=releases, accounting_method="adding")

    def state_dict(self) -> dict[str, object]:
        return {"sizes": list(self.sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sizes = list(state["sizes"])


def _private(accountant: Adding, side: str = "Server", key: str = "one", sampled: int = COHORT, **more: Any) -> Server:
    base = getattr(flower, f"DifferentialPrivacy{side}SideFixedClipping")(
        base_of("message", weighted_by_key=key), noise_multiplier=0.5, clipping_norm=1.0, num_sampled_clients=sampled,
        accountant=accountant,
    )  # fmt: skip
    return Server("message", selection("message", COHORT, base, **more), fleet(FLEET, extra={"one": 1.0}))


@accounted
@pytest.mark.parametrize("side", ["Server", "Client"])
def test_differential_privacy_with_an_accountant_runs_and_counts_every_round(side: str) -> None:
    accountant = Adding()
    server = _private(accountant, side).play(3)
    assert accountant.sizes == [COHORT] * 3
    assert [one.num_completed for one in server.strategy.history.rounds] == [COHORT] * 3


@accounted
def test_the_accountant_goes_on_with_the_run(tmp_path: Path) -> None:
    for rounds in (2, 4):
        accountant = Adding()
        _private(accountant, checkpoint_dir=tmp_path, resume=True).play(rounds)
        assert accountant.num_releases == rounds


@accounted
def test_a_privacy_budget_that_is_spent_ends_the_run_in_flowers_error() -> None:
    accountant = Adding(limit=2)
    server = _private(accountant)
    with pytest.raises(Exception, match="max_epsilon") as raised:
        server.play(4)
    assert type(raised.value).__name__ == "PrivacyBudgetExhausted"
    assert (accountant.num_releases, len(server.strategy.history.rounds)) == (2, 2)
    assert server.strategy.last_model is not None
    assert server.strategy.last_model.round == 2


@accounted
@pytest.mark.parametrize("options", [{"over_selection": 0.5}, {"warmup_rounds": 1}])
def test_an_accountant_refuses_rounds_that_ask_more_clients(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not match num_sampled_clients"):
        _private(Adding(), **options).play(1)


@accounted
def test_an_accountant_releases_no_round_with_fewer_replies_than_messages() -> None:
    accountant = Adding()
    server = _private(accountant, sampled=5, over_selection=0.5).play(2)
    assert accountant.sizes == []
    assert not any(array.any() for model in server.models for array in model)


@accounted
def test_an_accountant_needs_equal_weights_which_averaging_gives() -> None:
    accountant = Adding()
    _private(accountant, key="num-examples", averaging="mean").play(2)
    assert accountant.sizes == [COHORT] * 2
    with pytest.raises(ValueError, match="equal client weights"):
        _private(Adding(), key="num-examples").play(1)
