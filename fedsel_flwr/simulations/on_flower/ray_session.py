"""Ray session of a run: start or join Ray, watch it, and share the world through its object store.

If Ray dies, its client library ends this process at once or after a minute, without any message about the run. The
session ends the process before that, with one line that names the rounds and files that are left.

An actor needs more time to read data, draw partitions and import the libraries for this than for its first round of
training. Therefore the server puts its world into Ray's object store, once per machine, and actors read the arrays in
place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import psutil
from rich.console import Console

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import disable_actor_retries
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, start_hint, try_connect
from fedsel_flwr.simulations.shutdown import end_process
from fedsel_flwr.simulations.worlds.world import WORLD_CACHE

JOIN_LIMIT_S = 60.0
"""Longest wait for a cluster, in seconds. Ray would wait endlessly for a server that is not the head of a cluster."""
PERIOD_S = 0.3
"""Seconds between two checks of Ray."""
UNREACHABLE_S = 5.0
"""Longest time for which the head of a cluster may be unreachable, in seconds."""
RAY_SERVERS = ("raylet", "gcs_server")
"""Processes that all other processes of Ray depend on."""
EXIT_DEAD = 2
"""Exit status if Ray dies."""
logger = logging.getLogger("fedsel_flwr")
_SHARING = threading.Lock()
"""Held while the world is put into Ray."""


@dataclass(frozen=True)
class RaySession:
    """Ray session of one run.

    If the caller has already opened a connection, the session uses it as it is, and does not watch it.

    Args:
        resources: The resources of Ray, or the cluster to join.
        quiet: Whether to show nothing while Ray starts.
        what: What the resources of each client are for: "client" or "run".
        runtime_env: Ray's runtime environment of the processes on a cluster. If None, the search path for modules.
    """

    resources: RayResources
    quiet: bool = False
    what: str = "client"
    runtime_env: Mapping[str, Any] | None = None
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    @contextlib.contextmanager
    def open(self, what_is_left: Callable[[], str] = str) -> Iterator[None]:
        """Start or join Ray, and close the connection at the end; a joined cluster keeps running.

        Args:
            what_is_left: Function that returns the end of the sentence that is printed if Ray dies.

        Raises:
            RunError: Ray cannot be started or refuses the connection, or no machine has room for a client.
        """
        ray = _ray()
        # Flower ends an actor with a call in which the actor dies. With max_task_retries, Ray would retry that call,
        # and report at the end that an actor died.
        disable_actor_retries()
        if ray.is_initialized():
            yield
            return
        try:
            # The status shows nothing outside a terminal.
            with contextlib.nullcontext() if self.quiet else Console(stderr=True).status("Starting Ray"):
                self._start(ray, what_is_left)
            if self.resources.address is not None:
                self.resources.check_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]], self.what)
            yield
        finally:
            if ray.is_initialized():
                ray.shutdown()
            # Set last, because it ends the session's thread, and Ray's servers end with that thread.
            self._over.set()

    def _start(self, ray: Any, what_is_left: Callable[[], str]) -> None:
        """Start Ray or join a cluster; a failure raises :class:`RunError` with Ray's message in one line."""
        joins, started = self.resources.address is not None, Future[None]()
        handler = signal.getsignal(signal.SIGTERM)
        threading.Thread(
            target=self._attend, args=(ray, started, what_is_left), name="ray-session", daemon=True
        ).start()
        try:
            started.result(JOIN_LIMIT_S if joins else None)
        # ray.init raises exceptions of many kinds, with messages of several lines.
        except Exception as error:
            message = " ".join(str(error).split()) or f"no Ray answers there within {JOIN_LIMIT_S:g} s"
            if not joins:
                raise RunError(f"Ray cannot be started on this machine: {message}") from error
            source, address = self.resources.source, self.resources.address
            raise RunError(f"{source} = {address!r}: {message}. {start_hint(source)}") from error
        # Ray's C++ code has replaced the system's handler, so it is set again.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def _attend(self, ray: Any, started: Future[None], what_is_left: Callable[[], str]) -> None:
        """Start Ray, and end this process if Ray dies before the session is over.

        This runs in a thread for two reasons. An attempt to join a server that is not Ray never ends, and the session
        can abandon a thread. In the main thread, Ray would also replace the handler of SIGTERM. Linux ends Ray's
        servers with the thread that started them, so this thread runs until the session is over.
        """
        try:
            _init(ray, self.resources, self.runtime_env)
        except BaseException as error:
            started.set_exception(error)
            return
        if self._over.is_set():
            # Ctrl-C came while Ray was starting. If Ray lost its servers now, it would end this process.
            ray.shutdown()
            return
        why_dead = _servers_ended() if self.resources.address is None else _head_gone(ray, self.resources.address)
        started.set_result(None)
        while not self._over.wait(PERIOD_S):
            # The rounds may have ended since the check. Then Flower has shut Ray down.
            if (cause := why_dead()) and ray.is_initialized():
                break
        else:
            return
        # Not an exception, because Flower may hang in a call of Ray that never returns, and would not receive it.
        said = f"fedsel: error: Ray died ({cause}; was it killed, or did memory run out?)"
        end_process(lambda: said + what_is_left(), EXIT_DEAD)


def _servers_ended() -> Callable[[], str]:
    """Return a function that names the servers of Ray on this machine that have ended; empty if all still run."""
    servers = {child: child.name() for child in psutil.Process().children() if child.name() in RAY_SERVERS}
    return lambda: " and ".join(name + " ended" for process, name in servers.items() if not _alive(process))


def _head_gone(ray: Any, address: str) -> Callable[[], str]:
    """Return a function that says why the head of a cluster counts as gone; empty if it is reachable."""
    head = ray.get_runtime_context().gcs_address if address == "auto" else address
    since = time.monotonic()

    def why() -> str:
        nonlocal since
        try:
            try_connect(head)
        except OSError as error:
            if time.monotonic() - since >= UNREACHABLE_S:
                return f"the head of the cluster at {head} is gone: {error}"
        else:
            since = time.monotonic()
        return ""

    return why


def _alive(process: psutil.Process) -> bool:
    # This process is the parent of Ray's processes but never waits for them, so a dead process stays a zombie.
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _init(ray: Any, resources: RayResources, runtime_env: Mapping[str, Any] | None) -> None:
    """Call ``ray.init``."""
    address = resources.address
    # The workers must find the user's modules, as they do if Flower starts Ray. A Ray started here inherits the
    # variable, so that workers that it starts in advance can be used. A cluster has other processes, and needs a
    # runtime environment.
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))
    # Without this, Ray warns on standard error about the visible devices of actors without a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        _log_messages()
        environment = {"env_vars": {"PYTHONPATH": path}} if runtime_env is None else dict(runtime_env)
        ray.init(address=address, runtime_env=environment, **options)
        return
    if resources.num_gpus is not None or resources.client_gpus:
        options["num_gpus"] = resources.gpus()
    with _environment("PYTHONPATH", path):
        # Without "local", Ray joins a cluster that runs on this machine, and then refuses a number of cores.
        ray.init(address="local", num_cpus=resources.cpus, include_dashboard=False, **options)


def _log_messages() -> None:
    """Send Ray's messages about the cluster to the log, such as the loss of a node."""
    # With log_to_driver=False, Ray still prints them on standard output, which may hold JSON. There is no option.
    worker: Any = sys.modules.get("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix: logger.warning(
            "Ray: %s", " ".join(str(line).partition("\n")[0] for line in data["lines"])
        )


def _ray() -> Any:
    # Imported here, because the import takes a second, and the vectorized engine never needs Ray.
    import ray

    return ray


@contextlib.contextmanager
def _environment(key: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


@dataclass(frozen=True)
class SharedWorld:
    """World in Ray's object store.

    Attributes:
        scenario: The scenario as JSON.
        reference: Ray's reference to the world.
    """

    scenario: str
    reference: Any


def share_world() -> SharedWorld | None:
    """Put the world that this process has built into Ray's object store, for its actors, once per connection.

    Returns:
        The shared world. None if no world was built, Ray is not connected, or the world cannot be pickled; actors then
        build the world themselves.
    """
    # Not imported, because apps are pickled in processes without Ray too, and a connected Ray is already loaded.
    ray = sys.modules.get("ray")
    if WORLD_CACHE.latest is None or ray is None or not ray.is_initialized():
        return None
    # The job is part of the key, because an old reference is useless after Ray has started again.
    context = ray.get_runtime_context()
    # Flower pickles the messages of a round in several threads.
    with _SHARING:
        return _put_world(WORLD_CACHE.latest[0], context.get_node_id(), context.get_job_id())


@lru_cache(maxsize=1)
def _put_world(scenario: str, node: str, job: str) -> SharedWorld | None:
    """Put the cached world of a scenario into Ray; None if it cannot be pickled."""
    # If the user's data or model cannot be pickled, the actors build the world from the scenario.
    try:
        return SharedWorld(scenario, sys.modules["ray"].put(WORLD_CACHE.get(scenario).for_clients()))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        logger.warning("each actor builds its own copy of the data, which cannot be pickled: %s", error)
        return None


def receive_world(shared: SharedWorld) -> None:
    """Put a world that another process has built into this process's cache, unless the cache already has it."""
    if WORLD_CACHE.latest is None or WORLD_CACHE.latest[0] != shared.scenario:
        import ray

        WORLD_CACHE.put(shared.scenario, ray.get(shared.reference))
