"""What is refused or warned of before round 1 where it can be known, else at the first aggregate; in both APIs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.common import FitRes, ndarrays_to_parameters
from flwr.server import strategy as legacy_bases
from flwr.server.client_manager import SimpleClientManager
from flwr.serverapp import strategy as message_bases

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors import Random, create, names
from fedsel_flwr.strategies import Filter, Validation
from fedsel_flwr.strategies import message as message_api
from tests.rounds.written import Written, core_of, facts
from tests.strategies import numpy_world as world
from tests.strategies.flower_world import legacy_base, message_base, proxies
from tests.strategies.helpers import OK

pytestmark = pytest.mark.timeout(30)
APIS = pytest.mark.parametrize("api", [legacy_api, message_api], ids=["legacy", "message"])
READERS = ("fedcm-ts", "fedcm-ucb", "gpfl", "lsh", "nccb", "pczfl")
"""Selectors that read what the server measures on each client's model."""


def _bases(api: ModuleType) -> Any:
    return legacy_bases if api is legacy_api else message_bases


def _base(api: ModuleType) -> Any:
    return legacy_base() if api is legacy_api else message_base()


def _fed_adam(api: ModuleType) -> Any:
    own = {"initial_parameters": ndarrays_to_parameters([world.initial()])} if api is legacy_api else {}
    return _bases(api).FedAdam(fraction_evaluate=0.0, **own)


def _strategy(api: Any, name: str, base: Any, **options: Any) -> Any:
    """A selector by name with everything it needs."""
    given = {"validation": world.validation(), "learning_rate": world.ETA, "max_latency": world.MAX_LATENCY}
    given |= {"filter": Filter()} if name.startswith("fedcm") else {}
    return api.SelectionStrategy(create(name, **world.selector_params(name)), base, **given | options)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the package logs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("fedsel_flwr").addHandler(handler)
    yield records
    logging.getLogger("fedsel_flwr").removeHandler(handler)


# ---- before round 1 --------------------------------------------------------------------------------------------------

MISSING: dict[str, tuple[str, dict[str, Any], str]] = {
    "FedCA without a validation set": ("FedCA", {"clients_per_round": 3}, r"validation=Validation\("),
    "FedCM without a validation set": ("FedCM", {"clients_per_round": 3}, r"validation=Validation\("),
    "FedCM-TS without a validation set": (
        "FedCM", {"clients_per_round": 3, "sampler": "ts"}, r"validation=Validation\("
    ),
    "PCZFL without predict": ("PCZFL", {}, r"pczfl .*accuracy.* needs .*validation=Validation\("),
    "GPFL without a validation set": (
        "GPFL", {"clients_per_round": 3, "total_rounds": 9, "learning_rate": 0.1},
        r"gpfl .*global_accuracy, global_loss.* needs .*validation=Validation\(",
    ),
    "GPFL without a learning rate": (
        "GPFL", {"clients_per_round": 3, "total_rounds": 9, "validation": world.validation()},
        "gpfl .*learning_rate",
    ),
    "GPFL with a learning rate of 0": (
        "GPFL", {"clients_per_round": 3, "total_rounds": 9, "validation": world.validation(), "learning_rate": 0.0},
        "learning_rate",
    ),
    "GPFL without the number of rounds": (
        "GPFL", {"clients_per_round": 3, "validation": world.validation(), "learning_rate": 0.1}, "total_rounds",
    ),
    "FedCA without a sampling": ("FedCA", {"validation": world.validation()}, "either selector or clients_per_round"),
    "FedCA of an unknown score": (
        "FedCA", {"validation": world.validation(), "clients_per_round": 3, "score": "delta"}, "one of loss, accuracy",
    ),
    "FedCM of an unknown sampler": (
        "FedCM", {"validation": world.validation(), "clients_per_round": 3, "sampler": "exp3"}, "sampler",
    ),
    "an unknown averaging": (
        "FedCA", {"validation": world.validation(), "clients_per_round": 3, "averaging": "median"}, "averaging",
    ),
}  # fmt: skip


@APIS
@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named_at_construction(api: Any, case: str) -> None:
    name, params, message = MISSING[case]
    with pytest.raises(ParameterError, match=message) as caught:
        getattr(api, name)(_base(api), **params)
    assert isinstance(caught.value, FedSelError)
    assert isinstance(caught.value, ValueError)


@APIS
@pytest.mark.parametrize("name", ["fedcm-ucb", "fedcm-ts"])
def test_fedcm_has_its_papers_filter_and_averaging_by_default(api: Any, name: str) -> None:
    settings = _strategy(api, name, _base(api), filter=None).core.settings
    assert (settings.filter, settings.averaging) == (Filter(score="loss"), "fedpdp")
    given = _strategy(api, name, _base(api), filter=Filter(score="accuracy"), averaging="mean").core.settings
    assert (given.filter, given.averaging) == (Filter(score="accuracy"), "mean")


@APIS
def test_a_base_that_needs_many_models_is_refused_with_a_filter(api: Any) -> None:
    f = {"num_malicious_clients" if api is legacy_api else "num_malicious_nodes": 1}
    krum = _bases(api).Krum(fraction_evaluate=0.0, **f)
    with pytest.raises(ParameterError, match=r"Krum with f = 1 .* 5\b.*filter"):
        api.FedCA(krum, clients_per_round=7, validation=world.validation())
    trusting = _bases(api).Krum(fraction_evaluate=0.0)
    assert api.FedCA(trusting, clients_per_round=7, validation=world.validation()).base is trusting


@APIS
@pytest.mark.parametrize("name", names())
def test_a_filter_on_any_selector_needs_a_validation_set(api: Any, name: str) -> None:
    with pytest.raises(ParameterError, match=r"FedCA's filter needs a validation set .*validation=Validation\("):
        _strategy(api, name, _base(api), filter=Filter(), validation=None)


@APIS
@pytest.mark.parametrize("name", names())
def test_with_everything_given_no_selector_is_refused(api: Any, name: str) -> None:
    assert _strategy(api, name, _base(api)).selector.name == name


@pytest.mark.parametrize(
    ("predict", "labels"),
    [(None, [0, 1]), (world.predict, []), (world.predict, [[0, 1]]), (world.predict, [0.0, 1.0])],
    ids=["no predict", "no labels", "two dimensions", "fractions"],
)
def test_a_validation_set_without_predict_or_labels(predict: Any, labels: Any) -> None:
    with pytest.raises(ParameterError, match=r"predict\(arrays, inputs\) -> logits and integer labels"):
        Validation(predict, np.eye(2), np.array(labels))


# ---- averaging schemes -----------------------------------------------------------------------------------------------


@APIS
@pytest.mark.parametrize("averaging", ["fedpdp-exact", "fedavg-absent"])
def test_schemes_that_mix_in_the_old_model_are_refused_on_bases_that_are_no_averages(api: Any, averaging: str) -> None:
    bases = [_fed_adam(api), _bases(api).DifferentialPrivacyServerSideFixedClipping(_base(api), 1.0, 1.0, 3)]
    for base in bases:
        with pytest.raises(ParameterError, match=f"{averaging}.*{type(base).__name__}.*averaging='fedpdp'"):
            _strategy(api, "random", base, averaging=averaging)
        with pytest.raises(ParameterError, match=averaging):
            api.FedCA(base, clients_per_round=3, validation=world.validation(), averaging=averaging)
    assert _strategy(api, "random", _base(api), averaging=averaging).base is not None
    assert _strategy(api, "random", _bases(api).FedProx(proximal_mu=0.1, fraction_evaluate=0.0), averaging=averaging)


@pytest.mark.parametrize("averaging", ["fedpdp-exact", "fedavg-absent"])
def test_shares_of_all_examples_are_refused_where_the_base_weighs_by_something_else(averaging: str) -> None:
    base = message_bases.FedAvg(fraction_evaluate=0.0, weighted_by_key="share")
    with pytest.raises(ParameterError, match=f"{averaging}.*'share'.*averaging='fedpdp'"):
        _strategy(message_api, "random", base, averaging=averaging)


@pytest.mark.parametrize("momentum", [1.0, 1.5, -0.1, float("nan")])
def test_the_direction_of_gpfl_does_not_grow_without_bound(momentum: float) -> None:
    with pytest.raises(ParameterError, match="momentum must be"):
        _strategy(legacy_api, "gpfl", _base(legacy_api), momentum=momentum)


def test_models_that_are_no_arrays_cannot_be_filtered() -> None:
    """A forest of trees as the global model: FedCA would keep every reply and say nothing."""
    for options, refused in (
        ({"validation": world.validation(), "filter": Filter()}, True),
        ({"averaging": "mean"}, True),
        ({}, False),
    ):
        core = core_of(Random(clients_per_round=2, seed=0), **options)
        chosen = core.choose(["a", "b"], None, Written(facts("a", "b")))
        replies = {node: Reply(num_examples=3, metrics={"latency_s": 1.0}) for node in chosen}
        if refused:
            with pytest.raises(RunError, match="cannot be decoded into NumPy arrays"):
                core.collect(replies)
        else:
            assert core.collect(replies).usable == ["a", "b"]


@APIS
@pytest.mark.parametrize("averaging", ["fedpdp", "mean", None])
def test_schemes_that_only_weigh_are_for_every_base(api: Any, averaging: str | None) -> None:
    assert _strategy(api, "random", _fed_adam(api), averaging=averaging).core.settings.averaging == averaging


# ---- differential privacy --------------------------------------------------------------------------------------------

PRIVATE = [
    "DifferentialPrivacyServerSideFixedClipping",
    "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyServerSideAdaptiveClipping",
    "DifferentialPrivacyClientSideAdaptiveClipping",
]


def _private(api: ModuleType, kind: str) -> Any:
    params = {"noise_multiplier": 0.1, "num_sampled_clients": 3}
    params |= {} if "Adaptive" in kind else {"clipping_norm": 1.0}
    return getattr(_bases(api), kind)(_base(api), **params)


@APIS
@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.parametrize("name", READERS)
def test_a_selector_that_reads_updates_under_differential_privacy(api: Any, name: str, kind: str, logged: Any) -> None:
    strategy = _strategy(api, name, _private(api, kind))
    (record,) = logged
    assert (record.levelname, record.name) == ("WARNING", "fedsel_flwr")
    assert record.getMessage().startswith(f"{name} reads the clients' updates")
    assert f"not covered by the differential-privacy guarantee of {kind}" in record.getMessage()
    assert strategy.core.parts.measurer.reads_updates


@APIS
def test_fedcas_filter_under_differential_privacy(api: Any, logged: Any) -> None:
    api.FedCA(_private(api, PRIVATE[0]), clients_per_round=3, validation=world.validation())
    assert [record.levelname for record in logged] == ["WARNING"]


@APIS
@pytest.mark.parametrize("name", [name for name in names() if name not in READERS])
def test_no_warning_for_selectors_that_read_no_updates(api: Any, name: str, logged: Any) -> None:
    for kind in PRIVATE:
        _strategy(api, name, _private(api, kind))
    assert logged == []


@APIS
@pytest.mark.parametrize("name", names())
def test_no_warning_without_differential_privacy(api: Any, name: str, logged: Any) -> None:
    _strategy(api, name, _base(api))
    assert logged == []


# ---- secure aggregation: all replies share one parameters object -----------------------------------------------------


def _secure_round(strategy: Any, *, shared: bool, answering: int = world.FLEET) -> Any:
    """One round as SecAgg+ plays it: the server only ever has the sum, which stands in every result."""
    manager = SimpleClientManager()
    for proxy in proxies():
        manager.register(proxy)
    start = ndarrays_to_parameters([world.initial()])
    instructions = strategy.configure_fit(1, start, manager)
    total = ndarrays_to_parameters([world.initial() + 1.0])
    results = [
        (
            client,
            FitRes(OK, total if shared else ndarrays_to_parameters([world.initial() + 1.0]), 10, {"latency_s": 1.0}),
        )
        for client, _ in instructions
    ]
    return strategy.aggregate_fit(1, results[:answering], [])


@pytest.mark.parametrize("name", READERS)
def test_secure_aggregation_is_refused_at_the_first_aggregate(name: str) -> None:
    strategy = _strategy(legacy_api, name, legacy_base())
    with pytest.raises(RunError, match=rf"{name} reads each client's update, .*secure aggregation \(SecAgg\).*cs-ucb"):
        _secure_round(strategy, shared=True)
    assert strategy.history.rounds == []


def test_secure_aggregation_is_refused_with_fedcas_filter_too() -> None:
    with pytest.raises(RunError, match="SecAgg"):
        _secure_round(_strategy(legacy_api, "random", legacy_base(), filter=Filter()), shared=True)


@pytest.mark.parametrize("name", [name for name in names() if name not in READERS])
def test_selectors_that_read_no_updates_work_under_secure_aggregation(name: str) -> None:
    strategy = _strategy(legacy_api, name, legacy_base())
    parameters, _ = _secure_round(strategy, shared=True)
    assert parameters is not None
    assert strategy.history.rounds[0].num_completed == world.COHORT


@pytest.mark.parametrize("name", READERS)
def test_equal_updates_in_objects_of_their_own_are_no_secure_aggregation(name: str) -> None:
    _secure_round(_strategy(legacy_api, name, legacy_base(), channels=3), shared=False)


def test_a_single_reply_is_no_secure_aggregation() -> None:
    strategy = _strategy(legacy_api, "fedcm-ucb", legacy_base())
    _secure_round(strategy, shared=True, answering=1)
    assert strategy.history.rounds[0].num_completed == 1
