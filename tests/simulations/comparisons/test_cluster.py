"""Runs on a Ray cluster: what is refused, calls with a Ray that plays them here, and what comes back from a node."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedsel_flwr.callbacks import Recorder
from fedsel_flwr.callbacks.tracking import Tracking
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.progress import RunsProgress
from fedsel_flwr.simulations import Comparison, compare, engine
from fedsel_flwr.simulations.comparisons import cluster
from fedsel_flwr.simulations.comparisons.cluster import RETRIES, Cluster, pack_run, play_on_node, receive, unpack_run
from fedsel_flwr.simulations.comparisons.parallel_runs import Job, Report
from fedsel_flwr.simulations.comparisons.plan import Plan
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.reproductions import reproducing
from fedsel_flwr.simulations.run_options import RunOptions
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from tests.simulations.cut_off_runs import BREAKING, Stop, content, cut_off, smoke

ray = pytest.importorskip("ray")
NODE = "ab12" * 14
WHERE = RayResources(ray_address="head:6379", num_cpus=2).of_runs("cpu")


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


@pytest.mark.parametrize(("source", "command"), [("ray_address", "compare"), ("RAY_ADDRESS", "run")])
def test_nobody_at_the_address_is_two_sentences_and_nothing_is_written(
    source: str, command: str, free_address: str, here: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setenv("RAY_ADDRESS", free_address)
    options = ["--ray-address", free_address] if command == "compare" else []
    assert re.fullmatch(
        f"fedsel: error: {source} = '{free_address}': no server answers there .*. Start one with 'ray start --head' "
        f"and set {source} to what it prints, or set {source} to local",
        refused(command, "smoke", *options),
    )
    with pytest.raises(RunError, match="no server answers there"):
        reproducing.reproduce(["xia-fig-1a"], here / "figures", ray_address=free_address)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ray_address": "head"}, "ray_address must be HOST:PORT of the cluster's head.* got 'head'"),
        ({"ray_address": "head:6379", "jobs": 0}, "jobs must be a whole number of at least 1, got 0"),
        ({"ray_address": "head:6379", "client_cpus": 2}, "client_cpus is for clients of the engine 'ray'. Set"),
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
    monkeypatch.setattr(Cluster, "play", lambda *args: pytest.fail("distributed"))
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
    monkeypatch.setattr(Cluster, "play", Mock(side_effect=Stop))
    with pytest.raises(Stop):
        compare(smoke(3), ["random"], seeds=2, ray_address="head:6379", device="cuda", folder=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["where"] == {"ray_address": "head:6379"}
    with pytest.raises(ParameterError, match=r"where.ray_address = 'head:6379'. Read that code"):
        Plan.load(tmp_path)  # a cluster may run code here, so another person's plan must be trusted
    again = Plan.load(tmp_path, trust=True)
    assert (again.plays_on_cluster, again.jobs) == (True, None)
    assert again.count_rounds() == "2 runs of 3 rounds on the Ray cluster at head:6379"
    here = Plan.load(tmp_path, where=RayResources(ray_address="local"), device="cpu")
    assert (here.plays_on_cluster, here.jobs) == (False, 1)  # not as many as the cluster has room for
    assert Plan.load(tmp_path, where=RayResources(), device="cpu", jobs=2).jobs == 2


# ---- calls -----------------------------------------------------------------------------------------------------------


class FakeRay:
    """A connection that the caller has opened. A call is played when somebody waits for it, the last one first."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.results: dict[int, Any] = {}
        self.waiting: list[tuple[int, Any]] = []
        self.cancelled: list[int] = []
        self.most, self.lost, self.idle = 0, set[str](), 0
        self.cores, self.reports = 4.0, list[Any]()
        self._numbers = itertools.count()

    def remote(self, function: Any) -> Any:
        def options(**given: Any) -> Any:
            def submit(*args: Any) -> int:
                number = next(self._numbers)
                self.options.append(given)
                self.waiting.append((number, lambda: self._play(function, given["name"], args)))
                self.most = max(self.most, len(self.waiting))
                return number

            return SimpleNamespace(remote=submit)

        return SimpleNamespace(options=options)

    def _play(self, function: Any, name: str, args: tuple[Any, ...]) -> Any:
        if name in self.lost:
            return ray.exceptions.NodeDiedError("The node died\nlong ago.")
        index, call, given, shared, inputs, queue, versions = args
        try:
            return function(index, call, given, shared[0], inputs, queue, versions)
        except Exception as error:
            return ray.exceptions.RayTaskError(name, "traceback", error)

    def wait(self, references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        if self.idle:
            self.idle -= 1
            return [], references
        number, play = self.waiting.pop()
        self.results[number] = play()
        return [number], [one for one in references if one != number]

    def get(self, reference: int) -> Any:
        if isinstance(self.results[reference], Exception):
            raise self.results[reference]
        return self.results[reference]

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": NODE, "NodeManagerHostname": "a", "Alive": True, "Resources": {"CPU": self.cores}}]

    def queue(self, **_: Any) -> Any:
        def batch(count: int) -> list[Any]:
            taken, self.reports = self.reports[:count], self.reports[count:]
            return taken

        actor = SimpleNamespace(put_nowait=SimpleNamespace(remote=self.reports.append))
        return SimpleNamespace(actor=actor, qsize=lambda: len(self.reports), get_nowait_batch=batch)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    # Flower decorates its actors with ray.remote when it is imported: with Ray's own, for all later tests.
    import flwr.simulation.ray_transport.ray_actor  # noqa: F401

    made = FakeRay()
    for name in ("remote", "wait", "get", "nodes"):
        monkeypatch.setattr(ray, name, getattr(made, name))
    monkeypatch.setattr(ray, "put", lambda value: [value])
    monkeypatch.setattr(ray, "cancel", lambda reference, force: made.cancelled.append(reference))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE, get_temp_dir=lambda: None)
    )
    monkeypatch.setattr("ray.util.queue.Queue", made.queue)
    environment = {"working_dir": "place", "env_vars": {"OMP_NUM_THREADS": "2"}}
    monkeypatch.setattr(cluster, "runtime_environment", lambda *_: contextlib.nullcontext(environment))
    return made


def double(given: Any, shared: Any, report: Report) -> Any:
    report(3)
    if isinstance(given, Exception):
        raise given
    return 2 * given + shared


def called(given: list[Any], at_a_time: int | None = None, rounds: Any = (), **options: Any) -> list[tuple[int, Any]]:
    names = [f"call {number}" for number in range(len(given))]
    return list(Cluster(WHERE, at_a_time, **options).map(double, given, names, 100, rounds))


@pytest.mark.parametrize(("at_a_time", "most", "order"), [(None, 4, [3, 2, 1, 0]), (2, 2, [1, 2, 3, 0]), (9, 4, None)])
def test_calls_end_in_any_order_and_no_more_than_allowed_are_in_progress(
    at_a_time: int | None, most: int, order: list[int] | None, connection: FakeRay
) -> None:
    found = called([5, 6, 7, 8], at_a_time)
    assert dict(found) == {0: 110, 1: 112, 2: 114, 3: 116}
    assert connection.most == most
    assert order is None or [index for index, _ in found] == order
    (options,) = [dict(items) for items in {tuple(sorted((k, str(v)) for k, v in one.items() if k != "name"))
                                            for one in connection.options}]  # fmt: skip
    expected = {"num_cpus": "2", "num_gpus": "0.0", "max_retries": str(RETRIES), "scheduling_strategy": "SPREAD"}
    assert options == expected | {"runtime_env": "{'env_vars': {'OMP_NUM_THREADS': '2'}}"}  # the connection is not ours
    assert [one["name"] for one in connection.options] == ["call 0", "call 1", "call 2", "call 3"]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ParameterError("no such data. Give others"), ParameterError, "^no such data. Give others$"),
        (KeyError("speed"), RunError, "^call 1 failed: KeyError: 'speed'"),
    ],
)
def test_an_error_of_a_call_ends_all_calls(error: Exception, kind: Any, said: str, connection: FakeRay) -> None:
    with pytest.raises(kind, match=said):
        called([1, error, 3], 2)
    assert connection.cancelled == [0]


def test_a_call_that_has_lost_its_node_too_often(connection: FakeRay) -> None:
    connection.lost.add("call 0")
    with pytest.raises(RunError) as error:
        called([1, 2])
    assert str(error.value).startswith("call 0 has no result (NodeDiedError: ")
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("Give the run more cores or memory, and resume")


def test_without_a_node_with_room_nothing_waits_for_ever(connection: FakeRay) -> None:
    connection.idle = 2
    with pytest.raises(RunError, match=r"no run fits .* takes 2 cores and 0 GPUs, the machines have \[\(1, 0\)\]"):
        called([1, 2], watch=lambda report: setattr(connection, "cores", 1.0))
    assert connection.cancelled == [0, 1]


def test_the_progress_has_runs_nodes_and_rounds(connection: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunsProgress] = []
    monkeypatch.setattr(cluster, "PERIOD_S", 0.0)
    # Reports of a call in progress, and of one on a node that has died.
    connection.reports += [(0, NODE, 4), (1, "dead", 7)]
    connection.idle = 1
    assert len(called([1, 2, 3], 2, rounds=[10, 10, 10], watch=told.append)) == 3
    assert told[0] == RunsProgress(0, 3, {"a": 1}, 4, 30)
    assert told[-1] == RunsProgress(3, 3, {}, 30, 30)


def test_what_cannot_be_sent_is_refused(connection: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any) -> Any:
        raise TypeError("Could not serialize:\n====\n") from TypeError("cannot pickle '_thread.lock' object")

    monkeypatch.setattr(ray, "put", refuse)
    with pytest.raises(ParameterError) as error:
        called([1])
    assert connection.options == []
    assert str(error.value) == (
        "what the runs share cannot be sent to the cluster (TypeError: cannot pickle '_thread.lock' object). Leave "
        "ray_address out, or use a selector, model, data and objective that pickle supports"
    )


def test_nodes_of_the_same_name_are_told_apart() -> None:
    nodes = [{"NodeID": f"{k}abcdefgh", "NodeManagerHostname": name} for k, name in enumerate(("a", "b", "b"))]
    assert list(cluster._node_names(nodes).values()) == ["a", "b 1abcde", "b 2abcde"]


# ---- what comes back -------------------------------------------------------------------------------------------------


def job(folder: Path, name: str = "bsfl", **keys: Any) -> Job:
    made = Plan.of(smoke(6, **keys), [name], seeds=1, engine="vectorized")
    (one,) = made.selectors
    made_job = Job(one.scenario(made.scenario, 1), one, {"folder": folder, "label": one.label})
    return Job(made_job.scenario, one, {**made_job.place, "code": made_job.code(OwnParts())})


OPTIONS = RunOptions(resume=True)


def test_a_node_returns_the_files_of_the_run(tmp_path: Path) -> None:
    told: list[int] = []
    outcome = play_on_node((job(tmp_path / "study"), {}), OPTIONS, told.append)
    assert (outcome.error, outcome.diagnosis, told) == (None, "", [1, 2, 3, 4, 5, 6])
    unpack_run(tmp_path / "there", outcome.files)
    one = job(tmp_path / "here")
    engine.simulate(one.scenario, **one.place)
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_runs_come_back_to_their_folders(connection: FakeRay, tmp_path: Path) -> None:
    jobs = [job(tmp_path / name, name) for name in ("bsfl", "random")]
    cut_off(jobs[0].scenario, after=4, folder=tmp_path / "bsfl", checkpoint_every=1)
    found = dict(Cluster(WHERE, scenarios=[one.scenario for one in jobs]).play(jobs, OPTIONS))
    for index, one in enumerate(jobs):
        assert repr(found[index].history.rounds) == repr(engine.simulate(one.scenario).history.rounds)
        assert (tmp_path / one.contender.label / "model.safetensors").exists()
    assert [one["name"] for one in connection.options] == ["bsfl, seed 1", "random, seed 1"]


def test_a_tracker_gets_all_rounds_of_a_run_that_has_come_back(tmp_path: Path) -> None:
    sent: list[int] = []
    ended: list[bool] = []

    class Numbers(Recorder):
        def write(self, round: int, values: Mapping[str, float]) -> None:
            sent.append(round)

        def end(self, *, failed: bool) -> None:
            ended.append(failed)

    one = job(tmp_path / "study")
    receive(one, play_on_node((one, {}), OPTIONS, lambda number: None), Tracking.of(Numbers, "smoke", 10))
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
    engine.simulate(whole.scenario, **whole.place)
    names = ("rounds.parquet", "clients.parquet", "model.safetensors", "run.json", "scenario.toml")
    mine, theirs = content(tmp_path / "half"), content(tmp_path / "whole")
    assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}


def test_an_error_of_the_users_code_comes_back_with_the_rounds(here: Path) -> None:
    (here / "mine.py").write_text(BREAKING)
    (here / "broken").touch()
    one = job(here / "study", f"{here / 'mine.py'}:Mine")
    outcome: cluster.Outcome = play_on_node((one, {}), OPTIONS, lambda rounds: None)
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
