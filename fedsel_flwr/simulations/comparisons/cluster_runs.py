"""Runs of a comparison on a Ray cluster: each run is a task, and comes back as the files of its folder.

A node plays a run in a temporary folder. This machine then has the same files as if it had played the run itself. An
interrupted run travels to the node with its checkpoints, and continues there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from fedsel_flwr.callbacks.tracking import Tracking
from fedsel_flwr.errors import FedSelError, RunError, described, write_cure
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.progress import log_file, logging_to
from fedsel_flwr.report.run_folder import MOST_MODEL_BYTES, run_name
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.storage import RUN_IN_USE, lock_folder, make_folder, read_file, write_atomically
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.comparisons.cluster_tasks import ClusterTasks, Report, Watch
from fedsel_flwr.simulations.comparisons.parallel_runs import Job
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.existing_runs import CHECKPOINTS, discard_progress, has_begun, has_finished
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.results import RunResult, describe_runs, read_run
from fedsel_flwr.simulations.run_identity import RUN, run_parameters
from fedsel_flwr.simulations.worlds.ingredients import OwnParts

RUN_FILES = (RUN, run_folder.SCENARIO, run_folder.JOURNAL, "*.parquet", "*.safetensors", f"{CHECKPOINTS}/**/*")
"""Files of a run that travel. A comparison of one run has other files in the same folder."""
Files = Mapping[str, bytes]
"""Path inside a run's folder -> content."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run on a node.

    Attributes:
        files: The files of the run's folder. After an error, those that a resumed run needs.
        diagnosis: Diagnosis of the run.
        log: Log records of the run.
        error: Error that ended the run; None if it finished.
    """

    files: Files
    diagnosis: str = ""
    log: str = ""
    error: FedSelError | None = None


def run_on_cluster(
    jobs: Sequence[Job],
    options: Mapping[str, Any],
    where: RayResources,
    at_a_time: int | None,
    folder: Path | None = None,
    watch: Watch | None = None,
) -> Generator[RunResult]:
    """Run jobs on the nodes of a cluster.

    Finished runs in the folder are read here. The other runs are written to the folder as soon as they end.

    Args:
        jobs: The runs, which begin in this order.
        options: Arguments of :func:`~fedsel_flwr.simulations.engine.simulate` that are equal for all runs.
        where: The cluster, and the cores and GPUs of each run.
        at_a_time: Largest number of runs at the same time. If None, as many as the cluster has room for.
        folder: Folder of the comparison, for the message if the cluster's head dies.
        watch: Function called with the progress.

    Yields:
        The results, in the order of the runs.

    Raises:
        ParameterError: A run cannot be sent to the cluster.
        RunError: The cluster cannot be joined, a run has lost its node too often, or the user's code raised an error.
        FedSelError: A run raised another error. The other runs are then stopped.
    """
    shared = {key: value for key, value in options.items() if key != "track"}
    track: Tracking | None = options.get("track")
    left = [number for number, job in enumerate(jobs) if not _is_over(job, options)]
    own = OwnParts(shared.get("model"), shared.get("data"), shared.get("objective"))
    ended: dict[int, RunResult] = {}
    with contextlib.ExitStack() as stack:
        tasks: ClusterTasks | None = None
        if left:
            tasks = stack.enter_context(
                ClusterTasks(
                    play_on_node,
                    [(jobs[number], _sent_files(jobs[number], options)) for number in left],
                    where,
                    at_a_time,
                    shared=shared,
                    names=[f"{jobs[number].contender.label}, seed {jobs[number].scenario.seed}" for number in left],
                    scenarios=[jobs[number].scenario for number in left],
                    own=own,
                    rounds=[jobs[number].scenario.rounds for number in left],
                    watch=watch,
                    what_is_left=lambda: f"; {folder} holds {describe_runs(folder) or 'no run yet'}" if folder else "",
                    quiet=bool(options.get("quiet")),
                )
            )
        for number, job in enumerate(jobs):
            if tasks is None or number not in left:
                yield simulate(job.scenario, selector=job.selector(), **options, **job.place)
                continue
            while number not in ended:
                index, outcome = next(tasks)
                ended[left[index]] = _receive(jobs[left[index]], outcome, track)
            yield ended.pop(number)


def _is_over(job: Job, options: Mapping[str, Any]) -> bool:
    """Return whether a run has finished in its folder, and only needs to be read."""
    place = job.place["folder"]
    return bool(options.get("resume")) and not options.get("replay") and place is not None and has_finished(place)


def _sent_files(job: Job, options: Mapping[str, Any]) -> Files:
    """Return the files that a run needs to continue; none for a new run."""
    place = job.place["folder"]
    return pack_run(place) if options.get("resume") and place is not None and has_begun(place) else {}


def play_on_node(given: tuple[Job, Files], options: Mapping[str, Any], report: Report) -> Outcome:
    """Play a run on a node, and return its files.

    Args:
        given: The run, and the files with which it continues.
        options: See :func:`run_on_cluster`.
        report: Function called with the number of each finished round.
    """
    import ray

    job, files = given
    # In Ray's folder, so that a killed process leaves no file elsewhere.
    parent = ray.get_runtime_context().get_temp_dir() if ray.is_initialized() else None
    with TemporaryDirectory(prefix="fedsel-run-", dir=parent) as temporary:
        place, log = Path(temporary) / "run", Path(temporary) / "log"
        place.mkdir()
        unpack_run(place, files)
        with logging_to(log):
            error = _play(job, {**options, **job.place, "folder": place}, report)
        diagnosis = error if isinstance(error, str) else ""
        said = log.read_text(encoding="utf-8", errors="replace")
        return Outcome(pack_run(place), diagnosis, said, None if isinstance(error, str) else error)


def _play(job: Job, options: Mapping[str, Any], report: Report) -> str | FedSelError:
    """Simulate a run; return its diagnosis, or the error that ended it."""

    def on_round(record: RoundRecord) -> None:
        report(record.round)

    try:
        return simulate(job.scenario, selector=job.selector(), on_round=on_round, **options).diagnosis
    except FedSelError as error:
        return error
    # The user's code may raise any error. Its traceback is in the log, because the error that comes back has none.
    except Exception as error:
        logging.getLogger("fedsel_flwr").exception("the run failed")
        run = f"the run of {job.contender.label!r} on seed {job.scenario.seed} failed"
        return RunError(f"{run}: {described(error)}")


def _receive(job: Job, outcome: Outcome, track: Tracking | None) -> RunResult:
    """Write a run to its folder, send it to the tracker, and return its result.

    Raises:
        FedSelError: The run ended with this error.
        RunError: The folder cannot be written to.
    """
    if (target := log_file()) is not None and outcome.log:
        with contextlib.suppress(OSError), target.open("a", encoding="utf-8") as file:
            file.write(outcome.log)
    with contextlib.ExitStack() as stack:
        place = job.place["folder"] or Path(stack.enter_context(TemporaryDirectory()))
        make_folder(place)
        lock = lock_folder(place, RUN_IN_USE)
        try:
            discard_progress(place)
            unpack_run(place, outcome.files)
        except OSError as error:
            raise RunError(
                f"{str(place)!r} cannot be written: {error.strerror or error}. {write_cure(error)}, then resume "
                "with --resume (resume=True)"
            ) from error
        finally:
            # Removing the last reference releases the lock.
            del lock
        if outcome.error is not None:
            raise outcome.error
        _, scenario, result = read_run(place)
    if track is not None:
        label = str(job.place["label"])
        used = run_parameters(scenario, label, job.selector())
        with track.run(run_name(label, scenario.seed), used).follow(result.history) as tracked:
            tracked(result.history.rounds[-1])
    return replace(result, diagnosis=outcome.diagnosis)


def pack_run(place: Path) -> dict[str, bytes]:
    """Return the files of a run's folder."""
    found = {path for pattern in RUN_FILES for path in place.glob(pattern) if not path.is_dir()}
    return {path.relative_to(place).as_posix(): read_file(path, MOST_MODEL_BYTES) for path in sorted(found)}


def unpack_run(place: Path, files: Files) -> None:
    """Write the files of a run, and remove what an interrupted run has left.

    Raises:
        OSError: A file cannot be written.
        RunError: A name is not that of a file of a run; nothing is written.
    """
    for name in files:
        parts = PurePosixPath(name).parts
        own = parts[0] == CHECKPOINTS if len(parts) > 1 else any(map(PurePosixPath(name).match, RUN_FILES))
        # The names come from a task on another machine.
        if not own or ".." in parts or not name.isprintable():
            raise RunError(f"a task returned {shown(name)}, which is not a file of a run. Check the cluster's machines")
    for pattern in (run_folder.JOURNAL, run_folder.MODEL_AFTER_ROUND.format("*")):
        for path in place.glob(pattern):
            if path.name not in files:
                path.unlink()
    # The model comes last, because a folder with a model counts as finished.
    for name in sorted(files, key=lambda name: (name == run_folder.MODEL, name)):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, files[name])
