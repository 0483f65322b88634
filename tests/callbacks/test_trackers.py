"""Callbacks: what they hand over, and what happens when the library fails or is not installed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fedsel_flwr.callbacks import MLflow, Recorder, TensorBoard, WandB, figures, together
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.records import RoundRecord
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy
from tests.strategies.helpers import Federation, fedavg, fleet

ROUNDS = 4


class Broken(Recorder):
    """Its library raises in rounds 2 and 3, and at the end."""

    def __init__(self) -> None:
        self.written: dict[int, Mapping[str, float]] = {}
        self.ended: list[bool] = []

    def write(self, round: int, values: Mapping[str, float]) -> None:
        if round in (2, 3):
            raise ConnectionError("the tracking server\nis away")
        self.written[round] = values

    def end(self, *, failed: bool) -> None:
        self.ended.append(failed)
        raise OSError("still away")


def played(on_round: Callable[[RoundRecord], None]) -> list[RoundRecord]:
    """The rounds of a strategy with this callback: evaluated but for round 3, joules from round 1 on."""
    base = fedavg(evaluate_fn=lambda r, arrays, config: (1.0 / r, {"accuracy": r / 8}) if r not in (0, 3) else None)
    strategy = SelectionStrategy(Random(clients_per_round=2, seed=0), base, max_latency=10.0, on_round=on_round)
    Federation(strategy, fleet(3)).play(ROUNDS)
    return list(strategy.history.rounds)


def test_every_known_figure_is_handed_over() -> None:
    columns: dict[str, list[tuple[int, float]]] = {}
    for record in played(lambda record: None):
        for name, value in figures(record).items():
            columns.setdefault(name, []).append((record.round, value))
    assert columns["accuracy"] == [(1, 0.125), (2, 0.25), (4, 0.5)]
    assert columns["num_selected"] == [(r, 2.0) for r in (1, 2, 3, 4)]
    assert columns.keys() == {
        "num_available", "num_selected", "num_completed", "num_kept", "num_timeouts", "round_s", "simulated_s",
        "energy_j", "total_energy_j", "accuracy", "loss", "probe_s", "probe_j", "num_probed", "num_spares", "num_late",
        "late_j",
    }  # fmt: skip


def test_a_library_that_fails_ends_nothing_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, seen = Broken(), list[int]()
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"), broken as entered:
        rounds = played(together(entered, lambda record: seen.append(record.round)))
    assert (len(rounds), seen, sorted(broken.written)) == (ROUNDS, [1, 2, 3, 4], [1, 4])
    [said] = [message for message in caplog.messages if "Broken" in message]
    assert "Broken failed in round 2" in said
    assert "ConnectionError: the tracking server is away" in said
    assert broken.ended == [False]


@pytest.mark.parametrize(
    ("make", "package"), [(lambda: TensorBoard("x"), "tensorboard"), (MLflow, "mlflow"), (WandB, "wandb")]
)
def test_a_library_that_is_not_installed_is_named(
    make: Callable[[], Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RunError, match=rf"pip install {package}$"):
        make()
