"""Strategies as people outside write them: wrapped equals alone, and the chosen nodes get their own messages.

The clients, the runs and what is compared: ``world.py``. The strategies: ``own_start.py``,
``own_messages.py``, ``own_payload.py``, ``legacy.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.strategies.foreign import legacy, own_messages, own_payload, own_start
from tests.strategies.foreign.world import CLIENTS, FEW, ROUNDS, Case, Played, node_id, play

CASES: dict[str, dict[str, Case]] = {
    "legacy": legacy.LEGACY,
    "message": {**own_start.AROUND, **own_start.LOOPS, **own_messages.OWN, **own_payload.PAYLOADS},
}
ALL = [(api, name) for api, cases in CASES.items() for name in cases]
CLOCKS = pytest.mark.parametrize("clock", ["virtual", "server"])


def _play(api: str, name: str, folder: Path, wrap: bool, **options: Any) -> Played:
    # The last part of the path is the same in all runs, so that paths among the base's attributes can be compared.
    (folder / "files").mkdir(parents=True)
    return play(api, CASES[api][name], folder / "files", wrap, **options)


def _equal(wrapped: Played, alone: Played) -> None:
    """Each part for itself, so that a failure names the part."""
    for part in vars(alone.outcome):
        assert (part, getattr(wrapped.outcome, part)) == (part, getattr(alone.outcome, part))


def _rounds_of(played: Played) -> list[int]:
    return [row.round for row in played.strategy.history.rounds]


@CLOCKS
@pytest.mark.parametrize(("api", "name"), ALL)
def test_a_strangers_strategy_does_wrapped_what_it_does_alone(api: str, name: str, clock: str, tmp_path: Path) -> None:
    """The selector asks every node, so nothing may differ; and the history has each round once."""
    alone = _play(api, name, tmp_path / "alone", wrap=False, clock=clock)
    wrapped = _play(api, name, tmp_path / "wrapped", wrap=True, clock=clock)
    assert alone.cohorts
    assert wrapped.cohorts == alone.cohorts == [[*range(CLIENTS)]] * len(alone.cohorts)
    _equal(wrapped, alone)
    played = ROUNDS if CASES[api][name].skips else len(alone.cohorts)
    assert _rounds_of(wrapped) == [*range(1, played + 1)]
    completed = [row.num_completed for row in wrapped.strategy.history.rounds if row.num_completed]
    assert completed == [CLIENTS] * len(alone.cohorts)
    counts = wrapped.strategy.history.problem_counts()
    assert counts.pop("skipped", 0) == played - len(alone.cohorts)
    assert counts.keys() <= {*CASES[api][name].problems}


@CLOCKS
@pytest.mark.parametrize(("api", "name"), ALL)
def test_a_strangers_strategy_sees_the_chosen_nodes_alone(api: str, name: str, clock: str, tmp_path: Path) -> None:
    """Alone, with only the chosen nodes connected, it does the same: each node's message, counters, tables, files."""
    wrapped = _play(api, name, tmp_path / "wrapped", wrap=True, clock=clock, cohort=FEW)
    alone = _play(api, name, tmp_path / "alone", wrap=False, clock=clock, schedule=wrapped.cohorts)
    assert {len(cohort) for cohort in wrapped.cohorts} == {FEW}
    assert len({tuple(cohort) for cohort in wrapped.cohorts[:2]}) == 2
    _equal(wrapped, alone)
    # On the server's clock the connections name the clients.
    names = {name: k for k in range(CLIENTS) for name in (str(k), f"node-{k}", str(node_id(k)))}
    rows = wrapped.strategy.history.clients
    chosen = [sorted(names[row.client_id] for row in rows if row.round == n) for n in _rounds_of(wrapped)]
    assert [one for one in chosen if one] == wrapped.cohorts
