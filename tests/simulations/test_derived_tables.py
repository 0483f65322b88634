"""Tables derived from a run: computed again from its Parquet files and the world of the scenario."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.plots import selection_fractions
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations import compare
from fedsel_flwr.simulations.comparisons import comparison
from fedsel_flwr.simulations.comparisons.comparison import Comparison
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.run_record import read_record, write_record
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World

KEYS: dict[str, Any] = {
    "num_clients": 8, "clients_per_round": 2, "rounds": 40, "partition.kind": "dirichlet", "partition.alpha": 0.3,
    "model.name": "logistic", "clients.energy_score_low": 0.5, "per_class_accuracy": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    simulate(load_scenario("digits", KEYS | {"selector": "cs-ucb"}), engine="vectorized", folder=folder)
    return folder


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_the_regret_is_that_of_the_mean_latencies(finished: Path) -> None:
    """Means over 4,000 rounds as they are drawn, the best pair by trying all, the choices of clients.parquet."""
    system = World(load_scenario("digits", KEYS)).system
    mean = np.mean(
        [
            [min(d.download_s + d.compute_s + d.upload_s, 5.0) for d in system.draws(range(8), t)]
            for t in range(1000, 5000)
        ],
        axis=0,
    )
    best = min(max(mean[list(pair)]) for pair in combinations(range(8), 2))
    clients, lost, total = _rows(finished, "clients"), _rows(finished, "regret"), 0.0
    assert [row["round"] for row in lost] == list(range(1, 41))
    for row in lost:
        chosen = [int(one["client_id"]) for one in clients if one["round"] == row["round"]]
        total += max(mean[chosen]) - best
        assert row["Theta"] == pytest.approx(total, abs=0.01 * row["round"] + 0.01)
        assert row["theta"] == pytest.approx(row["Theta"] / row["round"])
    assert total > 1.0


def test_accuracy_by_client_and_class(finished: Path) -> None:
    """From the saved model, one example at a time."""
    world = World(load_scenario("digits", KEYS))
    weight, bias = run_folder.read_model(finished)
    counts: dict[tuple[int, int], list[bool]] = {}
    for k in range(8):
        for row in world.train_rows(k):
            logits = weight @ world.dataset.train.inputs[row].ravel() + bias
            label = int(world.dataset.train.labels[row])
            counts.setdefault((k, label), []).append(int(logits.argmax()) == label)
    told = {(row["client"], row["label"]): row for row in _rows(finished, "classes")}
    assert told.keys() == counts.keys()
    for key, hits in counts.items():
        assert told[key]["num_examples"] == len(hits)
        assert told[key]["accuracy"] == pytest.approx(np.mean(hits), abs=1.01 / len(hits))  # a tie of logits


def test_the_models_that_the_filter_kept(tmp_path: Path) -> None:
    """Beside `completed`, row by row: Thompson sampling's counts follow from it; who failed is not kept."""
    selector = create("fedcm-ts", clients_per_round=4, seed=2)
    keys = KEYS | {"selector": "fedcm-ts", "rounds": 12, "clients_per_round": 4, "wireless.max_latency_s": 0.2}
    simulate(load_scenario("digits", keys), engine="vectorized", folder=tmp_path, selector=selector)
    rounds, clients = _rows(tmp_path, "rounds"), _rows(tmp_path, "clients")
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
    scenario = load_scenario("digits", KEYS | {"target_accuracy": 0.6, "per_class_accuracy": False})
    table = compare(scenario, ["bsfl", "random"], seeds=2, folder=tmp_path).table()
    assert len(table) == 4
    assert (tmp_path / "rounds.png").stat().st_size > 10_000
    for _, line in table.iterrows():
        folder = tmp_path / f"{line['selector']}-seed{line['seed']}"
        rounds, clients = _rows(folder, "rounds"), _rows(folder, "clients")
        accuracy = [row["accuracy"] for row in rounds]
        assert line["loss"] == rounds[-1]["loss"]
        assert line["accuracy_last10"] == pytest.approx(sum(accuracy[-10:]) / 10)
        assert line["deviation_last10"] == pytest.approx(max(abs(a - sum(accuracy[-10:]) / 10) for a in accuracy[-10:]))
        assert line["accuracy_15"] == pytest.approx(sum(accuracy[:6]) / 6)
        assert line["accuracy_50"] == pytest.approx(sum(accuracy[10:20]) / 10)
        means = [sum(accuracy[max(0, i - 4) : i + 1]) / len(accuracy[max(0, i - 4) : i + 1]) for i in range(40)]
        assert line["rounds_to_target"] == next((i + 1 for i, mean in enumerate(means) if mean >= 0.6), math.inf)
        assert line["score_energy"] == pytest.approx(sum(1 - row["energy_score"] for row in clients))
        seen = [{row["client_id"] for row in clients if row["round"] <= t} for t in range(1, 41)]
        assert line["rounds_to_all"] == next((t for t, ids in enumerate(seen, start=1) if len(ids) == 8), math.inf)
        drawn = selection_fractions(run_folder.read_history(folder), 8)  # of the picture by rounds
        for t in (1, 6, 40):
            counts = [sum(row["client"] == k for row in clients if row["round"] <= t) for k in range(8)]
            assert drawn[t - 1].tolist() == pytest.approx([count / t for count in counts])
        assert (folder / "regret.parquet").exists()
        assert not (folder / "classes.parquet").exists()


def test_without_classes_it_is_refused() -> None:
    keys = {
        "data.dataset": "synthetic-regression",
        "model.name": "linear",
        "per_class_accuracy": True,
        "partition.kind": "iid",
    }
    with pytest.raises(ParameterError, match="per_class_accuracy needs classes"):
        simulate(load_scenario("digits", keys), engine="vectorized")


def test_the_picture_of_a_comparison_shows_the_regret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is the column theta of each run, also when the comparison is read back."""
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(comparison, "plot_comparison", lambda *given, **options: None)
    monkeypatch.setattr(comparison, "plot_rounds", lambda *given, **options: drawn.append(options["lost"]))
    small = load_scenario("digits", KEYS | {"rounds": 5, "per_class_accuracy": False})
    compare(small, ["random", "bsfl"], seeds=2, folder=tmp_path, quiet=True)
    Comparison.load(tmp_path).report(tmp_path)
    for lost in drawn:
        for name, each in lost.items():
            for seed, theta in zip((1, 2), each, strict=True):
                assert theta.tolist() == [row["theta"] for row in _rows(tmp_path / f"{name}-seed{seed}", "regret")]
    assert [set(lost) for lost in drawn] == [{"random", "bsfl"}] * 2
    older = tmp_path / "bsfl-seed2"
    (older / "regret.parquet").unlink()
    record = read_record(older)
    del record["files"]["regret.parquet"]  # a run without it has no digest of it
    write_record(older, record)
    Comparison.load(tmp_path).report(tmp_path)
    assert drawn[-1] is None
