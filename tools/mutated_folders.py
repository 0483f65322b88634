"""Folders with random faults, read by ``fedsel report``, ``fedsel advise`` and ``fedsel compare --resume``.

    python -m tools.mutated_folders NUMBER SEED [FIRST]

A folder must give a result, or one line and the exit status 2. Each folder is read by a process of its own, with a
limit of 20 seconds of processor time, and of 1 GB more memory than at its start. The script prints each kind of fault.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from fedsel_flwr.cli import main
from fedsel_flwr.report import advice
from fedsel_flwr.report.page import charts, document
from fedsel_flwr.simulations import Scenario, compare, load_scenario, simulate
from fedsel_flwr.simulations.comparisons.comparison import Comparison
from fedsel_flwr.simulations.run_identity import write_record
from tests.simulations.cut_off_runs import cut_off

CPU_S, WALL_S, GROWTH_MB = 20, 240, 1000
JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, -1e308, 1e-308, 5e-324, float("nan"), float("inf"),
    -float("inf"), "", "x" * 300, "y" * 100_000, "1", "[bold]x[/bold]", "\x1b[31mred\x07", "\u2028", "\u202e", "\ud800",
    "<script>", [], {}, [1], [[1]], {"a": 1}, "\0", "first", "observed", "max_latency", "late: x", "__proto__",
    "constructor", "../../x", "/dev/zero", "/etc/passwd", "/proc/kmsg", "a:b", "1979-05-27",
]  # fmt: skip
BYTES = [
    b"",
    b"\n",
    b"\0" * 100 + b"\n",
    b"[" * 100_000 + b"\n",
    b"{}\n",
    b"[]",
    b"9" * 5000 + b"\n",
    b"\xff\xfe",
    b"x",
]
FREE = {"rounds", "num_clients", "local_epochs", "local_steps", "batch_size", "hidden", "target_rounds"}
"""Keys of a plan that a long run may have; their large values are no fault."""
Mutation = Callable[[random.Random, Path], str]


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in inner for found in ((*path, key), *leaves(value, (*path, key)))]


def mutate_tree(rng: random.Random, tree: Any) -> str:
    """Replace, remove, rename or repeat a value somewhere in a tree."""
    places = leaves(tree)
    path = rng.choice(places)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    what = rng.choice(["value", "value", "value", "remove", "rename", "repeat"])
    if what == "remove":
        del parent[path[-1]]
    elif what == "rename" and isinstance(parent, dict):
        parent[rng.choice(["new", "\x1b", "__class__", "x" * 500])] = parent.pop(path[-1])
    elif what == "repeat" and isinstance(parent[path[-1]], list):
        parent[path[-1]] *= rng.choice([0, 2, 500])
    else:
        value = rng.choice(JUNK)
        parent[path[-1]] = 2 if path[-1] in FREE and isinstance(value, int) and value > 1 else value
    return f"{what} {'.'.join(map(str, path))[:60]}"


def mutate_bytes(rng: random.Random, path: Path) -> str:
    """Cut a file, change bytes of it, or replace its content."""
    content = path.read_bytes()
    place, what = rng.randrange(max(1, len(content))), rng.choice(["cut", "bytes", "content", "twice"])
    if what == "cut":
        content = content[:place]
    elif what == "bytes":
        content = content[:place] + rng.randbytes(rng.choice([1, 3, 50])) + content[place + 1 :]
    else:
        content = content * 2 if what == "twice" else rng.choice(BYTES)
    path.write_bytes(content)
    return what


def mutate_lines(rng: random.Random, path: Path) -> str:
    """Change a line of a journal, the order of its lines, or one value in every line."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    what = rng.choice(["line", "line", "line", "order", "twice", "column"])
    if what == "line":
        what += " " + mutate_tree(rng, lines[rng.randrange(len(lines))])
    elif what == "order":
        rng.shuffle(lines) if rng.random() < 0.5 else lines.reverse()
    elif what == "twice":
        lines.insert(0, lines[rng.randrange(len(lines))])
    else:
        part, value = rng.choice(["round", "clients"]), rng.choice(JUNK)
        key = rng.choice([*(lines[0]["round"] if part == "round" else lines[0]["clients"][0])])
        for line in lines:
            for row in [line["round"]] if part == "round" else line["clients"]:
                row[key] = value
        what += f" {key}={value!r:.30}"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return what


def mutate_json(rng: random.Random, path: Path) -> str:
    tree = json.loads(path.read_text())
    what = mutate_tree(rng, tree)
    path.write_text(json.dumps(tree))
    return what


def mutate_toml(rng: random.Random, path: Path) -> str:
    tree = tomllib.loads(path.read_text())
    what = mutate_tree(rng, tree)
    with contextlib.suppress(TypeError, ValueError):
        path.write_text(tomli_w.dumps(tree), errors="surrogateescape")
    return what


def mutate_checkpoint(rng: random.Random, path: Path) -> str:
    """Change the text in the header of a checkpoint, with a digest that fits, or any byte."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    said = json.loads(header["__metadata__"]["checkpoint"])
    what = mutate_tree(rng, said)
    said["sha256"] = "0" * 64
    header["__metadata__"]["checkpoint"] = json.dumps(said)
    text = json.dumps(header, separators=(",", ":")).encode()
    content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    path.write_bytes(content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1))
    return what


def mutate_parquet(rng: random.Random, path: Path) -> str:
    table, what = pq.read_table(path), rng.choice(["value", "column", "type", "drop", "twice", "null", "empty", "many"])
    name = rng.choice(table.schema.names)
    place, field = table.schema.names.index(name), table.schema.field(name)
    values = table.column(name).to_pylist()
    if what in ("value", "column"):
        new = rng.choice([one for one in JUNK if type(one) is type(values[0]) and one not in (2**63, 10**30)] or values)
        new = new.replace("\ud800", "?") if isinstance(new, str) else new
        values = [new] * len(values) if what == "column" else [*values[:-1], new]
        table = table.set_column(place, field, pa.array(values, field.type))
    elif what == "type":
        table = table.set_column(place, pa.field(name, pa.string(), nullable=False), pa.array(list(map(str, values))))
    elif what == "null":
        table = table.set_column(place, pa.field(name, field.type), pa.array([None] * len(values), field.type))
    elif what == "many":
        rows = rng.choice([2, 10**6, 3 * 10**6])
        table = table.slice(0, 1).take(pa.array([0] * rows))
    else:
        table = {"drop": table.drop_columns([name]), "twice": pa.concat_tables([table] * 3)}.get(
            what, table.slice(0, 0)
        )
    pq.write_table(table, path, compression="zstd")
    return f"{what} {name}"


def mutate_kind(rng: random.Random, path: Path) -> str:
    """Replace a file by a pipe, a link, a folder, or a file with 40 GB of nothing."""
    what = rng.choice(["pipe", "link", "device", "folder", "sparse", "none"])
    if what == "sparse":
        os.truncate(path, 40 * 10**9)
        return what
    shutil.move(path, path.parent.parent / "moved")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what != "none":
        path.symlink_to("/dev/zero" if what == "device" else path.parent.parent / "moved")
    return what


OWN: dict[str, Mutation] = {
    ".jsonl": mutate_lines, ".json": mutate_json, ".toml": mutate_toml, ".parquet": mutate_parquet,
    ".safetensors": mutate_checkpoint,
}  # fmt: skip


def is_small(path: Path) -> bool:
    """Whether this script may read a file that it may have changed."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1e8


def mutate(rng: random.Random, folder: Path) -> str:
    """Change one or two files of a folder; some runs get digests that fit."""
    told = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        files = sorted(path for path in folder.rglob("*") if path.suffix in OWN and is_small(path))
        path = rng.choice(files)
        own: Mutation = rng.choice([OWN[path.suffix]] * 6 + [mutate_bytes] * 2 + [mutate_kind])
        if own is mutate_checkpoint and not path.name.startswith("round-"):
            own = mutate_bytes
        # A second change may meet a file that the first one has broken.
        with contextlib.suppress(
            ValueError, KeyError, TypeError, IndexError, AttributeError, OSError, pa.ArrowException
        ):
            told.append(f"{path.relative_to(folder)}: {own(rng, path)}")
    if rng.random() < 0.7:
        for record in filter(is_small, folder.rglob("run.json")):
            with contextlib.suppress(ValueError, OSError, AttributeError, TypeError, KeyError):
                content = json.loads(record.read_text())
                for name in content["files"]:
                    if is_small(record.parent / name):
                        digest = hashlib.sha256((record.parent / name).read_bytes()).hexdigest()
                        content["files"][name] = f"sha256:{digest}"
                write_record(record.parent, content)
    return "; ".join(told)


def make_originals(folder: Path) -> None:
    """Write a deployment's folder, a finished comparison, and one that was cut off."""
    smoke = load_scenario("smoke", {"rounds": 12, "engine": "vectorized"})
    simulate(smoke, checkpoint_dir=folder / "deployment")
    compare(smoke, ["random", "bsfl"], seeds=1, folder=folder / "finished")
    shutil.copytree(folder / "finished", folder / "cut-off")
    cut = folder / "cut-off" / "bsfl-seed1"
    shutil.rmtree(cut)
    cut_off(contender_scenario(smoke), after=6, folder=cut, label="bsfl", checkpoint_every=1)


def contender_scenario(smoke: Scenario) -> Scenario:
    """The scenario of the run that is cut off, as the comparison plays it."""
    return smoke.model_copy(update={"selector": "bsfl", "seed": 1})


COMMANDS: dict[str, list[list[str]]] = {
    "deployment": [["report"], ["advise", "--rounds", "2"], ["report", "--json"]],
    "finished": [["advise", "--rounds", "2"], ["report"], ["compare", "--quiet", "--resume"]],
    "cut-off": [["report", "--json"], ["advise", "--rounds", "2"], ["compare", "--quiet", "--resume"]],
}


def faults_of(argv: Sequence[str]) -> list[str]:
    """Run a command in this process; return what is wrong with how it ends."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            status = main(argv)
        except SystemExit as error:
            return [f"exit {error.code}"]
        except BaseException as error:
            place = error.__traceback__
            while place and place.tb_next:
                place = place.tb_next
            where = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
            return [f"traceback {type(error).__name__} {str(error)[:80]} at {where}"]
    text = err.getvalue()
    found = [f"warning {str(one.message)[:60]} at {Path(one.filename).name}:{one.lineno}" for one in told[:1]]
    if status == 2 and (text.count("\n") != 1 or not text.startswith("fedsel: error: ")):
        found.append(f"not one line: {text[:200]!r}")
    if any(letter in text + out.getvalue() for letter in "\x1b\x07\0\u202e"):
        found.append("control characters")
    if len(text) > 1000:
        found.append(f"a message of {len(text)} characters")
    if "root:x:" in text:
        found.append("content of another file")
    return found if status in (0, 2) else [*found, f"status {status}"]


def read_in_process(argv: Sequence[str]) -> tuple[list[str], float, float]:
    """Run a command in a process of its own; return its faults, its seconds and its growth in MB."""
    started = time.monotonic()
    receiver, sender = os.pipe()
    if not (pid := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        os.write(sender, json.dumps(faults_of(argv)).encode()[:60_000])
        os._exit(0)
    os.close(sender)
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() - started > WALL_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with os.fdopen(receiver, "rb") as file:
        said = file.read()
    faults = json.loads(said) if said else [f"ended by signal {ended[1] & 127}"]
    grown = ended[2].ru_maxrss / 1000 - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return [*faults, *([f"grew by {grown:.0f} MB"] if grown > GROWTH_MB else [])], ended[2].ru_utime, grown


def without_pictures(target: Any = Comparison) -> None:
    """Do not draw; pictures take seconds and have no input that pages and tables do not have."""
    for name in ("plot", "plot_rounds"):
        setattr(target, name, lambda *_, **__: None)


def faster() -> None:
    """Leave out what has no input from a folder, and import once what every process needs."""
    advice.FLEETS, advice.ROUNDS = 2, 3
    document.vega_bundle = lambda: "0"  # type: ignore[assignment]
    charts.specification = lambda chart, height: {"height": height}
    without_pictures()
    for name in ("altair", "jinja2", "pandas", "scipy.special", "scipy.stats", "sklearn.datasets"):
        importlib.import_module(name)
    # Objects that are never collected stay shared with the processes that read.
    gc.freeze()


def run(number: int, seed: int, first: int = 0, out: Callable[[str], None] = print) -> Counter[str]:
    """Read folders with faults; return the number of results of each kind, and of each fault."""
    faster()
    counts: Counter[str] = Counter()
    longest, largest, total = 0.0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        make_originals(place / "originals")
        for name, commands in COMMANDS.items():
            for argv in commands:
                shutil.copytree(place / "originals" / name, place / "x" / name)
                if faults := read_in_process([*argv, str(place / "x" / name)])[0]:
                    out(f"unchanged {name}, {argv}: {faults}")
                shutil.rmtree(place / "x")
        for i in range(first, number):
            rng = random.Random(f"{seed}-{i}")
            name = rng.choice([*COMMANDS])
            shutil.copytree(place / "originals" / name, place / "x" / name)
            told = mutate(rng, place / "x" / name)
            for argv in COMMANDS[name]:
                faults, seconds, grown = read_in_process([*argv, str(place / "x" / name)])
                longest, largest = max(longest, seconds), max(largest, grown)
                total += seconds
                counts["commands"] += 1
                for fault in faults:
                    counts[fault] += 1
                    if counts[fault] == 1:
                        out(f"[{i}: {told}] {' '.join(argv)}: {fault}")
            shutil.rmtree(place / "x", ignore_errors=True)
            counts["folders"] += 1
            if (i + 1) % 50 == 0:
                out(f"{i + 1} folders in {total:.0f} s of processor time, for a command at most {longest:.1f} s "
                    f"and {largest:.0f} MB more memory")  # fmt: skip
    return counts


if __name__ == "__main__":
    print(dict(run(*map(int, sys.argv[1:]), out=lambda line: print(line, flush=True))))
