"""RAY_ADDRESS: which cluster is joined, and what is said before anything starts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fedsel_flwr import cli
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower import ray_session
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, cluster_address
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.scenario_files import load_scenario

SMOKE = load_scenario("smoke")


class FakeRay:
    """Ray as far as joining a cluster needs it."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault, self.connected = fault, False
        self.inits: list[dict[str, Any]] = []
        self.machines = [{"CPU": 4.0}]
        self.shutdowns = 0

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
def port() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def session(where: RayResources) -> RaySession:
    return RaySession(where)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_on_a_cluster_flower_gets_no_number_of_cores(
    asked: list[dict[str, Any]], ray: FakeRay, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray refuses num_cpus beside an address; the actors are as many as the cluster has cores."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(RunError, match="ended after 0 of 3 rounds"):  # Flower was not really started
        simulate(SMOKE)
    assert "init_args" not in asked[0]["backend_config"]
    assert [(options["address"], "num_cpus" in options) for options in ray.inits] == [(f"127.0.0.1:{port}", False)]
    assert ray.shutdowns == 1  # Flower did not get as far as leaving it


@pytest.mark.parametrize("address", ["", "local"])
def test_without_a_cluster_ray_is_started_as_before(
    address: str, asked: list[dict[str, Any]], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match="ended after 0 of 3 rounds"):
        simulate(SMOKE, num_cpus=3)
    (init,) = ray.inits
    assert (init["num_cpus"], init["address"]) == (3, "local")  # not one that somebody else started here
    assert "num_gpus" not in init
    assert "runtime_env" not in init  # else Ray starts every worker twice
    assert (len(asked), ray.shutdowns) == (1, 1)


def test_a_number_of_cores_is_refused_on_a_cluster(
    asked: list[dict[str, Any]], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    said = r"num_cpus = 3 .* cluster at RAY_ADDRESS = '10.0.0.1:6379' "
    with pytest.raises(ParameterError, match=said):
        simulate(SMOKE, num_cpus=3)
    assert (asked, ray.inits) == ([], [])


def test_nobody_at_the_address_is_one_line_and_quick(
    asked: list[dict[str, Any]], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for minutes."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        RunError, match=f"RAY_ADDRESS = '{address}': no server answers there .*ray start --head"
    ) as error:
        simulate(SMOKE)
    assert "\n" not in str(error.value)
    assert (asked, ray.inits) == ([], [])


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:many", "ray://10.0.0.1:10001"])
def test_what_is_no_address_is_refused(address: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ParameterError, match=f"RAY_ADDRESS must be HOST:PORT of the cluster's head, .*got '{address}'"):
        simulate(SMOKE)
    assert ray.inits == []


def test_what_ray_says_is_passed_on_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(ConnectionError("Could not find any running Ray instance.\nPlease start one."))
    monkeypatch.setattr(ray_session, "_ray", lambda: fake)
    said = "ray_address = 'auto': Could not find any running Ray instance. Please start one."
    with pytest.raises(RunError) as error, session(RayResources(ray_address="auto")).open():
        pytest.fail("there is no cluster")
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_connection_of_the_callers_is_used_and_kept(ray: FakeRay) -> None:
    ray.connected = True
    with session(RayResources(ray_address="10.0.0.1:6379")).open():
        pass
    assert (ray.inits, ray.shutdowns, ray.connected) == ([], 0, True)


def test_the_command_says_it_in_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cli.main(["run", "smoke", "--runs-dir", str(tmp_path)]) == cli.EXIT_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedsel: error: RAY_ADDRESS = '{address}': no server answers there")
    assert list(tmp_path.iterdir()) == []  # said before anything was written


def test_the_vectorized_engine_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1")
    assert len(simulate(SMOKE, engine="vectorized").history.rounds) == 3


def test_the_address_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_address() is None
    monkeypatch.setenv("RAY_ADDRESS", " 10.0.0.1:6379 ")
    assert cluster_address() == "10.0.0.1:6379"


def test_what_is_not_ray_is_one_line(
    asked: list[dict[str, Any]], ray: FakeRay, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait for ever."""
    monkeypatch.setattr(ray_session, "JOIN_LIMIT_S", 0.2)
    over = threading.Event()
    ray.init = lambda **options: over.wait(30)  # type: ignore[assignment,method-assign]
    with pytest.raises(RunError) as error:
        simulate(SMOKE, ray_address=f"127.0.0.1:{port}")
    over.set()
    assert str(error.value).startswith(f"ray_address = '127.0.0.1:{port}': no Ray answers there within 0.2 s. Start")
    assert asked == []


# ---- room for clients ----------------------------------------------------------------------------------------------


def test_a_cluster_without_room_is_refused_before_flower_starts(
    asked: list[dict[str, Any]], ray: FakeRay, port: int
) -> None:
    with pytest.raises(RunError, match=r"no client fits on any machine .* 1 cores and 0.5 GPUs, .*\[\(4, 0\)\]"):
        simulate(SMOKE, ray_address=f"127.0.0.1:{port}", client_gpus=0.5)
    assert (asked, ray.shutdowns) == ([], 1)


def test_clients_get_what_was_asked_for(asked: list[dict[str, Any]], ray: FakeRay, port: int) -> None:
    ray.machines = [{"CPU": 4.0, "GPU": 1.0}]
    with pytest.raises(RunError, match="ended after 0 of 3 rounds"):
        simulate(SMOKE, ray_address=f"127.0.0.1:{port}", client_gpus=0.5, client_cpus=2)
    resources = asked[0]["backend_config"]["client_resources"]
    assert resources == {"num_cpus": 2, "num_gpus": 0.5, "max_restarts": -1, "max_task_retries": 1}
