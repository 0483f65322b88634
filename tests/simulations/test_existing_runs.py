"""Resuming: checkpoints, what must be the same, and runs that have finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import cli
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.selectors import CSUCB, Random
from fedsel_flwr.simulations import (
    Comparison,
    OwnData,
    Scenario,
    compare,
    engine,
    existing_runs,
    load_scenario,
    simulate,
)
from fedsel_flwr.simulations.comparisons.flower_agreement import Agreement
from fedsel_flwr.simulations.existing_runs import CheckpointPace
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import CHANGEABLE_ON_RESUME, course_settings
from tests.simulations.cut_off_runs import content, parts
from tests.simulations.inprocess import in_process
from tests.simulations.test_scenario_files import OTHER_VALUES

X, Y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2


def smoke(**overrides: Any) -> Scenario:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_scenario("smoke", {"rounds": 6, "engine": "vectorized", "selector": "cs-ucb", **keys})


class Stop(Exception):
    """Ends a run in the middle."""


def cut_off(scenario: Scenario, after: int = 3, **options: Any) -> None:
    """Run a scenario until some rounds are done."""

    def stop(record: Any) -> None:
        if record.round == after:
            raise Stop

    with pytest.raises(Stop):
        simulate(scenario, on_round=stop, **options)


def test_a_run_in_a_folder_keeps_checkpoints_until_it_has_finished(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path / "run", checkpoint_every=2)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("round-*"))
    # None was due after round 3, in which an error ends the run.
    assert kept == ["round-000002.safetensors", "round-000003.safetensors"]
    assert [path.name for path in (tmp_path / "run").glob("model*")] == ["model-after-round-3.safetensors"]
    told: list[int] = []
    result = simulate(
        smoke(), folder=tmp_path / "run", resume="must", checkpoint_every=2, on_round=lambda one: told.append(one.round)
    )
    assert told == [3, 4, 5, 6]  # the last one that was kept is told again, after its evaluation
    simulate(smoke(), folder=tmp_path / "straight")
    assert content(tmp_path / "run") == content(tmp_path / "straight")
    assert parts(result) == parts(simulate(smoke()))
    again = simulate(smoke(), folder=tmp_path / "run", resume=True)
    assert parts(again) == parts(result)
    for longer in ({"rounds": 7}, {"simulated_s": 9.0}):
        with pytest.raises(RunError, match=r"finished after 6 rounds with .* = .*checkpoints are gone"):
            simulate(smoke(**longer), folder=tmp_path / "run", resume=True)
    assert content(tmp_path / "run") == content(tmp_path / "straight")


def test_no_checkpoints_where_none_are_wanted(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path / "run", checkpoint_every=0)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert len(read_history(tmp_path / "run").rounds) == 3
    result = simulate(smoke(), folder=tmp_path / "run", checkpoint_every=0, resume=True)  # anew: there is nothing
    assert parts(result) == parts(simulate(smoke()))


def test_a_new_run_over_a_finished_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """Its model is gone from the beginning on, whatever becomes of the new run."""
    simulate(smoke(), folder=tmp_path)
    cut_off(smoke(seed=2), after=4, folder=tmp_path)
    assert len(read_history(tmp_path).rounds) == 4
    assert parts(simulate(smoke(seed=2), folder=tmp_path, resume=True)) == parts(simulate(smoke(seed=2)))


@pytest.mark.parametrize("key", ["rounds", "simulated_s"])
def test_a_run_may_go_on_for_longer(key: str, tmp_path: Path) -> None:
    """What has ended goes on to a later end, with the choices of a run that had that end from the start."""
    short, long = {"rounds": (4, 9), "simulated_s": (0.5, 2.0)}[key]
    keys = {"rounds": 9, "evaluation_every": 4}
    simulate(smoke(**{**keys, key: short}), checkpoint_dir=tmp_path)
    result = simulate(smoke(**{**keys, key: long}), checkpoint_dir=tmp_path, resume="must")
    straight = simulate(smoke(**{**keys, key: long}))
    assert len(straight.history.rounds) > 4
    assert parts(result) == parts(straight)


ANOTHER: dict[str, tuple[dict[str, Any], list[str]]] = {
    "learning rate": ({"training__learning_rate": 0.2}, ["scenario.training.learning_rate = 0.1, this one has 0.2"]),
    "seed": ({"seed": 2}, ["scenario.seed = 1, this one has 2"]),
    "selector": ({"selector": "random"}, ["scenario.selector = 'cs-ucb', this one has 'random'"]),
    "base": ({"aggregation__base": "fedadam"}, ["scenario.aggregation.base = 'fedavg', this one has 'fedadam'"]),
    "API": ({"api": "message", "engine": "ray"}, ["scenario.api = 'legacy'", "scenario.engine = 'vectorized'"]),
    "fewer rounds": ({"rounds": 2}, ["has done 3 rounds, more than rounds = 2", "at least 3"]),
    "evaluation": ({"evaluation_every": 2}, ["scenario.evaluation_every = 1, this one has 2"]),
}
"""What differs -> the keys, and words of the message."""


@pytest.mark.parametrize("what", ANOTHER)
def test_a_checkpoint_of_another_run_is_refused_by_key(what: str, tmp_path: Path) -> None:
    keys, words = ANOTHER[what]
    cut_off(smoke(), checkpoint_dir=tmp_path)
    before = content(tmp_path)
    with pytest.raises(RunError) as refused:
        simulate(smoke(**keys), checkpoint_dir=tmp_path, resume=True)
    assert [part for part in words if part not in str(refused.value)] == []
    assert content(tmp_path) == before
    assert parts(simulate(smoke(), checkpoint_dir=tmp_path, resume="must")) == parts(simulate(smoke()))


def test_a_folder_with_another_run_is_refused_by_key(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path)
    before = content(tmp_path)
    for keys, words in (
        ({"training__learning_rate": 0.2}, "holds another run, .*: training.learning_rate is 0.1 there and 0.2 here"),
        ({"selectors__cs-ucb-q__fairness_scale": 0.2, "selector": "cs-ucb-q"}, "selectors.cs-ucb-q.fairness_scale is"),
    ):
        with pytest.raises(RunError, match=words):
            simulate(smoke(**keys), folder=tmp_path, resume=True)
    with pytest.raises(RunError, match=r"holds the checkpoints of .* another run\. .*resume=True"):
        simulate(smoke(), folder=tmp_path)
    assert content(tmp_path) == before


def test_a_run_whose_checkpoints_cannot_be_used_is_played_again_where_that_is_asked_for(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path)
    for path in (tmp_path / "checkpoints").glob("round-*"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match=r"none of the checkpoints .* can be used: .*damaged.*replay=True"):
        simulate(smoke(), folder=tmp_path, resume=True)
    result = simulate(smoke(), folder=tmp_path, resume=True, replay=True)
    assert parts(result) == parts(simulate(smoke()))
    assert not (tmp_path / "checkpoints").exists()


def test_a_selector_that_plans_for_the_end_keeps_it(tmp_path: Path) -> None:
    cut_off(smoke(selector="gpfl"), checkpoint_dir=tmp_path)
    with pytest.raises(RunError, match=r"scenario.rounds = 6, this one has 7"):
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
    with pytest.raises(RunError, match=r"data = 90 examples, SHA-256 \w+, this one has 90 examples"):
        run(selector=own(), data=data(1 - Y), folder=tmp_path, resume=True)
    with pytest.raises(RunError, match=r"data.dataset is 'python own' there and 'digits' here"):
        run(selector=own(), folder=tmp_path, resume=True)
    with pytest.raises(RunError, match=r"selector is called 'random' there, and 'cs-ucb' here"):
        run(data=data(), folder=tmp_path, resume=True)
    with pytest.raises(RunError, match=r"selector = random, this one has cs-ucb"):
        run(selector=CSUCB(clients_per_round=3, seed=5, max_latency=5.0), data=data(), folder=tmp_path, label="random",
            resume=True)  # fmt: skip
    assert parts(run(selector=own(), data=data(), folder=tmp_path, resume=True)) == parts(straight)


def test_every_key_of_a_scenario_is_compared_or_free() -> None:
    scenario = smoke(selector="bsfl")
    words = course_settings(scenario)
    assert OTHER_VALUES.keys() - CHANGEABLE_ON_RESUME <= words.keys()
    assert CHANGEABLE_ON_RESUME - {"name", "description", "selectors"} <= OTHER_VALUES.keys()
    assert not CHANGEABLE_ON_RESUME & words.keys()
    long = course_settings(smoke(partition__kind="sizes", partition__sizes=[10 + k for k in range(10)] * 1))
    assert all(len(value) < 100 for value in long.values())


def test_checkpoints_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 2 ms after every 0.1 s, where they may take 2 %."""
    now = [0.0]
    monkeypatch.setattr(existing_runs.time, "monotonic", lambda: now[0])

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


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of comparisons are empty files: nothing here looks at them."""
    for name in ("plot", "plot_rounds"):
        monkeypatch.setattr(Comparison, name, lambda self, path, *rest: Path(path).touch())


def compared(folder: Path, stop: tuple[str, int] | None = None, **options: Any) -> Any:
    """Compare two selectors on two seeds; stop after a round of one of the runs."""
    running: list[str] = []

    def update(record: Any, failed: int) -> None:
        told.append((running[-1], record.round))
        if told[-1] == stop:
            raise Stop

    told: list[tuple[str, int]] = []
    return (
        compare(
            smoke(target_accuracy=0.5), {"mine": CSUCB, "random": Random}, seeds=[1, 4], folder=folder, update=update,
            start_run=lambda label, rounds: running.append(label), checkpoint_every=1, **options,
        ),
        told,
    )  # fmt: skip


def test_a_comparison_of_classes_goes_on(tmp_path: Path, no_pictures: None) -> None:
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
    assert result.verdict == straight.verdict
    assert content(tmp_path / "cut") == content(tmp_path / "straight")


def test_the_command_goes_on_with_a_comparison(
    tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its folder alone: the plan is in it."""

    def stop(record: Any, failed: int) -> None:
        if (record.round, len(list(tmp_path.glob("cut/*/run.json")))) == (4, 2):
            raise Stop

    straight = compare(smoke(), ["bsfl", "random"], seeds=[1, 4], folder=tmp_path / "straight")
    with pytest.raises(Stop):
        compare(smoke(), ["bsfl", "random"], seeds=[1, 4], folder=tmp_path / "cut", update=stop)
    assert cli.main(["compare", "--resume", str(tmp_path / "cut"), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert straight.verdict is not None
    assert out.splitlines()[-2:] == [straight.verdict.sentence, str(tmp_path / "cut")]
    assert content(tmp_path / "cut") == {**content(tmp_path / "straight"), "flower.log": None}


def test_a_comparison_goes_on_only_with_its_own_runs(tmp_path: Path, no_pictures: None) -> None:
    with pytest.raises(Stop):
        compared(tmp_path, ("random, seed 1", 4))
    with pytest.raises(RunError, match=r"training.learning_rate is 0.1 there and 0.3 here"):
        compare(smoke(training__learning_rate=0.3), {"mine": CSUCB, "random": Random}, seeds=[1, 4], folder=tmp_path,
                resume=True)  # fmt: skip
    with pytest.raises(ParameterError, match="holds runs of another comparison"):
        compare(smoke(), {"mine": CSUCB}, seeds=[4], folder=tmp_path, resume=True)
    said = json.loads((tmp_path / "plan.json").read_text())
    assert [one["label"] for one in said["selectors"]] == ["mine", "random"]


def test_seeds_may_be_added(tmp_path: Path, no_pictures: None) -> None:
    compare(smoke(), ["random"], seeds=[1, 2], folder=tmp_path)
    model = tmp_path / "random-seed1" / "model.safetensors"
    before = model.stat().st_mtime_ns
    more = compare(smoke(), ["random", "round-robin"], seeds=[1, 2, 3], folder=tmp_path, resume=True)
    assert model.stat().st_mtime_ns == before
    assert more.table().equals(compare(smoke(), ["random", "round-robin"], seeds=[1, 2, 3]).table())


def test_rounds_on_flower_are_not_played_again(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(record: Any, failed: int) -> None:
        if record.round == 5:
            raise Stop

    scenario = smoke(api="message")
    monkeypatch.setattr(engine, "run_simulation", in_process)
    with pytest.raises(Stop):
        compare(scenario, ["random", "bsfl"], seeds=1, rounds_on_flower=2, folder=tmp_path, update=stop)
    monkeypatch.setattr(engine, "run_simulation", None)
    result = compare(scenario, ["random", "bsfl"], seeds=1, rounds_on_flower=2, folder=tmp_path, resume=True)
    assert result.agreement == Agreement(rounds=2, parted=0)


# ---- both APIs -----------------------------------------------------------------------------------------------------


def test_a_server_in_the_message_api_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over other nodes than before; and of a run that had finished there is the result."""
    scenario = smoke(api="message", engine="ray", aggregation__base="fedadam")
    monkeypatch.setattr(engine, "run_simulation", in_process)
    straight = simulate(scenario)
    cut_off(scenario, checkpoint_dir=tmp_path)
    told: list[int] = []
    for expected in ([3, 4, 5, 6], [6]):
        told.clear()
        result = simulate(scenario, checkpoint_dir=tmp_path, resume=True, on_round=lambda one: told.append(one.round))
        assert parts(result) == parts(straight)
        assert told == expected
