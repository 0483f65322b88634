"""When too few updates come back: the model stays, and bases that need more are spared or refused."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.server.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Krum,
)

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy
from tests.strategies.helpers import FakeProxy, Federation, RecordingBase, fleet, initial, row_of

pytestmark = pytest.mark.timeout(60)


def test_fewer_than_min_completed_keeps_the_model_and_still_observes() -> None:
    base = RecordingBase()
    strategy = CSUCB(clients_per_round=4, max_latency=5.0, seed=0, base=base, min_completed=3)
    proxies = [*fleet(2, prefix="h"), *(FakeProxy(f"x{k}", f"x{k}", fault="nan") for k in range(2))]
    federation = Federation(strategy, proxies).play(2)
    assert federation.models == [initial().tensors] * 2
    assert strategy.selector.state_dict()["plays"].tolist() == [2, 2, 2, 2]
    assert strategy.selector.state_dict()["mean"][row_of(strategy, "h0")] == pytest.approx(0.9)
    assert [r.num_completed for r in strategy.history.rounds] == [2, 2]
    assert len(strategy.history.clients) == 8
    proxies[2].fault = None
    federation.play(1)
    assert federation.models[-1] != initial().tensors  # exactly min_completed is enough


def test_a_base_that_accepts_no_failures_drops_the_round_but_the_selector_learns() -> None:
    base = RecordingBase(accept_failures=False)
    strategy = BSFL(clients_per_round=3, min_latency=0.1, max_latency=5.0, seed=0, base=base)
    proxies = [*fleet(2, prefix="h"), FakeProxy("x", "x", fault="shape")]
    federation = Federation(strategy, proxies).play(2)
    assert federation.models == [initial().tensors] * 2
    assert strategy.selector.state_dict()["plays"].tolist() == [2, 2, 2]
    assert strategy.selector.state_dict()["mean"][row_of(strategy, "h0")] == pytest.approx(0.1 / 0.5)
    assert [len(failures) for _, failures in base.given] == [1, 1]
    proxies[-1].fault = None
    federation.play(1)
    assert federation.models[-1] != initial().tensors


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("fault", ["nan", "raises", "status"])
def test_a_dp_wrapper_sees_every_failure_and_drops_the_round(adaptive: bool, fault: str) -> None:
    inner = RecordingBase()
    base = (
        DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.0, 3, clipped_count_stddev=0.0)
        if adaptive
        else DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1.0, 3)
    )
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=base)
    proxies = [*fleet(2, prefix="h"), FakeProxy("x", "x", fault=fault)]
    federation = Federation(strategy, proxies).play(2)
    assert inner.given == []  # the noise is calibrated for three clients: two must not be averaged
    assert federation.models == [initial().tensors] * 2
    assert strategy.selector.state_dict()["plays"].tolist() == [2, 2, 2]
    assert [r.num_completed for r in strategy.history.rounds] == [2, 2]


def test_krum_with_too_few_survivors_is_a_clear_error() -> None:
    base = Krum(num_malicious_clients=1, fraction_evaluate=0.0, initial_parameters=initial())
    strategy = CSUCB(clients_per_round=5, max_latency=5.0, seed=0, base=base)
    proxies = [*fleet(3, prefix="h"), *(FakeProxy(f"x{k}", f"x{k}", fault="nan") for k in range(2))]
    with pytest.raises(RunError, match=r"Krum.*3 updates"):
        Federation(strategy, proxies).play(1)


def test_bulyan_with_too_few_survivors_is_a_clear_error() -> None:
    base = Bulyan(num_malicious_clients=1, fraction_evaluate=0.0, initial_parameters=initial())
    strategy = CSUCB(clients_per_round=7, max_latency=5.0, seed=0, base=base)
    proxies = [*fleet(6, prefix="h"), FakeProxy("x", "x", fault="raises")]
    with pytest.raises(RunError, match=r"Bulyan.*6 updates"):
        Federation(strategy, proxies).play(1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_cohort_that_can_never_suffice_is_refused_before_round_one(wrapped: bool) -> None:
    base: Any = Krum(num_malicious_clients=1, fraction_evaluate=0.0)
    if wrapped:
        base = DifferentialPrivacyServerSideFixedClipping(base, 0.0, 1.0, 3)
    with pytest.raises(ParameterError, match=r"Krum.*clients_per_round"):
        SelectionStrategy(Random(clients_per_round=3, seed=0), base)


def test_min_completed_lets_krum_skip_a_round_instead() -> None:
    base = Krum(num_malicious_clients=1, fraction_evaluate=0.0, initial_parameters=initial())
    strategy = CSUCB(clients_per_round=5, max_latency=5.0, seed=0, base=base, min_completed=5)
    proxies = [*fleet(3, prefix="h"), *(FakeProxy(f"x{k}", f"x{k}", fault="nan") for k in range(2))]
    federation = Federation(strategy, proxies).play(2)
    assert federation.models == [initial().tensors] * 2
