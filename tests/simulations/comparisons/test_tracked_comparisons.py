"""Comparisons with a tracker: every run is one of its runs, in any process, resumed or not, and whatever it raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr import cli
from fedsel_flwr.selectors import BSFL
from fedsel_flwr.simulations import compare, load_scenario, simulate
from fedsel_flwr.simulations.run_identity import run_parameters
from tests.simulations.cut_off_runs import Stop, parts, smoke, stop_after

pytestmark = [pytest.mark.usefixtures("no_pictures"), pytest.mark.timeout(240)]

LINES = '''
import json
from pathlib import Path
from fedsel_flwr.callbacks import Recorder


class Lines(Recorder):
    """A file a run: its parameters, then a line for each round; away as long as there is a file "away"."""

    def __init__(self, *, name, params):
        while Path(f"{name}.lines").exists():
            name += "+"
        self._path = Path(f"{name}.lines")
        self._add({"params": params})

    def _add(self, line):
        if Path("away").exists():
            raise ConnectionError("the server is away")
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def write(self, round, values):
        self._add({"round": round, **values})

    def end(self, *, failed):
        self._add({"failed": failed})
'''
TRACK = "./lines.py:Lines"


@pytest.fixture(autouse=True)
def tracker(here: Path) -> None:
    (here / "lines.py").write_text(LINES)


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{name}.lines").read_text().splitlines()]


def rounds(name: str) -> list[int]:
    return [line["round"] for line in lines(name) if "round" in line]


def test_every_run_is_a_run_of_the_tracker() -> None:
    """With the same result as without a tracker."""
    plain = compare(smoke(5), ["bsfl", "random"], seeds=2)
    tracked = compare(smoke(5), ["bsfl", "random"], seeds=2, folder="study", track=TRACK, track_clients=[0, 3])
    for run, other in zip(tracked.runs, plain.runs, strict=True):
        assert parts(run.result) == parts(other.result)
        first, *middle, last = lines(f"{run.selector}-seed{run.scenario.seed}")
        params = first["params"]
        assert (params["selector"], params["seed"], params["scenario"]) == (run.selector, run.scenario.seed, "smoke")
        assert (params["rounds"], params["engine"], params["comparison"]) == (5, "vectorized", "study")
        assert "version.flwr" in params
        assert params.get("selector.alpha") == (1.0 if run.selector == "bsfl" else None)
        assert [line["round"] for line in middle] == [1, 2, 3, 4, 5]
        assert [line["accuracy"] for line in middle] == [record.accuracy for record in run.history.rounds]
        for line in middle:
            own = {key: value for key, value in line.items() if key.startswith("client/")}
            chosen = [row for row in run.history.clients if row.round == line["round"] and row.client_id in "03"]
            wanted = {f"client/{row.client_id}/{key}" for row in chosen for key in ("upload_s", "completed")}
            assert wanted <= own.keys()
            assert {key.split("/")[1] for key in own} == {row.client_id for row in chosen}
            for row in chosen:
                assert own[f"client/{row.client_id}/latency_s"] == row.latency_s
        assert last == {"failed": False}


def test_a_resumed_run_is_a_new_run_with_all_rounds_and_a_finished_one_is_not_sent_again() -> None:
    options: dict[str, Any] = {"seeds": 2, "folder": "study", "track": TRACK}
    with pytest.raises(Stop):
        compare(smoke(6), ["bsfl", "random"], update=stop_after(9), checkpoint_every=2, **options)
    assert rounds("bsfl-seed1") == [1, 2, 3, 4, 5, 6]
    assert rounds("random-seed1") == [1, 2, 3]
    assert lines("random-seed1")[-1] == {"failed": True}
    compare(smoke(6), ["bsfl", "random"], resume=True, **options)
    for name in ("bsfl-seed1", "random-seed1+", "bsfl-seed2", "random-seed2"):
        assert rounds(name) == [1, 2, 3, 4, 5, 6]
        assert lines(name)[-1] == {"failed": False}
    before = sorted(Path().glob("*.lines"))
    compare(smoke(6), ["bsfl", "random"], resume=True, jobs=2, **options)
    assert sorted(Path().glob("*.lines")) == before


def test_one_run_in_python() -> None:
    seen: list[int] = []
    simulate(smoke(3), on_round=lambda record: seen.append(record.round), track=TRACK, track_clients=0)
    assert rounds("bsfl-seed1") == seen == [1, 2, 3]
    assert not any(key.startswith("client/") for line in lines("bsfl-seed1") for key in line)


def test_the_command_continues_without_a_tracker_that_is_away(here: Path) -> None:
    (here / "away").touch()
    argv = ["compare", "smoke", "--rounds", "4", "--selectors", "bsfl,random", "--seeds", "1", "--quiet"]
    assert cli.main([*argv, "--track", "lines.py:Lines", "--track-clients", "0,"]) == 0
    [log] = here.glob("runs/*/flower.log")
    assert log.read_text().count("failed in round 1. The run continues") == 2
    (here / "away").unlink()
    assert cli.main([*argv, "--track", "lines.py:Lines", "--track-clients", "0,"]) == 0
    for name in ("bsfl-seed1", "random-seed1"):
        assert rounds(name) == [1, 2, 3, 4]
        assert {key.split("/")[1] for line in lines(name) for key in line if key.startswith("client/")} == {"0"}
    assert cli.main(["run", "smoke", "--rounds", "2", "--engine", "vectorized", "--quiet", "--track", TRACK]) == 0
    assert rounds("bsfl-seed1+") == [1, 2]


def test_parameters_of_a_run() -> None:
    scenario = load_scenario("smoke", {"rounds": 7, "training.learning_rate": 0.3, "selectors.bsfl.alpha": 2.0})
    found = run_parameters(scenario.model_copy(update={"selector": "bsfl"}), "bsfl")
    assert (found["selector.alpha"], found["rounds"], found["training.learning_rate"]) == (2.0, 7, 0.3)
    assert "target_accuracy" not in found  # as in the shipped scenario
    own = run_parameters(scenario, "mine", BSFL(clients_per_round=3, min_latency=0.25, alpha=5.0))
    assert (own["selector"], own["selector.alpha"]) == ("mine", 5.0)
    renamed = run_parameters(scenario.model_copy(update={"name": "study", "selector": "bsfl"}), "bsfl")
    assert renamed["target_accuracy"] == 0.5  # a scenario of one's own: each key that differs from its default
