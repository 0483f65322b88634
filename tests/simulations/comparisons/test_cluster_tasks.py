"""Calls on a Ray cluster, with a Ray that plays them in this process: their number, their errors, their end."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.progress import RunsProgress
from fedsel_flwr.simulations.comparisons import cluster_tasks
from fedsel_flwr.simulations.comparisons.cluster_tasks import RETRIES, ClusterTasks, Report
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources

ray = pytest.importorskip("ray")
NODE = "ab12" * 14
WHERE = RayResources(ray_address="head:6379", num_cpus=2).of_runs("cpu")


class Cluster:
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
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    for name in ("remote", "wait", "get", "nodes"):
        monkeypatch.setattr(ray, name, getattr(made, name))
    monkeypatch.setattr(ray, "put", lambda value: [value])
    monkeypatch.setattr(ray, "cancel", lambda reference, force: made.cancelled.append(reference))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE))
    monkeypatch.setattr("ray.util.queue.Queue", made.queue)

    @contextlib.contextmanager
    def nothing(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"working_dir": "place", "env_vars": {"OMP_NUM_THREADS": "2"}}

    monkeypatch.setattr(cluster_tasks, "runtime_environment", nothing)
    return made


def double(given: Any, shared: Any, report: Report) -> Any:
    report(3)
    if isinstance(given, Exception):
        raise given
    return 2 * given + shared


def tasks(given: list[Any], at_a_time: int | None = None, **options: Any) -> ClusterTasks:
    names = [f"call {number}" for number in range(len(given))]
    return ClusterTasks(double, given, WHERE, at_a_time, shared=100, names=names, **options)


@pytest.mark.parametrize(("at_a_time", "most", "order"), [(None, 4, [3, 2, 1, 0]), (2, 2, [1, 2, 3, 0]), (9, 4, None)])
def test_calls_end_in_any_order_and_no_more_than_allowed_are_in_progress(
    at_a_time: int | None, most: int, order: list[int] | None, cluster: Cluster
) -> None:
    with tasks([5, 6, 7, 8], at_a_time) as ended:
        found = list(ended)
    assert dict(found) == {0: 110, 1: 112, 2: 114, 3: 116}
    assert cluster.most == most
    assert order is None or [index for index, _ in found] == order
    (options,) = [dict(items) for items in {tuple(sorted((k, str(v)) for k, v in one.items() if k != "name"))
                                            for one in cluster.options}]  # fmt: skip
    expected = {"num_cpus": "2", "num_gpus": "0.0", "max_retries": str(RETRIES), "scheduling_strategy": "SPREAD"}
    assert options == expected | {"runtime_env": "{'env_vars': {'OMP_NUM_THREADS': '2'}}"}  # the connection is not ours
    assert [one["name"] for one in cluster.options] == ["call 0", "call 1", "call 2", "call 3"]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ParameterError("no such data. Give others"), ParameterError, "^no such data. Give others$"),
        (KeyError("speed"), RunError, "^call 1 failed: KeyError: 'speed'"),
    ],
)
def test_an_error_of_a_call_ends_all_calls(error: Exception, kind: Any, said: str, cluster: Cluster) -> None:
    with pytest.raises(kind, match=said), tasks([1, error, 3], 2) as ended:
        list(ended)
    assert cluster.cancelled == [0]


def test_a_call_that_has_lost_its_node_too_often(cluster: Cluster) -> None:
    cluster.lost.add("call 0")
    with pytest.raises(RunError) as error, tasks([1, 2]) as ended:
        list(ended)
    assert str(error.value).startswith("call 0 has no result (NodeDiedError: ")
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("Give the run more cores or memory, and resume")


def test_without_a_node_with_room_nothing_waits_for_ever(cluster: Cluster) -> None:
    def lose_cores(report: RunsProgress) -> None:
        cluster.cores = 1.0

    cluster.idle = 2
    said = r"no run fits .* takes 2 cores and 0 GPUs, the machines have \[\(1, 0\)\]"
    with pytest.raises(RunError, match=said), tasks([1, 2], watch=lose_cores) as ended:
        list(ended)
    assert cluster.cancelled == [0, 1]


def test_the_progress_has_runs_nodes_and_rounds(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunsProgress] = []
    monkeypatch.setattr(cluster_tasks, "PERIOD_S", 0.0)
    with tasks([1, 2, 3], 2, rounds=[10, 10, 10], watch=told.append) as ended:
        # Reports of a call in progress, and of one on a node that has died.
        cluster.reports += [(0, NODE, 4), (1, "dead", 7)]
        cluster.idle = 1
        assert len(list(ended)) == 3
    assert told[0] == RunsProgress(0, 3, {"a": 1}, 4, 30)
    assert told[-1] == RunsProgress(3, 3, {}, 30, 30)


def test_what_cannot_be_sent_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any) -> Any:
        raise TypeError("Could not serialize:\n====\n") from TypeError("cannot pickle '_thread.lock' object")

    monkeypatch.setattr(ray, "put", refuse)
    with pytest.raises(ParameterError) as error, tasks([1]):
        pytest.fail("begun")
    assert str(error.value) == (
        "what the runs share cannot be sent to the cluster (TypeError: cannot pickle '_thread.lock' object). Leave "
        "ray_address out, or use a selector, model, data and objective that pickle supports"
    )
