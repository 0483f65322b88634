"""Trackers: callbacks for TensorBoard, MLflow and Weights & Biases, and their base class, the recorder.

If a library fails, the run continues. :func:`together` combines several callbacks into one.
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
    """Callback for ``on_round``. It is also a context manager, which closes the library's run at the end.

    An exception in a round or at the end does not end the run. The first exception is logged as a warning, and later
    rounds are still passed on.
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
        """Write a round's figures; may raise any exception of the library."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Close the library's run; may raise any exception of the library."""

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the library's run; mark it as failed if an exception ended it."""
        self.close(failed=error is not None)

    @contextlib.contextmanager
    def _logging_errors(self, when: str) -> Iterator[None]:
        try:
            yield
        # Any exception, because a run of hours must not end if a tracking server is unreachable.
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "%s failed %s. The run continues, and further failures are not logged: %s",
                    type(self).__name__, when, described(error),
                )  # fmt: skip
            self._failed = True


def figures(record: RoundRecord) -> dict[str, float]:
    """Return a round's finite figures, with the names from :class:`~fedsel_flwr.rounds.records.RoundRecord`.

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
        module: Name of the module.
        package: Name of the package that contains it.

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
    """Combine callbacks into one callback, which calls them in this order.

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
    """Callback that writes each round's figures to TensorBoard as scalars, with the round as the step.

    It uses TensorBoard's event writer, and needs neither torch nor TensorFlow. Each round is on disk when it has ended.
    A resumed run writes to the same folder.

    Args:
        folder: Log folder of the run.
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
        """Write a scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(self._prefix + name, value, round)
        # The writer has a buffer. Without a flush, an interrupted run would lose its last rounds.
        self._writer.flush()

    def end(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(Recorder):
    """Callback that logs each round's figures as metrics of one MLflow run, with the round as the step.

    It uses a separate MLflow client. MLflow's active run and global settings do not change, and any thread may report
    rounds.

    Args:
        experiment: Name of the experiment; created if it does not exist.
        run_name: Name of the run. If None, MLflow chooses a name.
        tracking_uri: Address of the tracking server or store, such as ``http://host:5000`` or ``sqlite:///runs.db``. If
            None, MLflow's configuration decides.
        params: Parameters of the run, such as selector and seed.
        run_id: Identifier of the run to append to, after a resume. If None, a new run.

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
            # The run was closed when its first part was interrupted.
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = str(run_id)
        for name, value in (params or {}).items():
            self._client.log_param(self.run_id, name, value)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a metric for each figure, in one request."""
        # MLflow expects milliseconds.
        now = int(1000 * time.time())
        self._client.log_batch(self.run_id, metrics=[self._metric(n, v, now, round) for n, v in values.items()])

    def end(self, *, failed: bool) -> None:
        """Set the run's status to finished or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class WandB(Recorder):
    """Callback that logs each round's figures to one run of Weights & Biases, with the round as the step.

    Args:
        project: Name of the project.
        **settings: More arguments of ``wandb.init``, such as ``config``, ``name``, ``dir`` or ``mode="offline"``. For a
            resumed run, use ``id`` and ``resume="allow"``.

    Attributes:
        run: The run object of wandb.

    Raises:
        RunError: wandb is not installed.

    Example::

        with WandB("selection", config={"selector": "bsfl"}, mode="offline") as run:
            simulate(load_scenario("smoke"), on_round=run)
    """

    def __init__(self, project: str = "fedsel", **settings: Any) -> None:
        self.run = import_library("wandb", "wandb").init(project=project, **settings)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round's figures, with the round as the step."""
        self.run.log(dict(values), step=round)

    def end(self, *, failed: bool) -> None:
        """Finish the run; a failed run gets exit code 1."""
        self.run.finish(exit_code=int(failed))
