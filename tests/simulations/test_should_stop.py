"""A caller's own stop signal in ``simulate``: the same end in every engine and API."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.strategies import SelectionStrategy
from tests.processes import ROOT, Command
from tests.simulations.inprocess import in_process

pytestmark = pytest.mark.timeout(60)
END = 3
SMOKE = load_scenario("smoke", {"rounds": 6, "evaluation_every": 5})


def _after(number: int) -> Any:
    def should_stop(done: int, history: History) -> bool:
        return done >= number and history.rounds[-1].round == done

    return should_stop


def _scenario(way: str) -> Scenario:
    return SMOKE.model_copy(update={"api": "message" if way == "message" else "legacy"})


@pytest.mark.parametrize("way", ["vectorized", "legacy", "message"])
def test_a_simulation_ends_with_the_round_of_the_signal(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's part is played in this process, with Flower's own loops."""
    monkeypatch.setattr(engine, "run_simulation", in_process)
    name, scenario = ("vectorized" if way == "vectorized" else "ray"), _scenario(way)
    told: list[tuple[int, bool]] = []
    options: dict[str, Any] = {"engine": name, "checkpoint_dir": tmp_path, "checkpoint_every": 5}
    stopped = simulate(
        scenario, **options, should_stop=_after(END),
        on_round=lambda record: told.append((record.round, bool(np.isfinite(record.accuracy)))),
    )  # fmt: skip
    short = simulate(scenario.model_copy(update={"rounds": END}), engine=name)
    assert repr(stopped.history) == repr(short.history)
    assert [one.tobytes() for one in stopped.arrays] == [one.tobytes() for one in short.arrays]
    assert told == [(1, False), (2, False), (3, False), (3, True)]  # evaluated because it is the last
    assert sorted(path.stem for path in tmp_path.glob("round-*")) == ["round-000003"]
    again = simulate(scenario, **options, should_stop=_after(END), resume="must")
    assert repr(again.history) == repr(stopped.history)
    assert [one.tobytes() for one in again.arrays] == [one.tobytes() for one in stopped.arrays]
    on = simulate(scenario, **options, resume="must")
    straight = simulate(scenario, engine=name)
    assert [one.tobytes() for one in on.arrays] == [one.tobytes() for one in straight.arrays]
    assert [one.client_id for one in on.history.clients] == [one.client_id for one in straight.history.clients]


def test_a_run_of_a_folder_that_the_signal_ended_has_finished(tmp_path: Path) -> None:
    first = simulate(SMOKE, engine="vectorized", folder=tmp_path, should_stop=_after(END))
    assert len(first.history.rounds) == END
    again = simulate(SMOKE, engine="vectorized", folder=tmp_path, should_stop=_after(END), resume=True)
    assert repr(again.history.rounds) == repr(first.history.rounds)
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_is_checked_before_anything_starts() -> None:
    with pytest.raises(ParameterError, match="should_stop must be a function"):
        simulate(SMOKE, engine="vectorized", should_stop=3)  # type: ignore[arg-type]
    strategy = SelectionStrategy(create("random", clients_per_round=2))
    with pytest.raises(ParameterError, match="strategy and should_stop cannot be given together"):
        simulate(SMOKE, engine="vectorized", strategy=strategy, should_stop=_after(1))


ON_RAY = """
from fedsel_flwr.simulations import load_scenario, simulate

if __name__ == "__main__":
    for api in ("legacy", "message"):
        scenario = load_scenario("smoke", {"rounds": 6, "evaluation_every": 5, "api": api})
        result = simulate(scenario, engine="ray", should_stop=lambda number, history: number >= 3, quiet=True)
        print(api, [(one.round, one.accuracy > 0) for one in result.history.rounds])
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_simulation_on_ray_ends_with_the_round_of_the_signal(tmp_path: Path) -> None:
    command = Command(sys.executable, "-c", ON_RAY, folder=tmp_path, cwd=ROOT)
    try:
        assert command.wait(180) == 0, command.stderr[-5000:]
        played = "[(1, False), (2, False), (3, True)]"
        assert command.stdout.split("\n")[-3:-1] == [f"legacy {played}", f"message {played}"]
    finally:
        command.kill()
