"""Ray for one run: started on this machine or joined, told while it starts, watched while it runs.

Noticing that Ray has died: Ray itself waits for a minute, and then ends the process without a word on the run.

One world for the actors of a simulation: the server has built it, they read it where Ray keeps objects.

Reading data, drawing partitions and importing what does both takes an actor longer than its first round of training.
Ray keeps the arrays once a machine, and actors look at them in place.
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
from fedsel_flwr.simulations.on_flower.ray_resources import Where, knock, start
from fedsel_flwr.simulations.shutdown import (
    RAY_SERVERS,
    keep_sigterm_while_ray_ends,
    keep_sigterm_while_ray_starts,
    process_name,
)
from fedsel_flwr.simulations.worlds.world import WORLD_CACHE, World

PERIOD_S = 0.3
GRACE_S = 20.0
"""So long may Flower take to end after Ray's death; then the process ends, as Ray would end it."""
SILENT_S = 5.0
"""So long may the head of a cluster be out of reach."""
EXIT_DEAD = 2
"""The exit status where Flower does not come to its end."""


class Watch:
    """Looks after Ray's processes from a thread of its own, while the block lasts.

    Args:
        address: Of the cluster that was joined; None for Ray's processes that this process has started. Of those that
            are left when one has died, the others are ended: whoever waits for a worker then hears of its end.
    """

    def __init__(self, address: str | None) -> None:
        self._address = None if address is None else _head(address)
        self._said = ""
        self._over, self._closed = threading.Event(), threading.Event()
        self._workers: set[psutil.Process] = set()
        self._pillars = [] if address else [p for p in psutil.Process().children() if process_name(p) in RAY_SERVERS]
        self._thread = threading.Thread(target=self._look, name="ray-watch", daemon=True)

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        self._over.set()
        self._closed.set()

    @property
    def died(self) -> bool:
        """Whether Ray has died."""
        return bool(self._said)

    def over(self) -> None:
        """Ray may end from now on."""
        self._over.set()

    def check(self) -> None:
        """Raise :class:`RunError` if Ray has died."""
        if self._said:
            raise RunError(self._said)

    def _look(self) -> None:
        silent = 0.0
        while not self._over.wait(PERIOD_S):
            if self._address is None:
                for raylet in self._pillars:
                    with contextlib.suppress(psutil.Error):
                        self._workers |= set(raylet.children(recursive=True))
                dead = [process_name(process) or "a process of it" for process in self._pillars if not _alive(process)]
                if dead:
                    return self._end(f"Ray died ({' and '.join(dead)} ended; was it killed, or memory short?)")
            else:
                try:
                    knock(self._address)
                    silent = 0.0
                except OSError as error:
                    silent += PERIOD_S
                    if silent >= SILENT_S or isinstance(error, ConnectionRefusedError):
                        return self._end(f"the head of the Ray cluster at {self._address} is gone ({error})")

    def _end(self, said: str) -> None:
        if self._over.is_set():
            return
        self._said = said
        for process in (*self._pillars, *self._workers):
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not self._closed.wait(GRACE_S):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os.write(2, f"fedsel: error: {said}; the process ends, as Flower waits for it\n".encode())
            os._exit(EXIT_DEAD)


def _head(address: str) -> str:
    """HOST:PORT of the head, which "auto" does not say."""
    if address != "auto":
        return address
    import ray

    context: Any = ray.get_runtime_context()
    return str(context.gcs_address)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class Session:
    """Ray for one run.

    A connection that the caller has already opened serves, and is neither told nor watched.

    Args:
        where: What Ray gets, or which cluster is joined.
        waiting: Tells that Ray starts, from :meth:`open` to the first client's answer.
    """

    def __init__(self, where: Where, waiting: WaitNotice) -> None:
        self._where, self._waiting = where, waiting
        self.watch: Watch | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Start or join Ray, and close the connection at the end; a cluster goes on.

        Raises:
            RunError: Ray cannot be started or refuses the connection, no client finds room, or Ray died on the way.
        """
        ray = _ray()
        disable_actor_retries()
        if ray.is_initialized():
            yield
            return
        with self._waiting, keep_sigterm_while_ray_ends():  # Flower ends Ray itself
            address = self._where.address
            _start(ray, self._where, address)
            try:
                if address is not None:
                    self._where.check_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]])
                with Watch(address) as self.watch:
                    yield
            except Exception:
                self.check()  # Flower says something else where Ray has died
                raise
            finally:
                with contextlib.suppress(Exception):  # of a Ray that is dead
                    if ray.is_initialized():
                        ray.shutdown()

    @property
    def client_resources(self) -> dict[str, float]:
        """What Flower gives each actor."""
        return self._where.client_resources()

    @property
    def died(self) -> bool:
        """Whether Ray has died."""
        return self.watch is not None and self.watch.died

    def check(self) -> None:
        """Raise :class:`RunError` if Ray has died."""
        if self.watch is not None:
            self.watch.check()

    def ending(self) -> None:
        """The rounds are over: from now on Ray may end."""
        if self.watch is not None:
            self.watch.over()

    def attend(self, grid: Any) -> None:
        """Have a grid's pulls raise where Ray has died, and the first answer end the waiting; changes the grid."""
        pull = getattr(grid, "pull_messages", None)
        if pull is None:
            return

        def pull_messages(*args: Any, **kwargs: Any) -> Any:
            self.check()
            answers = list(pull(*args, **kwargs))
            if answers:
                self._waiting.done()
            return answers

        grid.pull_messages = pull_messages

    @contextlib.contextmanager
    def stopping(self, strategy: Any) -> Iterator[None]:
        """Have a strategy's next aggregation or configuration raise where Ray has died.

        Without this Flower's legacy server takes every answer that is missing for a client that failed, and plays all
        rounds to their end.
        """
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


def _start(ray: Any, where: Where, address: str | None) -> None:
    """Start Ray, or join a cluster; raises :class:`RunError` with what Ray says, in one line."""
    # As Flower does: where Python looks for modules. Of a Ray of our own the processes inherit it, so that the workers
    # that Ray starts beforehand serve; on a cluster they are those of ``ray start``.
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns on standard error
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is None:
            # "local": else Ray joins whatever was started on this machine, and refuses the number of cores.
            options |= {"address": "local", "num_cpus": where.cpus, "include_dashboard": False}
            if where.num_gpus is not None or where.client_gpus:
                options["num_gpus"] = where.gpus()
            with _environment("PYTHONPATH", path), keep_sigterm_while_ray_starts():
                ray.init(**options)
        else:
            with keep_sigterm_while_ray_starts():
                ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": path}}, **options)
    except Exception as error:  # Ray has many
        said = " ".join(str(error).split())
        if address is None:
            raise RunError(f"Ray cannot be started on this machine: {said}") from error
        raise RunError(f"{where.source} = {address!r}: {said}; {start(where.source)}") from error


@contextlib.contextmanager
def _environment(key: str, value: str) -> Iterator[None]:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _ray() -> Any:
    import ray

    return ray


logger = logging.getLogger("fedsel_flwr")


@dataclass(frozen=True)
class Offer:
    """Where a world is.

    Attributes:
        scenario: The scenario as JSON.
        reference: Ray's reference to the world.
    """

    scenario: str
    reference: Any


def offered() -> Offer | None:
    """Offer the world that this process has built to its actors.

    Returns:
        Where it is; None where no world was built, Ray is not connected or cannot hold it: actors build their own.
    """
    return _COUNTER.offer()


def accept(offer: Offer) -> None:
    """Take over a world that another process has built, unless this one has it."""
    if WORLD_CACHE.latest is None or WORLD_CACHE.latest[0] != offer.scenario:
        import ray

        WORLD_CACHE.put(offer.scenario, ray.get(offer.reference))


@dataclass
class _Counter:
    """Puts a world into Ray once for each connection to Ray."""

    made: tuple[Any, Offer | None] = (None, None)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self) -> Offer | None:
        ray = sys.modules.get("ray")
        if WORLD_CACHE.latest is None or ray is None or not ray.is_initialized():
            return None
        scenario, world = WORLD_CACHE.latest
        context = ray.get_runtime_context()
        of = (context.get_node_id(), context.get_job_id(), scenario)
        with self.lock:
            if self.made[0] != of:
                self.made = (of, _put(ray, scenario, world))
            return self.made[1]


def _put(ray: Any, scenario: str, world: World) -> Offer | None:
    try:
        return Offer(scenario, ray.put(world.for_clients()))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        logger.warning("each actor builds the data by itself, as they cannot be pickled: %s", error)
        return None


_COUNTER = _Counter()
