"""Results of a run: every finished round, whatever ends it, and what is computed when it is over."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.plots import selection_fractions
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.rounds import journal
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations import Comparison, Scenario, compare, load_scenario, simulate
from fedsel_flwr.simulations.comparisons import comparison
from fedsel_flwr.simulations.diagnosis import chance_level, diagnose
from fedsel_flwr.simulations.results import describe_runs, read_run
from fedsel_flwr.simulations.run_identity import read_record, write_record
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World
from tests.e2e.fleet import wait_until
from tests.processes import Command
from tests.report.made import make_history
from tests.simulations.cut_off_runs import cut_off, parts, smoke
from tests.simulations.test_run_identity import FILES

# ---- runs that are cut off -----------------------------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_comparison_that_is_cut_off_leaves_every_finished_round(
    end: signal.Signals, status: int, tmp_path: Path, refused: Any
) -> None:
    argv = ["compare", "smoke", "--rounds", "400", "--selectors", "bsfl,random", "--seeds", "1"]
    argv += ["--runs-dir", str(tmp_path / "runs")]
    with Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=tmp_path / "said", cwd=tmp_path) as command:
        journals = "runs/*/*/journal.jsonl"
        wait_until(lambda: any(path.stat().st_size > 9000 for path in tmp_path.glob(journals)), 100, command.stderr)
        os.kill(command.pid, end)
        assert command.wait(60) == status
    (folder,) = (tmp_path / "runs").iterdir()
    kept = read_history(folder / "bsfl-seed1").rounds
    count = len(kept)
    assert 1 < count < 400
    if end == signal.SIGINT:
        last = command.stderr.splitlines()[-1]
        assert last.startswith(f"fedsel: interrupted; {folder} holds bsfl-seed1: {count} rounds")
        assert "Traceback" not in command.stderr
    whole = simulate(smoke(count)).history.rounds
    assert [(r.round, r.simulated_s) for r in kept] == [(r.round, r.simulated_s) for r in whole]
    loaded = Comparison.load(folder)
    assert [(run.selector, len(run.history.rounds)) for run in loaded.cut_off] == [("bsfl", count)]
    assert len(loaded.table()) == 0
    with pytest.raises(ParameterError, match=rf"no run has finished: 'bsfl' after {count} rounds"):
        loaded.report(tmp_path / "report")
    assert refused("report", folder).startswith(f"fedsel: error: no run has finished: 'bsfl' after {count} rounds")


def test_a_history_that_is_not_in_memory_is_that_of_a_run_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = simulate(smoke())
    monkeypatch.setattr(journal, "LAST_ROUNDS", 1)
    told: list[Any] = []
    kept = simulate(smoke(), folder=tmp_path / "run", on_round=told.append)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*FILES, "timing.parquet"}
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert parts(kept) == parts(plain)
    assert told == kept.history.rounds
    again = read_history(tmp_path / "elsewhere")
    assert repr((again.rounds, again.clients)) == repr((plain.history.rounds, plain.history.clients))


def test_a_run_that_was_cut_off_is_left_out_and_named(tmp_path: Path, no_pictures: None) -> None:
    compare(smoke(), ["bsfl", "random"], seeds=2, folder=tmp_path)
    cut_off(smoke(seed=3), folder=tmp_path / "bsfl-seed3")
    loaded = Comparison.load(tmp_path)
    assert len(loaded.runs) == 4
    assert [(run.selector, run.scenario.seed, len(run.history.rounds)) for run in loaded.cut_off] == [("bsfl", 3, 3)]
    assert describe_runs(tmp_path).startswith(
        "bsfl-seed1: 6 rounds, finished; bsfl-seed2: 6 rounds, finished; bsfl-seed3: 3 ro"
    )


# ---- a full disk ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line_that_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fills_up(record: Any) -> None:
        if record.round == 2:
            monkeypatch.setattr(os, "pwrite", lambda *args: os.write(full.fileno(), b"-"))

    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(RunError, match=r"round 3 cannot be written .*No space left on device\. The earlier rounds"),
    ):
        simulate(smoke(), on_round=fills_up, folder=tmp_path / "run")
    assert len(read_history(tmp_path / "run").rounds) == 2


@contextlib.contextmanager
def small_disk(place: Path, pages: int) -> Iterator[Path]:
    """A file system of so many pages of memory."""
    place.mkdir()
    options = ["-o", f"size={pages * os.sysconf('SC_PAGE_SIZE')},mode=777"]
    mounted = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.timeout(200)
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may mount, and on Linux")
def test_wherever_the_disk_fills_up_it_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From no room for the scenario to no room for the picture: one line, and every round that was written."""
    whole = {name: simulate(smoke(12, selector=name)).history.rounds for name in ("bsfl", "random")}
    seen = set()
    for pages in (1, 9, 12, 16, 23, 64, 1024):
        with small_disk(tmp_path / str(pages), pages) as disk:
            argv = ["compare", "smoke", "--rounds", "12", "--selectors", "bsfl,random", "--seeds", "1", "--runs-dir"]
            status = main([*argv, str(disk / "runs")])
            err = capfd.readouterr().err
            in_a_round = re.search(r"round \d+ cannot be written", err)
            seen.add("in a round" if in_a_round else "elsewhere" if err else "never")
            if status == 0:
                assert err == ""
                assert len(list(disk.glob("runs/*/comparison.png"))) == 1
                continue
            assert status == 2
            assert re.fullmatch(r"fedsel: error: .*No space left on device.*\n", err), err
            for folder in disk.glob("runs/*"):
                assert f"; {folder} holds " in err
                if "no round yet" in err:
                    continue
                loaded = Comparison.load(folder)
                for run in (*loaded.runs, *loaded.cut_off):
                    count = len(run.history.rounds)
                    assert f"{run.selector}-seed1: {count} round" in err
                    assert repr(run.history.rounds) == repr(whole[run.selector][:count])
    assert seen == {"in a round", "elsewhere", "never"}


# ---- the wall time -------------------------------------------------------------------------------------------------


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the one of the wall times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (run_folder.TIMING, ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_wall_times_have_a_file_of_their_own_and_are_nowhere_else(tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = simulate(smoke(), folder=tmp_path / name)
        cut_off(smoke(), folder=tmp_path / "cut-off" / name, checkpoint_every=1)
        columns = run_folder.read_table(tmp_path / name / run_folder.TIMING)
        assert {key: column.tolist() for key, column in columns.items()} == {
            key: column.tolist() for key, column in result.timing.items()
        }
        assert columns.pop("round").tolist() == [1, 2, 3, 4, 5, 6]
        whole = columns.pop("round_ms")
        assert list(columns) == ["probe_ms", "select_ms", "collect_ms", "aggregate_ms", "observe_ms"]
        assert all((column > 0).all() for column in columns.values())
        # The clients train in between.
        assert (whole > sum(columns.values())).all()
    for place in (tmp_path, tmp_path / "cut-off"):
        one = bytes_of(place / "one")
        assert {"rounds.parquet", "clients.parquet", "run.json"} <= one.keys() or "journal.jsonl" in one
        assert one == bytes_of(place / "two")
    assert any(name.startswith("checkpoints/round-") for name in bytes_of(tmp_path / "cut-off" / "one"))


def test_a_resumed_run_has_the_times_of_its_own_rounds(tmp_path: Path) -> None:
    cut_off(smoke(), folder=tmp_path, checkpoint_every=1)
    timing = simulate(smoke(), folder=tmp_path, checkpoint_every=1, resume="must").timing
    assert timing["round"].tolist() == [1, 2, 3, 4, 5, 6]
    for name, column in timing.items():
        assert name == "round" or np.isnan(column).tolist() == [True] * 3 + [False] * 3
    assert read_run(tmp_path)[2].timing.keys() == timing.keys()


def test_a_run_of_an_older_version_has_no_times(tmp_path: Path) -> None:
    simulate(smoke(), folder=tmp_path / "bsfl-seed1")
    (tmp_path / "bsfl-seed1" / "timing.parquet").unlink()
    (run,) = Comparison.load(tmp_path).runs
    assert run.result.timing == {}
    assert len(run.history.rounds) == 6


# ---- derived tables ------------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {
    "num_clients": 8, "clients_per_round": 2, "rounds": 40, "partition.kind": "dirichlet", "partition.alpha": 0.3,
    "model.name": "logistic", "clients.energy_score_low": 0.5, "per_class_accuracy": True, "engine": "vectorized",
}  # fmt: skip


def digits(**keys: Any) -> Scenario:
    return load_scenario("digits", KEYS | {key.replace("__", "."): value for key, value in keys.items()})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    simulate(digits(selector="cs-ucb"), folder=folder)
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_the_regret_is_that_of_the_mean_latencies(finished: Path) -> None:
    """Means over 4,000 rounds as they are drawn, the best pair by trying all, the choices of clients.parquet."""
    system = World(digits()).system
    latencies = [
        [min(d.download_s + d.compute_s + d.upload_s, 5.0) for d in system.draws(range(8), t)]
        for t in range(1000, 5000)
    ]
    mean = np.mean(latencies, axis=0)
    best = min(max(mean[list(pair)]) for pair in combinations(range(8), 2))
    clients, lost, total = rows_of(finished, "clients"), rows_of(finished, "regret"), 0.0
    assert [row["round"] for row in lost] == list(range(1, 41))
    for row in lost:
        chosen = [int(one["client_id"]) for one in clients if one["round"] == row["round"]]
        total += max(mean[chosen]) - best
        assert row["Theta"] == pytest.approx(total, abs=0.01 * row["round"] + 0.01)
        assert row["theta"] == pytest.approx(row["Theta"] / row["round"])
    assert total > 1.0


def test_accuracy_by_client_and_class(finished: Path) -> None:
    """From the saved model, one example at a time."""
    world = World(digits())
    weight, bias = run_folder.read_model(finished)
    counts: dict[tuple[int, int], list[bool]] = {}
    for k in range(8):
        for row in world.train_rows(k):
            logits = weight @ world.dataset.train.inputs[row].ravel() + bias
            label = int(world.dataset.train.labels[row])
            counts.setdefault((k, label), []).append(int(logits.argmax()) == label)
    told = {(row["client"], row["label"]): row for row in rows_of(finished, "classes")}
    assert told.keys() == counts.keys()
    for key, hits in counts.items():
        assert told[key]["num_examples"] == len(hits)
        assert told[key]["accuracy"] == pytest.approx(np.mean(hits), abs=1.01 / len(hits))  # a tie of logits


def test_the_clients_accuracies_are_on_unseen_examples(finished: Path, tmp_path: Path) -> None:
    """Without test examples of their own: the test set, weighted by their classes. From the saved model."""
    world, told = World(digits()), [row["accuracy"] for row in rows_of(finished, "client-accuracy")]
    weight, bias = run_folder.read_model(finished)
    test = world.dataset.test
    right = [int((weight @ x.ravel() + bias).argmax()) == y for x, y in zip(test.inputs, test.labels, strict=True)]
    by_class = [np.mean([hit for hit, y in zip(right, test.labels, strict=True) if y == c]) for c in range(10)]
    own = [np.mean([by_class[int(world.dataset.train.labels[row])] for row in world.train_rows(k)]) for k in range(8)]
    assert told == pytest.approx(own, abs=0.01)  # a tie of logits

    local = digits(rounds=3, data__local_test_fraction=0.5)
    result = simulate(local, folder=tmp_path / "run")
    world, (weight, bias) = World(local), result.arrays
    rows = [world.train_test_rows([k])[0][1] for k in range(8)]
    data = world.dataset.train
    hits = [[int((weight @ data.inputs[i].ravel() + bias).argmax()) == data.labels[i] for i in own] for own in rows]
    assert result.client_accuracies == pytest.approx([np.mean(own) for own in hits], abs=0.05)
    assert read_run(tmp_path / "run")[2].client_accuracies.tolist() == result.client_accuracies.tolist()
    keys = {"data__dataset": "synthetic-regression", "model__name": "linear", "partition__kind": "iid"}
    assert simulate(digits(**keys, per_class_accuracy=False, rounds=1)).client_accuracies.size == 0


def test_the_models_that_the_filter_kept(tmp_path: Path) -> None:
    """Beside `completed`, row by row: Thompson sampling's counts follow from it; who failed is not kept."""
    selector = create("fedcm-ts", clients_per_round=4, seed=2)
    scenario = digits(selector="fedcm-ts", rounds=12, clients_per_round=4, wireless__max_latency_s=0.2)
    simulate(scenario, folder=tmp_path, selector=selector)
    rounds, clients = rows_of(tmp_path, "rounds"), rows_of(tmp_path, "clients")
    for k in range(8):
        mine = [row for row in clients if row["client"] == k]
        assert selector.state_dict()["successes"][k] == 1 + sum(row["kept"] for row in mine)
        assert selector.state_dict()["failures"][k] == 1 + sum(not row["kept"] for row in mine)
    for row in rounds:
        cohort = [one for one in clients if one["round"] == row["round"]]
        assert row["num_kept"] == sum(one["kept"] for one in cohort)
        assert row["num_completed"] == sum(one["completed"] for one in cohort)
        assert all(one["completed"] for one in cohort if one["kept"])
    assert 0 < sum(row["num_kept"] for row in rounds) < sum(row["num_completed"] for row in rounds) < len(clients)


def test_the_figures_of_table_and_picture_follow_from_the_files(tmp_path: Path) -> None:
    table = compare(
        digits(target_accuracy=0.6, per_class_accuracy=False), ["bsfl", "random"], seeds=1, folder=tmp_path
    ).table()
    assert len(table) == 2
    assert (tmp_path / "rounds.png").stat().st_size > 10_000
    for _, line in table.iterrows():
        folder = tmp_path / f"{line['selector']}-seed{line['seed']}"
        rounds, clients = rows_of(folder, "rounds"), rows_of(folder, "clients")
        accuracy = [row["accuracy"] for row in rounds]
        last = sum(accuracy[-10:]) / 10
        assert line["loss"] == rounds[-1]["loss"]
        assert line["accuracy_last10"] == pytest.approx(last)
        assert line["deviation_last10"] == pytest.approx(max(abs(a - last) for a in accuracy[-10:]))
        assert line["accuracy_15"] == pytest.approx(sum(accuracy[:6]) / 6)
        assert line["accuracy_50"] == pytest.approx(sum(accuracy[10:20]) / 10)
        means = {i + 1: np.mean(accuracy[i - 14 : i + 1]) for i in range(14, 40)}
        assert line["rounds_to_target"] == next((i for i, mean in means.items() if mean >= 0.6), math.inf)
        by_client = np.sort(pq.read_table(folder / "client-accuracy.parquet")["accuracy"].to_numpy())
        assert line["worst_tenth"] == pytest.approx(by_client[0])  # one of eight clients
        assert line["score_energy"] == pytest.approx(sum(1 - row["energy_score"] for row in clients))
        seen = [{row["client_id"] for row in clients if row["round"] <= t} for t in range(1, 41)]
        assert line["rounds_to_all"] == next((t for t, ids in enumerate(seen, start=1) if len(ids) == 8), math.inf)
        drawn = selection_fractions(read_history(folder), 8)  # of the picture by rounds
        for t in (1, 6, 40):
            counts = [sum(row["client"] == k for row in clients if row["round"] <= t) for k in range(8)]
            assert drawn[t - 1].tolist() == pytest.approx([count / t for count in counts])
        assert (folder / "regret.parquet").exists()
        assert not (folder / "classes.parquet").exists()


def test_the_picture_of_a_comparison_shows_the_regret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is the column theta of each run, also when the comparison is read back."""
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(comparison, "plot_comparison", lambda *given, **options: None)
    monkeypatch.setattr(comparison, "plot_rounds", lambda *given, **options: drawn.append(options["lost"]))
    compare(digits(rounds=5, per_class_accuracy=False), ["random", "bsfl"], seeds=2, folder=tmp_path, quiet=True)
    Comparison.load(tmp_path).report(tmp_path)
    for lost in drawn:
        for name, each in lost.items():
            for seed, theta in zip((1, 2), each, strict=True):
                assert theta.tolist() == [row["theta"] for row in rows_of(tmp_path / f"{name}-seed{seed}", "regret")]
    assert [set(lost) for lost in drawn] == [{"random", "bsfl"}] * 2
    older = tmp_path / "bsfl-seed2"
    (older / "regret.parquet").unlink()
    record = read_record(older)
    del record["files"]["regret.parquet"]  # a run without it has no digest of it
    write_record(older, record)
    Comparison.load(tmp_path).report(tmp_path)
    assert drawn[-1] is None


# ---- runs that diverged: the log and the command say so --------------------------------------------------------------

DIVERGING = {"engine": "vectorized", "rounds": 6, "selector": "random"}


def test_guessing_is_the_most_frequent_class() -> None:
    """37 of 360 digits are of one class: .1028, and two standard errors of .016."""
    world = World(load_scenario("smoke", DIVERGING))
    assert chance_level(world) == pytest.approx(37 / 360 + 2 * math.sqrt(37 / 360 * 323 / 360 / 360))
    assert chance_level(World(load_scenario("ben-ami-unequal", {"engine": "vectorized"}))) == 0
    own = OwnParts(objective=Objective(CLASSIFICATION.loss, CLASSIFICATION.quality))
    assert math.isnan(chance_level(World(load_scenario("smoke", DIVERGING), own)))


@pytest.mark.parametrize(
    ("losses", "accuracies", "said"),
    [
        ([2.0] * 4 + [math.inf], [0.9] * 5, "the loss of round 5 is inf"),
        ([2.0, math.nan], [0.9, 0.1], "the loss of round 2 is nan"),
        ([2.0, math.nan], [0.9, math.nan], ""),  # not measured
        ([2.0] * 6, [0.9] + [0.13] * 5, "no better than guessing (at most 0.13)"),
        ([2.0] * 5, [0.13] * 4 + [0.14], ""),
        ([2.0] * 4, [0.1] * 4, ""),  # too few
    ],
)
def test_what_counts(losses: list[float], accuracies: list[float], said: str) -> None:
    history = make_history([[]] * len(losses), accuracy=accuracies, loss=losses)
    found = diagnose(World(load_scenario("smoke", DIVERGING)), history)
    assert said in found if said else not found


@pytest.mark.parametrize("name", ["vectorized", "ray"])
@pytest.mark.parametrize(
    ("rate", "said"), [(1e20, "in rounds 2 to 6 no client sent a model of finite size"), (0.05, "")]
)
def test_a_run_says_so(name: str, rate: float, said: str, caplog: Any, without_ray: None) -> None:
    scenario = load_scenario("smoke", {**DIVERGING, "training.learning_rate": rate, "api": "message"})
    result = simulate(scenario, engine=name)
    assert said in result.diagnosis if said else not result.diagnosis
    assert (result.diagnosis in caplog.text) if said else ("diverged" not in caplog.text)


def test_a_run_in_which_nobody_delivers_says_why(caplog: Any) -> None:
    result = simulate(load_scenario("smoke", {**DIVERGING, "clients.crash_probability": 1.0}))
    assert result.diagnosis.startswith(
        "no update was usable in 6 rounds. Most frequent reason: crashed: the client did not train"
    )
    assert caplog.records[-1].getMessage() == result.diagnosis


def test_the_command_says_so(fedsel: Any, tmp_path: Any) -> None:
    keys = ["--set", "training.learning_rate=5", "--set", "rounds=6", "--quiet", "--runs-dir", str(tmp_path)]
    out = fedsel("run", "digits", "--engine", "vectorized", "--selector", "random", *keys)
    assert "random, seed 1: the run diverged or has learned nothing" in out
