"""The last model outlives an error that ends the run, in both of Flower's APIs: at hand, and in checkpoints on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.server.strategy import FedAdam as LegacyAdam
from flwr.serverapp.strategy import FedAdam as MessageAdam

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.checkpoints import read_checkpoint
from fedsel_flwr.selectors import CSUCB
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import FakeProxy, Federation, initial
from tests.strategies.message.helpers import FakeGrid, FakeNode, arrays_of, node_id

APIS = pytest.mark.parametrize("api", ["legacy", "message"])
BREAKS = pytest.mark.parametrize("where", ["aggregation", "evaluation", "on_round", "waiting", "interrupt"])
ROUNDS, AT = 4, 3
"""Rounds of a whole run, and the one in which it breaks."""


class OwnCode(Exception):
    """An error of somebody's own code."""


class Run:
    """Four clients, two a round, FedAdam; something of the user's own raises in round 3, once.

    Args:
        api: Flower's.
        where: What raises; empty: nothing.
        options: Of the strategy.
    """

    def __init__(self, api: str, where: str = "", **options: Any) -> None:
        self.api, self.where, self.models = api, where, list[list[bytes]]()
        self.proxies = [FakeProxy(f"n{k}", f"c{k}", number=k) for k in range(4)]
        base: Any = self._legacy_base() if api == "legacy" else MessageAdam(fraction_evaluate=0.0)
        self._break(base, "aggregate_fit" if api == "legacy" else "aggregate_train", "aggregation")
        self._break(base, "configure_fit" if api == "legacy" else "configure_train", "interrupt")
        strategy = LegacyStrategy if api == "legacy" else MessageStrategy
        self.strategy: Any = strategy(
            CSUCB(clients_per_round=2, max_latency=9.0, seed=0), base, max_latency=9.0, wait_timeout=0.05,
            on_round=lambda record: self._raise("on_round", record.round), min_available=4, **options,
        )  # fmt: skip

    def play(self) -> list[Any]:
        """Play all rounds, or those that are left."""
        if self.api == "legacy":
            federation = Federation(self.strategy, self.proxies)
            while self.strategy.core.round < ROUNDS:
                self._leave(lambda: [federation.manager.unregister(one) for one in self.proxies[1:]])
                federation.play(1)
            return federation.arrays()
        grid = FakeGrid({node_id(k): FakeNode(proxy) for k, proxy in enumerate(self.proxies)})
        configure = self.strategy.configure_train

        def configured(*args: Any) -> Any:
            self._leave(lambda: [grid.nodes.pop(node_id(k)) for k in (1, 2, 3)])
            return configure(*args)

        self.strategy.configure_train = configured
        result = self.strategy.start(grid, arrays_of(), ROUNDS, timeout=5.0, evaluate_fn=self._evaluate_messages)
        return result.arrays.to_numpy_ndarrays()

    def _legacy_base(self) -> LegacyAdam:
        return LegacyAdam(fraction_evaluate=0.0, initial_parameters=initial(), evaluate_fn=self._evaluate)

    def _evaluate(self, number: int, arrays: Any, config: Any) -> Any:
        self._raise("evaluation", number)
        return 0.5, {"accuracy": 0.5}

    def _evaluate_messages(self, number: int, arrays: Any) -> MetricRecord:
        self._raise("evaluation", number)
        return MetricRecord({"loss": 0.5, "accuracy": 0.5})

    def _break(self, base: Any, method: str, where: str) -> None:
        whole = getattr(base, method)

        def broken(*args: Any, **kwargs: Any) -> Any:
            self._raise(where, int(kwargs.get("server_round", args[0] if args else 0)))
            return whole(*args, **kwargs)

        setattr(base, method, broken)

    def _leave(self, leave: Any) -> None:
        if self.where == "waiting" and self.strategy.core.round == AT - 1:
            leave()

    def _raise(self, where: str, number: int) -> None:
        if where == self.where and number == AT:
            raise KeyboardInterrupt if where == "interrupt" else OwnCode("a mistake")


ERRORS = {"waiting": RunError, "interrupt": KeyboardInterrupt}
DONE = {"evaluation": AT, "on_round": AT}
"""Rounds that have ended when it raises; in the others the one before is the last."""


def _broken(run: Run) -> BaseException:
    with pytest.raises(ERRORS.get(run.where, OwnCode)) as caught:
        run.play()
    return caught.value


def _after(api: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The model of a run that was never cut off, after so many rounds."""
    monkeypatch.setattr("tests.strategies.test_last_model.ROUNDS", rounds)
    arrays = Run(api).play()
    monkeypatch.undo()
    return arrays


@APIS
@pytest.mark.parametrize("where", ["aggregation", "interrupt"])
def test_without_checkpoints_it_is_at_hand(
    api: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(api, where)
    assert run.strategy.last_model is None
    error, done = _broken(run), DONE.get(where, AT - 1)
    last = run.strategy.last_model
    assert (last.round, len(last.names)) == (done, 2)
    for array, expected in zip(last.arrays, _after(api, done, monkeypatch), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert error.__notes__ == [f"the model after round {done} is strategy.last_model"]
    told = [message for message in caplog.messages if "the run ends in an error" in message]
    assert [message.endswith(error.__notes__[0]) for message in told] == [True] * isinstance(error, Exception)


@APIS
@BREAKS
def test_with_checkpoints_it_is_on_the_disk_though_none_was_due_and_the_run_goes_on_from_it(
    api: str, where: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 4}
    error, done = _broken(Run(api, where, **options)), DONE.get(where, AT - 1)
    path = tmp_path / f"round-{done:06d}.safetensors"
    assert "strategy.last_model" in error.__notes__[0]
    assert repr(str(path)) in error.__notes__[0]
    assert read_checkpoint(path).round == done
    again = Run(api, resume="must", **options)
    assert again.strategy.resumed.round == done
    arrays, whole = again.play(), Run(api)
    for array, expected in zip(arrays, whole.play(), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert again.strategy.history == whole.strategy.history


@pytest.mark.parametrize(
    ("api", "failure"), [("legacy", RunError("no space left")), ("message", ZeroDivisionError("no space left"))]
)
def test_a_disk_that_refuses_keeps_the_error_and_the_model(api: str, failure: Exception, tmp_path: Path) -> None:
    run = Run(api, "aggregation", checkpoint_dir=tmp_path / "run", checkpoint_every=3)

    def refuses(checkpoint: Any) -> None:
        raise failure

    run.strategy._resuming._checkpoints.write = refuses
    (note,) = _broken(run).__notes__
    assert note == "the model after round 2 is strategy.last_model; its checkpoint could not be written: no space left"
    assert run.strategy.last_model.round == 2


@APIS
def test_before_the_first_round_has_ended_there_is_nothing_to_tell(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.strategies.test_last_model.AT", 1)
    assert not hasattr(_broken(Run(api, "aggregation")), "__notes__")


@APIS
def test_a_run_that_ends_well_has_it_too(api: str) -> None:
    run = Run(api)
    arrays = run.play()
    assert run.strategy.last_model.round == ROUNDS
    for array, expected in zip(run.strategy.last_model.arrays, arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
