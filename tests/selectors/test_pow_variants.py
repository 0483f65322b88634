"""cpow-d and rpow-d against rounds by hand, plain sorting of the whole history, and fleets that fail."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import CPowD, RoundReport, RPowD, create
from tests.selectors.oracle_draws import drawn_one_by_one, frequencies, p_value


def build(name: str, **parameters: Any) -> Any:
    return create(name, **{"clients_per_round": 2, "candidates": 30, "seed": 0} | parameters)


def play(selector: Any, available: list[int], losses: dict[int, float], failed: tuple[int, ...] = ()) -> list[int]:
    """Choose; then those chosen report their training's loss, but for those who fail."""
    chosen = selector.select(np.array(available)).tolist()
    completed = [k not in failed for k in chosen]
    told = [losses[k] if done else math.nan for k, done in zip(chosen, completed, strict=True)]
    report = RoundReport(clients=chosen, completed=completed, latency=np.ones(len(chosen)), train_loss=told)
    selector.observe(report)
    return list(chosen)


def test_rounds_of_rpow_d_by_hand() -> None:
    """Four clients, m = 2, all are candidates; rounds 1 and 2 are forced by availability.

    Round 1, {0, 1}: losses .9 and .2.  Round 2, {2, 3}: 2 tells 1.4, 3 fails: it stays infinite.
    Round 3: .9, .2, 1.4, inf -> {2, 3}. 2 tells .5; 3 fails again, the second time in a row: last for 2^2 = 4 rounds,
        3 + 4 = 7 included.
    Round 4: .9, .2, .5, last -> {0, 2}. 0 tells .1, 2 fails for the first time: it keeps .5.
    Round 5: .1, .2, .5, last -> {1, 2}. 1 tells .3, 2 tells .4.
    Round 6: .1, .3, .4, last -> {1, 2}, unchanged.  Round 7: the same.
    Round 8: .1, .3, .4, inf -> {2, 3}: 3 fails a third time, last for 8 rounds, 16 included.
    Round 9: {1, 2}. Round 10: 3 alone is there, is asked, and tells .35, which ends its failures in a row.
    Round 11: .1, .3, .4, .35 -> {2, 3}; one more failure keeps the .35.
    """
    for seed in range(10):
        selector = build("rpow-d", seed=seed)
        everybody = [0, 1, 2, 3]
        assert play(selector, [0, 1], {0: 0.9, 1: 0.2}) == [0, 1]
        assert play(selector, [2, 3], {2: 1.4}, failed=(3,)) == [2, 3]
        assert play(selector, everybody, {2: 0.5}, failed=(3,)) == [2, 3]
        assert play(selector, everybody, {0: 0.1}, failed=(2,)) == [0, 2]
        assert play(selector, everybody, {1: 0.3, 2: 0.4}) == [1, 2]
        for _ in range(2):
            assert play(selector, everybody, {1: 0.3, 2: 0.4}) == [1, 2]
        assert play(selector, everybody, {2: 0.4}, failed=(3,)) == [2, 3]
        assert play(selector, everybody, {1: 0.3, 2: 0.4}) == [1, 2]
        assert play(selector, [3], {3: 0.35}) == [3]
        assert selector.state_dict()["failures"].tolist() == [0, 0, 0, 0]
        assert selector.state_dict()["loss"].tolist() == [0.1, 0.3, 0.4, 0.35]
        assert play(selector, everybody, {2: 0.4}, failed=(3,)) == [2, 3]
        assert selector.state_dict()["loss"].tolist() == [0.1, 0.3, 0.4, 0.35]


def test_rounds_of_cpow_d_by_hand() -> None:
    """d = 4 of 5 clients; client 3 has no examples, so the candidates are 0, 1, 2, 4.

    Losses of their mini-batches .4, 2.0, 1.1, 1.3 -> 1, 4; those of all examples do not count.
    """
    for seed in range(10):
        selector = build("cpow-d", candidates=4, seed=seed)
        selector.inform(np.arange(5), num_examples=np.array([5.0, 5.0, 5.0, 0.0, 5.0]))
        question = selector.probe(np.arange(5))
        assert question is not None
        assert (question.columns, question.clients.tolist()) == (("batch_loss",), [0, 1, 2, 4])
        selector.inform(question.clients, batch_loss=np.array([0.4, 2.0, 1.1, 1.3]), loss=np.array([9.0, 0, 8.0, 0]))
        assert selector.select(np.arange(5)).tolist() == [1, 4]


@pytest.mark.parametrize("seed", range(3))
def test_every_choice_of_rpow_d_has_the_largest_losses(seed: int) -> None:
    """150 rounds with availability, failures and newcomers; every client is a candidate.

    The oracle keeps the plays alone, and reads off them what each client is worth.
    """
    rng = np.random.default_rng(seed)
    selector, plays, decided = build("rpow-d", clients_per_round=3, candidates=12, seed=seed), [], 0

    def worth(k: int, number: int) -> float:
        mine = [(t, loss) for t, who, loss in plays if who == k]
        told = [t for t, loss in mine if not math.isnan(loss)]
        since = [t for t, _ in mine if t > max(told, default=0)]  # the failures in a row
        if len(since) >= 2 and number <= since[-1] + 2 ** len(since):
            return -math.inf
        return next((loss for t, loss in mine if t == max(told)), math.inf) if told else math.inf

    for number in range(1, 151):
        available = np.flatnonzero(rng.random(8 if number < 50 else 12) < 0.7)
        chosen = selector.select(available)
        worths = {k: worth(k, number) for k in available.tolist()}
        inside, outside = ([worths[k] for k in part] for part in (chosen, np.setdiff1d(available, chosen)))
        assert chosen.size == min(3, available.size)
        assert not inside or not outside or min(inside) >= max(outside)
        decided += len(set(worths.values())) > 3
        losses = np.where(rng.random(chosen.size) < 0.3, np.nan, rng.exponential(size=chosen.size))
        plays += [(number, k, loss) for k, loss in zip(chosen.tolist(), losses.tolist(), strict=True)]
        selector.observe(RoundReport(clients=chosen, completed=~np.isnan(losses), latency=np.ones(chosen.size),
                                     train_loss=losses))  # fmt: skip
    assert decided > 100


@pytest.mark.parametrize("d", [1, 2])
def test_the_candidates_of_rpow_d_follow_the_sizes(d: int) -> None:
    """m = d, so that the choice is the candidates: each set as often as draws one by one in proportion to p_k."""
    sizes = {0: 10.0, 1: 20.0, 2: 40.0, 3: 80.0, 4: 160.0}
    selector = build("rpow-d", clients_per_round=d, candidates=d, seed=d)
    selector.inform(np.arange(5), num_examples=np.array(list(sizes.values())))
    counts = frequencies(lambda: selector.select(np.arange(5)).tolist(), 4000)
    assert p_value(counts, drawn_one_by_one(sizes, d)) > 1e-3
    assert p_value(counts, drawn_one_by_one(dict.fromkeys(sizes, 1.0), d)) < 1e-9


def test_rpow_d_asks_nothing_and_clients_never_heard_of_come_first() -> None:
    selector = build("rpow-d", clients_per_round=3)
    seen: set[int] = set()
    for _ in range(4):
        assert selector.probe(np.arange(12)) is None
        chosen = play(selector, list(range(12)), dict.fromkeys(range(12), 5.0))
        assert not seen & set(chosen)
        seen |= set(chosen)
    assert seen == set(range(12))
    assert RPowD.asks == frozenset()
    assert CPowD.asks == {"batch_loss"}


class Verdict(RPowD):
    """The second failure in a row is for good."""

    name = "verdict"

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        self._last_until[self._failures >= 2] = 10**9


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_lost_to_transient_failures(seed: int) -> None:
    """100 clients, 30 candidates, 10 a round, 10 % transient failures, 400 rounds; client 0 is dead.

    At most one of the others is never chosen in the last hundred rounds, and the dead one is asked 8 times at most. If
    the second failure in a row were for good, .24 to .39 would not be.
    """
    lost = {}
    for cls in (RPowD, Verdict):
        rng, selector = np.random.default_rng(seed), cls(clients_per_round=10, seed=seed)
        usual, late, dead = 0.5 + 0.5 * rng.exponential(size=100), set[int](), 0
        for number in range(400):
            chosen = selector.select(np.arange(100))
            done = (rng.random(10) >= 0.1) & (chosen != 0)
            losses = np.where(done, usual[chosen] * 0.99**number * rng.uniform(0.8, 1.2, 10), np.nan)
            selector.observe(RoundReport(clients=chosen, completed=done, latency=np.ones(10), train_loss=losses))
            dead += 0 in chosen
            late |= set(chosen.tolist()) if number >= 300 else set()
        lost[cls] = (99 - len(late - {0})) / 99
        assert dead <= 8
    assert lost[RPowD] <= 0.011
    assert 0.24 <= lost[Verdict] <= 0.395


def test_spares_have_not_failed() -> None:
    """Of two spares one answers with a loss of .4, the other not at all: it keeps 2; twice, and none has failed."""
    selector = RPowD(clients_per_round=2, candidates=2, seed=0)
    play(selector, [0, 1], {0: 1.0, 1: 2.0})
    for _ in range(2):
        chosen = selector.select(np.arange(2))
        selector.observe(
            RoundReport(
                clients=chosen, completed=[True, False], spare=[True, True], latency=[9.0, 4.0],
                train_loss=[0.4, np.nan],
            )
        )  # fmt: skip
    assert selector.state_dict()["loss"].tolist() == [0.4, 2.0]
    assert selector.state_dict()["failures"].tolist() == [0, 0]


def test_failures_beyond_counting_stay_numbers() -> None:
    """A single client that is all there is, and dead: 200 failures in a row."""
    selector = build("rpow-d", clients_per_round=1)
    for _ in range(200):
        assert play(selector, [0], {}, failed=(0,)) == [0]
    assert selector.state_dict()["failures"].tolist() == [200]
    assert 2**30 <= selector.state_dict()["last_until"][0] <= 2**30 + 200


@pytest.mark.parametrize("name", ["cpow-d", "rpow-d"])
def test_fewer_candidates_than_clients_a_round_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match="candidates must be at least clients_per_round, got 3 for 4 clients"):
        build(name, clients_per_round=4, candidates=3)
