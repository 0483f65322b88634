"""Results of a run: in memory, in the run's folder, and the tables computed after the run."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tomli_w
from torch import nn

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.objectives import fraction_correct, fresh_copy
from fedsel_flwr.clients.training import outputs, read_only_tensor
from fedsel_flwr.errors import FedSelError, ParameterError, RunError, write_cure
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import JOURNAL, load_optional
from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.storage import RUN_IN_USE, check_links, lock_folder, read_file
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.run_identity import (
    FILES,
    IDENTITY,
    Identity,
    check_digests,
    digest_of,
    digest_of_file,
    read_identity,
    read_record,
    read_versions,
    versions,
    write_record,
)
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import check_label, check_tree, describe_faults
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import fair_regret, xia_genie

if TYPE_CHECKING:
    from fedsel_flwr.strategies.wrapping.round_end import LastModel

MAX_CLIENTS = 10_000
"""Largest number of clients for which the regret is computed. The table of choices has a cell per client and round."""
CLIENT_ACCURACY = "client-accuracy"
"""Name of the table with the final model's accuracy on each client's examples."""
Columns = Mapping[str, npt.NDArray[Any]]


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
        with self._disk_errors("written"):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path, RUN_IN_USE)

    def begin(self) -> None:
        """Write the scenario and the record of the run, and begin the journal.

        Raises:
            RunError: A file cannot be written.
        """
        scenario = self._scenario
        record = {
            "scenario": scenario.name,
            "selector": self._label,
            "versions": versions(),
            IDENTITY: self._fingerprints,
        }
        with self._disk_errors("written"):
            # Remove files of an earlier run. The model goes first, because with it the folder would count as finished.
            for name in (run_folder.MODEL, run_folder.ROUNDS, run_folder.CLIENTS, run_folder.TIMING):
                (self.path / name).unlink(missing_ok=True)
            self._remove_saved_models()
            text = tomli_w.dumps(scenario.model_dump(exclude={"name"}))
            write_record(self.path, record | {FILES: {run_folder.SCENARIO: digest_of(text.encode())}})
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
        with self._disk_errors("finished (its journal holds every round)"):
            written = [*run_folder.write_history(self.path, result.history)]
            accuracies = result.client_accuracies
            measured = {"client": np.arange(len(accuracies)), "accuracy": accuracies}
            own = {CLIENT_ACCURACY: measured} if accuracies.size else {}
            for name, columns in (own | dict(tables or {})).items():
                written.append(self.path / f"{name}.parquet")
                run_folder.write_table(written[-1], columns)
            digests = {path.name: digest_of_file(path) for path in written}
            # Without a digest, so that equal runs have equal records.
            if result.timing:
                run_folder.write_table(self.path / run_folder.TIMING, result.timing)

            # A folder with a model counts as finished, so the record gets every digest before the model gets its name.
            def record_digests(model: bytes) -> None:
                record = read_record(self.path)
                files = record.get(FILES, {}) | digests | {run_folder.MODEL: digest_of(model)}
                write_record(self.path, record | {FILES: files})

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

    @contextlib.contextmanager
    def _disk_errors(self, what: str) -> Iterator[None]:
        """Convert the disk's errors into our errors, which name the folder."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{str(self.path)!r} cannot be {what}: {error.strerror or error}. {write_cure(error)}, then resume "
                "with --resume (resume=True)"
            ) from error


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
        record = read_record(folder)
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
    check_digests(folder, finished=finished)
    arrays = run_folder.read_model(folder) if finished else []
    accuracies, table = np.empty(0), folder / f"{CLIENT_ACCURACY}.parquet"
    if finished and table.exists():
        accuracies = np.asarray(run_folder.read_table(table, "accuracy")["accuracy"], dtype=np.float64)
    # Runs of older versions have no times.
    timing = run_folder.read_table(times) if finished and (times := folder / run_folder.TIMING).exists() else {}
    history, prints = run_folder.read_history(folder), read_identity(folder)
    result = RunResult(history, arrays, fingerprints=prints, client_accuracies=accuracies, timing=timing,
                       versions=read_versions(folder))  # fmt: skip
    return label, scenario, result


def derived_tables(world: World, result: RunResult) -> dict[str, Columns]:
    """Compute the tables of a finished run: name -> columns.

    The tables need the true latencies and every client's examples. Neither a selector nor a server knows them.

    Args:
        world: The scenario's world.
        result: Result of the run.

    Returns:
        ``regret`` if the system model defines the latencies, and ``classes`` if the scenario asks for it.
    """
    tables: dict[str, Columns] = {}
    if world.scenario.clients.latency_mode == "model" and world.scenario.num_clients <= MAX_CLIENTS:
        tables["regret"] = regret(world, result.history.clients, len(result.history.rounds))
    if world.scenario.per_class_accuracy:
        tables["classes"] = per_class_accuracy(world, result.arrays)
    return tables


def client_accuracies(world: World, arrays: Arrays) -> FloatArray:
    """Compute the model's accuracy for each client, on examples that no client trained on.

    If the scenario sets local test examples aside, they measure the client's accuracy. If not, the test set measures
    it, with each class weighted by its share of the client's examples.

    Args:
        world: The clients' examples and the test set.
        arrays: The model.

    Returns:
        Accuracies, shape (num_clients,); NaN for a client if the test set has none of its classes. Shape (0,) if there
        are more than :data:`MAX_CLIENTS` clients. Also shape (0,) without local test examples, if the labels are not
        classes.
    """
    scenario = world.scenario
    own = scenario.data.local_test_fraction > 0
    if scenario.num_clients > MAX_CLIENTS or not (own or world.objective.quality is fraction_correct):
        return np.empty(0)
    model = fresh_copy(world.model, arrays)
    return _on_own_examples(world, model) if own else _on_test_set(world, model)


def _on_own_examples(world: World, model: nn.Module) -> FloatArray:
    """Return the accuracy of a model on each client's test examples."""
    data, tested = world.dataset.train, [rows for _, rows in world.train_test_rows(range(world.scenario.num_clients))]
    # Clients may share examples, but the model evaluates each example once.
    needed = np.unique(np.concatenate(tested))
    found, labels = outputs(model, data.inputs[needed]), read_only_tensor(data.labels)
    quality = world.objective.quality
    return np.array([quality(found[np.searchsorted(needed, rows)], labels[rows]) for rows in tested])


def _on_test_set(world: World, model: nn.Module) -> FloatArray:
    """Return the accuracy of a model on the test set, for each client weighted by its share of each class."""
    test, classes = world.dataset.test, world.dataset.num_classes
    labels, trained = np.asarray(test.labels), np.asarray(world.dataset.train.labels)
    right = outputs(model, test.inputs).argmax(-1).numpy() == labels
    tested = np.bincount(labels, minlength=classes)
    held = np.array([
        np.bincount(trained[world.train_rows(k)], minlength=classes) for k in range(world.scenario.num_clients)
    ])  # fmt: skip
    # A class that is missing from the test set counts for no client.
    held[:, tested == 0] = 0
    by_class = np.bincount(labels, weights=right, minlength=classes) / np.maximum(tested, 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(held @ by_class / held.sum(axis=1))


def regret(world: World, clients: Sequence[ClientRecord], rounds: int) -> Columns:
    """Compute the seconds lost per round, compared with the m clients of the lowest mean latency (Xia, (14)).

    Args:
        world: The world, whose system model defines the mean latencies.
        clients: The clients chosen in each round.
        rounds: Number of rounds.

    Raises:
        RunError: A client or a round does not belong to the scenario.

    Returns:
        The columns ``round``, ``Theta`` and ``theta``. Theta is the seconds lost since the start, tau_max times the
        regret. theta = Theta / round.
    """
    scenario, longest = world.scenario, world.system.max_latency_s
    # A client that does not answer has reward 0. Latencies are capped at the maximum, so no reward is below 0.
    answers = 1.0 - world.dropout.probability
    mean_reward = answers * (1.0 - mean_latencies(world.system) / longest)  # mean of Xia (5)
    chosen = np.zeros((rounds, scenario.num_clients), dtype=np.bool_)
    known = {str(client): client for client in range(scenario.num_clients)}
    for row in clients:
        if row.client_id not in known or not 1 <= row.round <= rounds:
            raise RunError(
                f"the history holds client {shown(row.client_id)} in round {row.round}, but the scenario has clients "
                f"0 to {scenario.num_clients - 1} and {rounds} rounds. It was resumed from checkpoints of another "
                "run. Begin a new run"
            )
        chosen[row.round - 1, known[row.client_id]] = True
    _, best = xia_genie(mean_reward, scenario.clients_per_round)
    number = np.arange(1, rounds + 1)
    lost = longest * fair_regret(mean_reward, chosen, best)  # Theta, section V of Xia
    return {"round": number, "Theta": lost, "theta": lost / number}


def per_class_accuracy(world: World, arrays: Arrays) -> Columns:
    """Compute the model's accuracy on each client's examples of each class (Kim, Fig. 5).

    Args:
        world: The clients' training examples.
        arrays: The model.

    Returns:
        The columns ``client``, ``label``, ``num_examples`` and ``accuracy``, with a row for each class that a client
        has.
    """
    model, data = fresh_copy(world.model, arrays), world.dataset.train
    labels = np.asarray(data.labels)
    # One pass computes all outputs, because clients may share examples.
    right = (outputs(model, data.inputs).argmax(-1).numpy() == labels).astype(np.float64)
    rows: list[tuple[int, int, int, float]] = []
    for k in range(world.scenario.num_clients):
        own = world.train_rows(k)
        counts, hits = np.bincount(labels[own]), np.bincount(labels[own], weights=right[own])
        rows += [(k, int(c), int(counts[c]), float(hits[c] / counts[c])) for c in np.flatnonzero(counts)]
    columns = zip(*rows, strict=True)
    return dict(zip(("client", "label", "num_examples", "accuracy"), map(np.array, columns), strict=True))
