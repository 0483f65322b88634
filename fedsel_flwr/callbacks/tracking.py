"""Tracking: the tracker and the address that one option names, such as "mlflow:http://host:5000".

Each run becomes one run of the tracker. Its parameters and rounds come from the caller, so that this part needs
neither scenarios nor engines.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedsel_flwr.callbacks import trackers
from fedsel_flwr.callbacks.trackers import Recorder
from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, RunError, described
from fedsel_flwr.references import absolute_reference, is_reference, load_reference

logger = logging.getLogger("fedsel_flwr")
TRACKERS = {"tensorboard": "tensorboard.summary", "mlflow": "mlflow", "wandb": "wandb"}
"""Name of a tracker, which is also that of its package -> the module that it needs."""
DEFAULT_PLACES = {"tensorboard": "{}/tensorboard", "mlflow": "sqlite:///{}/mlflow.db"}
"""Tracker -> its address in the folder of a comparison, if the option has none."""
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Environment variables that limit how long MLflow waits for a server. By default it retries for minutes."""
TRACKED_CLIENTS = 50
"""Number of clients with per-client metrics by default."""
TrackerLike = str | type[Recorder]
"""A tracker: a name with or without an address, a reference to a class, or the class itself."""


@dataclass(frozen=True)
class Tracking:
    """A tracker for the runs of one comparison.

    Attributes:
        tracker: "tensorboard", "mlflow", "wandb", or the reference of a class.
        address: TensorBoard's log folder, MLflow's tracking URI or W&B's project; None takes the default.
        group: Name of the comparison, which all its runs share.
        experiment: Name of MLflow's experiment.
        folder: The folder of the comparison, for the default addresses; None: there is none.
        clients: Ids of the clients with per-client metrics.
        recorder: A class of the caller's.
    """

    tracker: str
    address: str | None
    group: str
    experiment: str = "fedsel"
    folder: Path | None = None
    clients: Collection[str] = ()
    recorder: type[Recorder] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        track: TrackerLike,
        scenario: str,
        num_clients: int,
        *,
        folder: str | Path | None = None,
        track_clients: int | Sequence[int] | None = None,
    ) -> Tracking:
        """Read the option.

        Args:
            track: The tracker.
            scenario: Name of the scenario.
            num_clients: Number of clients, whose ids are 0 … num_clients - 1.
            folder: Folder of the comparison; None: there is none.
            track_clients: Number of clients with per-client metrics, or their ids. If None,
                :data:`TRACKED_CLIENTS`.

        Raises:
            ParameterError: It names no tracker, the tracker needs an address, or there is no such client.
            RunError: The tracker's library is not installed, or W&B has no key.
        """
        options: dict[str, Any] = {
            "group": f"{scenario}-{datetime.now():%Y%m%d-%H%M%S}" if folder is None else Path(folder).resolve().name,
            "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or f"fedsel-{scenario}",
            "folder": None if folder is None else Path(folder),
            "clients": choose_clients(TRACKED_CLIENTS if track_clients is None else track_clients, num_clients),
        }
        if isinstance(track, type) and issubclass(track, Recorder):
            return cls(track.__qualname__, None, recorder=track, **options)
        if not isinstance(track, str):
            raise ParameterError(
                f"track must be a text such as 'tensorboard', or a class derived from fedsel_flwr.callbacks.Recorder, "
                f"got {type(track).__name__}"
            )
        name, _, address = track.partition(":")
        if name == "tensorboard" and address:
            # A resumed run must find its folder from any working directory.
            address = str(Path(address).expanduser().absolute())
        if name in TRACKERS:
            made = cls(name, address or None, **options)
            made._check()
            return made
        if not is_reference(track):
            raise ParameterError(
                f"track must be one of {', '.join(TRACKERS)}, with or without :ADDRESS, or a class such as "
                f"./file.py:Class, got {track!r}"
            )
        track = absolute_reference(track, Path.cwd())
        found = load_reference(track, "tracker")
        if not (isinstance(found, type) and issubclass(found, Recorder)):
            raise ParameterError(f"tracker {track!r} must be a class derived from fedsel_flwr.callbacks.Recorder")
        return cls(track, None, recorder=found, **options)

    def begin(self, folder: Path | None = None, warn: Callable[[str], None] = logger.warning) -> Tracking:
        """Return the same tracker for the runs in a folder, with MLflow's database and experiment.

        They are made here, before several processes would make them at one time.

        Args:
            folder: The folder of the comparison; None leaves it as it is.
            warn: Receives a warning if MLflow does not answer. The runs continue all the same.
        """
        tracking = self if folder is None else replace(self, folder=folder, group=folder.resolve().name)
        if tracking.tracker == "mlflow":
            try:
                client = trackers.import_library("mlflow", "mlflow").MlflowClient(tracking_uri=tracking._place())
                trackers.find_or_make_experiment(client, tracking.experiment)
            except Exception as error:
                text = described(error)[: trackers.MAX_ERROR]
                warn(f"mlflow does not answer. The runs continue, and mlflow lacks their rounds until it does: {text}")
        return tracking

    def _check(self) -> None:
        """Refuse one of :data:`TRACKERS` that cannot be used at all: its library, its address or its key is missing.

        From here on, MLflow gives up soon in this process and its children, unless its environment variables are set.
        """
        library = trackers.import_library(TRACKERS[self.tracker], self.tracker)
        if self.tracker == "mlflow":
            for name, limit in REQUEST_LIMITS.items():
                os.environ.setdefault(name, limit)
        if self.tracker != "wandb":
            if self._place() is None:
                raise ParameterError(
                    f"track = {self.tracker!r} needs a place for its files. Give folder=, or an address as in "
                    "'tensorboard:logs' or 'mlflow:sqlite:///runs.db'"
                )
        # Here, because in a run W&B would ask for the key at the terminal, and the run would wait.
        elif library.setup().settings.mode == "online" and not _has_key(library):
            raise RunError(
                "W&B has no API key on this machine. Log in with wandb login, or set WANDB_MODE=offline to write the "
                "runs to the disk"
            )

    def _place(self) -> str | None:
        """Return the address that was given, or the default one."""
        if self.address is None and self.tracker == "mlflow" and "MLFLOW_TRACKING_URI" in os.environ:
            return os.environ["MLFLOW_TRACKING_URI"]
        if self.address is not None or self.folder is None:
            return self.address
        return DEFAULT_PLACES[self.tracker].format(self.folder.resolve())

    def end_service(self) -> None:
        """End W&B's service process. It prints a traceback if it is killed."""
        if self.tracker == "wandb":
            trackers.import_library("wandb", "wandb").teardown()

    def run(self, name: str, params: Mapping[str, object]) -> trackers.TrackedRun:
        """Return the callback of one run.

        Args:
            name: Of the run.
            params: Its parameters.
        """
        return trackers.TrackedRun(self.tracker, lambda: self.open(name, params), self.clients)

    def open(self, name: str, params: Mapping[str, object]) -> Recorder:
        """Open a new run of the tracker.

        Args:
            name: Of the run.
            params: Its parameters.
        """
        params = {"comparison": self.group, **params}
        if self.recorder is not None:
            own = {"name": name, "params": params, "run_id": None, "group": self.group, "folder": self.folder}
            return self.recorder(**_accepted(self.recorder, own))
        if self.tracker == "tensorboard":
            # In a log folder that comparisons may share, each has its own folder.
            root = Path(str(self._place())) / ("" if self.address is None else self.group)
            # A run that is resumed or played again gets another folder: two runs in one folder would be one curve.
            folder, count = root / name, 1
            while folder.exists():
                folder, count = root / f"{name}-{count + 1}", count + 1
            return trackers.TensorBoard(folder, params=params)
        if self.tracker == "mlflow":
            return trackers.MLflow(self.experiment, run_name=name, tracking_uri=self._place(), params=params)
        # W&B makes links in its folder, and a run's folder must have none: W&B's files stay where it puts them.
        settings = {"console": "off", "silent": True, "init_timeout": 20}
        # W&B keeps the working directory of its first run in this process.
        place = os.environ.get("WANDB_DIR") or str(Path.cwd())
        project = self.address or os.environ.get("WANDB_PROJECT") or "fedsel"
        return trackers.WandB(project, name=name, group=self.group, config=params, settings=settings, dir=place)


def choose_clients(given: int | Sequence[int], num_clients: int) -> tuple[str, ...]:
    """Return the ids of the clients with per-client metrics.

    A number is spread evenly over the ids. So every run of a comparison has the same clients.

    Args:
        given: A number of clients, at least 0, or ids.
        num_clients: Number of clients.

    Raises:
        ParameterError: There is no such client.

    >>> choose_clients(3, 10), choose_clients([7, 2], 10)
    (('0', '3', '6'), ('7', '2'))
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        ids = [whole("track_clients", one, 0) for one in given]
        if wrong := [one for one in ids if one >= num_clients]:
            raise ParameterError(f"track_clients has {wrong[0]}, but the clients are 0 to {num_clients - 1}")
        return tuple(map(str, ids))
    number = min(whole("track_clients", given, 0), num_clients)
    return tuple(str(place * num_clients // number) for place in range(number))


def _accepted(make: type[Recorder], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class takes."""
    taken = inspect.signature(make).parameters
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return dict(own)
    return {key: value for key, value in own.items() if key in taken}


def _has_key(library: Any) -> bool:
    """Return whether W&B finds a key; a server that does not answer is no reason to refuse."""
    try:
        return bool(library.login(prompt=False))
    except Exception as error:
        logger.warning("W&B does not answer. The runs continue without it: %s", described(error)[: trackers.MAX_ERROR])
        return True
