"""Options of runs: how and where they run, with which parts of the caller's, and how they are kept and resumed.

The checkpoints of a run follow from its options. :mod:`fedsel_flwr.rounds.checkpoints` decides which one is loaded.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from fedsel_flwr.callbacks.tracking import TRACKED_CLIENTS, TrackerLike, Tracking
from fedsel_flwr.checks import whole
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.checkpoints import Checkpoint, Resume, check_length, check_resume
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.run_identity import Identity
from fedsel_flwr.simulations.scenario import Scenario, course_settings
from fedsel_flwr.simulations.worlds.ingredients import MakeModel, OwnParts
from fedsel_flwr.simulations.worlds.own_data import as_data
from fedsel_flwr.simulations.worlds.world import World

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints inside a run's folder."""
CHECKPOINT_SHARE = 0.02
"""Largest share of a vectorized run's time that checkpoints in the run's folder may take."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of :func:`~fedsel_flwr.simulations.engine.simulate` and of a comparison's runs.

    Args:
        num_cpus: Cores for Ray. If None, all cores. If each client takes one core, then ``num_cpus`` clients train at a
            time. On a cluster the argument is refused, because the cluster already has its cores. The vectorized engine
            refuses all arguments that only Ray uses. For vectorized runs of a comparison on a cluster: cores, and
            threads, of each run. If None, 1.
        num_gpus: GPUs for Ray. If None, all GPUs if ``client_gpus`` is above 0, otherwise none. On a cluster the
            argument is refused. For vectorized runs of a comparison on a cluster: GPUs of each run. If None, 1 if
            ``device`` is a GPU, otherwise 0.
        client_cpus: Cores per client on Ray, above 0.
        client_gpus: GPUs per client on Ray, a whole number or a fraction. A client with a GPU trains on it. If None, an
            equal share of ``num_gpus``.
        ray_address: HOST:PORT of the head of a Ray cluster, "auto", or "local" for Ray on this machine. If None, the
            environment variable RAY_ADDRESS. The vectorized runs of a comparison are then tasks on the cluster
            (:mod:`~fedsel_flwr.simulations.comparisons`), but they ignore RAY_ADDRESS. With the same number of threads,
            a run has the same result on every machine of one kind.
        quiet: Whether to print nothing on standard error. This option hides the progress, remarks on the runs, the logs
            of Flower and of this package, and the line "Starting Ray".
        device: Device on which the vectorized engine trains and evaluates: "cpu", "cuda" and so on. On a GPU, a run
            with convolutions does not repeat itself exactly.
        model: Function that makes your torch module. The module replaces ``model.name``
            (:class:`~fedsel_flwr.simulations.worlds.ingredients.OwnParts`).
        data: Your examples, which replace ``data.dataset``: an ``OwnData`` or a pair (train, test). Train and test are
            pairs of arrays or torch ``Dataset`` objects (:class:`~fedsel_flwr.simulations.worlds.own_data.OwnData`).
            You may also pass a function that takes the seed and returns an ``OwnData`` or such a pair.
        objective: Your loss and quality (:class:`~fedsel_flwr.clients.objectives.Objective`).
        folder: Folder of the results (:class:`~fedsel_flwr.simulations.results.RunFolder`). Each round is written as
            soon as it ends, and the summaries of a comparison at its end. After an error, the last model is in
            ``model-after-round-N.safetensors``. If None, nothing is written.
        checkpoint_every: Rounds between two checkpoints. With None, a checkpoint follows each round. With None and a
            ``folder``, the vectorized engine writes checkpoints less often: they take at most 2 % of the run's time.
            With 0, which is allowed only without ``checkpoint_dir``, there are no checkpoints.
        resume: False begins anew, and refuses to overwrite checkpoints or an interrupted comparison. True reads the
            finished runs in ``folder``, resumes an interrupted run from its newest usable checkpoint, and runs the
            rest. "must" raises an error if there is nothing to resume. Scenario, code and data must be unchanged, and
            you must pass your selectors, model or data again. ``rounds`` and the budgets may be larger, and a
            comparison may have more selectors and seeds. The last trained round is evaluated again, and ``on_round`` is
            called again with it. A run is refused if the code of its selector, model or objective, or its data,
            partition or scenario has changed. The error names what has changed.
        replay: Whether ``resume`` repeats, from the start, a run that is damaged or whose code or data changed. If
            False, such a run is refused.
        track: The tracker that receives parameters and metrics: "tensorboard", "mlflow" or "wandb". An address may
            follow, as in "mlflow:http://host:5000". For your own tracker, pass a class derived from
            :class:`~fedsel_flwr.callbacks.Recorder`, or its path ``./file.py:Class``. If the tracker fails, the run
            continues without it. A resumed run is a new run of the tracker. If None, there is no tracker.
        track_clients: Clients whose own metrics are tracked: a list of ids, or a number. With a number, the clients are
            picked evenly from all ids.
    """

    num_cpus: int | None = None
    num_gpus: int | None = None
    client_cpus: float = 1
    client_gpus: float | None = None
    ray_address: str | None = None
    quiet: bool = False
    device: str = "cpu"
    model: MakeModel | None = None
    data: Any = None
    objective: Objective | None = None
    folder: str | Path | None = None
    checkpoint_every: int | None = None
    resume: Resume = False
    replay: bool = False
    track: TrackerLike | Tracking | None = None
    track_clients: int | Sequence[int] = TRACKED_CLIENTS

    @property
    def where(self) -> RayResources:
        """Resources of Ray.

        Raises:
            ParameterError: A number is out of range.
        """
        return RayResources(self.num_cpus, self.num_gpus, self.client_cpus, self.client_gpus, self.ray_address)

    def __post_init__(self) -> None:
        """Refuse an objective of another type, and convert the data, so that all runs share one object."""
        if self.objective is not None and not isinstance(self.objective, Objective):
            raise ParameterError(
                "objective must be a fedsel_flwr.clients.objectives.Objective(loss=..., quality=...), got "
                f"{type(self.objective).__name__}"
            )
        if self.data is not None:
            object.__setattr__(self, "data", as_data(self.data))

    @property
    def own(self) -> OwnParts:
        """The caller's model, data and objective."""
        return OwnParts(self.model, self.data, self.objective)

    def tracking(self, scenario: str, num_clients: int) -> Tracking | None:
        """Return the tracker; None if there is none.

        Args:
            scenario: Name of the scenario.
            num_clients: Number of its clients.
        """
        if self.track is None or isinstance(self.track, Tracking):
            return self.track
        return Tracking.of(self.track, scenario, num_clients, folder=self.folder, track_clients=self.track_clients)


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Give a function the arguments of a dataclass, for ``help()``, editors and type checkers."""
    signature = inspect.signature(arguments)

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(arguments(*args, **kwargs))

        shown = inspect.signature(function).return_annotation
        vars(call).update(__signature__=signature.replace(return_annotation=shown))
        # The section Args of the function refers to the classes, whose sections take its place.
        documented = [inspect.cleandoc(one.__doc__ or "").partition("Args:\n")[2] for one in (arguments, RunOptions)]
        text = inspect.cleandoc(function.__doc__ or "")
        call.__doc__ = re.sub(r"(?<=^Args:\n)( +.*\n)+", lambda _: "\n".join([*documented, ""]), text, flags=re.M)
        return call

    return decorate


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run: their folder, how often they are written, and whether the run resumes from them.

    Attributes:
        folder: Folder of the checkpoints. If None, no checkpoints are written.
        temporary: Whether the folder is inside the run's folder, and is removed when the run has finished.
        every: Rounds between two checkpoints.
        keep: Number of checkpoints that are kept.
        resume: Whether to resume.
        share: Largest share of the run's time that checkpoints may take; 1 sets no limit.
    """

    folder: Path | None = None
    temporary: bool = False
    every: int = 1
    keep: int = 3
    resume: Resume = False
    share: float = 1.0

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        folder: str | os.PathLike[str] | None,
        checkpoint_dir: str | os.PathLike[str] | None,
        every: int | None,
        keep: int,
        resume: Resume,
    ) -> CheckpointPlan:
        """Return the plan that the arguments of :func:`~fedsel_flwr.simulations.engine.simulate` describe.

        Raises:
            ParameterError: An argument is out of range, or arguments contradict each other.
        """
        check_resume(resume)
        number = 1 if every is None else whole("checkpoint_every", every, 0)
        keep = whole("keep_checkpoints", keep, 1)
        if not number and (resume == "must" or checkpoint_dir is not None):
            what = "checkpoint_dir" if checkpoint_dir is not None else "resume = 'must'"
            raise ParameterError(f"{what} needs checkpoints. Leave out checkpoint_every = 0, which writes none")
        if checkpoint_dir is not None:
            return cls(Path(checkpoint_dir), False, number, keep, resume)
        if folder is None and resume:
            raise ParameterError(
                f"resume = {resume!r} needs the folder of the run, or checkpoint_dir with its checkpoints. Set "
                "one of them"
            )
        if folder is None or not number:
            return cls()
        # A vectorized round may take less time than its checkpoint. A round on Ray always takes longer.
        share = CHECKPOINT_SHARE if every is None and scenario.engine == "vectorized" else 1.0
        return cls(Path(folder) / CHECKPOINTS, True, number, keep, resume, share)

    def options(self, scenario: Scenario, selector: Selector | None = None) -> dict[str, Any]:
        """Return the options of a strategy that set these checkpoints.

        Args:
            scenario: Scenario that is run.
            selector: The caller's selector, which may plan for another number of rounds.
        """
        if self.folder is None:
            return {}
        total = None if hasattr(selector, "total_rounds") else scenario.rounds
        return {
            "checkpoint_dir": self.folder, "checkpoint_every": self.every, "keep_checkpoints": self.keep,
            "resume": self.resume, "total_rounds": total,
        }  # fmt: skip

    def attach(self, strategy: Any, world: World, prints: Identity) -> None:
        """Give a strategy the identity of its run, and let it read its checkpoint, if there is one.

        Args:
            strategy: Strategy made with :meth:`options`.
            world: The scenario's world.
            prints: Identity of the run. Those in the checkpoint must be equal.

        Raises:
            RunError: No checkpoint can be used, or the checkpoint has more rounds than the scenario.
        """
        if self.folder is None:
            return
        # Set before `resumed` is read, because reading the checkpoint compares it with these values.
        settings = course_settings(world.scenario)
        # A selector that plans for a number of rounds makes other choices for another number, from the first round on.
        if "total_rounds" in inspect.signature(type(strategy.selector)).parameters:
            settings["rounds"] = str(world.scenario.rounds)
        strategy.fingerprint.update({f"scenario.{key}": text for key, text in settings.items()})
        strategy.fingerprint.update({f"fingerprint of {key}": found for key, found in prints.items()})
        resumed: Checkpoint | None = strategy.resumed
        if resumed is not None:
            check_length(self.folder, resumed.round, world.scenario.rounds)

    def discard(self) -> None:
        """Remove checkpoints that the folder of a finished run no longer needs."""
        if self.temporary and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class CheckpointPace:
    """Limit on the share of a run's time that checkpoints take.

    Args:
        share: Largest share of the time; 1 sets no limit.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share, self._next = share, -np.inf

    def __call__(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, unless the last one was written too recently."""
        began = time.monotonic()
        if began < self._next:
            return
        write()
        ended = time.monotonic()
        if self._share < 1.0:
            # Waiting cost / share from now keeps the cost below its share, even if the disk is slow.
            self._next = ended + (ended - began) / self._share
