"""When too few updates come back, or none but one client's: the model stays, and bases that need more are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import CSUCB
from tests.strategies.either_api import RECORDING, Server, base_of, private, selection
from tests.strategies.helpers import FakeProxy, fleet, model, row_of
from tests.strategies.scripted import Spy, play_scripted

CLIENTS, ROUNDS, BAD = 10, 40, 7


def _server(api: str, good: int, bad: int, base: Any, fault: str = "nan", **options: Any) -> Server:
    """A server whose clients all train; the last ones are bad."""
    selector = CSUCB(clients_per_round=good + bad, max_latency=5.0, seed=0)
    proxies = [*fleet(good, prefix="h"), *(FakeProxy(f"x{k}", f"x{k}", number=k, fault=fault) for k in range(bad))]
    options = {"max_latency": 5.0, "cooldown": False, "busy_timeout": 0.0, **options}
    return Server(api, selection(api, selector, base, **options), proxies)


def _stays(server: Server) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(server.models[-1], model(), strict=True))


def test_fewer_than_min_completed_keeps_the_model_and_still_observes(api: str) -> None:
    server = _server(api, 2, 2, RECORDING[api](), min_completed=3).play(2)
    assert _stays(server)
    assert server.given() == []
    state = server.strategy.selector.state_dict()
    assert state["plays"].tolist() == [2, 2, 2, 2]
    assert state["mean"][row_of(server.strategy, "h0")] == pytest.approx(0.9)
    assert [r.num_completed for r in server.strategy.history.rounds] == [2, 2]
    server.proxies[2].fault = None
    assert not _stays(server.play(1))  # exactly min_completed is enough


def test_a_base_that_accepts_no_failures_drops_the_round_but_the_selector_learns() -> None:
    server = _server("legacy", 2, 1, RECORDING["legacy"](accept_failures=False), fault="shape").play(2)
    assert _stays(server)
    assert server.strategy.selector.state_dict()["plays"].tolist() == [2, 2, 2]
    assert [failures for _, failures in server.given()] == [1, 1]
    server.proxies[-1].fault = None
    assert not _stays(server.play(1))


@pytest.mark.parametrize("kind", ["ServerSideFixed", "ServerSideAdaptive"])
def test_a_dp_wrapper_sees_every_failure_and_drops_the_round(api: str, kind: str) -> None:
    """The noise is calibrated for three clients: two must not be averaged."""
    for fault in ("nan", "raises", "status"):
        server = _server(api, 2, 1, private(api, RECORDING[api](), kind), fault).play(2)
        assert server.given() == []
        assert _stays(server)
        assert server.strategy.selector.state_dict()["plays"].tolist() == [2, 2, 2]
        assert [r.num_completed for r in server.strategy.history.rounds] == [2, 2]


@pytest.mark.parametrize(
    ("api", "base", "good", "bad"), [("legacy", "Krum", 3, 2), ("message", "Krum", 4, 1), ("legacy", "Bulyan", 6, 1)]
)
def test_too_few_survivors_are_a_clear_error(api: str, base: str, good: int, bad: int) -> None:
    with pytest.raises(RunError, match=rf"{base}.*{good} updates"):
        _server(api, good, bad, base_of(api, base, num_malicious_nodes=1)).play(1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_cohort_that_can_never_suffice_is_refused_before_round_one(api: str, wrapped: bool) -> None:
    base = base_of(api, "Krum", num_malicious_nodes=1)
    with pytest.raises(ParameterError, match=r"Krum.*clients_per_round"):
        selection(api, 3, private(api, base) if wrapped else base)


def test_who_fails_for_the_selector_alone_cools_down_and_its_model_is_averaged(api: str) -> None:
    """Client 1 reports no score in round 1: it is out in rounds 2 and 3, and completed round 1 in the history."""
    spy = Spy("energy_score", requires=("energy_score",))
    strategy, models = play_scripted(
        api, spy, lambda k, t, w: w + k, 4, start=[0.0], cooldown=True,
        report=lambda k, t: {} if k == 1 and t == 1 else {"energy_score": 0.5},
    )  # fmt: skip
    asked = [(row.round, row.client) for row in strategy.history.clients]
    assert asked == [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1)]
    assert all(row.completed for row in strategy.history.clients)
    assert models[0] == [0.5]
