"""Ray that dies, is told, or is to be silent."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.on_flower.ray_session import EXIT_DEAD
from tests.processes import ROOT, Command

# The session of a Ray that is played by other processes: two children with the names of its servers, or a socket.
DYING = """
import shutil, socket, subprocess, sys, time
from types import SimpleNamespace
from fedsel_flwr.simulations.on_flower import ray_session
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession

head = socket.create_server(("127.0.0.1", 0))
servers, connected = {}, []

def init(address, **options):
    connected.append(True)
    for name in ("raylet", "gcs_server") if address == "local" else ():
        shutil.copy(shutil.which("sleep"), name)
        servers[name] = subprocess.Popen(["./" + name, "600"])

def nodes():
    return [{"Alive": True, "Resources": {"CPU": 1}}]

ray = SimpleNamespace(init=init, nodes=nodes, is_initialized=lambda: bool(connected), shutdown=connected.clear)
ray_session._ray, ray_session.UNREACHABLE_S, victim = lambda: ray, 1.0, sys.argv[1]
address = f"127.0.0.1:{head.getsockname()[1]}" if victim == "head" else "local"
with RaySession(RayResources(ray_address=address)).open(lambda: " after 7 rounds"):
    time.sleep(1)
    print(*(server.poll() for server in servers.values()), flush=True)
    if victim == "flower":
        ray.shutdown()
        servers["raylet"].kill()
    else:
        head.close() if victim == "head" else servers[victim].kill()
    time.sleep(0.8 if victim == "flower" else 20)
servers["gcs_server"].kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes as on Linux")
@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("raylet", "raylet ended"),
        ("gcs_server", "gcs_server ended"),
        ("head", r"the head of the cluster at 127\.0\.0\.1:\d+ is gone: .*refused"),
    ],
)
def test_the_death_of_ray_ends_the_process_with_one_line(victim: str, said: str, tmp_path: Path) -> None:
    command = Command(sys.executable, "-c", DYING, victim, folder=tmp_path, cwd=tmp_path)
    try:
        assert command.wait(60) == EXIT_DEAD, command.stderr
        assert re.fullmatch(rf"fedsel: error: Ray died \({said}; .*\) after 7 rounds\n", command.stderr), command.stderr
        assert command.left() == []
    finally:
        command.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes as on Linux")
def test_after_the_rounds_ray_may_end(tmp_path: Path) -> None:
    command = Command(sys.executable, "-c", DYING, "flower", folder=tmp_path, cwd=tmp_path)
    try:
        assert (command.wait(60), command.stdout, command.stderr) == (0, "None None\n", "")
    finally:
        command.kill()


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
    last = command.stderr.splitlines()[-1]
    assert last.startswith(f"fedsel: error: Ray died ({victim} ended")
    assert last.endswith(f"; {folder} holds {folder.name}: {len(rounds)} rounds")
    assert "Traceback" not in command.stderr
    whole = simulate(load_scenario("smoke", {"rounds": len(rounds), "engine": "vectorized"}))
    assert [(r.num_completed, r.simulated_s) for r in rounds] == [
        (r.num_completed, r.simulated_s) for r in whole.history.rounds
    ]
