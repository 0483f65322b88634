"""Active FL against a round by hand and the chances of its sets by enumeration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import RoundReport
from fedsel_flwr.selectors.active_fl import ActiveFL
from tests.selectors.oracle_draws import Chances, drawn_one_by_one, frequencies, p_value, then_uniformly


def build(**parameters: Any) -> ActiveFL:
    return ActiveFL(**{"clients_per_round": 2, "seed": 0} | parameters)


def chances(value: Mapping[int, float], m: int, a1: float, a2: float, a3: float) -> Chances:
    """The definition: drop the lowest, draw by exp(a2 v), fill up uniformly; in exact fractions of the arguments."""
    ranked = sorted(value, key=lambda k: value[k])
    kept = ranked[math.floor(round(a1 * len(value), 6)) :]
    top = max(value[k] for k in kept) if kept else 0.0
    weights = {k: math.exp(a2 * (value[k] - top)) for k in kept}
    first = drawn_one_by_one(weights, min(len(kept), math.floor(round((1 - a3) * m, 6))))
    return then_uniformly(first, value, m)


def informed(losses: Mapping[int, float], sizes: Mapping[int, float], **parameters: Any) -> ActiveFL:
    selector = build(**parameters)
    clients = np.array(sorted(losses))
    selector.inform(clients, num_examples=np.array([sizes[k] for k in clients.tolist()]))
    question = selector.probe(clients)
    assert question is not None
    selector.inform(question.clients, loss=np.array([losses[k] for k in question.clients.tolist()]))
    return selector


def test_a_round_by_hand() -> None:
    """Four clients, m = 2, alpha = (.5, 1, .5): the lowest 2 are dropped, floor(.5 * 2) = 1 is drawn by value.

    n = (4, 9, 1, 16), loss = (1, .5, 2.5, .25): v = sqrt(n) loss = (2, 1.5, 2.5, 1). Left: 0 and 2.
    P(2 first) = e^2.5/(e^2 + e^2.5) = .6225; then one of the three others, each 1/3.
    {1, 3} has no chance; {0, 2} has .6225/3 + .3775/3 = 1/3; {1, 2} has .6225/3 = .2075.
    """
    selector = informed(
        {0: 1.0, 1: 0.5, 2: 2.5, 3: 0.25}, {0: 4, 1: 9, 2: 1, 3: 16}, dropped=0.5, temperature=1.0, uniform=0.5
    )
    counts = frequencies(lambda: selector.select(np.arange(4)).tolist(), 4000)
    by_hand = {(0, 2): 1 / 3, (1, 2): 0.2075, (2, 3): 0.2075, (0, 1): 0.1258, (0, 3): 0.1258}
    assert p_value(counts, {frozenset(members): chance for members, chance in by_hand.items()}) > 1e-3


@pytest.mark.parametrize(
    ("m", "a1", "a2", "a3"),
    [(2, 0.75, 0.01, 0.1), (3, 0.5, 2.0, 0.4), (4, 0.25, 0.5, 0.25), (3, 0.0, 1.0, 0.0), (2, 1.0, 1.0, 0.0)],
)
def test_the_draws_follow_the_formula(m: int, a1: float, a2: float, a3: float) -> None:
    """Seven clients; every set as often as the definition says."""
    sizes = {k: float(5 + 3 * k) for k in range(7)}
    losses = {0: 0.9, 1: 0.2, 2: 1.4, 3: 0.6, 4: 0.45, 5: 0.1, 6: 0.3}
    value = {k: math.sqrt(sizes[k]) * losses[k] for k in range(7)}
    selector = informed(losses, sizes, clients_per_round=m, dropped=a1, temperature=a2, uniform=a3)
    counts = frequencies(lambda: selector.select(np.arange(7)).tolist(), 4000)
    assert p_value(counts, chances(value, m, a1, a2, a3)) > 1e-3


def test_the_draws_of_other_clients_than_all() -> None:
    """Only 1, 2, 4, 6 are there: the lowest half is dropped of them, not of all."""
    sizes = dict.fromkeys(range(7), 1.0)
    losses = {k: 0.5 * k for k in range(7)}
    selector = informed(losses, sizes, dropped=0.5, temperature=1.0, uniform=0.5)
    counts = frequencies(lambda: selector.select(np.array([1, 2, 4, 6])).tolist(), 3000)
    assert p_value(counts, chances({k: losses[k] for k in (1, 2, 4, 6)}, 2, 0.5, 1.0, 0.5)) > 1e-3


def test_a_huge_valuation_is_no_overflow() -> None:
    """v = 10^6: the largest is subtracted before the exponential, which would overflow at 710."""
    selector = informed({0: 1e6, 1: 1e6, 2: 1.0}, dict.fromkeys(range(3), 1.0), dropped=0.0, temperature=1.0, uniform=0)
    counts = frequencies(lambda: selector.select(np.arange(3)).tolist(), 200)
    assert set(counts) == {frozenset({0, 1})}


def test_everybody_is_asked_once_and_newcomers_when_they_come() -> None:
    selector = build()
    first = selector.probe(np.arange(4))
    assert first is not None
    assert (first.clients.tolist(), first.columns) == ([0, 1, 2, 3], ("loss",))
    selector.inform(first.clients, loss=np.array([1.0, np.nan, 1.0, 1.0]))
    selector.select(np.arange(4))
    assert selector.probe(np.arange(4)) is None  # client 1 did not answer, and is not asked again
    second = selector.probe(np.arange(6))
    assert second is not None
    assert second.clients.tolist() == [4, 5]


def test_valuations_are_refreshed_with_the_loss_before_training() -> None:
    """Losses (1, 2, 3), all sizes 1, m = 1, greedy by temperature: the value told last is the one that counts.

    Client 2 is chosen (3) and reports .5; then 1 (2), which fails once and keeps its valuation, so 1 again; it fails
    again and loses it; then 0 (1); client 0 completes without a loss and keeps 1, so 0 again; 2 is next when 0 reports
    .1.
    """
    selector = informed(
        {0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 1.0), clients_per_round=1, dropped=0.0, temperature=500.0,
        uniform=0.0,
    )  # fmt: skip
    story = [
        (2, True, 0.5), (1, False, np.nan), (1, False, np.nan), (0, True, np.nan), (0, True, 0.1), (2, True, 0.3),
        (2, True, 0.0),
    ]  # fmt: skip
    for expected, completed, loss in story:
        chosen = selector.select(np.arange(3))
        assert chosen.tolist() == [expected]
        latency = 1.0 if completed else 5.0
        selector.observe(RoundReport(clients=chosen, completed=[completed], latency=[latency], loss=[loss]))
    assert selector.select(np.arange(3)).tolist() == [0]


def test_spares_keep_their_valuation_or_get_the_one_that_they_report() -> None:
    """Both clients are spares twice: client 0 reports .4, client 1 has not answered; neither has failed."""
    selector = informed({0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.0}, clients_per_round=2)
    for _ in range(2):
        chosen = selector.select(np.arange(2))
        selector.observe(
            RoundReport(
                clients=chosen, completed=[True, False], spare=[True, True], latency=[9.0, 4.0], loss=[0.4, np.nan]
            )
        )
    assert selector.state_dict()["loss"].tolist() == [0.4, 2.0]
    assert selector.state_dict()["failures"].tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [{"dropped": 1.1}, {"temperature": -1.0}, {"uniform": -0.1}])
def test_parameters_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        build(**wrong)
