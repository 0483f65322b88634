"""Strategies that measure models on the server: the same choices and models through the legacy and the Message API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import message as message_api
from tests.strategies import numpy_world as world
from tests.strategies.flower_world import comparable, legacy_base, message_base, play_legacy, play_messages

pytestmark = pytest.mark.timeout(60)
ROUNDS = 14
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedca": ("FedCA", {"clients_per_round": 3, "seed": 3}),
    "fedca, accuracy, exact": (
        "FedCA", {"clients_per_round": 4, "seed": 1, "score": "accuracy", "averaging": "fedpdp-exact"},
    ),
    "fedca, absent": ("FedCA", {"clients_per_round": 3, "seed": 2, "averaging": "fedavg-absent"}),
    "fedcm-ucb": ("FedCM", {"clients_per_round": 3, "seed": 3}),
    "fedcm-ts": ("FedCM", {"clients_per_round": 3, "seed": 3, "sampler": "ts", "score": "accuracy"}),
    "pczfl": ("PCZFL", {"warmup_rounds": 3, "uncertainty": 0.01, "seed": 3, "channels": 3}),
    "pczfl, capped": ("PCZFL", {"uncertainty": 0.01, "seed": 3, "clients_per_round": 2}),
    "gpfl": ("GPFL", {"clients_per_round": 3, "total_rounds": ROUNDS, "learning_rate": world.ETA, "seed": 3}),
    "gpfl, momentum": (
        "GPFL",
        {"clients_per_round": 2, "total_rounds": ROUNDS, "learning_rate": 0.1, "momentum": 0.9, "loss_sign": "paper",
         "seed": 5, "channels": 3},
    ),
}  # fmt: skip


def _options(**options: Any) -> dict[str, Any]:
    return {"max_latency": world.MAX_LATENCY, "validation": world.validation(), **options}


def _both(name: str, params: dict[str, Any], rounds: int = ROUNDS) -> Any:
    legacy = getattr(legacy_api, name)(legacy_base(), **_options(**params))
    legacy_models = play_legacy(legacy, rounds)
    message = getattr(message_api, name)(message_base(), **_options(**params))
    return legacy, legacy_models, message, play_messages(message, rounds)


@pytest.mark.parametrize(
    "options", [{}, {"availability": world.available}, {"cooldown": True}], ids=("plain", "availability", "cooldown")
)
@pytest.mark.parametrize("case", CASES)
def test_the_same_choices_and_the_same_models(case: str, options: dict[str, Any]) -> None:
    name, params = CASES[case]
    legacy, legacy_models, message, message_models = _both(name, params | options)
    assert len(legacy.history.rounds) == ROUNDS
    assert comparable(legacy.history) == comparable(message.history)
    rows = legacy.history.clients
    assert any(not row.completed for row in rows)
    assert len({tuple(r.client for r in rows if r.round == t) for t in range(1, ROUNDS + 1)}) > 1
    for ours, theirs in zip(legacy_models, message_models, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert not np.allclose(legacy_models[-1], world.initial(), atol=0.05)
    own, other = legacy.selector.state_dict(), message.selector.state_dict()
    assert own.keys() == other.keys()
    for key in own:
        np.testing.assert_allclose(own[key], other[key], rtol=1e-9, atol=1e-9, err_msg=key)


def test_fedca_over_a_bandit() -> None:
    """Any sampling: the filter does not change whom CS-UCB asks, but which models are averaged."""
    models = {}
    for filtered in (True, False):
        runs = []
        for api, base, play in (
            (legacy_api, legacy_base, play_legacy),
            (message_api, message_base, play_messages),
        ):
            selector = create("cs-ucb", **world.selector_params("cs-ucb"))
            strategy: Any = (
                api.FedCA(base(), selector=selector, **_options()) if filtered else
                api.SelectionStrategy(selector, base(), max_latency=world.MAX_LATENCY, averaging="fedpdp")
            )  # fmt: skip
            runs.append((play(strategy, ROUNDS), comparable(strategy.history)))
        np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=0, atol=1e-6)
        assert runs[0][1] == runs[1][1]
        models[filtered] = runs[0]
    assert models[True][1] == models[False][1]
    assert not np.allclose(models[True][0][-1], models[False][0][-1], atol=1e-3)


def test_gpfl_keeps_the_initial_model_in_its_first_round_and_averages_without_weights() -> None:
    """Round 2 is the plain mean of its usable models, whatever their numbers of examples."""
    legacy, legacy_models, message, message_models = _both(*CASES["gpfl"], rounds=2)
    first = [row.client for row in legacy.history.clients if row.round == 1]
    assert first == list(range(world.FLEET))
    second = [row for row in legacy.history.clients if row.round == 2]
    usable = np.array([row.client for row in second if row.completed])
    assert len({world.num_examples(int(k)) for k in usable}) > 1
    for models in (legacy_models, message_models):
        np.testing.assert_array_equal(models[0], world.initial())
        np.testing.assert_allclose(models[1], world.train(world.initial(), usable).mean(axis=0), atol=1e-12)
    assert legacy.history.rounds[0].round_s == pytest.approx(_waves(legacy, 1, channels=3))
    assert message.history.rounds[0].round_s == legacy.history.rounds[0].round_s


def test_pczfls_warm_up_goes_in_waves_over_the_channels() -> None:
    name, options = CASES["pczfl"]
    legacy, _, message, _ = _both(name, options | {"cooldown": False}, rounds=3)
    for server_round, record in enumerate(legacy.history.rounds, start=1):
        assert record.num_selected == world.FLEET
        assert record.round_s == pytest.approx(_waves(legacy, server_round, channels=3))
        assert message.history.rounds[server_round - 1].round_s == record.round_s


def _waves(strategy: Any, server_round: int, channels: int) -> float:
    seconds = [row.latency_s for row in strategy.history.clients if row.round == server_round]
    return sum(max(seconds[i : i + channels]) for i in range(0, len(seconds), channels))
