"""A hundred new ids a round: selectors that prefer the unknown still train the clients that were there before."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.rounds.eligibility import NewcomerQuota
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.selectors import create
from tests.rounds.written import Written, core_of

OLD, COHORT, CALM, FLOODED, NEW = 8, 4, 4, 8, 100
MODEL = [np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.float32)]
BANDITS: dict[str, dict[str, Any]] = {
    "cs-ucb": {"max_latency": 5.0}, "cs-ucb-q": {"max_latency": 5.0}, "bsfl": {"min_latency": 0.1}, "fedcm-ucb": {},
    "fedcm-ts": {}, "gpfl": {"total_rounds": 40}, "lsh": {}, "nccb": {"clusters": 3}, "pczfl": {}, "oort": {},
    "pisces": {}, "tifl": {"tiers": 2}, "fedcs": {"deadline": 50.0, "channels": COHORT},
}  # fmt: skip
"""Selectors that try whom they do not know, and their parameters."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "fedsel_flwr")


def _flooded(name: str, limit: int | None, rounds: int = FLOODED) -> tuple[Any, list[list[str]]]:
    """Who was chosen in each round of the flood; of the ids made up, those admitted stay, and nobody ever answers."""
    exam = Validation(lambda arrays, x: x @ arrays[0] + arrays[1], np.eye(4, 3), np.arange(4) % 2)
    core = core_of(
        create(name, clients_per_round=COHORT, seed=0, **BANDITS[name]), roster=Roster(max_new_per_round=limit),
        max_latency=5.0, validation=exam, learning_rate=0.1, missing_columns="random",
        filter=Filter(score="accuracy") if name.startswith("fedcm") else None,
    )  # fmt: skip
    said = {f"old-{k}": {"client_id": f"old-{k}", "num_examples": 10, "energy_score": 0.9} for k in range(OLD)}
    sketch = {"sketch": np.array([1.0, 0.0, 1.0]), "latency_s": 0.1}
    chosen = []
    for number in range(1, CALM + rounds + 1):
        if number > CALM:
            admitted = set(core.parts.roster.ids)
            known = {key: one for key, one in said.items() if key in admitted}
            fresh = [f"new-{number}-{k}" for k in range(NEW)]
            said = known | {key: {"client_id": key, "num_examples": 10, "energy_score": 0.9} for key in fresh}
        nodes = core.choose(list(said), MODEL, Written(said, {key: sketch for key in said if key.startswith("old")}))
        metrics = {"latency_s": 0.5, "energy_score": 0.9, "rms_loss": 1.0}
        draws = np.random.default_rng(number)
        models = {node: [draws.normal(size=a.shape).astype(np.float32) for a in MODEL] for node in nodes}
        answered = [node for node in nodes if node.startswith("old")]
        core.collect({node: Reply(arrays=models[node], num_examples=10, metrics=metrics) for node in answered})
        core.finish(MODEL)
        chosen.append([core.parts.roster.name(node) for node in nodes])
    return core, chosen[CALM:]


@pytest.mark.parametrize("name", sorted(BANDITS))
def test_the_unknown_take_no_more_places_than_are_admitted(name: str) -> None:
    limit = 2
    core, chosen = _flooded(name, limit)
    old = [sum(one.startswith("old") for one in cohort) for cohort in chosen]
    assert len(core.parts.roster.ids) == OLD + limit * FLOODED
    assert all(len(cohort) - known <= limit for cohort, known in zip(chosen, old, strict=True))
    assert min(old) >= (1 if name == "pczfl" else COHORT - limit)  # that one decides itself how many there are
    assert len({one for cohort in chosen for one in cohort if one.startswith("old")}) >= OLD // 2


@pytest.mark.parametrize("name", ["cs-ucb", "bsfl", "lsh"])
def test_without_a_limit_they_take_all(name: str) -> None:
    _, chosen = _flooded(name, None, rounds=2)
    assert not [one for cohort in chosen for one in cohort if one.startswith("old")]


def test_a_newcomer_that_delivers_makes_room_for_the_next() -> None:
    quota, everybody, offers = NewcomerQuota(Roster(max_new_per_round=2)), np.arange(8), []
    quota.eligible(np.arange(3))
    for _ in range(4):
        mask = quota.eligible(everybody)
        offers.append(np.flatnonzero(mask)[3:].tolist())
        quota.note(np.flatnonzero(mask), everybody[mask] != 4)  # client 4 never delivers
    assert offers == [[3, 4], [3, 5, 6], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]
    unlimited = NewcomerQuota(Roster())  # nobody is a newcomer, and nothing is kept
    unlimited.note(np.arange(3), np.zeros(3, dtype=bool))
    assert unlimited.eligible(np.arange(5)).all()
    assert unlimited.state_dict()["trusted"].size == 0


def test_the_row_of_an_evicted_client_is_a_newcomer_again() -> None:
    quota = NewcomerQuota(Roster(max_new_per_round=1))
    quota.eligible(np.arange(2))
    quota.forget(np.array([1, 5]))
    assert quota.state_dict()["trusted"].tolist() == [True, False]
    twin = NewcomerQuota(Roster(max_new_per_round=1))
    twin.load_state_dict(quota.state_dict())
    assert twin.eligible(np.arange(4)).tolist() == quota.eligible(np.arange(4)).tolist() == [True, True, False, False]
