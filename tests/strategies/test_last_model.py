"""The last model outlives an error that ends the run, in both of Flower's APIs: at hand, and in checkpoints on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.checkpoints import read_checkpoint
from tests.strategies.either_api import BOTH
from tests.strategies.resumed_runs import Run, Seen

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
        evaluate = seen.evaluate

        def evaluated(number: int, arrays: Any, config: Any = None) -> Any:
            self._reach("evaluation", number)
            return evaluate(number, arrays, config)

        seen.evaluate = evaluated  # type: ignore[method-assign]
        made = super().strategy(folder, seen, resume)
        told, kind = made._on_round, "fit" if self.api == "legacy" else "train"

        def on_round(record: Any) -> None:
            self._reach("on_round", record.round)
            told(record)

        made._on_round = on_round
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
            self._reach(where, int(kwargs.get("server_round", args[0] if args else 0)), [*args, *kwargs.values()][-1])
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


OPTIONS = {"wait_timeout": 0.5}


@BOTH
@pytest.mark.parametrize("where", ["aggregation", "interrupt"])
def test_without_checkpoints_it_is_at_hand(api: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
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


@BOTH
@pytest.mark.parametrize("where", ["aggregation", "evaluation", "on_round", "waiting", "interrupt"])
def test_with_checkpoints_it_is_on_the_disk_though_none_was_due_and_the_run_goes_on_from_it(
    api: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "checkpoint_every": 4}
    run = Breaking(api, where=where, options=options)
    _, error = run.broken(tmp_path)
    path = tmp_path / f"round-{run.done:06d}.safetensors"
    assert "strategy.last_model" in error.__notes__[0]
    assert repr(str(path)) in error.__notes__[0]
    assert read_checkpoint(path).round == run.done
    again = Breaking(api, options=options)
    assert again.play(tmp_path, resume="must").result() == Run(api, rounds=ROUNDS).play().result()
    assert again.made[-1].resumed.round == run.done


@pytest.mark.parametrize(
    ("api", "failure"), [("legacy", RunError("no space left")), ("message", ZeroDivisionError("no space left"))]
)
def test_a_full_disk_keeps_error_and_model(api: str, failure: Exception, tmp_path: Path, monkeypatch: Any) -> None:
    def refuses(checkpoints: Any, checkpoint: Any) -> None:
        raise failure

    monkeypatch.setattr("fedsel_flwr.rounds.checkpoints.Checkpoints.write", refuses)
    strategy, error = Breaking(api, where="aggregation", options={"checkpoint_every": 3}).broken(tmp_path)
    (note,) = error.__notes__
    assert note == "the model after round 2 is strategy.last_model; its checkpoint could not be written: no space left"
    assert strategy.last_model.round == 2


@BOTH
@pytest.mark.parametrize(("where", "told"), [("aggregation", 1), ("interrupt", 0)])
def test_the_log_says_where_it_is_unless_somebody_interrupts(api: str, where: str, told: int, caplog: Any) -> None:
    run = Breaking(api, where=where)
    with pytest.raises((OwnCode, KeyboardInterrupt)):
        run._played(None, True, Seen())  # aloud
    said = [message for message in caplog.messages if "the run ends in an error" in message]
    assert [message.endswith("the model after round 2 is strategy.last_model") for message in said] == [True] * told
