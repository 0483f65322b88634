"""Results of a run: in memory, in the run's folder, and the tables that are computed when it is over."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tomli_w

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.objectives import fraction_correct, set_arrays
from fedsel_flwr.clients.training import outputs, read_only_tensor
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import JOURNAL, load_optional
from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.storage import RUN_IN_USE, lock_folder
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.fingerprints import Fingerprints
from fedsel_flwr.simulations.run_record import (
    FILES,
    FINGERPRINTS,
    check_digests,
    digest_of,
    digest_of_file,
    read_fingerprints,
    read_record,
    write_record,
)
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.untrusted_folders import check_label, check_links, check_tree, describe_faults
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import fair_regret, xia_genie

if TYPE_CHECKING:
    from fedsel_flwr.strategies.wrapping.round_end import LastModel

MAX_CLIENTS = 10_000
"""Largest fleet whose regret is computed: the table of choices has a cell for each client and round."""
CLIENT_ACCURACY = "client-accuracy"
"""Name of the table of the final model's accuracies on the clients' examples."""
Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class RunResult:
    """Result of a simulation.

    Attributes:
        history: Round by round and client by client.
        arrays: The final global model.
        diagnosis: One sentence if the run diverged, or no update could be used; empty if not, or of a run read back.
        fingerprints: Those of code and data (:mod:`fedsel_flwr.simulations.fingerprints`); empty if not known.
        client_accuracies: Accuracy of the final model on each client's test examples, shape (num_clients,); NaN for a
            client without any, empty if it was not measured.
    """

    history: History
    arrays: Arrays
    diagnosis: str = ""
    fingerprints: Fingerprints = field(default_factory=dict)
    client_accuracies: FloatArray = field(default_factory=lambda: np.empty(0))


class RunFolder:
    """Folder of a run: the scenario from the start, each round as it ends, history and model at the end.

    Args:
        folder: Its path; made if needed.
        scenario: What is run.
        label: The selector's label; None: as in the scenario.
        fingerprints: Those of code and data.

    Raises:
        ParameterError: There is a link in the folder.
        RunError: The folder cannot be written to, another process writes there, or pyarrow is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        scenario: Scenario,
        label: str | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        # Needed only when the run finishes: a missing package should not cost the run.
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
            RunError: That cannot be done.
        """
        versions = {"python": platform.python_version()} | {
            package: importlib.metadata.version(package) for package in ("fedsel-flwr", "flwr", "torch", "numpy")
        }
        scenario = self._scenario
        record = {
            "scenario": scenario.name,
            "selector": self._label,
            "versions": versions,
            FINGERPRINTS: self._fingerprints,
        }
        with self._disk_errors("written"):
            # Files of an earlier run here. The model goes first: with it the folder would count as finished.
            for name in (run_folder.MODEL, run_folder.ROUNDS, run_folder.CLIENTS):
                (self.path / name).unlink(missing_ok=True)
            self._remove_saved_models()
            text = tomli_w.dumps(scenario.model_dump(exclude={"name"}))
            write_record(self.path, record | {FILES: {run_folder.SCENARIO: digest_of(text.encode())}})
            run_folder.write_scenario(self.path, text)
        if self._journal is not None:
            self._journal.begin()

    def record_rounds(self, history: History, *, elsewhere: bool = False) -> None:
        """Write each round of a history as it ends; call this before the history is restored from a checkpoint.

        Args:
            history: Of the run.
            elsewhere: Whether the checkpoints' folder has its journal; else it goes to this folder.
        """
        if not elsewhere:
            history.write_to(Journal(self.path / JOURNAL))
        self._journal = history.journal

    @property
    def failure(self) -> RunError | None:
        """The error of a round that could not be written, if there is one."""
        return self._journal.failure if self._journal else None

    def finish(self, result: RunResult, tables: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Write history and model in place of the journal, and the tables derived from them.

        The history stays readable, though it had rows in the journal.

        Args:
            result: History and model.
            tables: Name -> columns.

        Raises:
            RunError: That cannot be done.
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

            # A folder with a model counts as finished. So the record has every digest before the model gets its name.
            def record_digests(model: bytes) -> None:
                record = read_record(self.path)
                files = record.get(FILES, {}) | digests | {run_folder.MODEL: digest_of(model)}
                write_record(self.path, record | {FILES: files})

            run_folder.write_model(self.path, list(result.arrays), before=record_digests)
        # The history still reads it: its journal keeps the file open.
        (self.path / JOURNAL).unlink(missing_ok=True)
        self._remove_saved_models()

    def save_last_model(self, last: LastModel | None) -> Path | None:
        """Write the last model of a run that an error ends, if a round has ended and the run has not finished.

        Returns:
            The file; None if there is none, or it cannot be written.
        """
        if last is None or not last.round or (self.path / run_folder.MODEL).exists():
            return None
        # The error that ends the run says more than one about this file would.
        with contextlib.suppress(OSError, FedSelError):
            return run_folder.write_model(self.path, last.arrays, run_folder.MODEL_AFTER_ROUND.format(last.round))
        return None

    def close(self) -> None:
        """Let other processes write to the folder."""
        # The lock is released with its last reference.
        self._lock = None

    def _remove_saved_models(self) -> None:
        """Remove the models of earlier attempts that an error ended."""
        for path in self.path.glob(run_folder.MODEL_AFTER_ROUND.format("*")):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _disk_errors(self, what: str) -> Iterator[None]:
        """Turn the disk's errors into ours, which name the folder."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{str(self.path)!r} cannot be {what}: {error.strerror or error}. Free disk space or make the folder "
                "writable, then resume with --resume (resume=True)"
            ) from error


def write_run(folder: Path, scenario: Scenario, result: RunResult, label: str | None = None) -> None:
    """Write the resolved scenario, the history and the model of a finished run.

    Args:
        folder: Its folder; made if needed.
        scenario: What was run.
        result: History and model.
        label: The selector's label; None: as in the scenario.

    Raises:
        RunError: The folder cannot be written to.
    """
    written = RunFolder(folder, scenario, label, result.fingerprints)
    written.begin()
    written.finish(result)
    written.close()


def write_interrupted_run(folder: Path, scenario: Scenario, history: History, last: LastModel | None) -> Path | None:
    """Write the resolved scenario, the rounds and the last model of a run that an error ended.

    Args:
        folder: Its folder; made if needed.
        scenario: What was run.
        history: Its rounds.
        last: Its last model.

    Returns:
        The model's file; None if there is none.

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
    """Return what the runs in a folder hold: "bsfl-seed1: 300 rounds, finished; random-seed1: 17 rounds"."""
    places = [folder, *sorted(folder.glob("*/"))]
    described = []
    for place in places:
        with contextlib.suppress(ParameterError):
            count = len(run_folder.read_history(place).rounds)
            end = ", finished" if (place / run_folder.MODEL).exists() else ""
            described.append(f"{place.name}: {count} round{'' if count == 1 else 's'}{end}")
    return "; ".join(described)


def read_label(folder: Path) -> tuple[str, Scenario]:
    """Read the label and the scenario of a run back; the selector's code is not needed.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, and the scenario.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    try:
        record = read_record(folder)
        tables = tomllib.loads((folder / run_folder.SCENARIO).read_text("utf-8"))
        # Before anything else looks at them: the folder may come from another person.
        check_tree(record)
        check_tree(tables)
        return check_label(str(record["selector"])), Scenario.model_validate({"name": str(record["scenario"])} | tables)
    except FileNotFoundError as error:
        raise ParameterError(
            f"{str(folder)!r} is not a run: it has no {Path(str(error.filename)).name}. Give a folder that fedsel "
            "run or compare has written"
        ) from error
    # The errors of JSON and TOML are ValueErrors; a file nested too deeply raises RecursionError.
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(f"{str(folder)!r} is not a run: {describe_faults(error)}") from error


def read_run(folder: Path) -> tuple[str, Scenario, RunResult]:
    """Read back what :func:`write_run` wrote, if every file is unchanged; the selector's code is not needed.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, the scenario and the result, whose model is empty if the run was cut off.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    label, scenario = read_label(folder)
    finished = (folder / run_folder.MODEL).exists()
    check_digests(folder, finished=finished)
    arrays = run_folder.read_model(folder) if finished else []
    accuracies, table = np.empty(0), folder / f"{CLIENT_ACCURACY}.parquet"
    if finished and table.exists():
        accuracies = np.asarray(run_folder.read_table(table)["accuracy"], dtype=np.float64)
    history, prints = run_folder.read_history(folder), read_fingerprints(folder)
    return label, scenario, RunResult(history, arrays, fingerprints=prints, client_accuracies=accuracies)


def derived_tables(world: World, result: RunResult) -> dict[str, Columns]:
    """Compute the tables of a finished run: name -> columns.

    They need the true latencies and every client's examples, which neither a selector nor a server knows.

    Args:
        world: The scenario's world.
        result: Of the run.

    Returns:
        ``regret`` if the system model gives the latencies; ``classes`` if the scenario asks for it.
    """
    tables: dict[str, Columns] = {}
    if world.scenario.clients.latency_mode == "model" and world.scenario.num_clients <= MAX_CLIENTS:
        tables["regret"] = regret(world, result.history.clients, len(result.history.rounds))
    if world.scenario.per_class_accuracy:
        tables["classes"] = per_class_accuracy(world, result.arrays)
    return tables


def client_accuracies(world: World, arrays: Arrays) -> FloatArray:
    """Compute the model's accuracy for each client, on examples on which nobody trained.

    A client with test examples of its own is judged by them. If the scenario sets none aside, it is judged by the test
    set, whose classes count as often as among the client's examples.

    Args:
        world: The clients' examples and the test set.
        arrays: The model.

    Returns:
        Shape (num_clients,); NaN for a client none of whose classes is in the test set. Shape (0,) with more than
        :data:`MAX_CLIENTS` clients, or without test examples of the clients if the labels are no classes.
    """
    scenario = world.scenario
    own = scenario.data.local_test_fraction > 0
    if scenario.num_clients > MAX_CLIENTS or not (own or world.objective.quality is fraction_correct):
        return np.empty(0)
    set_arrays(world.model, list(arrays))
    return _on_own_examples(world) if own else _on_test_set(world)


def _on_own_examples(world: World) -> FloatArray:
    """Return the accuracy of the world's model on each client's test examples."""
    data, tested = world.dataset.train, [rows for _, rows in world.train_test_rows(range(world.scenario.num_clients))]
    # Clients may share examples: each goes through the model once.
    needed = np.unique(np.concatenate(tested))
    found, labels = outputs(world.model, data.inputs[needed]), read_only_tensor(data.labels)
    quality = world.objective.quality
    return np.array([quality(found[np.searchsorted(needed, rows)], labels[rows]) for rows in tested])


def _on_test_set(world: World) -> FloatArray:
    """Return the accuracy of the world's model on the test set, its classes weighted as each client has them."""
    test, classes = world.dataset.test, world.dataset.num_classes
    labels, trained = np.asarray(test.labels), np.asarray(world.dataset.train.labels)
    right = outputs(world.model, test.inputs).argmax(-1).numpy() == labels
    tested = np.bincount(labels, minlength=classes)
    held = np.array([
        np.bincount(trained[world.train_rows(k)], minlength=classes) for k in range(world.scenario.num_clients)
    ])  # fmt: skip
    # A class that the test set lacks counts for nobody.
    held[:, tested == 0] = 0
    by_class = np.bincount(labels, weights=right, minlength=classes) / np.maximum(tested, 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(held @ by_class / held.sum(axis=1))


def regret(world: World, clients: Sequence[ClientRecord], rounds: int) -> Columns:
    """Compute the seconds a round that the choices lost to the m clients of the least mean latency (Xia, (14)).

    Args:
        world: Its system model gives the mean latencies.
        clients: The clients chosen in each round.
        rounds: Number of rounds.

    Raises:
        RunError: A client or a round is none of the scenario's.

    Returns:
        ``round``; ``Theta``, the seconds lost since the start, tau_max times the regret; ``theta`` = Theta / round.
    """
    scenario, longest = world.scenario, world.system.max_latency_s
    # A client that does not answer has reward 0. Latencies are capped at the longest, so no reward is below 0.
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
        ``client``, ``label``, ``num_examples`` and ``accuracy``, a row for each class that a client has.
    """
    set_arrays(world.model, list(arrays))
    data = world.dataset.train
    labels = np.asarray(data.labels)
    # All outputs in one pass: clients may share examples.
    right = (outputs(world.model, data.inputs).argmax(-1).numpy() == labels).astype(np.float64)
    rows: list[tuple[int, int, int, float]] = []
    for k in range(world.scenario.num_clients):
        own = world.train_rows(k)
        counts, hits = np.bincount(labels[own]), np.bincount(labels[own], weights=right[own])
        rows += [(k, int(c), int(counts[c]), float(hits[c] / counts[c])) for c in np.flatnonzero(counts)]
    columns = zip(*rows, strict=True)
    return dict(zip(("client", "label", "num_examples", "accuracy"), map(np.array, columns), strict=True))
