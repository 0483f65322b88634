"""What one client among ten can take by saying one thing and doing another, in both of Flower's APIs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import create
from tests.strategies.scripted import APIS, Spy, play_scripted, two_examples

pytestmark = pytest.mark.timeout(60)
CLIENTS, ROUNDS, BAD = 10, 40, 7


def _pczfl(api: str, lie: str, **options: Any) -> Counter[int]:
    """How often PCZFL asks each of ten clients in 40 rounds; client 7 says 1.0 of its energy in the roll call."""

    def script(k: int, t: int, w: Any) -> Any:
        if k == BAD and lie == "raises":
            raise TypeError("as often as it is asked")
        return w + (-1.0 if k == BAD else 0.01)

    def report(k: int, t: int) -> dict[str, Any]:
        return {"energy_score": -1.0 if k == BAD else 0.5}

    strategy, _ = play_scripted(
        api, create("pczfl", seed=0), script, ROUNDS, start=np.eye(2), clients=CLIENTS, report=report,
        facts=lambda k: {"energy_score": 1.0 if k == BAD else 0.5}, validation=two_examples(), **options,
    )  # fmt: skip
    return Counter(row.client for row in strategy.history.clients)


@APIS
@pytest.mark.parametrize("lie", ["raises", "reports -1.0"])
def test_a_client_that_fails_for_pczfl_takes_no_round_from_the_others(api: str, lie: str) -> None:
    asked = _pczfl(api, lie)
    assert min(asked[k] for k in range(CLIENTS) if k != BAD) >= 20, asked
    assert asked[BAD] <= 5, asked


def test_without_a_cool_down_the_selector_is_the_papers() -> None:
    """A ball all of whose clients failed changes nothing: the same client is asked for ever."""
    asked = _pczfl("legacy", "reports -1.0", cooldown=False)
    assert asked[BAD] >= 38
    assert max(asked[k] for k in range(CLIENTS) if k != BAD) <= 5, asked


@APIS
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
