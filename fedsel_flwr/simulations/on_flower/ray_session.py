"""Ray for one run: started on this machine or joined, watched while it runs, and shared memory for the world.

If Ray dies, its client library waits for a minute and then ends the process, without a word on the run. Flower waits
for answers from actors that no longer exist. The watchdog notices the death within a second, and the session turns it
into a :class:`RunError`.

Reading data, drawing partitions and importing what does both takes an actor longer than its first round of training.
The server therefore puts its world into Ray's object store, once per machine, and actors read the arrays in place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psutil

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import disable_actor_retries
from fedsel_flwr.report.progress import WaitNotice
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, start_hint, try_connect
from fedsel_flwr.simulations.shutdown import (
    RAY_SERVERS,
    keep_sigterm_while_ray_ends,
    keep_sigterm_while_ray_starts,
    process_name,
)
from fedsel_flwr.simulations.worlds.world import WORLD_CACHE, World

PERIOD_S = 0.3
"""Seconds between two looks at Ray."""
GRACE_S = 20.0
"""Seconds that Flower may take to end after Ray's death; then this process exits, as it would with Ray alone."""
UNREACHABLE_S = 5.0
"""Seconds for which the head of a cluster may be unreachable."""
EXIT_DEAD = 2
"""The exit status if Flower does not end in time."""
logger = logging.getLogger("fedsel_flwr")


class RaySession:
    """Ray for one run.

    A connection that the caller has already opened is used as it is, without notice and without watchdog.

    Args:
        where: The resources of Ray, or the cluster to join.
        waiting: Notice that Ray starts, from :meth:`open` to the first client's answer.
    """

    def __init__(self, where: RayResources, waiting: WaitNotice) -> None:
        self._where, self._notice = where, waiting
        self.watchdog: RayWatchdog | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Start or join Ray, and close the connection at the end; a joined cluster keeps running.

        Raises:
            RunError: Ray cannot be started or refuses the connection, no client finds room, or Ray died on the way.
        """
        ray = _ray()
        # Guard: Flower ends an actor by a call in which it dies. With max_task_retries Ray would retry that call, and
        # report at the end that an actor died.
        disable_actor_retries()
        if ray.is_initialized():
            yield
            return
        # Guard: Flower shuts Ray down itself at the end of a run, and Ray's C++ then resets the handler of SIGTERM. So
        # the guard spans the whole run, not only our own shutdown below.
        with self._notice, keep_sigterm_while_ray_ends():
            address = self._where.address
            _start(ray, self._where, address)
            try:
                if address is not None:
                    self._where.check_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]])
                with RayWatchdog(address) as self.watchdog:
                    yield
            except Exception:
                # Guard: after Ray's death Flower raises some error of its own. The cause is reported in its place.
                self.check()
                raise
            finally:
                # Guard: shutting down a dead Ray raises, and would hide the error above.
                with contextlib.suppress(Exception):
                    if ray.is_initialized():
                        ray.shutdown()

    @property
    def client_resources(self) -> dict[str, float]:
        """Resources of each of Flower's actors."""
        return self._where.client_resources()

    @property
    def died(self) -> bool:
        """Whether Ray has died."""
        return self.watchdog is not None and self.watchdog.died

    def check(self) -> None:
        """Raise :class:`RunError` if Ray has died."""
        if self.watchdog is not None:
            self.watchdog.check()

    def expect_shutdown(self) -> None:
        """Disarm the watchdog: the rounds are over, and Flower shuts Ray down."""
        if self.watchdog is not None:
            self.watchdog.expect_shutdown()

    def watch_grid(self, grid: Any) -> None:
        """Make a grid's pulls raise if Ray has died, and the first answer end the notice; changes the grid."""
        # Guard: Flower's grid polls for answers. Dead actors never answer, and only the round's timeout would stop it.
        pull = getattr(grid, "pull_messages", None)
        if pull is None:
            return

        def pull_messages(*args: Any, **kwargs: Any) -> Any:
            self.check()
            answers = list(pull(*args, **kwargs))
            if answers:
                self._notice.done()
            return answers

        grid.pull_messages = pull_messages

    @contextlib.contextmanager
    def watch_strategy(self, strategy: Any) -> Iterator[None]:
        """Make a strategy's next configuration or aggregation raise if Ray has died.

        Guard: Flower's legacy server catches what the grid raises, counts each missing answer as a failed client, and
        runs all remaining rounds. Exceptions of the strategy it does not catch.
        """
        # Attributes of the instance, which precede the class's methods; an instance may have such attributes already.
        names = ("configure_fit", "aggregate_fit", "configure_train", "aggregate_train")
        own = {name: strategy.__dict__[name] for name in names if name in getattr(strategy, "__dict__", {})}
        there = [name for name in names if hasattr(strategy, name)]
        for name in there:
            setattr(strategy, name, self._checked(getattr(strategy, name)))
        try:
            yield
        finally:
            for name in there:
                delattr(strategy, name)
            for name, value in own.items():
                setattr(strategy, name, value)

    def _checked(self, method: Any) -> Any:
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return method(*args, **kwargs)

        return checked


class RayWatchdog:
    """Watchdog in a thread: notices when Ray dies within the block.

    Args:
        address: Address of the joined cluster; None for a Ray that this process has started. If one of that Ray's main
            processes dies, the watchdog kills the others, so that a call that waits for a worker returns.
    """

    def __init__(self, address: str | None) -> None:
        self._address = None if address is None else _head(address)
        self._cause = ""
        self._over, self._closed = threading.Event(), threading.Event()
        # Collected while the raylet lives: afterwards its children belong to another parent and cannot be found.
        self._workers: set[psutil.Process] = set()
        self._pillars = [] if address else [p for p in psutil.Process().children() if process_name(p) in RAY_SERVERS]
        self._thread = threading.Thread(target=self._watch, name="ray-watch", daemon=True)

    def __enter__(self) -> RayWatchdog:
        """Start to watch."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop to watch."""
        self._over.set()
        self._closed.set()

    @property
    def died(self) -> bool:
        """Whether Ray has died."""
        return bool(self._cause)

    def expect_shutdown(self) -> None:
        """Ignore the end of Ray from now on."""
        self._over.set()

    def check(self) -> None:
        """Raise :class:`RunError` if Ray has died."""
        if self._cause:
            raise RunError(self._cause)

    def _watch(self) -> None:
        silent = 0.0
        while not self._over.wait(PERIOD_S):
            if self._address is None:
                for process in self._pillars:
                    with contextlib.suppress(psutil.Error):
                        self._workers |= set(process.children(recursive=True))
                dead = [process_name(process) or "a process of it" for process in self._pillars if not _alive(process)]
                if dead:
                    return self._report(f"Ray died ({' and '.join(dead)} ended; was it killed, or memory short?)")
            else:
                try:
                    try_connect(self._address)
                    silent = 0.0
                except OSError as error:
                    # A refused connection is proof; a timeout may be the network, and gets some seconds.
                    silent += PERIOD_S
                    if silent >= UNREACHABLE_S or isinstance(error, ConnectionRefusedError):
                        return self._report(f"the head of the Ray cluster at {self._address} is gone ({error})")

    def _report(self, cause: str) -> None:
        """Report Ray's death, and end this process if Flower does not end in time."""
        # The rounds may have ended since the look: then Flower itself has shut Ray down.
        if self._over.is_set():
            return
        self._cause = cause
        for process in (*self._pillars, *self._workers):
            with contextlib.suppress(psutil.Error):
                process.kill()
        # Guard: Flower may hang in a call of Ray that never returns, where no exception of ours can reach it. os._exit,
        # as sys.exit would only end this thread.
        if not self._closed.wait(GRACE_S):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os.write(2, f"fedsel: error: {cause}; the process ends, as Flower waits for it\n".encode())
            os._exit(EXIT_DEAD)


def _head(address: str) -> str:
    """Return HOST:PORT of the head, also for "auto"."""
    if address != "auto":
        return address
    import ray

    context: Any = ray.get_runtime_context()
    return str(context.gcs_address)


def _alive(process: psutil.Process) -> bool:
    # This process is the parent and never waits for Ray's processes: a dead one stays a zombie.
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _start(ray: Any, where: RayResources, address: str | None) -> None:
    """Start Ray, or join a cluster; raise :class:`RunError` with Ray's message in one line."""
    # The workers must find the user's modules, as under Flower's own start of Ray. A Ray that we start inherits the
    # variable, so that the workers that it starts beforehand can be used. A cluster has other processes and needs a
    # runtime environment.
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))
    # Guard: without this Ray warns on standard error about the visible devices of actors without a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is None:
            # Guard: without "local" Ray joins a cluster that runs on this machine, and then refuses a number of cores.
            options |= {"address": "local", "num_cpus": where.cpus, "include_dashboard": False}
            if where.num_gpus is not None or where.client_gpus:
                options["num_gpus"] = where.gpus()
            # Guard: ray.init installs its own handler of SIGTERM, which ends the process without a word.
            with _environment("PYTHONPATH", path), keep_sigterm_while_ray_starts():
                ray.init(**options)
        else:
            with keep_sigterm_while_ray_starts():
                ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": path}}, **options)
    # ray.init raises exceptions of many kinds, with messages of several lines.
    except Exception as error:
        message = " ".join(str(error).split())
        if address is None:
            raise RunError(f"Ray cannot be started on this machine: {message}") from error
        raise RunError(f"{where.source} = {address!r}: {message}. {start_hint(where.source)}") from error


def _ray() -> Any:
    # Ray's import takes a second, and the vectorized engine never needs it.
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
    """Put the world that this process has built into Ray's object store, for its actors.

    Returns:
        The world there; None if no world was built, Ray is not connected, or the world cannot be pickled. Actors then
        build their own.
    """
    return _WORLD_STORE.share()


def receive_world(shared: SharedWorld) -> None:
    """Put a world that another process has built into this process's cache, unless it is there."""
    if WORLD_CACHE.latest is None or WORLD_CACHE.latest[0] != shared.scenario:
        import ray

        WORLD_CACHE.put(shared.scenario, ray.get(shared.reference))


@dataclass
class _WorldStore:
    """Store that puts a world into Ray once per connection, however many messages ask for it."""

    stored: tuple[Any, SharedWorld | None] = (None, None)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def share(self) -> SharedWorld | None:
        """Return the cached world in Ray; put it there if this connection does not have it."""
        # Not imported: an app is pickled in processes without Ray too, and a Ray that is connected is loaded.
        ray = sys.modules.get("ray")
        if WORLD_CACHE.latest is None or ray is None or not ray.is_initialized():
            return None
        scenario, world = WORLD_CACHE.latest
        # The job is part of the key: after a new start of Ray the old reference is worthless.
        context = ray.get_runtime_context()
        key = (context.get_node_id(), context.get_job_id(), scenario)
        # Flower pickles the messages of a round in several threads.
        with self.lock:
            if self.stored[0] != key:
                self.stored = (key, _put(ray, scenario, world))
            return self.stored[1]


def _put(ray: Any, scenario: str, world: World) -> SharedWorld | None:
    # The user's own data or model may hold what cannot be pickled: then the actors build the world from the scenario.
    try:
        return SharedWorld(scenario, ray.put(world.for_clients()))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        logger.warning("each actor builds the data by itself, as they cannot be pickled: %s", error)
        return None


_WORLD_STORE = _WorldStore()
