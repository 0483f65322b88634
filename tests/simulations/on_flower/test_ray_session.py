"""Ray for one run: joining a cluster, Ray that dies or is to be silent, and the world that actors take over."""

from __future__ import annotations

import logging
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.common import Context, RecordDict
from ray import cloudpickle

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.simulations.engine import SameScenario, simulate
from fedsel_flwr.simulations.on_flower import ray_session
from fedsel_flwr.simulations.on_flower.app import ScenarioApp, client_of
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import EXIT_DEAD, RaySession, SharedWorld, share_world
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds import world
from fedsel_flwr.simulations.worlds.world import World, WorldCache, world_of
from tests.processes import ROOT, Command
from tests.simulations.cut_off_runs import smoke

SMOKE = load_scenario("smoke")


class FakeRay:
    """Ray as far as joining a cluster needs it; it keeps what it is given as bytes, as Ray does."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.connected, self.job, self.shutdowns = False, "01000000", 0
        self.inits: list[dict[str, Any]] = []
        self.machines = [{"CPU": 4.0}]
        self.objects: list[bytes] = []

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        if self.fault is not None:
            raise self.fault
        self.connected = True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": machine} for machine in self.machines]

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.connected = False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: "node", get_job_id=lambda: self.job, get_accelerator_ids=lambda: {"GPU": []}
        )

    def put(self, value: Any) -> int:
        self.objects.append(cloudpickle.dumps(value))
        return len(self.objects) - 1

    def get(self, reference: int) -> Any:
        return pickle.loads(self.objects[reference])


# ---- joining -------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Flower's simulation was started with."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("flwr.simulation.run_simulation", lambda **kwargs: calls.append(kwargs))
    return calls


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_session, "_ray", lambda: fake)
    return fake


@pytest.fixture
def address() -> Iterator[str]:
    """Where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_on_a_cluster_flower_gets_no_number_of_cores(
    asked: list[dict[str, Any]], ray: FakeRay, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray refuses num_cpus beside an address; the actors are as many as the cluster has cores."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match="ended after 0 of 3 rounds"):  # Flower was not really started
        simulate(SMOKE)
    assert "init_args" not in asked[0]["backend_config"]
    assert [(options["address"], "num_cpus" in options) for options in ray.inits] == [(address, False)]
    assert ray.shutdowns == 1  # Flower did not get as far as leaving it


@pytest.mark.parametrize("given", ["", " local "])
def test_without_a_cluster_ray_is_started_here(
    given: str, asked: list[dict[str, Any]], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(RunError, match="ended after 0 of 3 rounds"):
        simulate(SMOKE, num_cpus=3)
    (init,) = ray.inits
    assert (init["num_cpus"], init["address"]) == (3, "local")  # not one that somebody else started here
    assert "num_gpus" not in init
    assert "runtime_env" not in init  # else Ray starts every worker twice
    assert (len(asked), ray.shutdowns) == (1, 1)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("10.0.0.1:6379", {"num_cpus": 3}, "num_cpus = 3 has no effect on the cluster at '10.0.0.1:6379'"),
        ("10.0.0.1", {}, "RAY_ADDRESS must be HOST:PORT .*got '10.0.0.1'"),
        ("10.0.0.1:many", {}, "RAY_ADDRESS must be HOST:PORT .*got '10.0.0.1:many'"),
        ("ray://10.0.0.1:10001", {}, "RAY_ADDRESS must be HOST:PORT .*got 'ray://10.0.0.1:10001'"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(
    given: str, options: dict[str, Any], said: str, asked: Any, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ParameterError, match=said):
        simulate(SMOKE, **options)
    assert (asked, ray.inits) == ([], [])
    assert len(simulate(SMOKE, engine="vectorized").history.rounds) == 3  # needs no cluster


def test_what_ray_says_is_passed_on_in_one_line(ray: FakeRay) -> None:
    ray.fault = ConnectionError("Could not find any running Ray instance.\nPlease start one.")
    said = "ray_address = 'auto': Could not find any running Ray instance. Please start one."
    with pytest.raises(RunError) as error, RaySession(RayResources(ray_address="auto")).open():
        pytest.fail("there is no cluster")
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_connection_of_the_callers_is_used_and_kept(ray: FakeRay) -> None:
    ray.connected = True
    with RaySession(RayResources(ray_address="10.0.0.1:6379")).open():
        pass
    assert (ray.inits, ray.shutdowns, ray.connected) == ([], 0, True)


def test_what_is_not_ray_is_one_line(
    asked: list[dict[str, Any]], ray: FakeRay, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait for ever."""
    monkeypatch.setattr(ray_session, "JOIN_LIMIT_S", 0.2)
    over = threading.Event()
    ray.init = lambda **options: over.wait(30)  # type: ignore[assignment,method-assign]
    with pytest.raises(RunError) as error:
        simulate(SMOKE, ray_address=address)
    over.set()
    assert str(error.value).startswith(f"ray_address = '{address}': no Ray answers there within 0.2 s. Start")
    assert asked == []


def test_clients_get_what_was_asked_for_if_there_is_room(
    asked: list[dict[str, Any]], ray: FakeRay, address: str
) -> None:
    with pytest.raises(RunError, match=r"no client fits on any machine .* 1 cores and 0.5 GPUs, .*\[\(4, 0\)\]"):
        simulate(SMOKE, ray_address=address, client_gpus=0.5)
    assert (asked, ray.shutdowns) == ([], 1)
    ray.machines = [{"CPU": 4.0, "GPU": 1.0}]
    with pytest.raises(RunError, match="ended after 0 of 3 rounds"):
        simulate(SMOKE, ray_address=address, client_gpus=0.5, client_cpus=2)
    resources = asked[0]["backend_config"]["client_resources"]
    assert resources == {"num_cpus": 2, "num_gpus": 0.5, "max_restarts": -1, "max_task_retries": 1}


# ---- Ray that dies, or is to be silent -----------------------------------------------------------------------------

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
ray_session._ray, ray_session.UNREACHABLE_S, victim = lambda: ray, 0.5, sys.argv[1]
address = f"127.0.0.1:{head.getsockname()[1]}" if victim == "head" else "local"
with RaySession(RayResources(ray_address=address)).open(lambda: " after 7 rounds"):
    time.sleep(0.3)
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
        pytest.param("head", r"the head of the cluster at 127\.0\.0\.1:\d+ is gone: .*refused", marks=pytest.mark.slow),
        ("flower", ""),  # after the rounds Ray may end
    ],
)
def test_the_death_of_ray_ends_the_process_with_one_line(victim: str, said: str, tmp_path: Path) -> None:
    with Command(sys.executable, "-c", DYING, victim, folder=tmp_path, cwd=tmp_path) as command:
        assert command.wait(60) == (EXIT_DEAD if said else 0), command.stderr
        expected = rf"fedsel: error: Ray died \({said}; .*\) after 7 rounds\n" if said else ""
        assert re.fullmatch(expected, command.stderr), command.stderr
        assert said or command.stdout == "None None\n"
        assert command.left() == []


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_keeps_flowers_log_out(
    quiet: bool, without_ray: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("flwr", "fedsel_flwr"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    simulate(SMOKE, quiet=quiet)
    assert ("[ROUND 2]" in caplog.text) == (not quiet)
    assert not quiet or caplog.text == ""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_quiet_on_ray_leaves_no_line(tmp_path: Path) -> None:
    program = (
        "from fedsel_flwr.simulations import load_scenario, simulate; simulate(load_scenario('smoke'), quiet=True)"
    )
    with Command(sys.executable, "-c", program, folder=tmp_path, cwd=ROOT) as command:
        assert command.wait(150) == 0, command.stderr
        assert (command.stdout, command.stderr) == ("", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_ray_that_dies_is_one_line_and_every_round_is_kept(victim: str, tmp_path: Path) -> None:
    argv = ("run", "smoke", "--rounds", "3000", "--runs-dir", str(tmp_path / "runs"))
    with Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=tmp_path / "said", cwd=ROOT) as command:
        command.wait_for("round    1/3000", 150)
        time.sleep(1)
        for child in psutil.Process(command.pid).children():
            if child.name() == victim:
                child.kill()
        assert command.wait(60) == 2, command.stderr
        assert command.left() == []
    (folder,) = (tmp_path / "runs").iterdir()
    rounds = read_history(folder).rounds
    last = command.stderr.splitlines()[-1]
    assert last.startswith(f"fedsel: error: Ray died ({victim} ended")
    assert last.endswith(f"; {folder} holds {folder.name}: {len(rounds)} rounds")
    assert "Traceback" not in command.stderr
    assert [(r.num_completed, r.simulated_s) for r in rounds] == [
        (r.num_completed, r.simulated_s) for r in simulate(smoke(len(rounds))).history.rounds
    ]


# ---- the world that actors take over -------------------------------------------------------------------------------

XIA = load_scenario("smoke", {"data.local_test_fraction": 0.2, "clients.energy_score_low": 0.5})
PHONES = load_scenario("smoke", {"system.kind": "phones"})


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A connection to Ray, and a process that has not built anything."""
    fake, kept = FakeRay(), WorldCache()
    fake.connected = True
    monkeypatch.setitem(sys.modules, "ray", fake)
    ray_session._put_world.cache_clear()
    for module in (ray_session, world):
        monkeypatch.setattr(module, "WORLD_CACHE", kept)
    return fake


def context(partition_id: int) -> Context:
    node_config = {"partition-id": partition_id}
    return Context(run_id=1, node_id=9, node_config=node_config, state=RecordDict(), run_config={})  # type: ignore[arg-type]


@pytest.mark.parametrize("scenario", [XIA, PHONES], ids=["xia", "phones"])
def test_an_actor_takes_the_servers_world_and_its_clients_do_the_same(
    scenario: Scenario, connected: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = world_of(scenario)
    config = {"round": 3, "needs": "loss,gradient,local_accuracy"}
    expected = []
    for client in (built.client(k) for k in (0, 7)):
        trained = client.fit(built.initial_arrays(), dict(config))
        expected.append((client.get_properties({}), trained, client.evaluate(built.initial_arrays(), {})))
    sent = cloudpickle.dumps(ScenarioApp(SameScenario(scenario)))
    kept = WorldCache()  # of another process, in which nothing was built
    for module in (ray_session, world):
        monkeypatch.setattr(module, "WORLD_CACHE", kept)
    monkeypatch.setattr(World, "__init__", lambda *_: pytest.fail("the actor built a world of its own"))
    app = pickle.loads(sent)
    app._apps = {"legacy": lambda message, context: message}
    assert app("hello", context(0)) == "hello"  # the world is taken over before the answer
    for k, (properties, (arrays, count, metrics), evaluation) in zip((0, 7), expected, strict=True):
        client = client_of(scenario, context(k))
        assert client.get_properties({}) == properties
        ours, our_count, our_metrics = client.fit(built.initial_arrays(), dict(config))
        assert [a.tobytes() for a in ours] == [a.tobytes() for a in arrays]
        assert (our_count, our_metrics) == (count, metrics)
        assert client.evaluate(built.initial_arrays(), {}) == evaluation


def test_a_world_is_put_away_once_a_connection_however_many_messages_there_are(connected: FakeRay) -> None:
    world_of(XIA)
    assert [share_world() for _ in range(5)] == [SharedWorld(XIA.model_dump_json(), 0)] * 5
    connected.job = "02000000"  # Ray was started anew: the old reference is nothing to the new one
    assert share_world() == share_world() == SharedWorld(XIA.model_dump_json(), 1)
    world_of(PHONES)
    assert share_world() == SharedWorld(PHONES.model_dump_json(), 2)
    assert len(connected.objects) == 3


def test_without_ray_or_a_world_nothing_is_offered(connected: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_world() is None  # no world yet
    world_of(XIA)
    connected.connected = False
    assert share_world() is None
    monkeypatch.delitem(sys.modules, "ray")
    assert share_world() is None
    assert pickle.loads(cloudpickle.dumps(ScenarioApp(SameScenario(XIA))))._shared is None
    offered = ScenarioApp(SameScenario(XIA), SharedWorld("a", 5))  # passes the same offer on
    assert pickle.loads(cloudpickle.dumps(offered))._shared == SharedWorld("a", 5)
    assert connected.objects == []


def test_a_world_that_cannot_be_pickled_is_built_by_each_actor(
    connected: FakeRay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(World):
        def for_clients(self) -> World:
            raise TypeError("cannot pickle 'generator' object")

    monkeypatch.setattr(world, "World", Stubborn)
    world_of(XIA)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        assert [share_world() for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "each actor builds its own copy of the data, which cannot be pickled: cannot pickle 'generator' object"
    ]


def test_clients_are_not_given_what_no_client_sees() -> None:
    whole = World(XIA)
    part = whole.for_clients()
    assert len(part.dataset.validation) == len(part.dataset.test) == 0
    assert part.dataset.train is whole.dataset.train  # no copy
    assert len(whole.dataset.test) > 0
    assert len(whole.dataset.validation) > 0
    np.testing.assert_equal(part.examples(3), whole.examples(3))
