"""Tasks on a Ray cluster: a function called on the nodes, with retries, progress, and an end of all calls.

The runtime environment holds the code, files and data sets that travel to the nodes. Ray sends a folder once to each
node. It holds this package, the user's modules that are loaded here, and the files that scenarios name. The nodes need
only the installed packages, such as torch, in the same versions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import site
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Self

import fedsel_flwr
from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.references import WORKING_DIR, is_reference
from fedsel_flwr.report.progress import RunsProgress
from fedsel_flwr.simulations.comparisons.parallel_runs import THREADS
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.run_identity import versions
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.image_files import (
    IMAGE_SETS,
    SENT_FILES,
    SENT_INPUTS,
    find_data_folder,
    find_file,
    read_image_set,
    sent_file,
    without_gaps,
)
from fedsel_flwr.simulations.worlds.ingredients import WRITERS, OwnParts, find_writers, own_data_of
from fedsel_flwr.simulations.worlds.own_data import OwnData

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


LARGEST_MB = 100
"""Largest size of a module's folder, in megabytes. Ray refuses more than 500 MB of code."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
"""Files of a module's folder that do not travel."""


@contextlib.contextmanager
def runtime_environment(scenarios: Sequence[Scenario], threads: int) -> Iterator[dict[str, Any]]:
    """Yield Ray's runtime environment. Its folder is needed until Ray is connected.

    Args:
        scenarios: Scenarios of the runs.
        threads: Number of threads of each run.

    Raises:
        ParameterError: A file of a scenario cannot be found, or a module is too large.
        RunError: The folder cannot be written.
    """
    with TemporaryDirectory(prefix="fedsel-code-") as place:
        try:
            write_code(Path(place), scenarios)
        except (OSError, shutil.Error) as error:
            raise RunError(
                f"the code of the runs cannot be copied to {place!r}: {error!s:.200}. Free disk space, or set "
                "TMPDIR to another folder"
            ) from error
        variables = {name: str(threads) for name in THREADS} | {WORKING_DIR: str(Path.cwd())}
        yield {"working_dir": place, "env_vars": variables}


def write_code(place: Path, scenarios: Sequence[Scenario]) -> None:
    """Write everything that travels as files: modules, the version of this package, and the files of scenarios.

    Args:
        place: An empty folder, which is in the search path for modules on the nodes.
        scenarios: Scenarios of the runs.

    Raises:
        ParameterError: A module is too large.
        OSError: A file cannot be read or written.
    """
    shutil.copytree(Path(fedsel_flwr.__file__).parent, place / "fedsel_flwr", ignore=LEFT_OUT)
    # The record of a run states the version of the code that ran, not of a package that the node may have installed.
    metadata = place / f"fedsel_flwr-{importlib.metadata.version('fedsel-flwr')}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: fedsel-flwr\nVersion: {importlib.metadata.version('fedsel-flwr')}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    for name, source in own_modules().items():
        if source.is_dir():
            size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file()) / 1e6
            if size > LARGEST_MB:
                raise ParameterError(
                    f"the module {name} in {str(source)!r} has {size:.0f} MB, too much to send it to the cluster. Move "
                    "its data elsewhere, or install it as a package on every machine"
                )
            shutil.copytree(source, place / name, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
        else:
            suffix = source.suffix if source.suffix == ".py" else "".join(source.suffixes)
            shutil.copyfile(source, place / f"{name}{suffix}")
    (place / SENT_FILES).mkdir()
    for scenario in scenarios:
        trace = scenario.availability.trace if scenario.availability.kind == "trace" else ""
        for key, path in (("system.devices", scenario.system.devices), ("availability.trace", trace)):
            target = place / SENT_FILES / sent_file(path).name
            if path and not target.exists():
                shutil.copyfile(find_file(path, key=key, data_dir=scenario.data.data_dir or None), target)


def own_modules() -> dict[str, Path]:
    """Return the user's modules that are loaded: name -> folder or file; without installed packages and submodules."""
    installed = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = tuple(Path(folder).resolve() for folder in installed if folder)
    found = {}
    for name, module in list(sys.modules.items()):
        source = _source_of(module)
        if name in ("__main__", "fedsel_flwr") or "." in name or source is None:
            continue
        if not any(source.is_relative_to(folder) for folder in folders):
            found[name] = source
    return found


def _source_of(module: ModuleType) -> Path | None:
    """Return the folder of a package, or the file of a module; None if it has neither."""
    # Some modules of libraries raise errors on access to attributes.
    attributes = getattr(module, "__dict__", {})
    place = next(iter(attributes.get("__path__") or ()), None) or attributes.get("__file__")
    source = Path(place).resolve() if isinstance(place, str) else None
    return source if source is not None and source.exists() else None


def read_inputs(scenarios: Sequence[Scenario], own: OwnParts) -> dict[str, Any]:
    """Read the data sets of scenarios, each once, for :class:`~fedsel_flwr.simulations.worlds.image_files.SentInputs`.

    Args:
        scenarios: Scenarios of the runs.
        own: The user's parts. Data from Python code replace the data sets of the scenarios.

    Returns:
        Name of an input -> its value. :func:`restored` turns a value from a node's object store back.

    Raises:
        ParameterError: The data cannot be read.
    """
    found: dict[str, Any] = {}
    for scenario in scenarios:
        name = scenario.data.dataset
        if own.data is None and name in IMAGE_SETS and name not in found:
            halves = read_image_set(name, find_data_folder(scenario.data.data_dir or None))
            found[name] = [(*without_gaps(pixels), labels) for pixels, labels in halves]
        if own.data is None and is_reference(name) and name not in found:
            # A function of the seed runs on the nodes, and travels as code.
            given = own_data_of(scenario, own)
            if isinstance(given, OwnData):
                found[name] = given
        if scenario.partition.kind == "writers" and WRITERS not in found:
            found[WRITERS] = find_writers(scenario)
    return found


def restored(name: str, value: Any) -> Any:
    """Return an input as the function returns it that reads it from files."""
    if name not in IMAGE_SETS:
        return value
    return tuple((pixels.transpose(axes), labels) for pixels, axes, labels in value)


def check_versions(expected: dict[str, str]) -> None:
    """Refuse to run on a node with other versions of the packages on which a run depends.

    Args:
        expected: The versions on the machine that started the runs.

    Raises:
        RunError: A version differs. The error names it.
    """
    here = versions()
    if different := [name for name, version in expected.items() if here.get(name) != version]:
        listed = ", ".join(f"{name} {here.get(name)} instead of {expected[name]}" for name in different)
        raise RunError(
            f"the node {platform.node()} has {listed}, so its runs would differ by rounding. Install the same versions "
            "on every machine"
        )
