"""What a round costs a SuperLink with many nodes: ``python benchmarks/superlink_load.py``.

A real SuperLink process with its state in a file, a real run of the Message API under BSFL with ``clock="server"``, and
light nodes: they speak Flower's fleet protocol, and answer after a drawn delay, without training. Some answers are
errors, and some nodes leave in each round and come back in the next one. For each number of nodes and clients in a
round, the script measures what a round costs beyond the slowest drawn delay, and compares the history with what the
nodes did. Writes superlink_load.csv beside itself, and prints its tables.

    python benchmarks/superlink_load.py                          # all cases
    python benchmarks/superlink_load.py --case 1000 100 1 20     # nodes, clients in a round, arrays, rounds
    python benchmarks/superlink_load.py --add --case 200 50 1 4  # one case again; the table keeps the others
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import math
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from polling import listening, surroundings
from superlink_checks import KINDS, compared
from superlink_nodes import Behaviour, Fleet, Work
from superlink_page import page

APP = """\
[project]
name = "load"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "benchmark"
[tool.flwr.app.components]
serverapp = "load_app:server_app"
clientapp = "load_app:client_app"
[tool.flwr.app.config]
superlink = 0
cohort = 0
wait_for = 0
rounds = 0
arrays = 0
parameters = 0
timeout = 0
out = ""
"""
MODULE = """\
from benchmarks import superlink_app
server_app = superlink_app.server_app
client_app = superlink_app.client_app
"""
PARAMETERS = 10_000
ERROR = re.compile(r"\[/v1/(\S+)\]\[UnexpectedError:(\w+)\] ?(.*)")
"""An internal error in the SuperLink's log: the request, the error and its text."""


class Case(NamedTuple):
    """A load.

    Args:
        nodes: Number of nodes.
        cohort: Number of clients in a round.
        arrays: Number of arrays of the model.
        rounds: Number of rounds.
    """

    nodes: int
    cohort: int
    arrays: int
    rounds: int


CASES = (
    Case(100, 50, 1, 4), Case(150, 50, 1, 20), Case(200, 50, 1, 4), Case(400, 50, 1, 4), Case(1000, 100, 1, 20),
    Case(100, 10, 1, 4), Case(100, 95, 1, 4), Case(100, 50, 6, 4),
)  # fmt: skip
"""The number of nodes grows, then the clients in a round, then the arrays of the model."""


@dataclass
class Measured:
    """What was measured in a case.

    Attributes:
        rounds: A line for each finished round, as the app wrote it.
        works: What the nodes did.
        left: Round and node id of nodes that were away in the round, or in a part of it.
        requests: The nodes' requests by kind.
        troubles: The nodes' requests without success, by kind and reason.
        waits_s: Seconds of the nodes' requests for a message, during the run.
        idle: The SuperLink's processor seconds in a second, before the run, while nodes only ask for messages.
        run_s: Seconds of the run.
        superlink_cpu_s: The SuperLink's processor seconds in the run.
        nodes_cpu_s: Processor seconds of the nodes.
        database_mb: Size of the SuperLink's files.
        logged: Errors in the SuperLink's log, by text.
        ended: Empty, or why the run did not end.
    """

    rounds: list[dict[str, Any]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    left: set[tuple[int, int]] = field(default_factory=set)
    requests: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    idle: float = 0.0
    run_s: float = 1.0
    superlink_cpu_s: float = 0.0
    nodes_cpu_s: float = 0.0
    database_mb: float = 0.0
    logged: Counter[str] = field(default_factory=Counter)
    ended: str = ""

    def slowest_s(self) -> dict[int, float]:
        """Round -> the longest drawn delay of an answer that came in time, seconds."""
        came = {
            (line["round"], int(row["client_id"]))
            for line in self.rounds
            for row in line["clients"]
            if not row["timed_out"]
        }
        slowest: dict[int, float] = {}
        for work in self.works:
            if work.outcome in ("answered", "failed") and (work.round, work.node) in came:
                slowest[work.round] = max(slowest.get(work.round, 0.0), work.delay_s)
        return slowest


async def measured(
    case: Case,
    folder: Path,
    behaviour: Behaviour,
    *,
    timeout_s: float = 120.0,
    limit_s: float = 240.0,
    idle_s: float = 10.0,
) -> Measured:
    """Play a case.

    Args:
        case: The load.
        folder: An empty folder for the files of the SuperLink and the app.
        behaviour: How the nodes behave.
        timeout_s: The round's timeout, seconds.
        limit_s: Longest time of the run, seconds.
        idle_s: Seconds for which the SuperLink is measured before the run.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    _write_app(folder, address)
    environment, found = surroundings(folder), Measured()
    argv = ["flower-superlink", "--insecure", "--host=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    with (folder / "superlink.log").open("wb") as log:
        superlink = subprocess.Popen(
            [*argv, f"--database={folder / 'state.db'}"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    process, fleet = psutil.Process(superlink.pid), Fleet(address, case.nodes, behaviour)
    try:
        listening(address, superlink)
        await fleet.connect()
        began, own = _processor_s(process), time.process_time()
        await asyncio.sleep(idle_s)
        found.idle = (_processor_s(process) - began) / idle_s if idle_s else 0.0
        fleet.waits_s.clear()
        fleet.requests.clear()
        start, its = time.monotonic(), _processor_s(process)
        config = {
            "superlink": superlink.pid, "cohort": case.cohort, "rounds": case.rounds, "arrays": case.arrays,
            "wait_for": int(case.nodes * (1.0 - behaviour.leaving)),  # those that left come back after the choice
            "parameters": PARAMETERS, "timeout": int(timeout_s), "out": f"'{folder / 'out'}'",
        }  # fmt: skip
        words = " ".join(f"{key}={value}" for key, value in config.items())
        run = await asyncio.create_subprocess_exec(
            "flwr", "run", str(folder), "here", "--run-config", words,
            env=environment, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(run.communicate(), limit_s)
        if run.returncode:
            raise SystemExit(said.decode()[-3000:])
        found.ended = await _ended(process, folder / "out", case.rounds, limit_s)
        found.nodes_cpu_s, found.run_s = time.process_time() - own, time.monotonic() - start
        with contextlib.suppress(psutil.Error):
            found.superlink_cpu_s = _processor_s(process) - its
    finally:
        await fleet.disconnect()
        _end(process)
        superlink.wait(10)
    text = (folder / "out").read_text(encoding="utf-8") if (folder / "out").exists() else ""
    found.rounds = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
    found.works, found.left, found.requests, found.troubles = fleet.works, fleet.left, fleet.requests, fleet.troubles
    found.waits_s = fleet.waits_s
    said_by_it = (folder / "superlink.log").read_text(encoding="utf-8", errors="replace")
    found.logged = Counter(" ".join(parts) for parts in ERROR.findall(said_by_it))
    found.database_mb = sum(path.stat().st_size for path in folder.glob("state.db*")) / 2**20
    return found


def _write_app(folder: Path, address: str) -> None:
    """Write the app, and the connection for ``flwr``."""
    (folder / "pyproject.toml").write_text(APP, encoding="utf-8")
    (folder / "load_app.py").write_text(MODULE, encoding="utf-8")
    (folder / "home").mkdir()
    connection = f'[superlink.here]\naddress = "{address}"\ninsecure = true\n'
    (folder / "home" / "config.toml").write_text(connection, encoding="utf-8")


async def _ended(superlink: psutil.Process, out: Path, rounds: int, limit_s: float) -> str:
    """Wait until a run has finished its rounds; return "", or why it did not."""
    deadline, seen = time.monotonic() + limit_s, False
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        if not superlink.is_running() or superlink.status() == psutil.STATUS_ZOMBIE:
            return "the SuperLink ended"
        here = any("flwr-serverapp" in " ".join(_command(child)) for child in superlink.children(recursive=True))
        seen = seen or here
        done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
        if done >= rounds:
            return ""
        if seen and not here:
            return f"the run ended after round {done}"
    return f"not finished within {limit_s:g} s"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _end(superlink: psutil.Process) -> None:
    """End the SuperLink and what it has started, by their ids."""
    with contextlib.suppress(psutil.Error):
        family = [superlink, *superlink.children(recursive=True)]
        for sign in ("terminate", "kill"):
            for process in family:
                with contextlib.suppress(psutil.Error):
                    getattr(process, sign)()
            _, family = psutil.wait_procs(family, timeout=10)


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def row_of(case: Case, found: Measured) -> dict[str, Any]:
    """Return a case's row of the table: seconds of a round without the first one, which starts everything."""
    slowest, (kinds, _) = found.slowest_s(), compared(found.rounds, found.works, found.left)
    later = [line for line in found.rounds if line["round"] > 1]
    beyond = [line["elapsed_s"] - slowest.get(line["round"], 0.0) for line in later]

    def middle(values: list[float], percent: float = 50.0) -> float:
        return round(float(np.percentile(values, percent)), 3) if values else math.nan

    def typical(name: str) -> float:
        return middle([line[name] for line in later])

    requests = found.requests.total()
    beats = sum(number for name, number in found.troubles.items() if name.startswith("send-node-heartbeat"))
    own = [
        sum(line["parts_ms"][f"{part}_ms"] for part in ("select", "collect", "aggregate", "observe")) / 1000
        for line in later
    ]
    return {
        **case._asdict(), "finished": len(found.rounds),
        "first_s": round(found.rounds[0]["elapsed_s"], 2) if found.rounds else math.nan,
        "round_s": typical("elapsed_s"), "beyond_s": middle(beyond), "beyond_95_s": middle(beyond, 95.0),
        "push_s": typical("push_s"), "pull_s": typical("pull_s"), "strategy_s": middle(own),
        "superlink_idle": round(found.idle, 3), "superlink_cpu_s": typical("superlink_cpu_s"),
        "server_app_cpu_s": typical("server_app_cpu_s"),
        "superlink_mb": max((round(line["superlink_mb"]) for line in found.rounds), default=math.nan),
        "server_app_mb": max((round(line["server_app_mb"]) for line in found.rounds), default=math.nan),
        "database_mb": round(found.database_mb, 1), "requests_per_s": round(requests / found.run_s, 1),
        "request_cpu_ms": round(1000 * found.superlink_cpu_s / max(requests, 1), 2),
        "ask_ms": round(1000 * middle(found.waits_s)), "ask_95_ms": round(1000 * middle(found.waits_s, 95.0)),
        **{kind: kinds[kind] for kind in KINDS}, "missed_heartbeats": beats,
        "errors": sum(found.troubles.values()) - beats, "nodes_cpu_s": round(found.nodes_cpu_s, 1),
        "ended": found.ended,
    }  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table, with numbers as numbers."""

    def value(text: str) -> int | float | str:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text

    with path.open(encoding="utf-8", newline="") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def main() -> None:
    """Play the cases, write the table, and print it."""
    # The SuperLink and its processes are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, nargs=4, action="append", metavar=("NODES", "CLIENTS", "ARRAYS", "ROUNDS"))
    parser.add_argument("--add", action="store_true", help="keep the table's other cases")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a round (default: 120)")
    parser.add_argument(
        "--limit-s", type=float, default=240.0, help="of a case; what is finished counts (default: 240)"
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent, help="where the table goes")
    parser.add_argument("--note", default="", help="what the report is to say of the measurement")
    args = parser.parse_args()
    table = args.folder / "superlink_load.csv"
    rows = read_rows(table) if args.add else []
    for case in [Case(*numbers) for numbers in args.case] if args.case else CASES:
        with tempfile.TemporaryDirectory(prefix="load") as folder:
            found = asyncio.run(
                measured(case, Path(folder), Behaviour(), timeout_s=args.timeout_s, limit_s=args.limit_s)
            )
        rows = [row for row in rows if Case(*(row[name] for name in Case._fields)) != case] + [row_of(case, found)]
        troubles = [*found.troubles.most_common(8), *found.logged.most_common(8)]
        print(json.dumps(rows[-1]), *map(str, troubles), sep="\n  ", flush=True)
        for line in compared(found.rounds, found.works, found.left)[1][:10]:
            print(f"  {line}", file=sys.stderr)
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(page(rows, PARAMETERS, args.note))


if __name__ == "__main__":
    main()
