"""Ray for one run: started on this machine or joined, told while it starts, watched while it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import end_once
from fedsel_flwr.report.progress import Waiting
from fedsel_flwr.simulations.cluster import start
from fedsel_flwr.simulations.leaving import keeping_sigterm, own_handlers
from fedsel_flwr.simulations.ray_watch import Watch
from fedsel_flwr.simulations.where import Where


class Session:
    """Ray for one run.

    A connection that the caller has already opened serves, and is neither told nor watched.

    Args:
        where: What Ray gets, or which cluster is joined.
        waiting: Tells that Ray starts, from :meth:`open` to the first client's answer.
    """

    def __init__(self, where: Where, waiting: Waiting) -> None:
        self._where, self._waiting = where, waiting
        self.watch: Watch | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Start or join Ray, and close the connection at the end; a cluster goes on.

        Raises:
            RunError: Ray cannot be started or refuses the connection, no client finds room, or Ray died on the way.
        """
        ray = _ray()
        end_once()
        if ray.is_initialized():
            yield
            return
        with self._waiting, keeping_sigterm():  # Flower ends Ray itself
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
            with _environment("PYTHONPATH", path), own_handlers():
                ray.init(**options)
        else:
            with own_handlers():
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
