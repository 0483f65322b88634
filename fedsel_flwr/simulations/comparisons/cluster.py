"""Runs on a Ray cluster: calls of a function on its nodes, and runs that come back as files.

A node plays a run in a temporary folder. This machine then has the same files as if it had played the run itself. An
interrupted run travels to the node with its checkpoints, and continues there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from fedsel_flwr.callbacks.tracking import Tracking
from fedsel_flwr.errors import FedSelError, RunError, described, disk_errors
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.progress import RunsProgress, log_file, logging_to
from fedsel_flwr.report.run_folder import MOST_MODEL_BYTES, run_name
from fedsel_flwr.rounds.storage import read_file, write_atomically
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.comparisons.parallel_runs import Given, Got, Job, Report, unsendable
from fedsel_flwr.simulations.comparisons.runtime_environment import (
    check_versions,
    read_inputs,
    restored,
    runtime_environment,
)
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.results import THEN_RESUME, RunResult, discard_progress, has_begun, hold_folder, read_run
from fedsel_flwr.simulations.run_identity import RUN, run_parameters, versions
from fedsel_flwr.simulations.run_options import CHECKPOINTS, RunOptions
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.image_files import SENT_INPUTS
from fedsel_flwr.simulations.worlds.ingredients import OwnParts

RETRIES = 3
"""Number of times that a call is repeated after its node or its process died."""
PERIOD_S = 1.0
"""Seconds between two reports of progress."""
RUN_FILES = (RUN, run_folder.SCENARIO, run_folder.JOURNAL, "*.parquet", "*.safetensors", f"{CHECKPOINTS}/**/*")
"""Files of a run that travel. A comparison of one run has other files in the same folder."""
Files = Mapping[str, bytes]
"""Path inside a run's folder -> content."""
Watch = Callable[[RunsProgress], None]
"""Function called about once a second with the progress of all runs."""


@dataclass(frozen=True)
class Cluster:
    """Calls on the nodes of a Ray cluster, each a task with the cores and GPUs of one run: an ``Executor``.

    If a node dies, Ray repeats its calls on other nodes.

    Args:
        where: The cluster, and the cores and GPUs of each call (:meth:`RayResources.of_runs`).
        at_a_time: Largest number of calls at the same time. If None, as many as the cluster has room for.
        scenarios: Scenarios of the calls. Their data sets and files are sent to each node once.
        own: The user's parts, which replace data sets of the scenarios.
        watch: Function called with the progress.
        what_is_left: Function that returns the end of the sentence that is printed if the cluster's head dies.
        quiet: Whether to show nothing while Ray is joined.
    """

    where: RayResources
    at_a_time: int | None = None
    _: KW_ONLY
    scenarios: Sequence[Scenario] = ()
    own: OwnParts = OwnParts()  # noqa: RUF009 (frozen)
    watch: Watch | None = None
    what_is_left: Callable[[], str] = str
    quiet: bool = False

    def map(
        self,
        call: Callable[[Given, Any, Report], Got],
        given: Sequence[Given],
        names: Sequence[str],
        shared: Any = None,
        rounds: Sequence[int] = (),
    ) -> Generator[tuple[int, Got]]:
        """Call a function several times, see :meth:`~fedsel_flwr.simulations.comparisons.parallel_runs.Executor.map`.

        ``names`` are also the names in Ray's lists and in the titles of its processes. ``rounds`` is the number of
        rounds of each call, for the progress.
        """
        if not given:
            return
        import ray

        # Ray's reference to the result of each call in progress -> index of the call.
        playing: dict[Any, int] = {}
        waiting = deque(enumerate(names))
        with self._joined(playing) as options:
            sent = self._send(shared)
            progress = _Progress(self.watch, sent[2], rounds or [0] * len(given))
            task = ray.remote(_on_node)

            def begin() -> None:
                while waiting and len(playing) < (self.at_a_time or len(given)):
                    index, name = waiting.popleft()
                    try:
                        reference = task.options(name=name, **options).remote(index, call, given[index], *sent)
                    except (TypeError, AttributeError) as error:
                        raise unsendable(name, "the cluster", "ray_address", error) from error
                    playing[reference] = index

            begin()
            while playing:
                ended, _ = ray.wait(list(playing), num_returns=1, timeout=PERIOD_S)
                if not ended:
                    # Otherwise the calls would wait for a node for ever.
                    self.where.check_nodes([node["Resources"] for node in _living_nodes()], "run")
                    progress.tell(playing.values())
                    continue
                index = playing.pop(ended[0])
                result = _result(ended[0], names[index])
                # The next call begins before the caller works on this result.
                begin()
                progress.finished.add(index)
                progress.tell(playing.values(), at_once=True)
                yield index, result

    def play(self, jobs: Sequence[Job], options: RunOptions) -> Generator[tuple[int, RunResult]]:
        """Do runs, see :meth:`~fedsel_flwr.simulations.comparisons.parallel_runs.Executor.play`.

        Each run is written to its folder, and sent to the tracker, when it ends.
        """
        track = options.track if isinstance(options.track, Tracking) else None
        shared = replace(options, track=None, folder=None)
        places = [job.place["folder"] for job in jobs]
        # An interrupted run travels with the files that it needs to continue.
        begun = [options.resume and place is not None and has_begun(place) for place in places]
        given = [(job, pack_run(job.place["folder"]) if own else {}) for job, own in zip(jobs, begun, strict=True)]
        rounds = [job.scenario.rounds for job in jobs]
        outcomes = self.map(play_on_node, given, [job.name for job in jobs], shared, rounds)
        with contextlib.closing(outcomes):
            for index, outcome in outcomes:
                yield index, receive(jobs[index], outcome, track)

    @contextlib.contextmanager
    def _joined(self, playing: Collection[Any]) -> Iterator[dict[str, Any]]:
        """Join the cluster, and yield the options of its tasks. At the end, tasks that still run are ended."""
        import ray

        options = {
            "num_cpus": self.where.client_cpus, "num_gpus": self.where.gpus_per_client(), "max_retries": RETRIES,
            # The default fills half of this machine first.
            "scheduling_strategy": "SPREAD",
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            with runtime_environment(self.scenarios, max(1, int(self.where.client_cpus))) as environment:
                if ray.is_initialized():
                    # The caller's own connection to Ray keeps its environment. Only the variables can be added to it.
                    options["runtime_env"] = {"env_vars": environment["env_vars"]}
                stack.enter_context(RaySession(self.where, self.quiet, "run", environment).open(self.what_is_left))
            try:
                yield options
            finally:
                for reference in playing:
                    with contextlib.suppress(Exception):
                        ray.cancel(reference, force=True)

    def _send(self, shared: Any) -> tuple[Any, dict[str, Any], Any, dict[str, str]]:
        """Put everything into Ray's object store that the calls share, and start the queue of their reports."""
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            common = ray.put(shared)
        # Pickling raises errors of many kinds, including errors of the user's code.
        except Exception as error:
            raise unsendable("what the runs share", "the cluster", "ray_address", error) from error
        inputs = {name: ray.put(value) for name, value in read_inputs(self.scenarios, self.own).items()}
        # On this machine, so that the queue does not die with another node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return common, inputs, Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here}), versions()


class _Progress:
    """Progress of the calls on a cluster.

    Args:
        watch: Function called with the progress.
        queue: Ray's queue of reports: index of a call, node, and rounds done there.
        rounds: Number of rounds of each call.

    Attributes:
        finished: Indices of the calls that have ended.
    """

    def __init__(self, watch: Watch | None, queue: Any, rounds: Sequence[int]) -> None:
        self._watch, self._queue, self._rounds, self._told = watch, queue, rounds, -PERIOD_S
        self._reports: dict[int, tuple[str, int]] = {}
        self.finished: set[int] = set()

    def tell(self, playing: Collection[int], at_once: bool = False) -> None:
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
        reported = [self._reports[index] for index in playing if index in self._reports]
        # A call whose node died waits for another one.
        alive = [(names[node], rounds) for node, rounds in reported if node in names]
        done = sum(self._rounds[index] for index in self.finished) + sum(rounds for _, rounds in alive)
        nodes = dict(sorted(Counter(name for name, _ in alive).items()))
        self._watch(RunsProgress(len(self.finished), len(self._rounds), nodes, done, sum(self._rounds)))


def _result(reference: Any, name: str) -> Any:
    """Return the result of a call that has ended."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, FedSelError):
            raise cause from None
        raise RunError(f"{name} failed: {described(cause)}") from error
    except ray.exceptions.RayError as error:
        raise RunError(
            f"{name} has no result ({type(error).__name__}: {' '.join(str(error).split()):.300}). Give the run more "
            "cores or memory, and resume"
        ) from error


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
    SENT_INPUTS.clear()
    SENT_INPUTS.update({name: partial(_fetch, name, reference) for name, reference in inputs.items()})
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


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run on a node.

    Attributes:
        files: The files of the run's folder. After an error, those that a resumed run needs.
        diagnosis: Diagnosis of the run.
        log: Log records of the run.
        error: Error that ended the run; None if it finished.
    """

    files: Files
    diagnosis: str = ""
    log: str = ""
    error: FedSelError | None = None


def play_on_node(given: tuple[Job, Files], options: RunOptions, report: Report) -> Outcome:
    """Play a run on a node, and return its files.

    Args:
        given: The run, and the files with which it continues.
        options: The options that all runs share.
        report: Function called with the number of each finished round.
    """
    import ray

    job, files = given
    # In Ray's folder, so that a killed process leaves no file elsewhere.
    parent = ray.get_runtime_context().get_temp_dir() if ray.is_initialized() else None
    with TemporaryDirectory(prefix="fedsel-run-", dir=parent) as temporary:
        place, log = Path(temporary) / "run", Path(temporary) / "log"
        place.mkdir()
        unpack_run(place, files)
        diagnosis, failure = "", None
        with logging_to(log):
            try:
                here = replace(job, place={**job.place, "folder": place})
                diagnosis = here.simulate_elsewhere(options, report).diagnosis
            except FedSelError as error:
                failure = error
        return Outcome(pack_run(place), diagnosis, log.read_text(encoding="utf-8", errors="replace"), failure)


def receive(job: Job, outcome: Outcome, track: Tracking | None) -> RunResult:
    """Write a run to its folder, send it to the tracker, and return its result.

    Raises:
        FedSelError: The run ended with this error.
        RunError: The folder cannot be written to.
    """
    if (target := log_file()) is not None and outcome.log:
        with contextlib.suppress(OSError), target.open("a", encoding="utf-8") as file:
            file.write(outcome.log)
    with contextlib.ExitStack() as stack:
        place = job.place["folder"] or Path(stack.enter_context(TemporaryDirectory()))
        lock = hold_folder(place, THEN_RESUME)
        with disk_errors(place, THEN_RESUME):
            try:
                discard_progress(place)
                unpack_run(place, outcome.files)
            finally:
                # Removing the last reference releases the lock, also after an error.
                del lock
        if outcome.error is not None:
            raise outcome.error
        _, scenario, result = read_run(place)
    if track is not None:
        label = str(job.place["label"])
        used = run_parameters(scenario, label, job.selector())
        with track.run(run_name(label, scenario.seed), used).follow(result.history) as tracked:
            tracked(result.history.rounds[-1])
    return replace(result, diagnosis=outcome.diagnosis)


def pack_run(place: Path) -> dict[str, bytes]:
    """Return the files of a run's folder."""
    found = {path for pattern in RUN_FILES for path in place.glob(pattern) if not path.is_dir()}
    return {path.relative_to(place).as_posix(): read_file(path, MOST_MODEL_BYTES) for path in sorted(found)}


def unpack_run(place: Path, files: Files) -> None:
    """Write the files of a run, and remove what an interrupted run has left.

    Raises:
        OSError: A file cannot be written.
        RunError: A name is not that of a file of a run; nothing is written.
    """
    for name in files:
        parts = PurePosixPath(name).parts
        own = parts[0] == CHECKPOINTS if len(parts) > 1 else any(map(PurePosixPath(name).match, RUN_FILES))
        # The names come from a task on another machine.
        if not own or ".." in parts or not name.isprintable():
            raise RunError(f"a task returned {shown(name)}, which is not a file of a run. Check the cluster's machines")
    for pattern in (run_folder.JOURNAL, run_folder.MODEL_AFTER_ROUND.format("*")):
        for path in place.glob(pattern):
            if path.name not in files:
                path.unlink()
    # The model comes last, because a folder with a model counts as finished.
    for name in sorted(files, key=lambda name: (name == run_folder.MODEL, name)):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, files[name])
