"""What a caller sees: parameters, and what is refused or warned of, before round 1 where possible."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
from flwr.common import FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as flower

import fedsel_flwr.strategies as strategies
from fedsel_flwr import selectors
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.selectors import create, names
from fedsel_flwr.selectors.columns import PER_UPDATE
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.strategies import BSFL, CSUCB, Filter, SelectionStrategy, Validation, message
from tests.strategies import numpy_world as world
from tests.strategies.either_api import PACKAGES, Server, base_of, private, selection
from tests.strategies.flower_world import legacy_base, proxies
from tests.strategies.helpers import OK

READERS = tuple(name for name in names() if selector_class(name).needs & PER_UPDATE)
"""Selectors that read what the server measures on each client's model."""


def _strategy(api: str, name: str, base: Any = None, **options: Any) -> Any:
    """A selector by name with everything it needs."""
    given = {"validation": world.validation(), "learning_rate": world.ETA, "max_latency": world.MAX_LATENCY}
    given |= {"filter": Filter()} if name.startswith("fedcm") else {}
    return selection(api, create(name, **world.selector_params(name)), base, **given | options)


def _fedca(api: str, base: Any, cohort: int = 3, **options: Any) -> Any:
    return PACKAGES[api].FedCA(base, clients_per_round=cohort, validation=world.validation(), **options)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if record.name == "fedsel_flwr"]
    assert all(record.levelname == "WARNING" for record in own)
    return [record.getMessage() for record in own]


THREE, EXAMPLES = {"clients_per_round": 3}, {"clients_per_round": 3, "validation": world.validation()}
GPFL = {**THREE, "total_rounds": 9}
MISSING: dict[str, tuple[str, dict[str, Any], str]] = {
    "FedCA without a validation set": ("FedCA", THREE, r"FedCA's filter needs a .*validation=Validation\("),
    "FedCM without a validation set": ("FedCM", THREE, r"validation=Validation\("),
    "FedCM-TS without a validation set": ("FedCM", {**THREE, "sampler": "ts"}, r"validation=Validation\("),
    "PCZFL without predict": ("PCZFL", {}, r"pczfl .*accuracy.* needs .*validation=Validation\("),
    "GPFL without a validation set": (
        "GPFL", {**GPFL, "learning_rate": 0.1}, r"gpfl .*global_accuracy, global_loss.* needs .*Validation\(",
    ),
    "GPFL without a learning rate": ("GPFL", {**GPFL, **EXAMPLES}, "gpfl .*learning_rate"),
    "GPFL with a learning rate of 0": ("GPFL", {**GPFL, **EXAMPLES, "learning_rate": 0.0}, "learning_rate"),
    "GPFL without the number of rounds": ("GPFL", {**EXAMPLES, "learning_rate": 0.1}, "total_rounds"),
    "GPFL whose direction grows without bound": (
        "GPFL", {**GPFL, **EXAMPLES, "learning_rate": 0.1, "momentum": 1.0}, "momentum must be",
    ),
    "FedCA without a sampling": ("FedCA", {"validation": world.validation()}, "either selector or clients_per_round"),
    "FedCA of an unknown score": ("FedCA", {**EXAMPLES, "score": "delta"}, "one of loss, accuracy"),
    "FedCM of an unknown sampler": ("FedCM", {**EXAMPLES, "sampler": "exp3"}, "sampler"),
    "an unknown averaging": ("FedCA", {**EXAMPLES, "averaging": "median"}, "averaging"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named_at_construction(api: str, case: str) -> None:
    name, params, message = MISSING[case]
    with pytest.raises(ParameterError, match=message) as caught:
        getattr(PACKAGES[api], name)(base_of(api), **params)
    assert isinstance(caught.value, FedSelError)
    assert isinstance(caught.value, ValueError)


def test_a_base_that_needs_many_models_is_refused_with_a_filter(api: str) -> None:
    with pytest.raises(ParameterError, match=r"Krum with f = 1 .* 5\b.*filter"):
        _fedca(api, base_of(api, "Krum", num_malicious_nodes=1), 7)
    trusting = base_of(api, "Krum")
    assert _fedca(api, trusting, 7).base is trusting


@pytest.mark.parametrize(
    ("predict", "labels"),
    [(None, [0, 1]), (world.predict, []), (world.predict, [[0, 1]]), (world.predict, [0.0, 1.0])],
    ids=["no predict", "no labels", "two dimensions", "fractions"],
)
def test_a_validation_set_without_predict_or_labels(predict: Any, labels: Any) -> None:
    with pytest.raises(ParameterError, match=r"predict\(arrays, inputs\) -> logits and integer labels"):
        Validation(predict, np.eye(2), np.array(labels))


@pytest.mark.parametrize("averaging", ["fedpdp-exact", "fedavg-absent"])
def test_schemes_that_mix_in_the_old_model_are_refused_on_bases_that_are_no_averages(api: str, averaging: str) -> None:
    for base in (base_of(api, "FedAdam"), private(api, base_of(api))):
        with pytest.raises(ParameterError, match=f"{averaging}.*{type(base).__name__}.*averaging='fedpdp'"):
            _strategy(api, "random", base, averaging=averaging)
        with pytest.raises(ParameterError, match=averaging):
            _fedca(api, base, averaging=averaging)
    for base in (base_of(api), base_of(api, "FedProx", proximal_mu=0.1)):
        assert _strategy(api, "random", base, averaging=averaging).base is base
    if api == "message":  # shares of all examples, where the base weighs by something else
        with pytest.raises(ParameterError, match=f"{averaging}.*'share'.*averaging='fedpdp'"):
            _strategy(api, "random", base_of(api, weighted_by_key="share"), averaging=averaging)


@pytest.mark.parametrize("averaging", ["fedpdp", "mean", None])
def test_schemes_that_only_weigh_are_for_every_base(api: str, averaging: str | None) -> None:
    base = base_of(api, "FedAdam")
    assert _strategy(api, "random", base, averaging=averaging).core.settings.averaging == averaging


PRIVATE = ["ServerSideFixed", "ClientSideFixed", "ServerSideAdaptive", "ClientSideAdaptive"]


@pytest.mark.parametrize("name", names())
def test_readers_of_updates_are_warned_of_under_differential_privacy(api: str, name: str, caplog: Any) -> None:
    _strategy(api, name)
    assert not _warnings(caplog)
    for kind in PRIVATE:
        strategy = _strategy(api, name, private(api, base_of(api), kind))
        assert bool(strategy.core.parts.measurer.reader) == (name in READERS)
        said = _warnings(caplog)
        assert len(said) == (name in READERS)
        assert all(text.startswith(f"{name} reads the clients' updates") for text in said)
        assert all(f"guarantee of DifferentialPrivacy{kind}Clipping" in text for text in said)
        caplog.clear()


def test_fedcas_filter_under_differential_privacy(api: str, caplog: pytest.LogCaptureFixture) -> None:
    _fedca(api, private(api, base_of(api)))
    assert len(_warnings(caplog)) == 1


def _secure_round(name: str, shared: bool = True, answering: int = world.FLEET, **options: Any) -> Any:
    """One round as SecAgg+ plays it: the server only ever has the sum, which stands in every result."""
    strategy = _strategy("legacy", name, legacy_base(), missing_columns="random", **options)
    manager = Server("legacy", strategy, proxies()).federation.manager
    instructions = strategy.configure_fit(1, ndarrays_to_parameters([world.initial()]), manager)
    total = ndarrays_to_parameters([world.initial() + 1.0])
    results = [
        (client, FitRes(OK, total if shared else copy.deepcopy(total), 10, {"latency_s": 1.0}))
        for client, _ in instructions
    ]
    parameters, _ = strategy.aggregate_fit(1, results[:answering], [])
    if name not in READERS:
        np.testing.assert_allclose(parameters_to_ndarrays(parameters)[0], world.initial() + 1.0, rtol=1e-12)
    return strategy.history


@pytest.mark.parametrize("name", [*READERS, "random"])
def test_secure_aggregation_is_refused_at_the_first_aggregate(name: str) -> None:
    """Equal updates in objects of their own are none, and so is a single reply."""
    cure = "such as cs-ucb or bsfl, and have the clients report their latency"
    said = rf"{name} reads each client's update, .*secure aggregation \(SecAgg\).*{cure}"
    with pytest.raises(RunError, match="SecAgg" if name == "random" else said):
        _secure_round(name, filter=Filter() if name == "random" or name.startswith("fedcm") else None)
    _secure_round(name, shared=False, channels=3)
    _secure_round(name, answering=1)


def test_under_secure_aggregation_there_is_no_norm_of_a_client() -> None:
    with pytest.raises(RunError, match=r"max_update_norm reads each client's update.*SecAgg"):
        _secure_round("random", max_update_norm=1)


@pytest.mark.parametrize("name", [name for name in names() if name not in READERS])
def test_selectors_that_read_no_updates_work_under_secure_aggregation(name: str) -> None:
    """Flower's workflow asks the clients itself, so that nobody is timed. Of three clients the last one drops out."""
    history = _secure_round(name, answering=2, clock="server", identity="claim")
    told = [(row.completed, row.latency_s, row.latency_source) for row in history.clients]
    assert told[:2] == [(True, 1.0, "reported")] * 2
    assert set(told[2:]) == {(False, world.MAX_LATENCY, "max_latency")}
    assert {row.problem.split(";")[0] for row in history.clients[2:]} == {"no answer"}


@pytest.mark.parametrize("wrapper", ["DPFedAvgFixed", "DPFedAvgAdaptive"])
@pytest.mark.parametrize("on_server", [True, False])
def test_older_wrappers_are_warned_of_if_the_server_adds_noise(wrapper: str, on_server: bool, caplog: Any) -> None:
    arguments = {"noise_multiplier": 0.1, "server_side_noising": on_server}
    arguments |= {"clip_norm": 1.0} if wrapper == "DPFedAvgFixed" else {}
    _strategy("legacy", "gpfl", getattr(flower, wrapper)(base_of("legacy"), num_sampled_clients=3, **arguments))
    assert len(_warnings(caplog)) == on_server
    assert all(f"guarantee of {wrapper}" in text for text in _warnings(caplog))


# ---- parameters and errors -------------------------------------------------------------------------------------------


def test_the_message_package_has_every_name_of_the_legacy_one() -> None:
    assert set(strategies.__all__) <= set(message.__all__)
    for name in ("Validation", "Filter", "MetricKeys", "History"):
        assert getattr(message, name) is getattr(strategies, name)


@pytest.mark.parametrize("name", [name for name in strategies.__all__ if name.isupper() or name.startswith("Fed")])
def test_a_papers_twin_asks_for_what_the_legacy_class_asks_for(name: str) -> None:
    legacy, twin = getattr(strategies, name), getattr(message, name)
    assert issubclass(legacy, SelectionStrategy)
    assert issubclass(twin, message.SelectionStrategy)
    assert not issubclass(twin, SelectionStrategy)
    assert inspect.signature(twin) == inspect.signature(legacy)
    asked = [key for key in vars(legacy) if not key.startswith("_")]
    assert {key: getattr(twin, key) for key in asked} == {key: getattr(legacy, key) for key in asked}


@pytest.mark.parametrize("cls", [CSUCB, BSFL])
def test_unknown_and_missing_parameters_are_named_with_those_that_exist(cls: Any) -> None:
    required = {"clients_per_round": 2, "max_latency": 5.0, "min_latency": 0.1}
    required = {k: v for k, v in required.items() if k in inspect.signature(cls).parameters}
    with pytest.raises(ParameterError, match=rf"{cls.__name__}.*max_latancy.*max_latency"):
        cls(**required, max_latancy=3.0)
    del required["clients_per_round"]
    with pytest.raises(ParameterError, match=rf"{cls.__name__} needs the parameter clients_per_round"):
        cls(**required)


def test_a_selector_must_be_a_selector() -> None:
    for wrong in ("random", selectors.Random, None):
        with pytest.raises(ParameterError, match="selector"):
            SelectionStrategy(wrong)  # type: ignore[arg-type]
