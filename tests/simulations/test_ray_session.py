"""Ray that dies, is told, or is to be silent."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.progress import WaitNotice
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession, RayWatchdog
from tests.processes import ROOT, Command


def until_dead(watch: RayWatchdog) -> str:
    """What is said of Ray's death."""
    deadline = time.monotonic() + 10
    while not watch.died:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(RunError) as error:
        watch.check()
    return str(error.value)


@pytest.fixture
def pillars(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two children that are called as Ray's two main processes."""
    sleep = shutil.which("sleep")
    if sys.platform != "linux" or sleep is None:
        pytest.skip("names of processes as on Linux")
    made = {}
    for name in ("raylet", "gcs_server"):
        shutil.copy(sleep, tmp_path / name)
        made[name] = subprocess.Popen([tmp_path / name, "600"])
    yield made
    for process in made.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_the_end_of_a_process_of_ray_is_noticed_and_the_others_end(
    victim: str, pillars: dict[str, subprocess.Popen[bytes]]
) -> None:
    with RayWatchdog(None) as watch:
        time.sleep(0.5)
        watch.check()
        pillars[victim].kill()
        assert until_dead(watch).startswith(f"Ray died ({victim} ended")
        for process in pillars.values():
            assert process.wait(5) == -9


def test_after_the_rounds_ray_may_end(pillars: dict[str, subprocess.Popen[bytes]]) -> None:
    with RayWatchdog(None) as watch:
        watch.expect_shutdown()
        pillars["raylet"].kill()
        time.sleep(0.8)
        assert not watch.died
    assert pillars["gcs_server"].poll() is None


def test_a_cluster_whose_head_is_gone_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        watch = RayWatchdog(address).__enter__()
        time.sleep(0.5)
        watch.check()
    assert until_dead(watch).startswith(f"the head of the Ray cluster at {address} is gone")
    watch.__exit__(None, None, None)


def test_a_strategy_stops_where_ray_died_and_is_as_before_after_that() -> None:
    class Strategy:
        def aggregate_fit(self, number: int) -> int:
            return number + 1

    session, strategy = RaySession(RayResources(), WaitNotice("", "")), Strategy()
    with session.watch_strategy(strategy):
        assert strategy.aggregate_fit(1) == 2
        session.watchdog = SimpleNamespace(check=lambda: (_ for _ in ()).throw(RunError("Ray died")))  # type: ignore[assignment]
        with pytest.raises(RunError, match="Ray died"):
            strategy.aggregate_fit(1)
    assert strategy.__dict__ == {}
    assert strategy.aggregate_fit(1) == 2


@pytest.mark.parametrize("quiet", [pytest.param(False, marks=pytest.mark.slow), True])
def test_quiet_keeps_flowers_log_out(quiet: bool, capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "from fedsel_flwr.simulations import engine, load_scenario, simulate; "
        "from tests.simulations.inprocess import in_process; engine.run_simulation = in_process; "
        f"simulate(load_scenario('smoke'), engine='ray', quiet={quiet})"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=100)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("[ROUND 2]" in err) == (not quiet)
    if quiet:
        assert err == ""


# ---- with Ray ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_quiet_on_ray_leaves_no_line(tmp_path: Path) -> None:
    program = (
        "from fedsel_flwr.simulations import load_scenario, simulate; simulate(load_scenario('smoke'), quiet=True)"
    )
    command = Command(sys.executable, "-c", program, folder=tmp_path, cwd=ROOT)
    try:
        assert command.wait(150) == 0, command.stderr
        assert (command.stdout, command.stderr) == ("", "")
    finally:
        command.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_ray_that_dies_is_one_line_and_every_round_is_kept(victim: str, tmp_path: Path) -> None:
    argv = ("run", "smoke", "--rounds", "3000", "--runs-dir", str(tmp_path / "runs"))
    command = Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=tmp_path / "said", cwd=ROOT)
    try:
        command.wait_for("round    1/3000", 150)
        time.sleep(1)
        for child in psutil.Process(command.pid).children():
            if child.name() == victim:
                child.kill()
        assert command.wait(60) == 2, command.stderr
        assert command.left() == []
    finally:
        command.kill()
    (folder,) = (tmp_path / "runs").iterdir()
    rounds = read_history(folder).rounds
    assert f"fedsel: error: Ray died ({victim} ended" in command.stderr
    assert command.stderr.splitlines()[-1].endswith(
        f"after {len(rounds)} of 3000 rounds; {folder} holds {folder.name}: {len(rounds)} rounds"
    )
    assert "Traceback" not in command.stderr
    whole = simulate(load_scenario("smoke", {"rounds": len(rounds), "engine": "vectorized"}))
    assert [(r.num_completed, r.simulated_s) for r in rounds] == [
        (r.num_completed, r.simulated_s) for r in whole.history.rounds
    ]
