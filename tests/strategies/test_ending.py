"""How a run ends, in both APIs: by a caller's own signal as by a budget, or by an error, which the model outlives."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.checkpoints import read_checkpoint
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.run_length import Budget
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.message import SelectionStrategy
from tests.strategies.either_api import APIS, base_of, make
from tests.strategies.flower_world import Run, Seen
from tests.strategies.helpers import Federation, fleet
from tests.strategies.message.helpers import FakeGrid, arrays_of, crowd, play

pytestmark = pytest.mark.usefixtures("no_syncs")
ALL, END = 8, 3
EVALUATES = pytest.mark.parametrize("evaluates", [True, False])


def _after(number: int) -> Any:
    return lambda done, history: done >= number and history.last.round == done


def _of_two(api: str = "message", selector: Any = None, fraction_evaluate: float = 0.0, **options: Any) -> Any:
    """A strategy that chooses two clients a round."""
    selector = selector or Random(clients_per_round=2, seed=0)
    return make(api, selector, base_of(api, fraction_evaluate=fraction_evaluate), **options)


@EVALUATES
def test_the_run_ends_with_model_history_and_checkpoint(api: str, evaluates: bool, tmp_path: Path) -> None:
    """Neither a checkpoint nor an evaluation was due in that round; it has both, as the last round of a run has."""
    seldom = {"checkpoint_every": 5, "evaluate_in": lambda number: number % 5 == 0}
    run = Run(api, rounds=ALL, evaluates=evaluates, options=seldom)
    short = replace(run, rounds=END).play(tmp_path / "short")
    stopped = replace(run, options={**seldom, "should_stop": _after(END)}).play(tmp_path / "stopped")
    assert [one.round for one, _ in stopped.finished] == [1, 2, 3]
    assert (stopped.model, stopped.state) == (short.model, short.state)
    assert max(stopped.trained) == END
    assert sorted(path.stem for path in (tmp_path / "stopped").glob("round-*")) == ["round-000003"]
    if evaluates:
        assert stopped.evaluated == [0, END]
        assert [np.isfinite(one.accuracy) for one, _ in stopped.finished] == [False, False, True]
        assert stopped.records[2:] == replace(run, rounds=END, options={}).play().records[2:]
        assert '"accuracy":0.' in (stopped.journal or "").splitlines()[-1].replace(" ", "")


@EVALUATES
def test_a_resumed_run_plays_on_only_if_the_signal_is_off(api: str, evaluates: bool, tmp_path: Path) -> None:
    run = Run(api, rounds=ALL, evaluates=evaluates)
    stopping = replace(run, options={"should_stop": _after(END)})
    first, again = stopping.play(tmp_path), stopping.play(tmp_path, resume="must")
    assert again.trained == []
    assert again.result() == first.result()
    assert run.play(tmp_path, resume="must").result() == run.play().result()


def test_the_signal_is_asked_once_a_round_after_the_round_was_told(api: str) -> None:
    told: list[int] = []
    asked: list[tuple[int, int, int]] = []

    def should_stop(number: int, history: History) -> Any:
        asked.append((number, len(history.rounds), len(told)))
        assert np.isfinite(history.rounds[-1].accuracy)
        return np.bool_(len(told) == END)

    def watch(strategy: Any) -> None:
        strategy._on_round = lambda record: told.append(record.round)

    Run(api, rounds=ALL, options={"should_stop": should_stop}, watch=watch).play()
    assert told == [1, 2, 3]
    assert asked == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_whatever_ends_a_run_ends_it_in_the_same_way() -> None:
    thrice = type("Thrice", (Random,), {"done": property(lambda self: self.round >= END)})
    seconds = Run("legacy", rounds=END, selector="random").play().finished[-1][0].simulated_s
    ends = {"budget": Budget(simulated_s=seconds)}, {"should_stop": _after(END)}
    for api in APIS:
        by_budget, by_signal = (Run(api, rounds=ALL, selector="random", options=end).play() for end in ends)
        assert by_signal.result() == by_budget.result()
        assert by_signal.evaluated == by_budget.evaluated == [0, 1, 2, 3]
        assert by_signal.told == by_budget.told
    grid = FakeGrid(crowd(4))
    strategy = _of_two(selector=thrice(clients_per_round=2, seed=0))
    play(strategy, grid, ALL)
    assert [one.round for one in strategy.history.rounds] == [1, 2, 3]
    assert sum(len(batch) for batch in grid.sent) == 4 + 3 * 2  # the roll call, and three rounds of two


@pytest.mark.parametrize("end", [{"budget": Budget(simulated_s=1e-9)}, {"should_stop": _after(1)}])
def test_nobody_evaluates_or_is_waited_for_after_the_end(end: dict[str, Any]) -> None:
    """Flower up to 1.42 counts on; later ones end the loop."""
    grid = FakeGrid(crowd(4))
    strategy = _of_two(fraction_evaluate=1.0, wait_timeout=0.1, **end)

    def evaluate_fn(number: int, arrays: ArrayRecord) -> MetricRecord:
        if strategy.core.ended:
            grid.nodes.clear()  # the clients go home: waiting for them would end in an error
        return MetricRecord({"accuracy": 0.5})

    result = strategy.start(grid, arrays_of(), 5, evaluate_fn=evaluate_fn)
    assert [len(strategy.history.rounds), sorted(result.evaluate_metrics_clientapp)] == [1, [1]]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1]

    legacy = _of_two("legacy", fraction_evaluate=1.0, wait_timeout=0.1, **end)
    federation = Federation(legacy, fleet(3)).play(1)
    for client in list(federation.manager.all().values()):
        federation.manager.unregister(client)
    for number in (2, 3):
        assert legacy.configure_fit(number, federation.server.parameters, federation.manager) == []
        assert legacy.configure_evaluate(number, federation.server.parameters, federation.manager) == []


def test_start_takes_the_signal_in_flowers_form() -> None:
    ours = [*inspect.signature(SelectionStrategy.start).parameters]
    flowers = [*inspect.signature(Strategy.start).parameters]
    assert (ours[: len(flowers)], ours[-1]) == (flowers, "should_stop")


@EVALUATES
def test_flowers_signal_is_shown_the_result_so_far(evaluates: bool) -> None:
    shown: list[tuple[Any, ...]] = []

    def should_stop(number: int, result: Result) -> bool:
        kinds = result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp
        shown.append((number, *map(sorted, kinds), result.arrays.to_numpy_ndarrays()[0].tobytes()))
        return number == 2

    strategy = _of_two(fraction_evaluate=1.0)
    evaluate_fn = (lambda number, arrays: MetricRecord({"accuracy": 0.1 * number})) if evaluates else None
    result = strategy.start(FakeGrid(crowd(4)), arrays_of(), 6, evaluate_fn=evaluate_fn, should_stop=should_stop)
    served = [0, 1, 2] if evaluates else []
    assert [one[:4] for one in shown] == [(1, [1], [1], served[:2]), (2, [1, 2], [1, 2], served)]
    assert shown[-1][4] == result.arrays.to_numpy_ndarrays()[0].tobytes() != shown[0][4]
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert [one.round for one in strategy.history.rounds] == [1, 2]


def test_either_signal_ends_the_run_and_that_of_start_is_of_this_run_alone() -> None:
    asked: list[int] = []
    strategy = _of_two(should_stop=lambda number, history: bool(asked.append(number)) or number >= 4)
    signals: list[dict[str, Any]] = [{"should_stop": lambda number, result: number >= 2}, {}, {}]
    lengths = []
    for signal in signals:  # the same object goes on: Flower counts from 1 again
        play(strategy, FakeGrid(crowd(4)), 9, **signal)
        lengths.append(len(strategy.history.rounds))
    assert lengths == [2, 4, 4]
    assert asked == [1, 2, 2, 3, 4, 4]  # about the last round before the next one


def test_rounds_are_absolute_in_a_resumed_run(tmp_path: Path) -> None:
    shown: list[tuple[int, list[int]]] = []

    def should_stop(number: int, result: Result) -> bool:
        shown.append((number, sorted(result.train_metrics_clientapp)))
        return number == 4

    for rounds in (2, 9):
        strategy = _of_two(checkpoint_dir=tmp_path, resume=True)
        result, _ = play(strategy, FakeGrid(crowd(4)), rounds, should_stop=should_stop)
    assert shown == [(1, [1]), (2, [1, 2]), (2, []), (3, [3]), (4, [3, 4])]
    assert sorted(result.train_metrics_clientapp) == [3, 4]


def test_a_signal_of_start_must_be_a_function() -> None:
    with pytest.raises(ParameterError, match="should_stop must be a function"):
        _of_two().start(FakeGrid(crowd(3)), arrays_of(), 1, should_stop=3)


# ---- the last model outlives an error --------------------------------------------------------------------------------

ROUNDS, AT = 4, 3
"""Rounds of a whole run, and the one in which it breaks."""


class OwnCode(Exception):
    """An error of somebody's own code."""


@dataclass(frozen=True)
class Breaking(Run):
    """A run in which something of the user's raises, once: ``where``, in round ``at``; empty: nothing."""

    rounds: int = ROUNDS
    where: str = ""
    at: int = AT
    made: list[Any] = field(default_factory=list)

    def strategy(self, folder: Path | None, seen: Seen, resume: Any = True) -> Any:
        self._watch(seen, "evaluate", "evaluation")
        made = super().strategy(folder, seen, resume)
        kind = "fit" if self.api == "legacy" else "train"
        self._watch(made, "_on_round", "on_round")
        self._watch(made.base, f"aggregate_{kind}", "aggregation")
        self._watch(made.base, f"configure_{kind}", "interrupt")
        self._watch(made, f"configure_{kind}", "waiting")
        self.made.append(made)
        return made

    def broken(self, folder: Path | None = None) -> tuple[Any, BaseException]:
        """The strategy of a run that broke, and its error."""
        errors = {"waiting": RunError, "interrupt": KeyboardInterrupt}
        with pytest.raises(errors.get(self.where, OwnCode)) as caught:
            self.play(folder)
        return self.made[-1], caught.value

    @property
    def done(self) -> int:
        """Rounds that have ended when it raises."""
        return self.at if self.where in ("evaluation", "on_round") else self.at - 1

    def _watch(self, owner: Any, method: str, where: str) -> None:
        whole = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            first = kwargs.get("server_round", args[0] if args else 0)
            self._reach(where, getattr(first, "round", first), [*args, *kwargs.values()][-1])
            return whole(*args, **kwargs)

        setattr(owner, method, watched)

    def _reach(self, where: str, number: int, clients: Any = None) -> None:
        if (where, number) != (self.where, self.at):
            return
        if where != "waiting":
            raise KeyboardInterrupt if where == "interrupt" else OwnCode("a mistake")
        if self.api == "message":
            clients.nodes.clear()  # all of them leave
            return
        for client in list(clients.all().values()):
            clients.unregister(client)


@pytest.mark.parametrize("where", ["aggregation", "interrupt"])
def test_without_checkpoints_it_is_at_hand(api: str, where: str) -> None:
    run = Breaking(api, where=where)
    assert run.strategy(None, Seen()).last_model is None
    strategy, error = run.broken()
    last = strategy.last_model
    assert (last.round, len(last.names)) == (run.done, 1)
    assert [array.tobytes() for array in last.arrays] == Run(api, rounds=run.done).play().model
    assert error.__notes__ == [f"the model after round {run.done} is strategy.last_model"]
    early = Breaking(api, where=where, at=1)  # before the first round has ended there is nothing to tell
    assert not hasattr(early.broken()[1], "__notes__")
    whole = Breaking(api)  # a run that ends well has it too
    assert whole.play().model == [array.tobytes() for array in whole.made[-1].last_model.arrays]


@pytest.mark.parametrize("where", ["aggregation", "evaluation", "on_round", "waiting", "interrupt"])
def test_with_checkpoints_it_is_written_though_none_was_due_and_resumed(api: str, where: str, tmp_path: Path) -> None:
    options = {"wait_timeout": 0.5, "checkpoint_every": 4}
    run = Breaking(api, where=where, options=options)
    _, error = run.broken(tmp_path)
    path = tmp_path / f"round-{run.done:06d}.safetensors"
    assert "strategy.last_model" in error.__notes__[0]
    assert repr(str(path)) in error.__notes__[0]
    assert read_checkpoint(path).round == run.done
    again = Breaking(api, options=options)
    assert again.play(tmp_path, resume="must").result() == Run(api, rounds=ROUNDS).play().result()
    assert again.made[-1].resumed.round == run.done


@pytest.mark.parametrize(("api", "failure"), [("legacy", RunError), ("message", ZeroDivisionError)])
def test_a_full_disk_keeps_error_and_model(api: str, failure: Any, tmp_path: Path, monkeypatch: Any) -> None:
    full = Mock(side_effect=failure("no space left"))
    monkeypatch.setattr("fedsel_flwr.rounds.checkpoints.Checkpoints.write", full)
    strategy, error = Breaking(api, where="aggregation", options={"checkpoint_every": 3}).broken(tmp_path)
    (note,) = error.__notes__
    assert note == "the model after round 2 is strategy.last_model; its checkpoint could not be written: no space left"
    assert strategy.last_model.round == 2


@pytest.mark.parametrize(("where", "told"), [("aggregation", 1), ("interrupt", 0)])
def test_the_log_says_where_it_is_unless_somebody_interrupts(api: str, where: str, told: int, caplog: Any) -> None:
    run = Breaking(api, where=where)
    with pytest.raises((OwnCode, KeyboardInterrupt)):
        run._played(None, True, Seen())  # aloud
    said = [message for message in caplog.messages if "the run ends in an error" in message]
    assert [message.endswith("the model after round 2 is strategy.last_model") for message in said] == [True] * told
