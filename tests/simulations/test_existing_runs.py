"""Existing runs: checkpoints, what must be the same, finished runs, and folders that another process holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import JOURNAL, read_history
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.selectors import CSUCB, Random
from fedsel_flwr.simulations import OwnData, Scenario, compare, engine, run_options, simulate
from fedsel_flwr.simulations.comparisons.comparison import Agreement
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.run_options import CheckpointPace
from fedsel_flwr.simulations.scenario import CHANGEABLE_ON_RESUME, course_settings
from tests.processes import ROOT
from tests.simulations import cut_off_runs
from tests.simulations.cut_off_runs import Stop, content, cut_off, parts, stop_after
from tests.simulations.inprocess import in_process
from tests.simulations.test_scenario_files import OTHER_VALUES

pytestmark = pytest.mark.usefixtures("no_pictures")
X, Y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2


def smoke(**keys: Any) -> Scenario:
    return cut_off_runs.smoke(**{"selector": "cs-ucb", **keys})


def test_a_run_in_a_folder_keeps_checkpoints_until_it_has_finished(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path / "run", checkpoint_every=2)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("round-*"))
    # None was due after round 3, in which an error ends the run.
    assert kept == ["round-000002.safetensors", "round-000003.safetensors"]
    assert [path.name for path in (tmp_path / "run").glob("model*")] == ["model-after-round-3.safetensors"]
    told: list[Any] = []
    result = simulate(smoke(), folder=tmp_path / "run", resume="must", checkpoint_every=2, on_round=told.append)
    # The last one that was kept is told again, after its evaluation.
    assert [record.round for record in told] == [3, 4, 5, 6]
    simulate(smoke(), folder=tmp_path / "straight")
    assert content(tmp_path / "run") == content(tmp_path / "straight")
    assert parts(result) == parts(simulate(smoke()))
    assert parts(simulate(smoke(), folder=tmp_path / "run", resume=True)) == parts(result)
    for longer in ({"rounds": 7}, {"simulated_s": 9.0}):
        with pytest.raises(RunError, match=r"finished after 6 rounds with .* = .*has ended"):
            simulate(smoke(**longer), folder=tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == content(tmp_path / "straight")


def test_a_new_run_over_a_finished_one_is_not_taken_for_it(tmp_path: Path) -> None:
    simulate(smoke(), folder=tmp_path)
    cut_off(smoke(seed=2), after=4, folder=tmp_path)
    assert len(read_history(tmp_path).rounds) == 4
    assert parts(simulate(smoke(seed=2), folder=tmp_path, resume=True)) == parts(simulate(smoke(seed=2)))


@pytest.mark.parametrize(("key", "short", "long"), [("rounds", 4, 9), ("simulated_s", 0.5, 2.0)])
def test_a_run_may_go_on_for_longer(key: str, short: float, long: float, tmp_path: Path) -> None:
    """With the choices of a run that had the later end from the start."""
    keys = {"rounds": 9, "evaluation_every": 4}
    simulate(smoke(**{**keys, key: short}), checkpoint_dir=tmp_path)
    result = simulate(smoke(**{**keys, key: long}), checkpoint_dir=tmp_path, resume="must")
    straight = simulate(smoke(**{**keys, key: long}))
    assert len(straight.history.rounds) > 4
    assert parts(result) == parts(straight)


ANOTHER: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "checkpoint_dir": [
        ({"training__learning_rate": 0.2}, ["scenario.training.learning_rate is 0.1 there and 0.2 here"]),
        ({"seed": 2}, ["scenario.seed is 1 there and 2 here"]),
        ({"selector": "random"}, ["scenario.selector is 'cs-ucb' there and 'random' here"]),
        ({"aggregation__base": "fedadam"}, ["scenario.aggregation.base is 'fedavg' there and 'fedadam' here"]),
        ({"api": "message", "engine": "ray"}, ["scenario.api is 'legacy'", "scenario.engine is 'vectorized'"]),
        ({"rounds": 2}, ["has finished 3 rounds, more than rounds = 2", "at least 3"]),
        ({"evaluation_every": 2}, ["scenario.evaluation_every is 1 there and 2 here"]),
    ],
    "folder": [
        ({"training__learning_rate": 0.2}, ["another run", "training.learning_rate is 0.1 there and 0.2 here"]),
        ({"selectors__cs-ucb-q__fairness_scale": 0.2, "selector": "cs-ucb-q"}, ["selectors.cs-ucb-q.fairness_scale"]),
    ],
}
"""What differs, and words of the message."""


@pytest.mark.parametrize("place", ANOTHER)
def test_another_run_is_refused_by_key(place: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {place: tmp_path}
    cut_off(smoke(), **where)
    before = content(tmp_path)
    for keys, words in ANOTHER[place]:
        with pytest.raises(RunError) as refused:
            simulate(smoke(**keys), **where, resume=True)
        assert [part for part in words if part not in str(refused.value)] == []
    with pytest.raises(RunError, match=r"holds .*checkpoints .*resume=True"):
        simulate(smoke(), **where)
    assert content(tmp_path) == before
    assert parts(simulate(smoke(), **where, resume="must")) == parts(simulate(smoke()))


def test_a_run_whose_checkpoints_cannot_be_used_is_played_again_where_that_is_asked_for(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path)
    for path in (tmp_path / "checkpoints").glob("round-*"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match=r"none of the checkpoints .* can be used: .*damaged.*replay=True"):
        simulate(smoke(), folder=tmp_path, resume=True)
    assert parts(simulate(smoke(), folder=tmp_path, resume=True, replay=True)) == parts(simulate(smoke()))
    assert not (tmp_path / "checkpoints").exists()


def test_a_selector_that_plans_for_the_end_keeps_it(tmp_path: Path) -> None:
    cut_off(smoke(selector="gpfl"), checkpoint_dir=tmp_path)
    with pytest.raises(RunError, match=r"scenario.rounds is 6 there and 7 here"):
        simulate(smoke(selector="gpfl", rounds=7), checkpoint_dir=tmp_path, resume=True)


def test_what_the_caller_brings_is_given_again(tmp_path: Path) -> None:
    """A selector and data of one's own; other data of the same name are known by what they hold."""

    def data(labels: Any = Y) -> OwnData:
        return OwnData(train=(X, labels), test=(X, Y))

    def own() -> Random:
        return Random(clients_per_round=3, seed=5)

    def run(**options: Any) -> RunResult:
        return simulate(smoke(model__name="mlp"), **options)

    straight = run(selector=own(), data=data())
    cut_off(smoke(model__name="mlp"), selector=own(), data=data(), folder=tmp_path)
    other = CSUCB(clients_per_round=3, seed=5, max_latency=5.0)
    for given, said in (
        ({"selector": own(), "data": data(1 - Y)}, r"fingerprint of data is \w+ drawn for seed 1 there and \w+ drawn"),
        ({"selector": own()}, "data.dataset is 'python own' there and 'digits' here"),
        ({"data": data()}, "selector is called 'random' there, and 'cs-ucb' here"),
        ({"selector": other, "data": data(), "label": "random"}, "selector is random there and cs-ucb here"),
    ):
        with pytest.raises(RunError, match=said):
            run(**given, folder=tmp_path, resume=True)  # type: ignore[arg-type]
    assert parts(run(selector=own(), data=data(), folder=tmp_path, resume=True)) == parts(straight)


def test_every_key_of_a_scenario_is_compared_or_free() -> None:
    words = course_settings(smoke(selector="bsfl"))
    assert OTHER_VALUES.keys() - CHANGEABLE_ON_RESUME <= words.keys()
    assert CHANGEABLE_ON_RESUME - {"name", "description", "selectors"} <= OTHER_VALUES.keys()
    assert not CHANGEABLE_ON_RESUME & words.keys()
    long = course_settings(smoke(partition__kind="sizes", partition__sizes=[10 + k for k in range(10)]))
    assert all(len(value) < 100 for value in long.values())


def test_checkpoints_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 2 ms after every 0.1 s, where they may take 2 %."""
    now = [0.0]
    monkeypatch.setattr(run_options.time, "monotonic", lambda: now[0])

    def write() -> None:
        now[0] += 0.002
        written.append(now[0])

    written: list[float] = []
    pace = CheckpointPace(0.02)
    while now[0] < 10.0:
        now[0] += 0.010
        pace(write)
    assert 0.002 * len(written) <= 0.02 * now[0] + 0.002
    assert len(written) >= 0.8 * 0.02 * now[0] / 0.002
    written, pace = [], CheckpointPace()
    for _ in range(5):
        pace(write)
    assert len(written) == 5


# ---- comparisons ---------------------------------------------------------------------------------------------------


def compared(folder: Path, stop: tuple[str, int] | None = None, **options: Any) -> Any:
    """Compare two selectors on two seeds; stop after a round of one of the runs."""
    running: list[str] = []
    told: list[tuple[str, int]] = []

    def update(record: Any, failed: int) -> None:
        told.append((running[-1], record.round))
        if told[-1] == stop:
            raise Stop

    own, scenario = {"mine": CSUCB, "random": Random}, smoke(target_accuracy=0.5)
    options |= {"start_run": lambda label, rounds: running.append(label), "update": update, "checkpoint_every": 1}
    return compare(scenario, own, seeds=[1, 4], folder=folder, **options), told


def test_a_comparison_of_classes_goes_on(tmp_path: Path) -> None:
    straight, _ = compared(tmp_path / "straight")
    with pytest.raises(Stop):
        compared(tmp_path / "cut", ("random, seed 1", 4))
    with pytest.raises(ParameterError, match=r"\(random-seed1\).*resume=True"):
        compared(tmp_path / "cut")
    result, told = compared(tmp_path / "cut", resume=True)
    assert told == [
        ("mine, seed 1", 6), *(("random, seed 1", k) for k in (4, 5, 6)), *(("mine, seed 4", k) for k in range(1, 7)),
        *(("random, seed 4", k) for k in range(1, 7)),
    ]  # fmt: skip
    assert result.table().equals(straight.table())
    assert repr(result.verdict) == repr(straight.verdict)  # NaN is not equal to itself
    assert content(tmp_path / "cut") == content(tmp_path / "straight")


def test_seeds_may_be_added(tmp_path: Path) -> None:
    compare(smoke(), ["random"], seeds=[1, 2], folder=tmp_path)
    model = tmp_path / "random-seed1" / "model.safetensors"
    before = model.stat().st_mtime_ns
    more = compare(smoke(), ["random", "round-robin"], seeds=[1, 2, 3], folder=tmp_path, resume=True)
    assert model.stat().st_mtime_ns == before
    assert more.table().equals(compare(smoke(), ["random", "round-robin"], seeds=[1, 2, 3]).table())


def test_rounds_on_flower_are_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, options = smoke(api="message"), {"seeds": 1, "rounds_on_flower": 2, "folder": tmp_path}
    monkeypatch.setattr(engine, "run_simulation", in_process)
    with pytest.raises(Stop):
        compare(scenario, ["random", "bsfl"], update=stop_after(2 + 5), **options)  # type: ignore[arg-type]
    monkeypatch.setattr(engine, "run_simulation", None)
    result = compare(scenario, ["random", "bsfl"], resume=True, **options)  # type: ignore[arg-type]
    assert result.agreement == Agreement(rounds=2, parted=0)


# ---- folders that another process holds ----------------------------------------------------------------------------

HOLDING = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1] + "/.lock")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
HELD = r"another process writes to '.*'"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-c", HOLDING, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            yield
        finally:
            other.kill()


def test_a_run_without_checkpoints_is_not_cut_by_a_second_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "checkpoint_every": 0}
    cut_off(smoke(), **options)
    before = (tmp_path / JOURNAL).read_bytes()
    assert len(before.splitlines()) == 3
    assert not (tmp_path / "checkpoints").exists()
    with held(tmp_path):
        for resume in (True, False):
            with pytest.raises(RunError, match=HELD):
                simulate(smoke(), resume=resume, **options)
    assert (tmp_path / JOURNAL).read_bytes() == before
    for resume in (True, False):
        assert parts(simulate(smoke(), resume=resume, **options)) == parts(simulate(smoke()))


def test_a_comparison_holds_its_folder_and_lets_it_go(tmp_path: Path) -> None:
    both = ["round-robin", "random"]
    compare(smoke(), both, seeds=1, folder=tmp_path)
    assert not list(tmp_path.rglob(".lock"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    with held(tmp_path), pytest.raises(RunError, match=HELD):
        compare(smoke(), both, seeds=2, folder=tmp_path, resume=True)
    (tmp_path / ".lock").unlink()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before
    with held(tmp_path / "random-seed1"):
        pass
    assert len(compare(smoke(), both, seeds=2, folder=tmp_path, resume=True).runs) == 4


def test_the_command_says_so_and_names_no_rounds(tmp_path: Path, fedsel: Any, refused: Any) -> None:
    options = ("--selectors", "random", "--seeds", "1", "--rounds", "3", "--no-checkpoints", "--runs-dir", tmp_path)
    fedsel("compare", "smoke", *options)
    (folder,) = tmp_path.iterdir()
    (folder / "model.safetensors").unlink()
    with held(folder):
        line = refused("compare", "--resume", folder)
    assert line.startswith("fedsel: error: another process writes to ")
    assert "rounds" not in line
    assert "Resume with" not in line
    fedsel("compare", "--resume", folder)


def test_a_journal_that_was_cut_is_not_said_to_hold_the_rounds_before(tmp_path: Path) -> None:
    first, second, *_ = simulate(smoke()).history.rounds
    journal = Journal(tmp_path / JOURNAL)
    journal.add(first, [])
    journal.add(second, [])
    (tmp_path / JOURNAL).write_bytes(b"")
    with pytest.raises(RunError, match=r"round 2 cannot be written .* to 0 bytes\. Earlier rounds are lost"):
        journal.close_round()
