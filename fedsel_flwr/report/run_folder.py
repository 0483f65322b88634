"""Folder of a run: scenario, history and model on disk. Each file is written completely or not at all.

A finished run has its resolved scenario (TOML), its history (two Parquet files) and its model (safetensors). Its wall
times are in a third Parquet file, which differs between equal runs. Instead of the Parquet files, an interrupted run
has a journal, with one line of JSON for each finished round. If the process died while it was writing a line, that line
is ignored; the rounds before it are complete.
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

from fedsel_flwr import operating_system
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.journal import read_lines
from fedsel_flwr.rounds.records import MOST_CHARACTERS, ClientRecord, RoundRecord, checked, in_order
from fedsel_flwr.rounds.storage import open_file, read_file
from fedsel_flwr.rounds.untrusted import one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray


SCENARIO = "scenario.toml"
ROUNDS = "rounds.parquet"
CLIENTS = "clients.parquet"
TIMING = "timing.parquet"
"""Wall times of the rounds, which differ from run to run (:class:`~fedsel_flwr.rounds.round.Stopwatch`)."""
JOURNAL = "journal.jsonl"
"""Rounds of a run that has not finished (:class:`~fedsel_flwr.rounds.journal.Journal`)."""
MODEL = "model.safetensors"
MODEL_AFTER_ROUND = "model-after-round-{}.safetensors"
"""Model of a run that ended with an error."""
ROWS_PER_BATCH = 2**12
"""Number of rows of a Parquet file that are in memory at a time."""
MOST_ROWS, BYTES_PER_ROW = 10**5, 8
"""Largest number of rows of a small Parquet file, and the fewest bytes per row of a large one."""
MOST_TABLE_BYTES, MOST_MODEL_BYTES = 2**30, 2**32
"""Largest Parquet file, compressed or not, and largest model."""
CURE = "Run the scenario again, or restore the file from a copy"
"""Cure for a file that cannot be read."""


def create_run_folder(scenario_name: str, root: str | os.PathLike[str] = "runs", now: datetime | None = None) -> Path:
    """Create a new, empty folder ``<root>/<scenario>-<YYYYmmdd-HHMMSS>``.

    Args:
        scenario_name: Name of the scenario. Letters, digits, ``.``, ``_`` and ``-`` are kept; all other characters
            become ``-``.
        root: Folder of all runs; created if needed.
        now: The time in the name; the local time by default.

    Returns:
        The new folder. The name of a second folder in the same second ends in ``-2``, and so on.

    Raises:
        ParameterError: ``scenario_name`` has no letter or digit, or no folder can be created in ``root``.
    """
    name = re.sub(r"[^\w.-]+", "-", scenario_name, flags=re.ASCII).strip(".-")
    if not name:
        raise ParameterError(
            f"scenario_name = {scenario_name!r} has no letter or digit. A run folder needs a name with one."
        )
    base = f"{name}-{now or datetime.now():%Y%m%d-%H%M%S}"
    count = 1
    while True:
        folder = Path(root) / (base if count == 1 else f"{base}-{count}")
        # mkdir decides, not a check before it, because two runs may start in the same second.
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            if not (isinstance(error, FileExistsError) and Path(root).is_dir()):
                raise ParameterError(
                    f"no run folder can be created in {os.fspath(root)!r}: {error}. Choose another folder."
                ) from error
            count += 1
        else:
            return folder


def run_name(label: str, seed: int) -> str:
    """Return the name of a run's folder inside that of its comparison."""
    return f"{label}-seed{seed}"


def write_scenario(folder: str | os.PathLike[str], text: str) -> Path:
    """Write the resolved scenario.

    Args:
        folder: The run folder.
        text: The scenario as TOML.

    Returns:
        Path of the file, ``scenario.toml``.
    """
    path = Path(folder) / SCENARIO
    with atomic_write(path) as temporary:
        temporary.write_bytes(text.encode())
    return path


def write_history(folder: str | os.PathLike[str], history: History) -> tuple[Path, Path]:
    """Write a history as two Parquet files, with one column per field of the records, in the type of the field.

    Args:
        folder: The run folder, or a folder inside it for one of several runs.
        history: The history.

    Returns:
        Paths of ``rounds.parquet``, with a row per round, and ``clients.parquet``, with a row per selected client and
        round.

    Raises:
        RunError: pyarrow is not installed.
    """
    paths = Path(folder) / ROUNDS, Path(folder) / CLIENTS
    _write_records(paths[0], RoundRecord, history.rounds)
    _write_records(paths[1], ClientRecord, history.clients)
    return paths


def write_table(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Write columns of equal length as a Parquet file; raise :class:`RunError` if pyarrow is not installed."""
    with atomic_write(path) as temporary:
        table = load_optional("pyarrow").table(dict(columns))
        load_optional("pyarrow.parquet").write_table(table, temporary, compression="zstd")


def read_table(path: Path, *needed: str) -> dict[str, NDArray[Any]]:
    """Read a file of :func:`write_table`.

    Args:
        path: The file.
        needed: Columns that it must have.

    Raises:
        ParameterError: The file is damaged, has too many rows, lacks a column, or has a column without numbers.
    """
    with _table(path) as table:
        kinds = dict(zip(table.schema_arrow.names, map(str, table.schema_arrow.types), strict=True))
        if not {*needed} <= {*kinds} or not {*kinds.values()} <= {"int64", "double"}:
            raise ValueError(f"expected columns of numbers with the names {[*needed]}, found {one_line(str([*kinds]))}")
        columns = table.read()
        return {name: np.asarray(columns[name]) for name in kinds}


def read_history(folder: str | os.PathLike[str]) -> History:
    """Read the files of ``write_history``, or the journal of an interrupted run.

    Args:
        folder: The folder of the run.

    Returns:
        The history.

    Raises:
        ParameterError: A file is missing, is not Parquet or has other columns.
        RunError: pyarrow is not installed.
    """
    # Both files are needed. After a full disk the second one may be missing, but the journal still has every round.
    complete = all((Path(folder) / name).exists() for name in (ROUNDS, CLIENTS))
    if not complete and (Path(folder) / JOURNAL).exists():
        return read_journal(Path(folder))
    rounds = _read_records(Path(folder) / ROUNDS, RoundRecord)
    return History.from_records(
        rounds, _read_records(Path(folder) / CLIENTS, ClientRecord, {one.round for one in rounds})
    )


def read_journal(folder: Path) -> History:
    """Read the finished rounds from a journal.

    Args:
        folder: The run's folder.

    Returns:
        The history, in memory, without an incomplete last line.

    Raises:
        ParameterError: There is no journal, or a line before the last line is damaged.
    """
    path = folder / JOURNAL
    if not path.exists():
        raise ParameterError(f"{str(folder)!r} holds no {JOURNAL}. Give the folder of an interrupted run.")
    try:
        entries = [entry for _, entry in read_lines(path)]
        rounds = list(in_order(entry.round for entry in entries))
        return History.from_records(
            rounds, in_order((row for one in entries for row in one.clients), {one.round for one in rounds})
        )
    except StateError as error:
        raise ParameterError(f"{error}. {CURE}") from error
    except ValueError as error:
        raise _unreadable(path, error) from error


def write_model(
    folder: str | os.PathLike[str],
    arrays: Sequence[NDArray[Any]],
    name: str = MODEL,
    before: Callable[[bytes], None] | None = None,
) -> Path:
    """Write a model's arrays with the names "00", "01", …, which keep their order.

    Args:
        folder: The run folder.
        arrays: Parameters in the model's order, any shapes.
        name: Name of the file.
        before: Function called with the file's content before the file appears.

    Returns:
        Path of the file.

    Raises:
        ParameterError: The format cannot hold the type of an array.
        RunError: safetensors is not installed.
    """
    save = load_optional("safetensors.numpy").save
    path = Path(folder) / name
    # safetensors sorts by name, and with leading zeros this is the order of the arrays.
    digits = max(2, len(str(len(arrays) - 1)))
    tensors = {f"{i:0{digits}d}": np.asarray(array, order="C") for i, array in enumerate(arrays)}
    for key, tensor in tensors.items():
        if tensor.dtype.kind not in "fiub" or not tensor.dtype.isnative:
            raise ParameterError(
                f"Array {key} of the model is of type {tensor.dtype!s}, but a model file holds numbers in native byte "
                "order. Convert it with astype."
            )
    with atomic_write(path) as temporary:
        content = save(tensors)
        temporary.write_bytes(content)
        # Called here, not after the block, because the record of a model must be on disk before the model.
        if before is not None:
            before(content)
    return path


def read_model(folder: str | os.PathLike[str], name: str = MODEL) -> list[NDArray[Any]]:
    """Read a model that ``write_model`` wrote.

    Args:
        folder: The folder that was passed to ``write_model``.
        name: Name of the file.

    Returns:
        The arrays in their original order.

    Raises:
        ParameterError: The file is missing, damaged or has other names.
        RunError: safetensors is not installed.
    """
    module = load_optional("safetensors")
    load = load_optional("safetensors.numpy").load
    path = Path(folder) / name
    try:
        tensors: dict[str, NDArray[Any]] = load(read_file(path, MOST_MODEL_BYTES))
    except (OSError, module.SafetensorError) as error:
        raise ParameterError(f"{path} is not a readable model: {error}. Give the folder of a finished run.") from error
    if not all(name.isdecimal() for name in tensors):
        raise ParameterError(
            f"{path} names its arrays {sorted(tensors)}, not 00, 01, …. Give a file that write_model wrote."
        )
    return [tensors[name] for name in sorted(tensors, key=int)]


def _write_records(path: Path, record: type, rows: Sequence[Any]) -> None:
    schema, rest = _schema(record), iter(rows)
    pa, parquet = load_optional("pyarrow"), load_optional("pyarrow.parquet")
    with atomic_write(path) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        # Written in batches, because a long history is on disk, and its records may not fit in memory together.
        while part := list(islice(rest, ROWS_PER_BATCH)):
            writer.write_table(pa.table({n: [getattr(row, n) for row in part] for n in schema.names}, schema=schema))


def _unreadable(path: Path, error: object) -> ParameterError:
    return ParameterError(f"{path} is not a readable file of a run: {one_line(str(error))}. {CURE}")


@contextmanager
def _table(path: Path, **options: Any) -> Iterator[Any]:
    """Open a Parquet file whose rows fit into memory; their number is checked before any is read."""
    pa, parquet = load_optional("pyarrow"), load_optional("pyarrow.parquet")
    try:
        with open_file(path, MOST_TABLE_BYTES) as file:
            table, size = parquet.ParquetFile(file, **options), os.fstat(file.fileno()).st_size
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            if table.metadata.num_rows > max(MOST_ROWS, size // BYTES_PER_ROW):
                raise ValueError(f"it has {table.metadata.num_rows:,} rows, more than a run writes into {size:,} bytes")
            if sum(group.total_byte_size for group in groups) > MOST_TABLE_BYTES:
                raise ValueError(f"its content has more than {MOST_TABLE_BYTES:,} bytes")
            yield table
    except (OSError, ValueError, pa.ArrowException) as error:
        raise error if isinstance(error, ParameterError) else _unreadable(path, error) from error


def _read_records(path: Path, record: type, rounds: Collection[int] | None = None) -> list[Any]:
    """Return the rows of a file of :func:`write_history`; those of clients are of these rounds."""
    with _table(path) as table:
        found = table.schema_arrow
    # Fields with a default were added later, so files of an older version may lack them.
    schema = _schema(record, {one.name for one in fields(record) if one.default is MISSING} | {*found.names})
    if not found.equals(schema):
        raise _unreadable(
            path, f"expected the columns of {record.__name__}, {schema.names}, got {found.names} or others"
        )
    texts = [one.name for one in schema if str(one.type) == "string"]
    # As a dictionary, a text of a million rows is in memory once, and its length is known.
    with _table(path, read_dictionary=texts) as table:
        return list(in_order(_rows(table, record, texts), rounds))


def _rows(table: Any, record: Callable[..., Any], texts: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a table, with a part of them in memory at a time."""
    same: dict[str, str] = {}
    for batch in table.iter_batches(ROWS_PER_BATCH):
        words = [word for name in texts for word in batch.column(name).dictionary.to_pylist()]
        if max(map(len, words), default=0) > MOST_CHARACTERS:
            raise ValueError(f"a text has more than {MOST_CHARACTERS:,} characters")
        for row in batch.to_pylist():
            yield checked(record, row | {name: same.setdefault(row[name], row[name]) for name in texts})


def _schema(record: type, known: Collection[str] | None = None) -> Any:
    pa = load_optional("pyarrow")
    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    hints = get_type_hints(record)
    names = [field.name for field in fields(record) if known is None or field.name in known]
    return pa.schema([pa.field(name, types[hints[name]], nullable=False) for name in names])


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file completely or not at all.

    Args:
        path: The file to create or replace; its folder is created if needed.

    Yields:
        A temporary path to write to. When the block ends, this file replaces ``path``. If the block raises, it is
        removed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A new folder next to the target, because os.replace is atomic only within one file system. Ctrl-C removes folders
    # with this prefix (``UNFINISHED`` in rounds/storage.py).
    folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    temporary = folder / target.name
    try:
        yield temporary
        operating_system.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
        folder.rmdir()


def load_optional(module: str) -> ModuleType:
    """Import a module that a minimal installation does not have.

    Args:
        module: Full name of the module.

    Returns:
        The module.

    Raises:
        RunError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise RunError(
            f"This report needs {package}, which is not installed. Install it: pip install 'fedsel-flwr[sim]'"
        ) from error
