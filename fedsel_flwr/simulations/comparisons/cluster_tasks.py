"""Tasks on a Ray cluster: a function called on the nodes, with retries, progress, and an end of all calls."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.report.progress import RunsProgress
from fedsel_flwr.simulations.comparisons.runtime_environment import (
    check_versions,
    read_inputs,
    restored,
    runtime_environment,
)
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.run_record import versions
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.sent_inputs import SENT_INPUTS

RETRIES = 3
"""Number of times that a call is repeated after its node or its process died."""
PERIOD_S = 1.0
"""Seconds between two reports of progress."""
Report = Callable[[int], None]
"""Function called on a node with the number of rounds that are done."""
Watch = Callable[[RunsProgress], None]
"""Function called about once a second with the progress of all runs."""


class ClusterTasks(Iterator[tuple[int, Any]]):
    """Calls of a function on the nodes of a cluster, each a Ray task with the cores and GPUs of one run.

    If a node dies, Ray repeats its calls on other nodes. At the end of the block, calls that still run are ended.

    Args:
        call: Function of a module. It gets one of ``given``, ``shared`` and a :data:`Report`.
        given: Its first argument in each call. The calls begin in this order.
        where: The cluster, and the cores and GPUs of each call (:meth:`RayResources.of_runs`).
        at_a_time: Largest number of calls at the same time. If None, as many as the cluster has room for.
        shared: Second argument of all calls, which is sent to each node once.
        names: Name of each call in Ray's lists and in the titles of its processes.
        scenarios: Scenarios of the calls. Their data sets are sent to each node once, and their files too.
        own: The user's parts, which replace data sets of the scenarios.
        rounds: Number of rounds of each call, for the progress.
        watch: Function called with the progress.
        what_is_left: Function that returns the end of the sentence that is printed if the cluster's head dies.
        quiet: Whether to show nothing while Ray is joined.

    Example::

        with ClusterTasks(simulate_cell, cells, where, None, names=map(str, cells)) as tasks:
            for index, row in tasks:
                print(cells[index], row)
    """

    def __init__(
        self,
        call: Callable[[Any, Any, Report], Any],
        given: Sequence[Any],
        where: RayResources,
        at_a_time: int | None,
        *,
        shared: Any = None,
        names: Sequence[str],
        scenarios: Sequence[Scenario] = (),
        own: OwnParts = OwnParts(),  # noqa: B008 (frozen)
        rounds: Sequence[int] = (),
        watch: Watch | None = None,
        what_is_left: Callable[[], str] = str,
        quiet: bool = False,
    ) -> None:
        self._call, self._given, self._where, self._names = call, given, where, names
        self._at_a_time = at_a_time or max(1, len(given))
        self._shared, self._inputs, self._own, self._scenarios = shared, dict[str, Any](), own, scenarios
        self._watch, self._what_is_left, self._quiet = watch, what_is_left, quiet
        self._rounds = list(rounds) or [0] * len(given)
        self._waiting = iter(range(len(given)))
        # Ray's reference to the result of each call in progress -> index of the call.
        self._playing: dict[Any, int] = {}
        # Index of a call -> node, and rounds done there.
        self._reports: dict[int, tuple[str, int]] = {}
        self._finished: set[int] = set()
        self._options: dict[str, Any] = {}
        self._told, self._stack = -PERIOD_S, contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Join the cluster, send what the calls share, and begin the first calls.

        Raises:
            ParameterError: Something cannot be sent, or data cannot be read.
            RunError: The cluster cannot be joined, or no node has room for a call.
        """
        import ray

        with contextlib.ExitStack() as stack:
            threads = max(1, int(self._where.client_cpus))
            with runtime_environment(self._scenarios, threads) as environment:
                # The caller's own connection to Ray keeps its environment. Only the variables can be added to it.
                variables = {"env_vars": environment["env_vars"]}
                self._options = {"runtime_env": variables} if ray.is_initialized() else {}
                session = RaySession(self._where, self._quiet, "run", environment)
                stack.enter_context(session.open(self._what_is_left))
            stack.callback(self._cancel)
            self._send()
            self._begin_calls()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """End all calls and leave the cluster."""
        self._stack.close()

    def __next__(self) -> tuple[int, Any]:
        """Return the index and the result of the next call that ends.

        Raises:
            FedSelError: A call raised this error.
            RunError: A call raised another error, or its node died too often.
        """
        import ray

        self._begin_calls()
        if not self._playing:
            self._tell(at_once=True)
            raise StopIteration
        while not (ended := ray.wait(list(self._playing), num_returns=1, timeout=PERIOD_S)[0]):
            # Otherwise the calls would wait for a node for ever.
            self._where.check_nodes([node["Resources"] for node in _living_nodes()], "run")
            self._tell()
        index = self._playing.pop(ended[0])
        try:
            result = ray.get(ended[0])
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, FedSelError):
                raise cause from None
            raise RunError(f"{self._names[index]} failed: {described(cause)}") from error
        except ray.exceptions.RayError as error:
            raise RunError(
                f"{self._names[index]} has no result ({type(error).__name__}: {' '.join(str(error).split()):.300}). "
                "Give the run more cores or memory, and resume"
            ) from error
        self._finished.add(index)
        # The next call begins before the caller works on this result.
        self._begin_calls()
        self._tell(at_once=True)
        return index, result

    def _send(self) -> None:
        """Put everything into Ray's object store that the calls share, and start the queue of their reports."""
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            self._shared = ray.put(self._shared)
        # Pickling raises errors of many kinds, including errors of the user's code.
        except Exception as error:
            raise _unsendable("what the runs share", error) from error
        self._inputs = {name: ray.put(value) for name, value in read_inputs(self._scenarios, self._own).items()}
        # On this machine, so that the queue does not die with another node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._on_node = ray.remote(_on_node)
        self._versions = versions()

    def _begin_calls(self) -> None:
        """Begin calls until there are as many as allowed."""
        while len(self._playing) < self._at_a_time and (index := next(self._waiting, None)) is not None:
            task = self._on_node.options(
                name=self._names[index],
                num_cpus=self._where.client_cpus,
                num_gpus=self._where.gpus_per_client(),
                max_retries=RETRIES,
                # The default fills half of this machine first.
                scheduling_strategy="SPREAD",
                **self._options,
            )
            try:
                reference = task.remote(
                    index, self._call, self._given[index], self._shared, self._inputs, self._queue, self._versions
                )
            except (TypeError, AttributeError) as error:
                raise _unsendable(self._names[index], error) from error
            self._playing[reference] = index

    def _tell(self, at_once: bool = False) -> None:
        """Report the progress, at most once per period."""
        if self._watch is None or not (at_once or time.monotonic() - self._told >= PERIOD_S):
            return
        import ray

        self._told = time.monotonic()
        # A report may be lost with the queue, and must not end the runs.
        with contextlib.suppress(ray.exceptions.RayError):
            for index, node, rounds in self._queue.get_nowait_batch(self._queue.qsize()):
                self._reports[index] = node, rounds
        names = _node_names(_living_nodes())
        playing = {
            index: self._reports[index]
            for index in self._playing.values()
            # A call whose node died waits for another one.
            if index in self._reports and self._reports[index][0] in names
        }
        done = sum(self._rounds[index] for index in self._finished) + sum(rounds for _, rounds in playing.values())
        nodes = Counter(names[node] for node, _ in playing.values())
        self._watch(
            RunsProgress(len(self._finished), len(self._given), dict(sorted(nodes.items())), done, sum(self._rounds))
        )

    def _cancel(self) -> None:
        """End the calls in progress."""
        import ray

        for reference in self._playing:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)


def _on_node(
    index: int,
    call: Callable[[Any, Any, Report], Any],
    given: Any,
    shared: Any,
    inputs: Mapping[str, Any],
    queue: Any,
    expected: dict[str, str],
) -> Any:
    """Call the function in a process of a node."""
    import ray

    check_versions(expected)
    # The node fetches an input when a run first needs it, and its other processes read the same memory.
    SENT_INPUTS.accept({name: partial(_fetch, name, reference) for name, reference in inputs.items()})
    node, told = ray.get_runtime_context().get_node_id(), -PERIOD_S

    def report(rounds: int) -> None:
        nonlocal told
        if time.monotonic() - told >= PERIOD_S:
            told = time.monotonic()
            # Without waiting for the reply.
            queue.actor.put_nowait.remote((index, node, rounds))

    report(0)
    return call(given, shared, report)


def _fetch(name: str, reference: Any) -> Any:
    import ray

    return restored(name, ray.get(reference))


def _node_names(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the id of each node -> its host name, with the beginning of the id if the name is not unique."""
    count = Counter(node["NodeManagerHostname"] for node in nodes)
    return {
        node["NodeID"]: node["NodeManagerHostname"]
        + (f" {node['NodeID'][:6]}" if count[node["NodeManagerHostname"]] > 1 else "")
        for node in nodes
    }


def _living_nodes() -> list[Mapping[str, Any]]:
    """Return Ray's description of each node that is alive."""
    import ray

    nodes: Callable[[], list[Mapping[str, Any]]] = ray.nodes
    return [node for node in nodes() if node["Alive"]]


def _unsendable(what: str, error: Exception) -> ParameterError:
    # Ray's message has several lines. Its cause is the error of pickling.
    cause = error.__cause__ or error
    return ParameterError(
        f"{what} cannot be sent to the cluster ({type(cause).__name__}: {' '.join(str(cause).split()):.300}). Leave "
        "ray_address out, or use a selector, model, data and objective that pickle supports"
    )
