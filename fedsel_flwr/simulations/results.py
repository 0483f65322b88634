"""What a simulation leaves behind, in memory and on disk.

What is worked out when a run is over, from what no selector and no server knows.
"""

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

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.training import outputs
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import JOURNAL, load_optional
from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.rounds.history_storage import Ledger
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.storage import WRITES, hold
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
from fedsel_flwr.simulations.untrusted_folders import check_label, check_links, check_tree, faults_of
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import fair_regret, xia_genie

if TYPE_CHECKING:
    from fedsel_flwr.strategies.wrapping.round_end import LastModel


@dataclass(frozen=True)
class RunResult:
    """What a simulation leaves behind.

    Attributes:
        history: Round by round and client by client.
        arrays: The final global model.
        trouble: One sentence if the run diverged, or no update could be used; empty if not, or of a run read back.
        fingerprints: What the run was made of (:mod:`fedsel_flwr.simulations.fingerprints`); empty if not known.
    """

    history: History
    arrays: Arrays
    trouble: str = ""
    fingerprints: Fingerprints = field(default_factory=dict)


class RunFolder:
    """The folder of a run: the scenario from the start, each round as it ends, history and model at the end.

    Args:
        folder: Where; made if needed.
        scenario: What is run.
        label: What the selector is called; None: as in the scenario.
        fingerprints: What the run is made of.

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
        load_optional("pyarrow.parquet")  # before a long run, not behind it
        self.path, self._scenario, self._label = Path(folder), scenario, label or scenario.selector
        self._fingerprints = dict(fingerprints or {})
        self._ledger: Ledger | None = None
        check_links(self.path)
        with self._told("begun"):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = hold(self.path, WRITES)

    def begin(self) -> None:
        """Write what is run, and begin the journal.

        Raises:
            RunError: That cannot be done.
        """
        made_by = {"python": platform.python_version()} | {
            package: importlib.metadata.version(package) for package in ("fedsel-flwr", "flwr", "torch", "numpy")
        }
        scenario = self._scenario
        said = {
            "scenario": scenario.name,
            "selector": self._label,
            "versions": made_by,
            FINGERPRINTS: self._fingerprints,
        }
        with self._told("begun"):
            for name in (run_folder.MODEL, run_folder.ROUNDS, run_folder.CLIENTS):  # of a run that was here before
                (self.path / name).unlink(missing_ok=True)
            self._forget_rescued()
            text = tomli_w.dumps(scenario.model_dump(exclude={"name"}))
            write_record(self.path, said | {FILES: {run_folder.SCENARIO: digest_of(text.encode())}})
            run_folder.write_scenario(self.path, text)
        if self._ledger is not None:
            self._ledger.begin()

    def follow(self, history: History, *, elsewhere: bool = False) -> None:
        """Have each round of a history written as it ends; to be called before the history goes on from a checkpoint.

        Args:
            history: Of the run.
            elsewhere: Whether it has a place of its own; else it goes to the folder's journal.
        """
        if not elsewhere:
            history.write_to(Ledger(self.path / JOURNAL))
        self._ledger = history.ledger

    @property
    def failure(self) -> RunError | None:
        """What the disk said when a round could not be written."""
        return self._ledger.failure if self._ledger else None

    def finish(self, result: RunResult, tables: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Write history and model in place of the journal, and tables that were worked out of them by name.

        What the history has in the journal can still be read.

        Raises:
            RunError: That cannot be done.
        """
        with self._told("finished; the journal in it holds every round"):
            written = [*run_folder.write_history(self.path, result.history)]
            for name, columns in (tables or {}).items():
                written.append(self.path / f"{name}.parquet")
                run_folder.write_table(written[-1], columns)
            digests = {path.name: digest_of_file(path) for path in written}

            def note(model: bytes) -> None:
                """Record the digests before the model is there, which says that the run has finished."""
                record = read_record(self.path)
                files = record.get(FILES, {}) | digests | {run_folder.MODEL: digest_of(model)}
                write_record(self.path, record | {FILES: files})

            run_folder.write_model(self.path, list(result.arrays), before=note)
        journal, ledger = self.path / JOURNAL, result.history.ledger
        if ledger is not None and ledger.path.resolve() == journal.resolve():
            ledger.remove()
        journal.unlink(missing_ok=True)
        self._forget_rescued()

    def rescue(self, last: LastModel | None) -> Path | None:
        """Write the last model of a run that an error ends, if a round has ended and the run has not finished.

        Returns:
            The file; None where there is none, or the disk refuses: the error that ends the run says more.
        """
        if last is None or not last.round or (self.path / run_folder.MODEL).exists():
            return None
        with contextlib.suppress(OSError, FedSelError):
            return run_folder.write_model(self.path, last.arrays, run_folder.AFTER_ROUND.format(last.round))
        return None

    def close(self) -> None:
        """Leave the journal as it is, and let other processes write to the folder."""
        if self._ledger is not None:
            self._ledger.close()
        self._lock = None

    def _forget_rescued(self) -> None:
        """Remove the model of an attempt that an error ended."""
        for path in self.path.glob(run_folder.AFTER_ROUND.format("*")):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{str(self.path)!r} cannot be {what}: {error.strerror or error}") from error


def write_run(folder: Path, scenario: Scenario, result: RunResult, label: str | None = None) -> None:
    """Write the resolved scenario, the history and the model of one run that is over.

    Args:
        folder: Where to; made if needed.
        scenario: What was run.
        result: What came out.
        label: What the selector is called; None: as in the scenario.

    Raises:
        RunError: The folder cannot be written to.
    """
    written = RunFolder(folder, scenario, label, result.fingerprints)
    written.begin()
    written.finish(result)
    written.close()


def write_cut_off(folder: Path, scenario: Scenario, history: History, last: LastModel | None) -> Path | None:
    """Write what there is of a run that an error ended: the resolved scenario, the rounds, the last model.

    Args:
        folder: Where to; made if needed.
        scenario: What was run.
        history: Its rounds.
        last: Its last model.

    Returns:
        The model's file; None where there is none.

    Raises:
        RunError: The folder cannot be written to.
    """
    written = RunFolder(folder, scenario)
    written.begin()
    run_folder.write_history(folder, history)
    rescued = written.rescue(last)
    written.close()
    return rescued


def rounds_in(folder: Path) -> str:
    """Say what the runs in a folder hold: "bsfl-seed1: 300 rounds, finished; random-seed1: 17 rounds"."""
    places = [folder, *sorted(folder.glob("*/"))]
    told = []
    for place in places:
        with contextlib.suppress(ParameterError):
            count = len(run_folder.read_history(place).rounds)
            end = ", finished" if (place / run_folder.MODEL).exists() else ""
            told.append(f"{place.name}: {count} round{'' if count == 1 else 's'}{end}")
    return "; ".join(told)


def read_label(folder: Path) -> tuple[str, Scenario]:
    """Read back what is run in a folder; the selector itself is not needed.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, and the scenario.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    try:
        said = read_record(folder)
        tables = tomllib.loads((folder / run_folder.SCENARIO).read_text("utf-8"))
        check_tree(said)
        check_tree(tables)
        return check_label(str(said["selector"])), Scenario.model_validate({"name": str(said["scenario"])} | tables)
    except FileNotFoundError as error:
        raise ParameterError(
            f"{str(folder)!r} is no run: it has no {Path(str(error.filename)).name}, which fedsel run and compare write"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # JSON's and TOML's are ValueErrors
        raise ParameterError(f"{str(folder)!r} is no run: {faults_of(error)}") from error


def read_run(folder: Path) -> tuple[str, Scenario, RunResult]:
    """Read back what :func:`write_run` wrote, if every file is as it was; the selector itself is not needed.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, the scenario, and what came out; no model of a run that was cut off.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    label, scenario = read_label(folder)
    finished = (folder / run_folder.MODEL).exists()
    check_digests(folder, finished=finished)
    arrays = run_folder.read_model(folder) if finished else []
    return label, scenario, RunResult(run_folder.read_history(folder), arrays, fingerprints=read_fingerprints(folder))


MAX_CLIENTS = 10_000
"""In larger fleets regret is left out."""
Columns = Mapping[str, npt.NDArray[Any]]


def worked_out(world: World, history: History, arrays: Arrays) -> dict[str, Columns]:
    """Return the tables of a run that is over: name -> columns.

    Args:
        world: The scenario's world.
        history: What happened.
        arrays: The final global model.

    Returns:
        ``regret``, where the system model gives the latencies; ``classes``, where the scenario asks for it.
    """
    tables: dict[str, Columns] = {}
    if world.scenario.clients.latency_mode == "model" and world.scenario.num_clients <= MAX_CLIENTS:
        tables["regret"] = regret(world, history.clients, len(history.rounds))
    if world.scenario.per_class_accuracy:
        tables["classes"] = per_class_accuracy(world, arrays)
    return tables


def regret(world: World, clients: Sequence[ClientRecord], rounds: int) -> Columns:
    """What the choices lost in seconds a round, against the m clients of the least mean latency (Xia, (14)).

    Args:
        world: Its system model gives the mean latencies.
        clients: Who was chosen.
        rounds: How many rounds there were.

    Raises:
        RunError: A client or a round is none of the scenario's.

    Returns:
        ``round``; ``Theta``, the seconds lost since the start, tau_max times the regret; ``theta`` = Theta / round.
    """
    scenario, longest = world.scenario, world.system.max_latency_s
    answers = 1.0 - world.dropout.probability  # who does not answer has reward 0
    mean_reward = answers * (1.0 - mean_latencies(world.system) / longest)  # of Xia (5); capped, hence never below 0
    chosen = np.zeros((rounds, scenario.num_clients), dtype=np.bool_)
    known = {str(client): client for client in range(scenario.num_clients)}
    for row in clients:
        if row.client_id not in known or not 1 <= row.round <= rounds:
            raise RunError(
                f"the history holds client {shown(row.client_id)} in round {row.round}, but the scenario has clients 0 "
                f"to {scenario.num_clients - 1} and {rounds} rounds. The checkpoints that the run was resumed from are "
                "of another run: begin a new one"
            )
        chosen[row.round - 1, known[row.client_id]] = True
    _, best = xia_genie(mean_reward, scenario.clients_per_round)
    number = np.arange(1, rounds + 1)
    lost = longest * fair_regret(mean_reward, chosen, best)  # Theta, section V of Xia
    return {"round": number, "Theta": lost, "theta": lost / number}


def per_class_accuracy(world: World, arrays: Arrays) -> Columns:
    """How often the model is right on each client's examples of each class (Kim, Fig. 5).

    Args:
        world: The clients' training examples.
        arrays: The model.

    Returns:
        ``client``, ``label``, ``num_examples`` and ``accuracy``, a row for each class that a client has.
    """
    set_arrays(world.model, list(arrays))
    data = world.dataset.train
    labels = np.asarray(data.labels)
    right = (outputs(world.model, data.inputs).argmax(-1).numpy() == labels).astype(np.float64)
    rows: list[tuple[int, int, int, float]] = []
    for k in range(world.scenario.num_clients):
        own = world.train_rows(k)
        counts, hits = np.bincount(labels[own]), np.bincount(labels[own], weights=right[own])
        rows += [(k, int(c), int(counts[c]), float(hits[c] / counts[c])) for c in np.flatnonzero(counts)]
    client, label, examples, accuracy = zip(*rows, strict=True)
    return {
        "client": np.array(client),
        "label": np.array(label),
        "num_examples": np.array(examples),
        "accuracy": np.array(accuracy),
    }
