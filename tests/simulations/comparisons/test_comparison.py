"""What a comparison says at its end, worked out again from nothing but the files that it left."""

from __future__ import annotations

import contextlib
import io
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedsel_flwr import cli
from fedsel_flwr.report.paired import paired_interval
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.comparisons.comparison import Agreement, compare_choices
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.report.made import make_history
from tests.simulations.inprocess import in_process

SEEDS, TARGET = (1, 2, 3), 0.5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a small comparison of phones printed, and its folder; Flower's part in this process instead of on Ray."""
    folder, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    argv = ["compare", "phones", "--selectors", "bsfl,round-robin,random", "--seeds", "3", "--rounds", "30"]
    argv += ["--runs-dir", str(folder), "--rounds-on-flower", "3", "--set", f"target_accuracy={TARGET}"]
    argv += ["--set", "num_clients=60", "--set", "api=message"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(engine, "run_simulation", in_process)
        assert cli.main(argv) == 0
    return printed.getvalue(), Path(printed.getvalue().splitlines()[-1])


def to_target(run: Path) -> tuple[float, float, float]:
    """Simulated seconds, joules and rounds of a run until the mean of 15 accuracies reaches the target."""
    rounds = pq.read_table(run / "rounds.parquet").to_pylist()
    accuracy = [row["accuracy"] for row in rounds]
    for i in range(14, len(rounds)):
        if sum(accuracy[i - 14 : i + 1]) / 15 >= TARGET:
            return rounds[i]["simulated_s"], rounds[i]["total_energy_j"], i + 1
    return np.inf, np.inf, np.inf


def test_the_verdict_is_in_the_files(finished: tuple[str, Path]) -> None:
    out, folder = finished
    said = json.loads((folder / "verdict.json").read_text())
    assert said["sentence"] in out
    reference = np.array([to_target(folder / f"random-seed{seed}") for seed in SEEDS])
    assert np.isfinite(reference).all()
    opening = f"random reaches 50 % accuracy after {reference[:, 0].mean():.1f} simulated seconds on average."
    assert said["sentence"].startswith(opening)
    assert "on the same 3 seeds and partitions:" in said["sentence"]
    for one, name in zip(said["selectors"], ("bsfl", "round-robin"), strict=True):
        logs = np.log(np.array([to_target(folder / f"{name}-seed{seed}") for seed in SEEDS]) / reference)
        logs = np.column_stack([logs, logs[:, 0] - logs[:, 2]])
        assert (one["selector"], one["time"]["reference"], one["time"]["pairs"]) == (name, "random", 3)
        for key, column in zip(("time", "energy", "rounds", "seconds_per_round"), logs.T, strict=True):
            ends = one[key]["estimate"], one[key]["low"], one[key]["high"]
            assert ends == pytest.approx(tuple(np.exp([column.mean(), *paired_interval(column)])), rel=1e-5)
        ratio, low, high = (one["time"][key] for key in ("estimate", "low", "high"))
        assert re.search(rf"^{name} +{ratio:.2f} \({low:.2f}-{high:.2f}\) .* {one['word']}", out, re.MULTILINE)


def test_the_table_has_the_same_times(finished: tuple[str, Path]) -> None:
    out, folder = finished
    for name in ("bsfl", "round-robin", "random"):
        times = np.array([to_target(folder / f"{name}-seed{seed}")[0] for seed in SEEDS])
        found = re.search(rf"^{name} +\S+ ±\S+ +\S+ ±\S+ +(\S+) ±(\S+) ", out, re.MULTILINE)
        assert found is not None
        assert found.groups() == (f"{times.mean():.1f}", f"{times.std(ddof=1):.1f}")


def test_the_first_rounds_with_flower_are_a_run_of_their_own(finished: tuple[str, Path]) -> None:
    out, folder = finished
    assert "Flower on Ray and the vectorized engine selected the same clients in all 3 rounds that both ran." in out
    chosen = []
    for name in ("bsfl-seed1-on-flower", "bsfl-seed1"):
        rows = pq.read_table(folder / name / "clients.parquet").to_pylist()
        chosen.append([{row["client_id"] for row in rows if row["round"] == number} for number in (1, 2, 3)])
    assert chosen[0] == chosen[1]
    assert all(len(one) == 10 for one in chosen[0])
    assert any(one != other for one, other in pairwise(chosen[0]))
    short = load_scenario(str(folder / "bsfl-seed1-on-flower" / "scenario.toml"))
    assert (short.engine, short.rounds) == ("ray", 3)


def test_engines_that_part_are_said_to() -> None:
    one = make_history([[0, 1], [2, 3], [4, 5]], accuracy=[0.5] * 3)
    other = make_history([[1, 0], [2, 4]], accuracy=[0.5] * 2)
    assert compare_choices(one, one) == Agreement(rounds=3, parted=0)
    assert compare_choices(one, other) == Agreement(rounds=2, parted=2)  # the order within a round does not count
    assert compare_choices(one, other).sentence.endswith("selected different clients from round 2 on.")
