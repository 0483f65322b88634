"""Results of a run: in memory and in the run's folder; reads a folder and checks that it fits a scenario."""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tomli_w

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import FedSelError, ParameterError, RunError, disk_errors
from fedsel_flwr.references import is_reference
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import JOURNAL, load_optional
from fedsel_flwr.report.summary import RunSummary, summarize
from fedsel_flwr.rounds.fingerprints import differences
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.storage import RUN_IN_USE, FolderLock, check_links, lock_folder, read_file
from fedsel_flwr.simulations import run_identity
from fedsel_flwr.simulations.run_identity import FILES, IDENTITY, PARTS, RUN, Identity, versions
from fedsel_flwr.simulations.run_options import CHECKPOINTS
from fedsel_flwr.simulations.scenario import Scenario, course_settings
from fedsel_flwr.simulations.scenario_files import check_label, check_tree, describe_faults

if TYPE_CHECKING:
    from fedsel_flwr.strategies.wrapping.round_end import LastModel

CLIENT_ACCURACY = "client-accuracy"
"""Name of the table with the final model's accuracy on each client's examples."""
Columns = Mapping[str, npt.NDArray[Any]]
END_KEYS = ("rounds", "simulated_s", "joules")
"""Keys of a scenario that determine when a run ends."""
THEN_RESUME = ", then resume with --resume (resume=True)"
"""End of an error about a folder that cannot be written."""
REPLAY_CURE = "Repeat it with --replay (replay=True), or begin a new run in another folder"
"""Advice in errors about a run that does not fit the scenario."""


@dataclass(frozen=True)
class RunResult:
    """Result of a simulation.

    Attributes:
        history: Records of each round and each client.
        arrays: The final global model.
        diagnosis: One sentence if the run diverged, or if no update could be used. Otherwise empty, as it is for a run
            that was read from its folder.
        fingerprints: Identity of code and data (:mod:`fedsel_flwr.simulations.run_identity`); empty if unknown.
        client_accuracies: Accuracy of the final model on each client's test examples, shape (num_clients,). NaN for a
            client without test examples. Empty if it was not measured.
        timing: Milliseconds of wall time of each round and of the server's steps in it
            (:meth:`~fedsel_flwr.rounds.round.Stopwatch.columns`). They differ from run to run. Empty if unknown.
        versions: Program -> version with which the run was made. Those of this process unless the run was read.
    """

    history: History
    arrays: Arrays
    diagnosis: str = ""
    fingerprints: Identity = field(default_factory=dict)
    client_accuracies: FloatArray = field(default_factory=lambda: np.empty(0))
    timing: Columns = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def summary(self, scenario: Scenario, label: str) -> RunSummary:
        """Return the figures of the run.

        Args:
            scenario: Scenario that was run.
            label: The selector's label.
        """
        return summarize(
            self.history,
            selector=label,
            seed=scenario.seed,
            num_clients=scenario.num_clients,
            target_accuracy=scenario.target_accuracy,
            target_rounds=scenario.target_rounds,
            model_bytes=scenario.model_bytes(sum(array.nbytes for array in self.arrays)),
            client_accuracies=self.client_accuracies,
        )


def hold_folder(folder: Path, then: str = "") -> FolderLock | None:
    """Create the folder of a run or of a comparison if needed, and lock it for this process.

    Args:
        folder: The folder.
        then: Continuation of the cure in errors.

    Returns:
        The lock, which is held until its last reference is gone; None if folders cannot be locked.

    Raises:
        RunError: The folder cannot be created, or another process writes there.
    """
    with disk_errors(folder, then):
        folder.mkdir(parents=True, exist_ok=True)
    return lock_folder(folder, RUN_IN_USE)


class RunFolder:
    """Folder of a run: written at the start (scenario), after each round, and at the end (history and model).

    Args:
        folder: Path of the folder; created if needed.
        scenario: Scenario that is run.
        label: The selector's label. If None, the scenario's.
        fingerprints: Identity of code and data.

    Raises:
        ParameterError: The folder contains a link.
        RunError: The folder cannot be written to, another process writes there, or pyarrow is not installed.
    """

    def __init__(
        self, folder: str | Path, scenario: Scenario, label: str | None = None, fingerprints: Identity | None = None
    ) -> None:
        # Loaded now although it is needed only at the end, so that a missing package does not cost the run.
        load_optional("pyarrow.parquet")
        self.path, self._scenario, self._label = Path(folder), scenario, label or scenario.selector
        self._fingerprints = dict(fingerprints or {})
        self._journal: Journal | None = None
        check_links(self.path)
        self._lock = hold_folder(self.path, THEN_RESUME)

    def begin(self) -> None:
        """Write the scenario and the record of the run, and begin the journal.

        Raises:
            RunError: A file cannot be written.
        """
        scenario = self._scenario
        record: dict[str, Any] = {"scenario": scenario.name, "selector": self._label, "versions": versions()}
        record[IDENTITY] = self._fingerprints
        with disk_errors(self.path, THEN_RESUME):
            # Remove files of an earlier run. The model goes first, because with it the folder would count as finished.
            for name in (run_folder.MODEL, run_folder.ROUNDS, run_folder.CLIENTS, run_folder.TIMING):
                (self.path / name).unlink(missing_ok=True)
            self._remove_saved_models()
            text = tomli_w.dumps(scenario.model_dump(exclude={"name"}))
            run_identity.write_record(
                self.path, record | {FILES: {run_folder.SCENARIO: run_identity.digest_of(text.encode())}}
            )
            run_folder.write_scenario(self.path, text)
        if self._journal is not None:
            self._journal.begin()

    def record_rounds(self, history: History, *, elsewhere: bool = False) -> None:
        """Write each round of a history when it ends; call this before a checkpoint restores the history.

        Args:
            history: History of the run.
            elsewhere: Whether the journal is in the checkpoints' folder. If not, it is in this folder.
        """
        if not elsewhere:
            history.write_to(Journal(self.path / JOURNAL))
        self._journal = history.journal

    @property
    def failure(self) -> RunError | None:
        """Error of a round that could not be written; None if there is none."""
        return self._journal.failure if self._journal else None

    def finish(self, result: RunResult, tables: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Replace the journal with the history and the model, and write the tables computed from them.

        The history in memory stays readable, although it had rows in the journal.

        Args:
            result: History and model.
            tables: Name -> columns.

        Raises:
            RunError: A file cannot be written.
        """
        with disk_errors(self.path, THEN_RESUME):
            written = [*run_folder.write_history(self.path, result.history)]
            accuracies = result.client_accuracies
            measured = {"client": np.arange(len(accuracies)), "accuracy": accuracies}
            own = {CLIENT_ACCURACY: measured} if accuracies.size else {}
            for name, columns in (own | dict(tables or {})).items():
                written.append(self.path / f"{name}.parquet")
                run_folder.write_table(written[-1], columns)
            digests = {path.name: run_identity.digest_of_file(path) for path in written}
            # Without a digest, so that equal runs have equal records.
            if result.timing:
                run_folder.write_table(self.path / run_folder.TIMING, result.timing)

            # A folder with a model counts as finished, so the record gets every digest before the model gets its name.
            def record_digests(model: bytes) -> None:
                record = run_identity.read_record(self.path)
                files = record.get(FILES, {}) | digests | {run_folder.MODEL: run_identity.digest_of(model)}
                run_identity.write_record(self.path, record | {FILES: files})

            run_folder.write_model(self.path, list(result.arrays), before=record_digests)
        # The history can still read the journal, because it keeps the file open.
        (self.path / JOURNAL).unlink(missing_ok=True)
        self._remove_saved_models()

    def save_last_model(self, last: LastModel | None) -> Path | None:
        """Write the last model after an error, if at least one round has ended and the run has not finished.

        Returns:
            Path of the file; None if there is no model, or if it cannot be written.
        """
        if last is None or not last.round or (self.path / run_folder.MODEL).exists():
            return None
        # The error that ends the run is more useful than an error about this file.
        with contextlib.suppress(OSError, FedSelError):
            return run_folder.write_model(self.path, last.arrays, run_folder.MODEL_AFTER_ROUND.format(last.round))
        return None

    def close(self) -> None:
        """Release the folder, so that other processes can write to it."""
        # Removing the last reference releases the lock.
        self._lock = None

    def _remove_saved_models(self) -> None:
        """Remove the models that earlier attempts saved after an error."""
        for path in self.path.glob(run_folder.MODEL_AFTER_ROUND.format("*")):
            path.unlink(missing_ok=True)


def write_run(folder: Path, scenario: Scenario, result: RunResult, label: str | None = None) -> None:
    """Write the resolved scenario, the history and the model of a finished run.

    Args:
        folder: Folder of the run; created if needed.
        scenario: Scenario that was run.
        result: History and model.
        label: The selector's label. If None, the scenario's.

    Raises:
        RunError: The folder cannot be written to.
    """
    written = RunFolder(folder, scenario, label, result.fingerprints)
    written.begin()
    written.finish(result)
    written.close()


def write_interrupted_run(folder: Path, scenario: Scenario, history: History, last: LastModel | None) -> Path | None:
    """Write the resolved scenario, the rounds and the last model of a run that ended with an error.

    Args:
        folder: Folder of the run; created if needed.
        scenario: Scenario that was run.
        history: Rounds of the run.
        last: Last model of the run.

    Returns:
        Path of the model's file; None if there is no model.

    Raises:
        RunError: The folder cannot be written to.
    """
    written = RunFolder(folder, scenario)
    written.begin()
    run_folder.write_history(folder, history)
    model = written.save_last_model(last)
    written.close()
    return model


def describe_runs(folder: Path) -> str:
    """Describe the runs in a folder, for example "bsfl-seed1: 300 rounds, finished; random-seed1: 17 rounds"."""
    places = [folder, *sorted(folder.glob("*/"))]
    described = []
    for place in places:
        with contextlib.suppress(ParameterError):
            count = len(run_folder.read_history(place).rounds)
            end = ", finished" if (place / run_folder.MODEL).exists() else ""
            described.append(f"{place.name}: {count} round{'' if count == 1 else 's'}{end}")
    return "; ".join(described)


def read_label(folder: Path) -> tuple[str, Scenario]:
    """Read the label and the scenario of a run, without the selector's code.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, and the scenario.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    try:
        record = run_identity.read_record(folder)
        tables = tomllib.loads(read_file(folder / run_folder.SCENARIO).decode())
        # Checked first, because the folder may come from another person.
        check_tree(record)
        check_tree(tables)
        return check_label(str(record["selector"])), Scenario.model_validate({"name": str(record["scenario"])} | tables)
    except FileNotFoundError as error:
        raise ParameterError(
            f"{str(folder)!r} is not a run: it has no {Path(str(error.filename)).name}. Give a folder that fedsel "
            "run or compare has written"
        ) from error
    # Errors of JSON and TOML are ValueErrors. A file with too deep nesting raises RecursionError.
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(f"{str(folder)!r} is not a run: {describe_faults(error)}") from error


def read_run(folder: Path) -> tuple[str, Scenario, RunResult]:
    """Read the files of :func:`write_run`, if they are unchanged, without the selector's code.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, the scenario and the result. The result's model is empty if the run was interrupted.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    label, scenario = read_label(folder)
    finished = (folder / run_folder.MODEL).exists()
    found = run_identity.check_digests(folder, finished=finished).get("versions", {})
    # A record of an older version does not have them.
    made_with = {str(name): str(one) for name, one in found.items()} if isinstance(found, dict) else {}
    arrays = run_folder.read_model(folder) if finished else []
    accuracies, table = np.empty(0), folder / f"{CLIENT_ACCURACY}.parquet"
    if finished and table.exists():
        accuracies = np.asarray(run_folder.read_table(table, "accuracy")["accuracy"], dtype=np.float64)
    # Runs of older versions have no times.
    timing = run_folder.read_table(times) if finished and (times := folder / run_folder.TIMING).exists() else {}
    history, prints = run_folder.read_history(folder), run_identity.read_identity(folder)
    result = RunResult(history, arrays, fingerprints=prints, client_accuracies=accuracies, timing=timing,
                       versions=made_with)  # fmt: skip
    return label, scenario, result


def has_begun(folder: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    return (folder / RUN).is_file() and (folder / run_folder.SCENARIO).is_file()


def has_finished(folder: Path) -> bool:
    """Return whether a folder holds a run with its result."""
    # The model is written last, after the digests of all other files.
    return has_begun(folder) and (folder / run_folder.MODEL).is_file()


def read_fitting_run(
    folder: str | Path, scenario: Scenario, label: str, prints: Identity, *, explain: bool
) -> RunResult | None:
    """Read the result of a finished run, if the run fits the scenario.

    Args:
        folder: Folder of the run.
        scenario: Scenario that is to be run there.
        label: The selector's label.
        prints: Identity of the code and data of this process.
        explain: Whether to compare the fingerprints of an interrupted run too. If not, its checkpoint is compared
            later, and that error names the differences.

    Returns:
        The result of the run; None if there is no run, or if it was interrupted.

    Raises:
        RunError: The folder holds another run. The error names the differences.
        ParameterError: A file is damaged.
    """
    place = Path(folder)
    if not has_begun(place):
        return None
    named, other = read_label(place)
    _check_same_settings(place, scenario, other)
    if named != label:
        raise _different_run(place, f"selector is called {named!r} there, and {label!r} here")
    result = _read_finished_run(place, scenario, other) if has_finished(place) else None
    if result is not None or explain:
        _check_fingerprints(place, label, prints)
    return result


def _read_finished_run(folder: Path, mine: Scenario, theirs: Scenario) -> RunResult:
    """Read the result of a finished run; refuse a run with another length or budget."""
    _, _, result = read_run(folder)
    done = len(result.history.rounds)
    for key in END_KEYS:
        if (wanted := getattr(mine, key)) != (there := getattr(theirs, key)):
            raise RunError(
                f"the run in {str(folder)!r} finished after {done} rounds with {key} = {there}, and has ended. Start "
                f"a new run with {key} = {wanted}"
            )
    return result


def _check_fingerprints(folder: Path, label: str, here: Identity) -> None:
    """Refuse to resume a run whose code, data or scenario has changed."""
    there = run_identity.read_identity(folder)
    if names := [name for name in PARTS if there.get(name) != here.get(name)]:
        changed = ", ".join(f"selector {label!r}" if name == "selector" else name for name in names)
        raise RunError(
            f"the run in {str(folder)!r} was made with other code or data. Changed since then: {changed}. "
            f"{REPLAY_CURE}. Notebook cells that your code uses, and values in closures, are not compared"
        )


def discard_progress(folder: Path) -> None:
    """Remove the checkpoints and the result of a run, so that it can be run again."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    (folder / run_folder.MODEL).unlink(missing_ok=True)


def _check_same_settings(folder: Path, mine: Scenario, theirs: Scenario) -> None:
    """Refuse to resume in a folder with another run.

    Raises:
        RunError: The settings differ. The error names their keys.
    """
    # References are compared first. The keys of another selector's parameters begin with its label, and the label is
    # known only after the selector's code has run.
    if theirs.selector != mine.selector and is_reference(theirs.selector):
        raise _different_run(folder, f"selector is {theirs.selector!r} there and {mine.selector!r} here")
    if found := differences(course_settings(theirs), course_settings(mine)):
        raise _different_run(folder, ", ".join(found.values()))


def _different_run(folder: Path, differences: str) -> RunError:
    return RunError(
        f"{str(folder)!r} holds another run: {differences}. Begin a new run in another folder, or resume the run in "
        "this folder"
    )
