"""A base's own ``start``: history, calls of ``on_round``, checkpoints, resuming and the end of the run are as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, Result

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.strategies.wrapping.grids import _GridWrapper
from tests.strategies.foreign.own_start import AROUND, LOOPS, OneRoundAtATime
from tests.strategies.foreign.world import ACCURACY, ROUNDS, Case, Played, play

pytestmark = pytest.mark.usefixtures("no_syncs")
OWN = {**AROUND, **LOOPS}
EACH = pytest.mark.parametrize("name", sorted(OWN))
AROUND_THAT_RESUME = [
    "best-model", "logging", "logging-without-evaluate-fn", "final-evaluation", "last-round-evaluation",
]  # fmt: skip
PLAYED = {"early-stopping": 4, "advanced-example": 4, "extra-arguments": 3}
"""Rounds of the strategies that stop early."""


def _play(case: Case, folder: Path, rounds: int = ROUNDS, wrap: bool = True, **options: Any) -> Played:
    folder.mkdir(exist_ok=True)

    def base(folder: Path) -> Any:
        """The strategy; if there are checkpoints, it says itself that it has nothing to save."""
        made = case.base(folder)
        if "checkpoint_dir" in options:
            inner = getattr(made, "strategy", made)
            inner.state_dict, inner.load_state_dict = dict, lambda state: None
        return made

    return play("message", replace(case, base=base, options=options), folder, wrap, rounds=rounds)


@EACH
def test_each_round_is_recorded_and_told_once(name: str, tmp_path: Path) -> None:
    """A loop that never evaluates, or evaluates twice, included."""
    told: list[int] = []
    played = _play(OWN[name], tmp_path, on_round=lambda record: told.append(record.round))
    rounds = played.strategy.history.rounds
    assert [row.round for row in rounds] == told == [*range(1, PLAYED.get(name, ROUNDS) + 1)]
    evaluated = [number for number, _ in played.outcome.evaluated if number]
    for row in rounds:
        expected = ACCURACY[row.round] if row.round in evaluated else np.nan
        np.testing.assert_equal(row.accuracy, expected)
    assert len(played.strategy.history.clients) == 5 * len(rounds)


@EACH
def test_the_last_checkpoint_holds_the_last_model(name: str, tmp_path: Path) -> None:
    played = _play(OWN[name], tmp_path / "files", checkpoint_dir=tmp_path / "checkpoints")
    last = PLAYED.get(name, ROUNDS)
    kept = sorted(path.stem for path in (tmp_path / "checkpoints").glob("round-*.safetensors"))
    assert kept[-1] == f"round-{last:06d}"
    returned = played.outcome.returned[0] if isinstance(played.outcome.returned, list) else played.outcome.returned
    assert played.strategy.last_model.round == last
    for array, (dtype, shape, data) in zip(played.strategy.last_model.arrays, returned["arrays"].values(), strict=True):
        assert np.asarray(array, dtype).tobytes() == data[-int(np.prod(shape)) * np.dtype(dtype).itemsize :]


@pytest.mark.parametrize("name", AROUND_THAT_RESUME)
def test_a_run_around_flowers_start_resumes(name: str, tmp_path: Path) -> None:
    """The result's rounds are absolute, and the model is that of the uninterrupted run.

    The base's ``start`` gets the number of rounds of the whole run, because the base sees absolute rounds.
    """
    case, checkpoints = OWN[name], tmp_path / "checkpoints"
    straight = _play(case, tmp_path / "straight")
    _play(case, tmp_path / "first", rounds=2, checkpoint_dir=checkpoints)
    rest = _play(case, tmp_path / "rest", checkpoint_dir=checkpoints, resume=True)
    assert rest.outcome.returned["arrays"] == straight.outcome.returned["arrays"]
    assert [*rest.outcome.returned["train_metrics_clientapp"]] == [3, 4, 5, 6]
    if name == "last-round-evaluation":
        assert rest.base.num_rounds == ROUNDS
        assert [*rest.outcome.returned["evaluate_metrics_clientapp"]] == [ROUNDS]
    assert len(rest.cohorts) == ROUNDS - 2
    assert [row.round for row in rest.strategy.history.rounds][-4:] == [3, 4, 5, 6]
    assert {number for number, _ in rest.outcome.evaluated} <= {*range(2, ROUNDS + 1)}


@pytest.mark.parametrize("name", sorted(set(LOOPS) - {"moving-average"}))
def test_a_loop_of_its_own_is_not_resumed(name: str, tmp_path: Path) -> None:
    """It counts from round 1, so the refusal comes before a node trains, with the base's name and the reason."""
    case, checkpoints = LOOPS[name], tmp_path / "checkpoints"
    first = _play(case, tmp_path / "first", rounds=2, checkpoint_dir=checkpoints)
    before = sorted(checkpoints.glob("round-*"))
    trained: list[int] = []
    watching = replace(case, client=lambda: lambda number, content: trained.append(number))
    with pytest.raises(FedSelError, match=r"(?s)(start.*resum|resum.*start)") as error:
        _play(watching, tmp_path / "rest", checkpoint_dir=checkpoints, resume=True)
    assert type(first.base).__name__ in str(error.value)
    assert trained == []
    assert sorted(checkpoints.glob("round-*")) == before


@pytest.mark.parametrize("name", ["best-model", "logging", "logging-without-evaluate-fn", "advanced-example"])
@pytest.mark.parametrize("whose", ["option", "argument"])
def test_should_stop_ends_the_run(name: str, whose: str, tmp_path: Path) -> None:
    """The option of the strategy and the argument of ``start``, which the base's own does not know."""
    case = OWN[name]
    if whose == "option":
        played = _play(case, tmp_path, should_stop=lambda number, history: number >= 2)
    else:
        own = case.start(tmp_path)
        stop = {"should_stop": lambda number, result: number >= 2}
        played = _play(replace(case, start=lambda folder: {**own, **stop}), tmp_path)
    assert len(played.cohorts) == 2
    assert [row.round for row in played.strategy.history.rounds] == [1, 2]
    assert [*played.outcome.returned["train_metrics_clientapp"]] == [1, 2]
    alone = _play(case, tmp_path / "alone", rounds=2, wrap=False)
    assert played.outcome.returned["arrays"] == alone.outcome.returned["arrays"]


def test_should_stop_is_no_matter_of_a_loop_with_any_keywords(tmp_path: Path) -> None:
    """It takes ``**kwargs``, and does nothing with them."""
    case = replace(LOOPS["preflight"], start=lambda folder: {"should_stop": lambda number, result: number >= 2})
    played = _play(case, tmp_path)
    assert len(played.cohorts) == 2
    assert [row.round for row in played.strategy.history.rounds] == [1, 2]


def test_flowers_start_for_one_round_at_a_time(tmp_path: Path) -> None:
    """It restarts the numbers of the rounds, and works as it does alone."""
    case = Case(lambda folder: OneRoundAtATime())
    alone, wrapped = (_play(case, tmp_path / str(wrap), wrap=wrap) for wrap in (False, True))
    assert len(alone.base.losses) == ROUNDS
    assert wrapped.outcome.returned["arrays"] == alone.outcome.returned["arrays"]
    assert [row.round for row in wrapped.strategy.history.rounds] == [*range(1, ROUNDS + 1)]


class Loop(FedAvg):
    """A loop of its own that counts its runs in its class, and may pass on more than Flower does."""

    runs = 0

    def __init__(self, more: tuple[Any, ...] = ()) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.more = more

    def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, **kwargs: Any) -> Result:
        type(self).runs += 1
        counting, result, result.arrays = CountingGrid(grid), Result(), initial_arrays
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, result.arrays, ConfigRecord(), counting, *self.more)
            arrays, _ = self.aggregate_train(number, counting.send_and_receive(messages))
            result.arrays = result.arrays if arrays is None else arrays
        self.sent = counting.sent
        return result


class CountingGrid(_GridWrapper):
    """A grid of the base's own around Flower's."""

    sent = 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        self.sent += len(messages)
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("clock", ["virtual", "server"])
def test_a_grid_and_a_class_of_the_bases_own_count_what_they_count_alone(clock: str, tmp_path: Path) -> None:
    Loop.runs = 0
    case = Case(lambda folder: Loop())
    for wrap in (False, True):
        assert play("message", case, tmp_path, wrap, clock=clock).base.sent == ROUNDS * 5
    assert Loop.runs == 2


def test_a_loop_that_passes_on_more_than_flower_does_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedSelError, match=r"start of Loop calls self\.configure_train with other arguments"):
        _play(Case(lambda folder: Loop(more=({},))), tmp_path)
