"""Trackers: callbacks for TensorBoard, MLflow and Weights & Biases, and their base class, the recorder.

If a library fails, the run continues without the rounds that it did not take. :func:`together` combines several
callbacks into one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, Self

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

logger = logging.getLogger("fedsel_flwr")
OnRound = Callable[[RoundRecord], None]
Figures = Mapping[str, float]
"""Name of a metric -> its value in one round."""
CLIENT_FIGURES = ("latency_s", "download_s", "compute_s", "upload_s", "energy_j", "train_loss", "completed")
"""Fields of a client's record that are metrics."""
METRICS_PER_REQUEST = 1000
"""Most metrics that MLflow takes in one request."""
RETRY = 10.0
"""After a failure, a tracked run sends no round for this many times the seconds that the failure took."""
MAX_ERROR = 160
"""Longest text of a tracker's error, characters: MLflow's errors are long."""


class Recorder(ABC):
    """Callback for ``on_round``. It is also a context manager, which closes the library's run at the end.

    An exception in a round or at the end does not end the run. The first exception is logged as a warning, and later
    rounds are still passed on.

    Attributes:
        run_id: The tracker's identifier of the run; None without one.
    """

    run_id: str | None = None
    _failed, _name = False, ""

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
    def write(self, round: int, values: Figures) -> None:
        """Write a round's figures; may raise any exception of the library."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Close the library's run; may raise any exception of the library."""

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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
                    self._name or type(self).__name__, when, described(error)[:MAX_ERROR],
                )  # fmt: skip
            self._failed = True


class TrackedRun(Recorder):
    """Callback of one run for any tracker: opens the tracker's run with the first round, and adds the clients' figures.

    The tracker's run of a resumed run is a new one, which begins with the rounds before.

    Args:
        name: Name of the tracker.
        open_run: Opens a run of the tracker.
        clients: Ids of the clients with per-client metrics.
    """

    def __init__(self, name: str, open_run: Callable[[], Recorder], clients: Collection[str] = ()) -> None:
        self._name, self._open, self._clients = name, open_run, frozenset(clients)
        self._recorder: Recorder | None = None
        self._next = -math.inf

    def follow(self, history: History) -> Self:
        """Take the clients and the rounds before from a history; returns itself."""
        self._history = history
        return self

    def __call__(self, record: RoundRecord) -> None:
        """Send a finished round, unless the tracker has just failed.

        Args:
            record: The round, the last one of the history.
        """
        if (began := time.monotonic()) < self._next:
            return
        with self._logging_errors(f"in round {record.round}"):
            for number, values in self._figures(record.round if self._recorder else 1):
                self.write(number, values)
            self._next = -math.inf
            return
        ended = time.monotonic()
        self._next = ended + RETRY * (ended - began)

    def write(self, round: int, values: Figures) -> None:
        """Write a round's figures, in a run that the first ones open."""
        self._recorder = self._recorder or self._open()
        self._recorder.write(round, values)

    def end(self, *, failed: bool) -> None:
        """Close the tracker's run. Ctrl-C does not wait for a tracker that has just failed."""
        if self._recorder is not None and not (failed and time.monotonic() < self._next):
            self._recorder.end(failed=failed)

    def _figures(self, first: int) -> Iterator[tuple[int, Figures]]:
        """Yield the figures of the history's rounds from the first on, each with its number."""
        rounds = [record for record in self._history.rounds if record.round >= first]
        # Clients are counted from the end, so that old rounds are not read.
        place = len(self._history.clients) - sum(record.num_selected for record in rounds)
        for record in rounds:
            values = figures(record)
            for row in self._history.clients[place : place + record.num_selected] if self._clients else ():
                if row.client_id in self._clients:
                    values |= client_figures(row)
            place += record.num_selected
            yield record.round, values


def figures(record: RoundRecord) -> dict[str, float]:
    """Return a round's finite figures, with the names from :class:`~fedsel_flwr.rounds.records.RoundRecord`.

    >>> record = RoundRecord(round=1, num_available=9, num_selected=3, num_completed=2, round_s=0.5, simulated_s=0.5,
    ...                      energy_j=float("nan"), total_energy_j=float("nan"), accuracy=0.25)
    >>> figures(record)["accuracy"], "energy_j" in figures(record)
    (0.25, False)
    """
    values = {name: float(one) for name, one in vars(record).items() if name != "round" and not isinstance(one, str)}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def client_figures(row: ClientRecord) -> dict[str, float]:
    """Return a client's finite figures in a round, named ``client/ID/latency_s`` and so on.

    Trackers allow few characters in a name: any but a letter, digit, ``_``, ``-`` or ``.`` of the id becomes ``_``.

    >>> nothing = dict.fromkeys(["download_s", "compute_s", "upload_s", "energy_j", "train_loss"], float("nan"))
    >>> client_figures(ClientRecord(round=1, client_id="a/b", client=0, completed=True, problem="", latency_s=2.5,
    ...                             num_examples=0, **nothing))
    {'client/a_b/latency_s': 2.5, 'client/a_b/completed': 1.0}
    """
    name = re.sub(r"[^\w.-]", "_", row.client_id, flags=re.ASCII)[:100]
    values = {f"client/{name}/{field}": float(getattr(row, field)) for field in CLIENT_FIGURES}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def import_library(module: str, package: str, what: str = "this tracker", extra: str = "") -> ModuleType:
    """Import a library's module.

    Args:
        module: Name of the module.
        package: Name of the package that contains it.
        what: What needs the library, for the message.
        extra: Extra of this package that installs the library; empty if there is none.

    Raises:
        RunError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"'fedsel-flwr[{extra}]'" if extra else package
        raise RunError(
            f"{what} needs {package}, which is not installed ({error}). Install it with pip install {install}"
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

    Args:
        folder: Log folder of the run.
        prefix: Prefix of the tags of rounds. The tags of clients begin with ``client/``.
        params: Parameters of the run, for the tab HPARAMS. If None, none.

    Raises:
        RunError: tensorboard is not installed.

    Example::

        with TensorBoard("logs/bsfl") as board:
            simulate(load_scenario("smoke"), on_round=board)
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, prefix: str = "fedsel/", params: Mapping[str, object] | None = None
    ) -> None:
        self._prefix = prefix
        self._writer = import_library("tensorboard.summary", "tensorboard").Writer(os.fspath(folder))
        if params:
            self._write_params(os.fspath(folder), params)

    def write(self, round: int, values: Figures) -> None:
        """Write a scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(name if name.startswith("client/") else self._prefix + name, value, round)
        # The writer has a buffer. Without a flush, an interrupted run would lose its last rounds.
        self._writer.flush()

    def end(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _write_params(self, folder: str, params: Mapping[str, object]) -> None:
        modules = ("compat.proto.event_pb2", "plugins.hparams.summary_v2", "summary.writer.event_file_writer")
        event, summary, writer = (import_library(f"tensorboard.{name}", "tensorboard") for name in modules)
        plain = {key: one if isinstance(one, bool | int | float | str) else str(one) for key, one in params.items()}
        # In a file of its own: TensorBoard's writer of scalars takes nothing else.
        file = writer.EventFileWriter(folder, filename_suffix=".hparams")
        file.add_event(event.Event(wall_time=time.time(), summary=summary.hparams_pb(plain)))
        file.close()


def find_or_make_experiment(client: Any, name: str) -> str:
    """Return the id of an experiment of MLflow, made if there is none."""
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


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
        self._client = import_library("mlflow", "mlflow").MlflowClient(tracking_uri=tracking_uri)
        entities = import_library("mlflow.entities", "mlflow")
        self._metric = entities.Metric
        if run_id is None:
            place = find_or_make_experiment(self._client, experiment)
            run_id = self._client.create_run(place, run_name=run_name).info.run_id
            given = [entities.Param(name, str(value)) for name, value in (params or {}).items()]
            # MLflow takes 100 parameters in one request.
            for first in range(0, len(given), 100):
                self._client.log_batch(run_id, params=given[first : first + 100])
        else:
            # The run was closed when its first part was interrupted.
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = str(run_id)

    def write(self, round: int, values: Figures) -> None:
        """Log a metric for each figure, in as few requests as MLflow allows."""
        # MLflow expects milliseconds.
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, round) for name, value in values.items()]
        for first in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + METRICS_PER_REQUEST])

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
        run_id: W&B's identifier of the run.

    Raises:
        RunError: wandb is not installed.

    Example::

        with WandB("selection", config={"selector": "bsfl"}, mode="offline") as run:
            simulate(load_scenario("smoke"), on_round=run)
    """

    def __init__(self, project: str = "fedsel", **settings: Any) -> None:
        self.run = import_library("wandb", "wandb").init(project=project, **settings)
        self.run_id = str(self.run.id)

    def write(self, round: int, values: Figures) -> None:
        """Log a round's figures, with the round as the step."""
        self.run.log(dict(values), step=round)

    def end(self, *, failed: bool) -> None:
        """Finish the run; a failed run gets exit code 1."""
        self.run.finish(exit_code=int(failed))
