"""Whatever hostile clients send, in either API: nothing raises, nothing overflows, the honest are judged alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.server.strategy import Strategy as LegacyStrategy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.testing.random_rounds import nonfinite_key
from tests.strategies.generated import (
    BASES,
    HONEST,
    HOSTILE,
    MAX_LATENCY,
    METRICS,
    PLAY,
    ROUNDS,
    World,
    courses,
    honest_metrics,
    honest_model,
    validation,
)

EVERYBODY = HONEST + HOSTILE
SELECTORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cs-ucb": ({"max_latency": MAX_LATENCY}, ("plays", "mean")),
    "cs-ucb-q": ({"max_latency": MAX_LATENCY}, ("plays", "mean")),
    "bsfl": ({"min_latency": 0.1}, ("plays", "mean")),
    "oort": ({}, ("rms_loss", "duration", "last_round")),
    "fedcs": ({"deadline": 1e6}, ("latency", "measurements", "measured_in")),
    "tifl": ({"tiers": 2, "interval": 2}, ("profile", "attempts")),
    "active-fl": ({}, ("loss",)),
    "rpow-d": ({}, ("loss", "failures")),
    "lsh": ({}, ("plays", "reward_sum")),
    "nccb": ({"clusters": 3}, ("plays", "reward_sum")),
    "pczfl": ({"warmup_rounds": 9}, ("accuracy", "energy_score")),
    "gpfl": ({"total_rounds": 9}, ("plays",)),
    "fedcm-ts": ({}, ()), "fedcm-ucb": ({}, ()), "divfl": ({}, ()), "power-of-choice": ({}, ()),
    "cpow-d": ({}, ()),
    "fedcor": ({"warmup_rounds": 3, "interval": 2}, ()), "local-accuracy": ({}, ()), "random-by-size": ({}, ()),
}  # fmt: skip
"""Selector -> its parameters, and what it keeps of each client that depends on that client's replies alone."""


def _made(name: str) -> Any:
    return create(name, clients_per_round=None if name == "fedcs" else EVERYBODY, seed=0, **SELECTORS[name][0])


def _twin(name: str, strategy: Any, rows: list[int]) -> Any:
    """A selector that is told what honest clients did, and nothing else."""
    twin, exam = _made(name), validation()
    twin.inform(np.array(rows))
    for entry in strategy.history.rounds:
        twin.select(np.array(rows))
        chosen = {r.client_id: r.client for r in strategy.history.clients if r.round == entry.round}
        mine = [k for k in range(HONEST) if f"h{k}" in chosen]
        said = [honest_metrics(k, entry.round) for k in mine]
        accuracy = [exam.accuracy(exam.logits(honest_model(k, entry.round))) for k in mine]
        columns: dict[str, Any] = {"accuracy": accuracy} | {
            key: [one[key] for one in said] for key in ("energy_score", "loss", "rms_loss", "train_loss")
        }
        twin.observe(
            RoundReport(
                clients=np.array([chosen[f"h{k}"] for k in mine], dtype=np.int64),
                completed=np.ones(len(mine), dtype=bool),
                latency=[one["latency_s"] for one in said],
                projection=np.zeros(len(mine)), global_accuracy=0.5, global_loss=1.0,
                **{key: column for key, column in columns.items() if key in twin.needs},
            )
        )  # fmt: skip
    return twin


def _finite(value: Any) -> bool:
    """Whether every number in lists, mappings and arrays is finite."""
    if isinstance(value, dict):
        return all(_finite(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(one) for one in value)
    if isinstance(value, float | np.floating) or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
        return bool(np.isfinite(value).all())
    return True


def _check(api: str, name: str, base: str, world: World) -> int:
    """Play, look at everything that is left, and return how many hostile replies were sent."""
    needs_filter = name.startswith("fedcm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flower's averages, on metrics that overflow
        strategy = PLAY[api](
            world, _made(name), base, validation=validation(), learning_rate=0.1,
            filter=Filter(score="accuracy") if needs_filter else None,
        )  # fmt: skip
    assert [record.round for record in strategy.history.rounds] == list(range(1, ROUNDS + 2))
    assert all(_finite([model]) for model in world.models)
    assert base != "FedAvg" or all([a.dtype for a in model] == [np.float32] * 2 for model in world.models)
    assert not nonfinite_key(strategy.selector), nonfinite_key(strategy.selector)
    state = strategy.state_dict()
    assert _finite({part: own for part, own in state.items() if part not in ("selector", "history")})
    assert _finite({key: value for key, value in vars(strategy.base).items() if "arrays" in key or key.endswith("_t")})
    for row in strategy.history.clients:
        if row.client_id.startswith("h") and row.client_id[1:].isdigit() and int(row.client_id[1:]) < HONEST:
            assert (row.completed, row.problem) == (True, ""), row
        assert row.problem.isprintable()
        assert row.client_id.isprintable()
        assert 0.0 <= row.latency_s <= MAX_LATENCY
    for record in strategy.history.rounds:
        assert np.isfinite([record.round_s, record.simulated_s]).all()
        assert not np.isinf([record.energy_j, record.total_energy_j]).any()
    rows = [strategy.roster.ids.index(f"h{k}") for k in range(HONEST)]
    twin = _twin(name, strategy, rows).state_dict() if SELECTORS[name][1] else {}
    for key in SELECTORS[name][1]:
        assert state["selector"][key][rows].tolist() == twin[key][rows].tolist(), key
    return world.sent


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in ("flwr", "fedsel_flwr")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _generated(api: str, examples: int) -> int:
    """Play so many generated courses; returns how many hostile replies were sent in them."""
    sent = 0

    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        course=courses(),
        said=st.lists(METRICS, min_size=HOSTILE, max_size=HOSTILE),
        name=st.sampled_from(sorted(SELECTORS)),
        base=st.sampled_from(BASES),
        evaluates=st.booleans(),
    )
    def play(course: Any, said: Any, name: str, base: str, evaluates: bool) -> None:
        nonlocal sent
        sent += _check(api, name, base, World(course, said, evaluates))

    play()
    return sent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("api", sorted(PLAY))
def test_some_hundred_hostile_replies(api: str) -> None:
    assert _generated(api, 4) >= 2 * HOSTILE * ROUNDS  # those refused in the roll call are not asked


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("api", sorted(PLAY))
def test_fifty_thousand_hostile_replies_in_each_api(api: str) -> None:
    sent = 0
    while sent < 50_000:
        sent += _generated(api, 200)
    print(f"{api}: {sent} hostile replies")
    assert sent >= 50_000


def test_the_traps_are_traps() -> None:
    """The generated bytes that must not be unpickled would raise, if they were."""
    import pickle

    from tests.strategies.generated import Trap

    assert LegacyStrategy  # Flower's own types are what is played
    with pytest.raises(SystemExit):
        pickle.loads(pickle.dumps(Trap()))
