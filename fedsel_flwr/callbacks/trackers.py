"""Trackers: callbacks for TensorBoard, MLflow and Weights & Biases, and the recorder from which they derive.

A library that fails does not end the run. :func:`together` combines several callbacks into one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any, Self

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.rounds.records import RoundRecord

logger = logging.getLogger("fedsel_flwr")
OnRound = Callable[[RoundRecord], None]


class Recorder(ABC):
    """A callback for ``on_round``; also a context manager that closes at the end.

    An exception in a round or at the end does not end the run. The first one is logged as a warning, and later rounds
    are still handed over.
    """

    _failed = False

    def __call__(self, record: RoundRecord) -> None:
        """Write a finished round.

        Args:
            record: The round.
        """
        with self._logging_errors(f"in round {record.round}"):
            self.write(record.round, figures(record))

    def close(self, *, failed: bool = False) -> None:
        """Close the library's run.

        Args:
            failed: Whether an exception ended the run.
        """
        with self._logging_errors("at the end"):
            self.end(failed=failed)

    @abstractmethod
    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Write a round's figures; may raise whatever the library raises."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Close the library's run; may raise whatever the library raises."""

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the library's run, as failed if an exception ended it."""
        self.close(failed=error is not None)

    @contextlib.contextmanager
    def _logging_errors(self, when: str) -> Iterator[None]:
        try:
            yield
        # Any exception: a run of hours must not end because a tracking server is away.
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "%s failed %s. The run continues, and further failures are not logged: %s",
                    type(self).__name__, when, described(error),
                )  # fmt: skip
            self._failed = True


def figures(record: RoundRecord) -> dict[str, float]:
    """Return a round's finite figures under the names of :class:`~fedsel_flwr.rounds.records.RoundRecord`.

    >>> record = RoundRecord(round=1, num_available=9, num_selected=3, num_completed=2, round_s=0.5, simulated_s=0.5,
    ...                      energy_j=float("nan"), total_energy_j=float("nan"), accuracy=0.25)
    >>> figures(record)["accuracy"], "energy_j" in figures(record)
    (0.25, False)
    """
    values = {name: float(value) for name, value in vars(record).items() if name != "round"}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def import_library(module: str, package: str) -> ModuleType:
    """Import a library's module.

    Args:
        module: The module's name.
        package: The package that holds it.

    Raises:
        RunError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(
            f"this callback needs {package}, which is not installed ({error}). Install it with pip install {package}"
        ) from error


def together(*callbacks: OnRound) -> OnRound:
    """Combine callbacks into one that calls them in the order given.

    >>> seen = []
    >>> together(seen.append, lambda record: seen.append(2 * record))(1)
    >>> seen
    [1, 2]
    """

    def on_round(record: RoundRecord) -> None:
        for callback in callbacks:
            callback(record)

    return on_round


class TensorBoard(Recorder):
    """Writes each round's figures as scalars, the round as their step.

    TensorBoard's own writer is used: neither torch nor TensorFlow is needed. Each round is on disk when it has ended. A
    resumed run writes to the same folder.

    Args:
        folder: The log folder of the run.
        prefix: Prefix of the tags.

    Raises:
        RunError: tensorboard is not installed.

    Example::

        with TensorBoard("logs/bsfl") as board:
            simulate(load_scenario("smoke"), on_round=board)
    """

    def __init__(self, folder: str | os.PathLike[str], *, prefix: str = "fedsel/") -> None:
        self._prefix = prefix
        self._writer = import_library("tensorboard.summary", "tensorboard").Writer(os.fspath(folder))

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(self._prefix + name, value, round)
        # The writer buffers: a run that is cut off would lose its last rounds.
        self._writer.flush()

    def end(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(Recorder):
    """Logs each round's figures as metrics of one MLflow run, the round as their step.

    It uses its own MLflow client: MLflow's active run and global settings stay as they are, and rounds may come from
    any thread.

    Args:
        experiment: Name of the experiment; made if there is none.
        run_name: Name of the run; None: MLflow chooses one.
        tracking_uri: Address of the tracking server or store, such as ``http://host:5000`` or ``sqlite:///runs.db``;
            None: as MLflow is configured.
        params: The run's parameters, such as selector and seed.
        run_id: A run to append to, after a resume; None: a new one.

    Attributes:
        run_id: MLflow's identifier of the run.

    Raises:
        RunError: mlflow is not installed.

    Example::

        with MLflow("selection", tracking_uri="sqlite:///runs.db", params={"selector": "bsfl"}) as run:
            simulate(load_scenario("smoke"), on_round=run)
    """

    def __init__(
        self,
        experiment: str = "fedsel",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, object] | None = None,
        run_id: str | None = None,
    ) -> None:
        module = import_library("mlflow", "mlflow")
        self._metric = import_library("mlflow.entities", "mlflow").Metric
        self._client = module.MlflowClient(tracking_uri=tracking_uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            place = found.experiment_id if found else self._client.create_experiment(experiment)
            run_id = self._client.create_run(place, run_name=run_name).info.run_id
        else:
            # The run was closed when the first part of it was cut off.
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = str(run_id)
        for name, value in (params or {}).items():
            self._client.log_param(self.run_id, name, value)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a metric for each figure, in one request."""
        # MLflow counts in milliseconds.
        now = int(1000 * time.time())
        self._client.log_batch(self.run_id, metrics=[self._metric(n, v, now, round) for n, v in values.items()])

    def end(self, *, failed: bool) -> None:
        """Set the run's status: finished, or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class WandB(Recorder):
    """Logs each round's figures to one run of Weights & Biases, the round as their step.

    Args:
        project: Name of the project.
        **settings: Further arguments of ``wandb.init``, such as ``config``, ``name``, ``dir``, ``mode="offline"``, or
            ``id`` and ``resume="allow"`` for a run that is resumed.

    Attributes:
        run: wandb's object of the run.

    Raises:
        RunError: wandb is not installed.

    Example::

        with WandB("selection", config={"selector": "bsfl"}, mode="offline") as run:
            simulate(load_scenario("smoke"), on_round=run)
    """

    def __init__(self, project: str = "fedsel", **settings: Any) -> None:
        self.run = import_library("wandb", "wandb").init(project=project, **settings)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round's figures, the round as their step."""
        self.run.log(dict(values), step=round)

    def end(self, *, failed: bool) -> None:
        """Finish the run; a failed one with exit code 1."""
        self.run.finish(exit_code=int(failed))
