"""The folder of a run: resolved scenario, history as Parquet, model as safetensors. Every write is atomic.

Whole files or none, and packages that only reports need.

The journal of a run: each finished round as one line of JSON, written as it ends.

A run that is cut off leaves its journal; one that ends well has Parquet files in its place. A line that was being
written when the process died is passed over: the rounds before it are whole.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from datetime import datetime
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from fedsel_flwr.errors import ParameterError, RunError, StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedsel_flwr.rounds.history import History


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file completely or not at all.

    Args:
        path: The file to make or replace; its folder is made if needed.

    Yields:
        A path in the same folder to write to. It takes the place of ``path`` when the block ends, and is removed if
        the block raises.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    temporary = folder / target.name
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
        folder.rmdir()


def load_optional(module: str) -> ModuleType:
    """Import a module that a bare installation lacks.

    Args:
        module: Its full name.

    Returns:
        The module.

    Raises:
        RunError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise RunError(
            f"This report needs {package}, which is not installed. Install it with: pip install 'fedsel-flwr[sim]'"
        ) from error


JOURNAL = "journal.jsonl"
"""What the journal of a run is called in its folder (:class:`~fedsel_flwr.rounds.history_storage.Journal`)."""


def read_journal(folder: Path) -> History:
    """Read the rounds that were finished.

    Args:
        folder: The run's folder.

    Returns:
        The history, in memory, without a line that was cut off at the end.

    Raises:
        ParameterError: There is no journal, or a line before the last is damaged.
    """
    from fedsel_flwr.rounds.history import History
    from fedsel_flwr.rounds.history_storage import Journal

    journal = Journal(folder / JOURNAL)
    if not journal.path.exists():
        raise ParameterError(f"{str(folder)!r} holds no journal: there is no {JOURNAL} in it")
    try:
        journal.load()
    except StateError as error:
        raise ParameterError(str(error)) from error
    entries = [journal.entry(line) for line in range(len(journal))]
    journal.close()
    return History.from_records([one.round for one in entries], [row for one in entries for row in one.clients])


ROUNDS = "rounds.parquet"
CLIENTS = "clients.parquet"
MODEL = "model.safetensors"
AFTER_ROUND = "model-after-round-{}.safetensors"
"""The model of a run that an error ended."""
SCENARIO = "scenario.toml"
AT_A_TIME = 2**12
"""Rows that are written together."""


def create_run_folder(scenario_name: str, root: str | os.PathLike[str] = "runs", now: datetime | None = None) -> Path:
    """Make a new, empty folder ``<root>/<scenario>-<YYYYmmdd-HHMMSS>``.

    Args:
        scenario_name: Name of the scenario; whatever is not a letter, digit, ``.``, ``_`` or ``-`` becomes ``-``.
        root: Folder that holds all runs; made if needed.
        now: The time in the name; the local time by default.

    Returns:
        The new folder. A second one in the same second ends in ``-2``, and so on.

    Raises:
        ParameterError: If nothing usable is left of ``scenario_name``, or no folder can be made in ``root``.
    """
    name = re.sub(r"[^\w.-]+", "-", scenario_name, flags=re.ASCII).strip(".-")
    if not name:
        raise ParameterError(f"A run folder is named after its scenario; {scenario_name!r} has no letter or digit.")
    base = f"{name}-{now or datetime.now():%Y%m%d-%H%M%S}"
    count = 1
    while True:
        folder = Path(root) / (base if count == 1 else f"{base}-{count}")
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            if not (isinstance(error, FileExistsError) and Path(root).is_dir()):
                raise ParameterError(f"No folder for runs can be made in {os.fspath(root)!r}: {error}.") from error
            count += 1
        else:
            return folder


def write_scenario(folder: str | os.PathLike[str], text: str) -> Path:
    """Write the resolved scenario.

    Args:
        folder: The run folder.
        text: The scenario as TOML.

    Returns:
        The file, ``scenario.toml``.
    """
    path = Path(folder) / SCENARIO
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())
    return path


def write_history(folder: str | os.PathLike[str], history: History) -> tuple[Path, Path]:
    """Write a history as two Parquet files, one column per field of the records, typed as the field is.

    Args:
        folder: The run folder, or a folder inside it for one of several runs.
        history: The history.

    Returns:
        ``rounds.parquet``, a row per round, and ``clients.parquet``, a row per selected client and round.

    Raises:
        RunError: If pyarrow is not installed.
    """
    from fedsel_flwr.rounds.history import ClientRecord, RoundRecord

    paths = Path(folder) / ROUNDS, Path(folder) / CLIENTS
    _write_records(paths[0], RoundRecord, history.rounds)
    _write_records(paths[1], ClientRecord, history.clients)
    return paths


def write_table(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Write columns of one length as a Parquet file; raises :class:`RunError` if pyarrow is not installed."""
    with replacing(path) as temporary:
        table = load_optional("pyarrow").table(dict(columns))
        load_optional("pyarrow.parquet").write_table(table, temporary, compression="zstd")


def read_table(path: Path) -> dict[str, NDArray[Any]]:
    """Read back what :func:`write_table` wrote; raises :class:`ParameterError` if it is damaged."""
    try:
        table = load_optional("pyarrow.parquet").ParquetFile(path).read()
    except (OSError, ValueError) as error:
        raise ParameterError(f"Expected a table that write_table wrote in {path}: {error}") from error
    return {name: np.asarray(column) for name, column in zip(table.schema.names, table.columns, strict=True)}


def read_history(folder: str | os.PathLike[str]) -> History:
    """Read back what ``write_history`` wrote, or, of a run that was cut off, the rounds in its journal.

    Args:
        folder: The folder of the run.

    Returns:
        The history.

    Raises:
        ParameterError: If a file is missing, is not Parquet or has other columns.
        RunError: If pyarrow is not installed.
    """
    from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord

    written = all((Path(folder) / name).exists() for name in (ROUNDS, CLIENTS))  # a full disk may lack the second one
    if not written and (Path(folder) / JOURNAL).exists():
        return read_journal(Path(folder))
    rounds = _read_records(Path(folder) / ROUNDS, RoundRecord)
    return History.from_records(rounds, _read_records(Path(folder) / CLIENTS, ClientRecord))


def write_model(
    folder: str | os.PathLike[str],
    arrays: Sequence[NDArray[Any]],
    name: str = MODEL,
    before: Callable[[bytes], None] | None = None,
) -> Path:
    """Write a model's arrays under the names "00", "01", …, which keep their order.

    Args:
        folder: The run folder.
        arrays: Parameters in the model's order, any shapes.
        name: Of the file.
        before: Called with the file's content before the file is there.

    Returns:
        The file.

    Raises:
        ParameterError: If an array is of a type that the format cannot hold.
        RunError: If safetensors is not installed.
    """
    save = load_optional("safetensors.numpy").save
    path = Path(folder) / name
    digits = max(2, len(str(len(arrays) - 1)))
    tensors = {f"{i:0{digits}d}": np.asarray(array, order="C") for i, array in enumerate(arrays)}
    for key, tensor in tensors.items():
        if tensor.dtype.kind not in "fiub" or not tensor.dtype.isnative:
            raise ParameterError(
                f"A model file holds arrays of numbers in the machine's byte order; array {key} is of type "
                f"{tensor.dtype!s}. Convert it with astype."
            )
    with replacing(path) as temporary:
        content = save(tensors)
        temporary.write_bytes(content)
        if before is not None:
            before(content)
    return path


def read_model(folder: str | os.PathLike[str], name: str = MODEL) -> list[NDArray[Any]]:
    """Read back what ``write_model`` wrote.

    Args:
        folder: The folder given to ``write_model``.
        name: Of the file.

    Returns:
        The arrays in the order in which they were given.

    Raises:
        ParameterError: If the file is missing, damaged or has other names.
        RunError: If safetensors is not installed.
    """
    module = load_optional("safetensors")
    load = load_optional("safetensors.numpy").load
    path = Path(folder) / name
    try:
        tensors: dict[str, NDArray[Any]] = load(path.read_bytes())
    except (OSError, module.SafetensorError) as error:
        raise ParameterError(f"Expected a model that write_model wrote in {path}: {error}") from error
    if not all(name.isdecimal() for name in tensors):
        raise ParameterError(f"{path} names its arrays {sorted(tensors)}, not 00, 01, …; it is another program's.")
    return [tensors[name] for name in sorted(tensors, key=int)]


def _write_records(path: Path, record: type, rows: Sequence[Any]) -> None:
    schema, rest = _schema(record), iter(rows)
    pa, parquet = load_optional("pyarrow"), load_optional("pyarrow.parquet")
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while part := list(islice(rest, AT_A_TIME)):  # a long history is never in memory as a whole
            writer.write_table(pa.table({n: [getattr(row, n) for row in part] for n in schema.names}, schema=schema))


def _read_records(path: Path, record: type) -> list[Any]:
    try:
        table = load_optional("pyarrow.parquet").ParquetFile(path).read()
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ParameterError(f"Expected a history that write_history wrote in {path}: {error}") from error
    known = {field.name for field in fields(record) if field.default is MISSING} | {*table.schema.names}
    schema = _schema(record, known)  # an older version's records lack some of the others
    if not table.schema.equals(schema):
        raise ParameterError(
            f"{path} does not hold the columns of {record.__name__}: expected {schema.names}, found "
            f"{table.schema.names} (or other types). It is of another version; run the scenario again."
        )
    return [record(**row) for row in table.to_pylist()]


def _schema(record: type, known: Collection[str] | None = None) -> Any:
    pa = load_optional("pyarrow")
    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    hints = get_type_hints(record)
    names = [field.name for field in fields(record) if known is None or field.name in known]
    return pa.schema([pa.field(name, types[hints[name]], nullable=False) for name in names])
