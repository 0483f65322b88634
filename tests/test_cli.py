"""The command ``fedsel``: lists, faults in one line, runs with everything they leave behind, and Ctrl-C."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedsel_flwr import __version__
from fedsel_flwr.cli import main
from fedsel_flwr.report.run_folder import read_history, read_model
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.processes import Command, environment
from tests.simulations.inprocess import play

RUN_FILES = {
    "client-accuracy.parquet", "regret.parquet", "run.json", "scenario.toml", "rounds.parquet", "clients.parquet",
    "model.safetensors", "timing.parquet",
}  # fmt: skip
FILES = RUN_FILES | {
    "plan.json", "report.html", "comparison.png", "rounds.png", "runs.csv", "comparison.tex", "summary.json"
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in a folder of its own, so that ./runs would be seen."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- without a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [["list"], pytest.param(["run", "smoke", "--engine", "vectorized"], marks=pytest.mark.slow)],
    ids=lambda argv: argv[0],
)
def test_a_command_whose_reader_goes(argv: list[str], own_folder: Path) -> None:
    """As ``fedsel list | head -1``; a run goes on."""
    command, pipe = [sys.executable, "-m", "fedsel_flwr.cli", *argv], subprocess.PIPE
    process = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as said:
        assert said.read() == b""
    assert process.wait(60) == 0
    assert len(list(own_folder.glob("runs/*/model.safetensors"))) == (argv[0] == "run")


def test_quiet_shows_the_table_and_the_folder_alone(own_folder: Path, fedsel: Any) -> None:
    out = fedsel("run", "smoke", "--engine", "vectorized", "--quiet")
    assert "round 1/3" not in out
    assert re.search(r"^bsfl +[\d.]+ ", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith(str(own_folder / "runs" / "smoke-"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fedsel {__version__}\n"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, fedsel: Any, refused: Any) -> None:
    def without(*missing: str) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())

    without("ray", "torch")
    for argv in (["list"], ["cite", "bsfl"]):  # they need no more than they load
        fedsel(*argv)
    message = refused("run", "smoke")
    assert "torch, ray not installed" in message
    assert "pip install 'fedsel-flwr[sim]'" in message
    without("pydantic")
    assert "pydantic not installed" in refused("show")


def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("fedsel_flwr.simulations.scenario_files.load_scenario", interrupted)
    assert main(["run", "smoke"]) == 130
    assert capsys.readouterr() == ("", "fedsel: interrupted\n")


# ---- compare -------------------------------------------------------------------------------------------------------


def test_compare_runs_every_selector_on_every_seed(own_folder: Path, fedsel: Any) -> None:
    argv = ["compare", "smoke", "--selectors", "cs-ucb, random", "--seeds", "2", "--rounds", "4", "--set", "seed=5"]
    folder = Path(fedsel(*argv, "--engine", "vectorized").splitlines()[-1])
    assert folder.parent == own_folder / "runs"
    played = [("cs-ucb", 5), ("random", 5), ("cs-ucb", 6), ("random", 6)]
    runs = {f"{selector}-seed{seed}" for selector, seed in played}
    assert {path.name for path in folder.iterdir()} == FILES - RUN_FILES | {"verdict.json", "flower.log"} | runs
    assert [(s["selector"], s["seed"]) for s in json.loads((folder / "summary.json").read_text())] == played
    for name in runs:
        assert {path.name for path in (folder / name).iterdir()} == RUN_FILES


# ---- one run from the shell ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """``fedsel run smoke``, which has ended and left no process."""
    folder = tmp_path_factory.mktemp("first")
    with Command(sys.executable, "-m", "fedsel_flwr.cli", "run", "smoke", folder=folder, cwd=folder) as command:
        assert command.wait(120) == 0, command.stderr
        assert command.left() == []
        place = Path(command.stdout.splitlines()[-1])
        return SimpleNamespace(out=command.stdout, err=command.stderr, started=command.number_started, folder=place)


def test_run_prints_plain_lines_a_table_and_the_folder_and_leaves_no_process(first: Any) -> None:
    assert first.started > 4  # Ray was there: server, raylet, actors
    assert first.err == ""  # no terminal: Ray starts without a word
    assert "\x1b" not in first.out
    lines = first.out.splitlines()
    figures = r"accuracy +[\d.]+ %  simulated [\d.]+ s  energy [\d.]+ J  failed 0"
    for i in (1, 2, 3):
        assert re.fullmatch(f"bsfl: round {i}/3  {figures}", lines[i - 1])
    header = " ".join(lines[3:5])
    assert all(word in header for word in ("accuracy", "time to", "energy", "Jain", "failed"))
    assert any(re.match(r"bsfl +[\d.]+ ", line) for line in lines[5:])
    assert re.fullmatch(r".*/runs/smoke-\d{8}-\d{6}", lines[-1])
    assert first.folder.is_dir()


def test_run_folder_holds_everything(first: Any) -> None:
    assert {path.name for path in first.folder.iterdir()} == FILES | {"flower.log"}
    assert (first.folder / "comparison.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    history = read_history(first.folder)
    assert [r.round for r in history.rounds] == [1, 2, 3]
    assert len(history.clients) == 9
    assert all(map(math.isfinite, (x for row in history.clients for x in (row.latency_s, row.energy_j))))
    smoke, own = load_scenario("smoke"), load_scenario(str(first.folder / "scenario.toml"))
    assert own.model_dump(exclude={"name"}) == smoke.model_dump(exclude={"name"})
    assert World(smoke).test(read_model(first.folder))[1] == history.rounds[-1].accuracy
    assert "configure_fit" in (first.folder / "flower.log").read_text()


def test_summary_is_json_that_any_reader_takes(first: Any) -> None:
    """No NaN and no Infinity, which only Python's reader knows."""

    def refuse(constant: str) -> None:
        pytest.fail(f"summary.json holds {constant}")

    (summary,) = json.loads((first.folder / "summary.json").read_text(), parse_constant=refuse)
    history = read_history(first.folder)
    assert (summary["selector"], summary["seed"], summary["failed_clients"]) == ("bsfl", 1, 0)
    assert summary["accuracy"] == history.rounds[-1].accuracy
    assert summary["energy_j"] == history.rounds[-1].total_energy_j
    reached = [r.simulated_s for r in history.rounds if r.accuracy >= 0.5]
    assert summary["time_to_target_s"] == (reached[0] if reached else None)


def test_the_resolved_scenario_is_the_same_run(first: Any) -> None:
    """Played in this process, without Ray: the same choices, latencies and losses, and the same model, bit by bit."""
    history = read_history(first.folder)
    result = play(load_scenario(str(first.folder / "scenario.toml")))
    assert repr(result.history.clients) == repr(history.clients)
    assert repr(result.history.rounds) == repr(history.rounds)
    assert [a.tobytes() for a in result.arrays] == [a.tobytes() for a in read_model(first.folder)]


BUSY = """
import time
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from fedsel_flwr.cli import main
RayBackend.terminate = lambda self: time.sleep(60)  # as on a busy machine, where Flower waits for Ray's dead workers
raise SystemExit(main())
"""


def test_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    argv = ["run", "smoke", "--rounds", "3000", "--selector", "random"]
    with Command(sys.executable, "-c", BUSY, *argv, folder=tmp_path, cwd=tmp_path) as command:
        command.wait_for("random: round    1/3000", timeout=100)
        assert command.number_started > 4
        time.sleep(0.5)
        pressed = time.monotonic()
        command.interrupt()
        assert command.wait(30) == 130
        assert time.monotonic() - pressed < 10
        assert command.left() == []
    (said,) = command.stderr.splitlines()
    wanted = r"fedsel: interrupted; (\S+) holds \S+: (\d+) rounds?\. Resume with: fedsel run --resume \1"
    told = re.fullmatch(wanted, said)
    assert told, said
    assert len(read_history(told[1]).rounds) == int(told[2]) > 0
