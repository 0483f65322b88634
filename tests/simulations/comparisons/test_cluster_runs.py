"""Comparisons on a Ray cluster, without Ray: what is refused, what travels, and what comes back from a node."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import cli
from fedsel_flwr.callbacks import Recorder
from fedsel_flwr.callbacks.tracking import Tracking
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.references import WORKING_DIR
from fedsel_flwr.simulations import Comparison, compare, load_scenario
from fedsel_flwr.simulations.comparisons import cluster_runs
from fedsel_flwr.simulations.comparisons import plan as plans
from fedsel_flwr.simulations.comparisons.cluster_runs import Outcome, pack_run, play_on_node, unpack_run
from fedsel_flwr.simulations.comparisons.cluster_tasks import (
    _node_names,
    check_versions,
    own_modules,
    read_inputs,
    restored,
    write_code,
)
from fedsel_flwr.simulations.comparisons.parallel_runs import Job
from fedsel_flwr.simulations.comparisons.plan import Plan
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.reproductions import reproducing
from fedsel_flwr.simulations.run_identity import versions
from fedsel_flwr.simulations.worlds import data as data_sets
from fedsel_flwr.simulations.worlds.image_files import SENT_INPUTS
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from tests.processes import environment
from tests.simulations.cut_off_runs import Stop, content, cut_off, smoke

OWN = '''
from pathlib import Path

import numpy as np
import torch

from fedsel_flwr.selectors import Random


class Mine(Random):
    """At random; it breaks off if a file says so."""

    def _select(self, available):
        if Path("{folder}/broken").exists() and self.round == 3:
            raise ValueError("broken as asked")
        return super()._select(available)


def net(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(input_shape)), num_classes))


def examples():
    numbers = np.load("examples.npy")
    return (numbers, np.arange(len(numbers)) % 3), (numbers, np.arange(len(numbers)) % 3)
'''


@pytest.fixture
def free_address() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address is one of a cluster."""
    monkeypatch.setattr("fedsel_flwr.simulations.on_flower.ray_resources.try_connect", lambda address: None)


# ---- what is refused, and what is not distributed --------------------------------------------------------------------


def test_nobody_at_the_address_is_two_sentences_and_nothing_is_written(
    free_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "smoke", "--ray-address", free_address, "--jobs", "2"]) == cli.EXIT_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        f"fedsel: error: ray_address = '{free_address}': no server answers there .*. Start one with 'ray start --head' "
        "and set ray_address to what it prints, or set ray_address to local",
        line,
    )
    for start in (
        lambda: compare(smoke(), ["bsfl"], ray_address=free_address, folder=tmp_path / "study"),
        lambda: reproducing.reproduce(["xia-fig-1a"], tmp_path / "figures", ray_address=free_address),
    ):
        with pytest.raises(RunError, match="no server answers there"):
            start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ray_address": "head"}, "ray_address must be HOST:PORT of the cluster's head.* got 'head'"),
        ({"ray_address": "ray://head:10001"}, "ray_address must be HOST:PORT"),
        ({"ray_address": "head:6379", "jobs": 0}, "jobs must be a whole number of at least 1, got 0"),
        ({"ray_address": "head:6379", "client_cpus": 2}, "client_cpus is for clients of the engine 'ray'. Set"),
        ({"num_cpus": 2}, "num_cpus is for Ray, but the vectorized engine runs in one process"),
        ({"ray_address": "local", "num_gpus": 2}, "num_gpus is for Ray"),
    ],
)
def test_what_cannot_be_distributed_is_refused(
    given: dict[str, Any], said: str, reachable: None, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=said):
        compare(smoke(), ["bsfl", "random"], folder=tmp_path / "study", **given)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(("variable", "given"), [(True, {}), (False, {"ray_address": "local"}), (True, {"jobs": 1})])
def test_only_the_option_distributes(
    variable: bool, given: dict[str, Any], free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable RAY_ADDRESS is for Flower's engine; nobody answers there, and nobody is asked."""
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", free_address)
    monkeypatch.setattr(plans, "run_on_cluster", lambda *args: pytest.fail("distributed"))
    assert [len(run.history.rounds) for run in compare(smoke(2), ["random"], seeds=2, **given).runs] == [2, 2]


def test_a_run_has_the_cores_and_gpus_of_the_options() -> None:
    where = RayResources(ray_address="head:6379", num_cpus=4)
    assert where.of_runs("cpu").client_resources()["num_cpus"] == 4
    assert [where.of_runs(device).gpus_per_client() for device in ("cpu", "cuda")] == [0, 1]
    two = RayResources(ray_address="head:6379", num_gpus=2).of_runs("cuda")
    assert (two.client_cpus, two.gpus_per_client()) == (1, 2)
    with pytest.raises(RunError, match=r"no run fits on any machine .* 4 cores and 0 GPUs.*Lower num_cpus or num_gpus"):
        where.of_runs("cpu").check_nodes([{"CPU": 2.0}, {"CPU": 3.0}], "run")
    where.of_runs("cpu").check_nodes([{"CPU": 2.0}, {"CPU": 4.0}], "run")


def test_a_plan_goes_on_with_other_machines(reachable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: Any) -> Any:
        raise Stop
        yield

    monkeypatch.setattr(plans, "run_on_cluster", nothing)
    with pytest.raises(Stop):
        compare(smoke(3), ["random"], seeds=2, ray_address="head:6379", device="cuda", folder=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["where"] == {"ray_address": "head:6379"}
    with pytest.raises(ParameterError, match=r"where.ray_address = 'head:6379'. Read that code"):
        Plan.load(tmp_path)  # a cluster may run code here, so another person's plan must be trusted
    again = Plan.load(tmp_path, trust=True)
    assert (again.form.plays_on_cluster, again.form.jobs) == (True, None)
    assert again.count_rounds() == "2 runs of 3 rounds on the Ray cluster at head:6379"
    here = Plan.load(tmp_path, where=RayResources(ray_address="local"), device="cpu")
    assert (here.form.plays_on_cluster, here.form.jobs) == (False, 1)  # not as many as the cluster has room for
    assert Plan.load(tmp_path, where=RayResources(), device="cpu", jobs=2).form.jobs == 2


# ---- what travels ----------------------------------------------------------------------------------------------------

# A process of a node: it has the packages that are installed, and the folder that Ray has sent.
ARRIVED = """
import importlib.metadata, json, sys
import fedsel_flwr
from fedsel_flwr.references import load_reference
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.on_flower.building import make_availability
from fedsel_flwr.simulations.worlds.availability import devices_of

found = load_reference(sys.argv[1], "selector")
scenario = load_scenario("phones", json.loads(sys.argv[2]))
print(json.dumps({
    "package": fedsel_flwr.__file__, "version": importlib.metadata.version("fedsel-flwr"),
    "selector": [found.__module__, sys.modules[found.__module__].__file__],
    "devices": devices_of(scenario)[0].tolist(), "trace": make_availability(scenario)("3", 2, 0.0),
}))
"""


def test_code_and_small_files_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has neither the user's file nor the CSV files, under the same relative paths."""
    home, place, node = tmp_path / "home", tmp_path / "place", tmp_path / "node"
    for folder in (home, place, node):
        folder.mkdir()
    (home / "my.own-1.py").write_text(OWN)
    (home / "d.csv").write_text("seconds_per_example,download_bytes_per_s,upload_bytes_per_s\n0.5,7,8\n")
    (home / "t.csv").write_text("round,client,state\n2,3,down\n")
    monkeypatch.chdir(home)
    keys = {"system.devices": "d.csv", "availability.kind": "trace", "availability.trace": "t.csv"}
    small = {"num_clients": 5, "clients_per_round": 2, "partition.kind": "iid"}
    scenario = load_scenario("phones", small | keys | {"selector": "./my.own-1.py:Mine"})
    from fedsel_flwr.references import load_reference

    here = load_reference("./my.own-1.py:Mine", "selector")
    write_code(place, [scenario, scenario])
    for path in home.iterdir():
        path.unlink()
    env = environment() | {"PYTHONPATH": str(place), WORKING_DIR: str(home)}
    argv = [sys.executable, "-c", ARRIVED, "./my.own-1.py:Mine", json.dumps(small | keys)]
    done = subprocess.run(argv, cwd=node, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["package"]) == place / "fedsel_flwr" / "__init__.py"
    assert said["version"] == versions()["fedsel-flwr"]
    assert said["selector"] == [here.__module__, str(place / f"{here.__module__}.py")]  # pickles by name work too
    assert (said["devices"], said["trace"]) == ([0.5, 7.0, 8.0], False)


def test_own_modules_are_those_that_are_not_installed() -> None:
    found = own_modules()
    assert found["tests"] == Path(__file__).resolve().parents[2]
    assert not found.keys() & {"numpy", "ray", "json", "pytest", "fedsel_flwr", "__main__"}


def test_a_data_set_is_read_once_and_needs_no_folder_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels keep their order in memory, on which the rounding of convolutions depends."""
    generator, reads = np.random.default_rng(0), []
    halves = [
        (generator.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8).transpose(0, 3, 1, 2), np.arange(200) % 10)
        for _ in range(2)
    ]

    def read(name: str, folder: Path) -> Any:
        reads.append((name, folder))
        return tuple(halves)

    for module in ("comparisons.cluster_tasks", "worlds.data"):
        monkeypatch.setattr(f"fedsel_flwr.simulations.{module}.read_image_set", read)
    keys = {"data.dataset": "cifar-10", "data.data_dir": str(tmp_path), "model.name": "cnn"}
    scenarios = [load_scenario("smoke", keys | {"seed": seed}) for seed in (1, 2)]
    mine = data_sets.load_dataset("cifar-10", data_dir=tmp_path, seed=1)
    reads.clear()
    inputs = read_inputs(scenarios, OwnParts())
    assert (list(inputs), reads) == (["cifar-10"], [("cifar-10", tmp_path)])
    assert all(pixels.flags.c_contiguous for pixels, _, _ in inputs["cifar-10"])  # else Ray could not share them
    monkeypatch.setattr(SENT_INPUTS, "_sent", {"cifar-10": lambda: restored("cifar-10", inputs["cifar-10"])})
    theirs = data_sets.load_dataset("cifar-10", data_dir="/no/such/folder", seed=1)
    assert theirs.train.inputs.strides == mine.train.inputs.strides != np.ascontiguousarray(mine.train.inputs).strides
    np.testing.assert_array_equal(theirs.train.inputs, mine.train.inputs)
    assert len(reads) == 1


def test_own_data_by_reference_are_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.py").write_text(OWN + "\n\ndef seeded(seed):\n    return examples()\n")
    np.save(tmp_path / "examples.npy", np.ones((9, 2)))
    made, drawn = (load_scenario("smoke", {"data.dataset": f"./data.py:{name}"}) for name in ("examples", "seeded"))
    inputs = read_inputs([made, drawn], OwnParts())
    assert list(inputs) == [made.data.dataset]  # a function of the seed travels as code
    np.testing.assert_array_equal(inputs[made.data.dataset].train[0], np.ones((9, 2)))


def test_other_versions_on_a_node_are_refused() -> None:
    check_versions(versions())
    with pytest.raises(RunError, match=r"has torch \S+ instead of 1.0, so .*Install the same versions"):
        check_versions(versions() | {"torch": "1.0"})


def test_nodes_of_the_same_name_are_told_apart() -> None:
    nodes = [{"NodeID": f"{k}abcdefgh", "NodeManagerHostname": name} for k, name in enumerate(("a", "b", "b"))]
    assert list(_node_names(nodes).values()) == ["a", "b 1abcde", "b 2abcde"]


# ---- what comes back -------------------------------------------------------------------------------------------------


def job(folder: Path, name: str = "bsfl", **keys: Any) -> Job:
    """A run as a plan makes it."""
    made = Plan.of(smoke(6, **keys), [name], seeds=1, engine="vectorized")
    (one,) = made.contenders
    label = one.label
    made_job = Job(one.scenario(made.form.scenario, 1), one, {"folder": folder, "label": label})
    return Job(made_job.scenario, one, {**made_job.place, "code": made_job.code(OwnParts())})


OPTIONS: dict[str, Any] = {"resume": True, "replay": False, "device": "cpu"}


def test_a_node_returns_the_files_of_the_run(tmp_path: Path) -> None:
    told: list[int] = []
    outcome = play_on_node((job(tmp_path / "study"), {}), OPTIONS, told.append)
    assert (outcome.error, outcome.diagnosis, told) == (None, "", [1, 2, 3, 4, 5, 6])
    unpack_run(tmp_path / "there", outcome.files)
    one = job(tmp_path / "here")
    plans.simulate(one.scenario, **one.place)
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_a_tracker_gets_all_rounds_of_a_run_that_has_come_back(tmp_path: Path) -> None:
    sent: list[int] = []
    ended: list[bool] = []

    class Numbers(Recorder):
        def write(self, round: int, values: Mapping[str, float]) -> None:
            sent.append(round)

        def end(self, *, failed: bool) -> None:
            ended.append(failed)

    one = job(tmp_path / "study")
    outcome = play_on_node((one, {}), OPTIONS, lambda number: None)
    cluster_runs._receive(one, outcome, Tracking.of(Numbers, "smoke", 10))
    assert (sent, ended) == ([1, 2, 3, 4, 5, 6], [False])


def test_an_interrupted_run_goes_on_on_a_node(tmp_path: Path) -> None:
    cut_off(smoke(6, selector="bsfl", seed=1), after=4, folder=tmp_path / "half", checkpoint_every=1)
    one, told = job(tmp_path / "half"), list[int]()
    sent = pack_run(tmp_path / "half")
    assert {"journal.jsonl", "run.json"} < sent.keys()
    outcome = play_on_node((one, sent), OPTIONS, told.append)
    assert (outcome.error, told) == (None, [4, 5, 6])  # the last round is evaluated again
    unpack_run(tmp_path / "half", outcome.files)
    assert not (tmp_path / "half" / "journal.jsonl").exists()
    whole = job(tmp_path / "whole")
    plans.simulate(whole.scenario, **whole.place)
    names = ("rounds.parquet", "clients.parquet", "model.safetensors", "run.json", "scenario.toml")
    mine, theirs = content(tmp_path / "half"), content(tmp_path / "whole")
    assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}


def test_an_error_of_the_users_code_comes_back_with_the_rounds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace("{folder}", str(tmp_path)))
    (tmp_path / "broken").touch()
    one = job(tmp_path / "study", f"{tmp_path / 'mine.py'}:Mine")
    outcome: Outcome = play_on_node((one, {}), OPTIONS, lambda rounds: None)
    assert isinstance(outcome.error, RunError)
    assert "the run of 'Mine' on seed 1 failed: ValueError: broken as asked (mine.py, line" in str(outcome.error)
    assert "ValueError: broken as asked" in outcome.log
    assert "model.safetensors" not in outcome.files
    assert outcome.files["journal.jsonl"].count(b"\n") == 2


def test_other_files_of_a_folder_stay(tmp_path: Path) -> None:
    """The only run of a comparison is in the comparison's folder."""
    for name in ("plan.json", "notes.parquet", "journal.jsonl", "model-after-round-3.safetensors", "flower.log"):
        (tmp_path / name).write_bytes(b"before")
    assert pack_run(tmp_path).keys() == {"notes.parquet", "journal.jsonl", "model-after-round-3.safetensors"}
    unpack_run(tmp_path, {"model.safetensors": b"m", "rounds.parquet": b"r"})
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.json", "notes.parquet", "flower.log", "model.safetensors", "rounds.parquet",
    }  # fmt: skip


def test_finished_runs_are_only_read(reachable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not needed, although the plan is one for a cluster."""
    monkeypatch.setattr(Comparison, "report", lambda self, folder: None)
    keys: dict[str, Any] = {"seeds": 2, "folder": tmp_path, "quiet": True}
    first = compare(smoke(3), ["bsfl", "random"], **keys)
    monkeypatch.setitem(sys.modules, "ray", None)
    again = compare(smoke(3), ["bsfl", "random"], resume=True, ray_address="head:6379", **keys)
    mine, theirs = ([(run.name, repr(run.history)) for run in one.runs] for one in (first, again))
    assert mine == theirs
    assert len(mine) == 4


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/run.json", "checkpoints/../../x", "evil.py", "", "checkpoints", "run.json\0"]
)
def test_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    """The names come from a task on another machine."""
    place = tmp_path / "a" / "run"
    place.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="which is not a file of a run"):
        unpack_run(place, {"run.json": b"{}", name: b"x"})
    assert sorted(tmp_path.rglob("*")) == before
    unpack_run(place, {"run.json": b"{}", "checkpoints/round-000001.safetensors": b"x", "regret.parquet": b"x"})
    assert len([path for path in place.rglob("*") if path.is_file()]) == 3
