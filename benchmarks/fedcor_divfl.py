"""Costs of FedCor and DivFL, an earlier commit's and today's, from one run.

    python benchmarks/fedcor_divfl.py                 writes fedcor_divfl.csv and the last section of selection.md
    python benchmarks/fedcor_divfl.py --clients 1000 --folder DIR

The earlier code is that of a commit (``--before``), which git unpacks into a temporary folder. Every cell runs in a
process of its own with one thread, the earlier code's next to today's, and counts the processor's seconds: other work
on the machine disturbs it less. Both get the same samples, gradients and seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import selection_page

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "acd4780"
FLEETS = (1_000, 10_000, 100_000)
MOST_WITH_DISTANCES = 20_000
"""Clients whose distances (3 GiB) fit into a machine's memory with what the earlier code copies of them."""
SAMPLES, GAPS, NUMBERS = 26, 0.1, 64
"""Samples of a fit, the part of missing loss changes, and numbers of a gradient."""
RUNS, LONGEST_S = 3, 60.0
"""Runs of a cell; no further one begins once they have taken so many seconds."""
FIELDS = ("selector", "work", "clients", "cohort", "code", "seconds", "low", "high", "runs", "same_choices")
WORK = {
    "fit": "fit to 26 complete samples, and a choice", "gaps": "the same, a tenth of the losses missing",
    "choice": "a choice from given embeddings", "first": "the first choice, with all distances",
    "later": "a choice after the chosen ones' gradients changed",
}  # fmt: skip
PARTS = {"fedcor": ("fit", "gaps", "choice"), "divfl": ("first", "later")}
Row = dict[str, Any]


def repeated(prepare: Callable[[], None], choose: Callable[[], Any]) -> tuple[list[float], list[Any]]:
    """Processor seconds and choices of some runs; what comes before each is not counted."""
    seconds: list[float] = []
    choices = []
    while len(seconds) < RUNS and sum(seconds) < LONGEST_S:
        prepare()
        start = time.process_time()
        chosen = choose()
        seconds.append(time.process_time() - start)
        choices.append(chosen.tolist())
    return seconds, choices


def fedcor(num_clients: int, cohort: int, work: str) -> tuple[list[float], list[Any]]:
    """A fit and a choice in the round after the warm-up, or a choice from embeddings that are given."""
    from fedsel_flwr.selectors import create

    rng, everybody = np.random.default_rng(0), np.arange(num_clients)
    selector = create(
        "fedcor", clients_per_round=cohort, warmup_rounds=SAMPLES, interval=10**6, max_clients=num_clients, seed=1
    )
    selector.inform(everybody, num_examples=rng.integers(10, 500, num_clients).astype(float))
    changes = 0.08 * rng.normal(size=(SAMPLES, 4)) @ rng.normal(size=(4, num_clients))
    changes += 0.01 * rng.normal(size=changes.shape) - 0.02
    changes[rng.random(changes.shape) < (GAPS if work == "gaps" else 0.0)] = np.nan
    state = selector.state_dict()
    state["changes"][:, 1 - SAMPLES :] = changes[:-1].T
    state["embedding"] = rng.normal(size=state["embedding"].shape) / 15**0.5
    state |= {"sampled": np.arange(1, SAMPLES), "round": SAMPLES - 1}

    def ready() -> None:
        selector.load_state_dict(state)
        if work == "choice":
            selector.load_state_dict(state | {"round": SAMPLES + 1})
            return
        selector.inform(everybody, loss=np.full(num_clients, 2.0))
        selector.select(everybody)
        selector.inform(everybody, loss=2.0 + changes[-1])

    return repeated(ready, lambda: selector.select(everybody))


def divfl(num_clients: int, cohort: int, work: str) -> tuple[list[float], list[Any]]:
    """A choice when no distance is known, or when those of the last choice's clients are out of date."""
    from fedsel_flwr.selectors import RoundReport, create

    rng, everybody = np.random.default_rng(0), np.arange(num_clients)
    gradients = 2 * rng.normal(size=(20, NUMBERS))[rng.integers(0, 20, num_clients)]
    gradients += rng.normal(size=gradients.shape)
    made = [create("divfl", clients_per_round=cohort, max_clients=num_clients, seed=1)]
    made[0].inform(everybody, gradient=gradients)
    if work == "first":
        state = made[0].state_dict()

        def loaded() -> None:
            made[0] = create("divfl", clients_per_round=cohort, max_clients=num_clients, seed=1)
            made[0].load_state_dict(state)

        return repeated(loaded, lambda: made[0].select(everybody))

    def observed() -> None:
        chosen = made[0].select(everybody)
        fresh = gradients[chosen] + 0.3 * rng.normal(size=(chosen.size, NUMBERS))
        ones = np.ones(chosen.size)
        made[0].observe(RoundReport(clients=chosen, completed=ones > 0, latency=ones, gradient=fresh))

    return repeated(observed, lambda: made[0].select(everybody))


def measured(code: Path, selector: str, num_clients: int, cohort: int, work: str) -> tuple[list[float], list[Any]]:
    """Seconds and choices of a cell, in a process that imports the package from ``code``."""
    environment = os.environ | {
        "PYTHONPATH": str(code), **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    }  # fmt: skip
    cell = json.dumps([selector, num_clients, cohort, work])
    command = [sys.executable, __file__, "--cell", cell]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=code)
    seconds, choices = json.loads(ran.stdout)
    return seconds, choices


def unpacked(commit: str, folder: Path) -> Path:
    """The package as of a commit, below ``folder``."""
    packed = subprocess.run(["git", "archive", commit, "fedsel_flwr"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        sys.exit(f"commit {commit} is not in this clone ({packed.stderr.decode().strip()}); run git fetch --unshallow")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def compared(before: Path, fleets: Sequence[int]) -> list[Row]:
    """The rows of all cells, each one's earlier code first."""
    rows: list[Row] = []
    for selector, parts in PARTS.items():
        for num_clients in fleets:
            if selector == "divfl" and num_clients > MOST_WITH_DISTANCES:
                continue
            for work in parts:
                cohort, choices = max(1, num_clients // 100), []
                for name, code in (("before", before), ("after", ROOT)):
                    seconds, chosen = measured(code, selector, num_clients, cohort, work)
                    choices.append(chosen)
                    values = (float(np.median(seconds)), min(seconds), max(seconds))
                    fixed = (selector, work, num_clients, cohort, name, *(f"{value:.6f}" for value in values))
                    rows.append(dict(zip(FIELDS, (*fixed, len(seconds), ""), strict=True)))
                    print(*rows[-1].values(), flush=True)
                if work not in ("fit", "gaps"):  # the fits differ, so their choices may
                    shared = min(map(len, choices))
                    rows[-1]["same_choices"] = choices[0][:shared] == choices[1][:shared]
    return rows


def section(rows: Sequence[Mapping[str, Any]], fleets: Sequence[int], before: str, machine: str) -> str:
    """The section of selection.md."""
    lines = []
    for selector, parts in PARTS.items():
        for work in parts:
            for num_clients in fleets:
                found = [row for row in rows if (row["selector"], row["work"]) == (selector, work)]
                pair = {row["code"]: row for row in found if row["clients"] == num_clients}
                figures = ["does not fit", f"does not fit: {8 * num_clients**2 / 2**30:.0f} GiB of distances", ""]
                if pair:
                    same = {True: "yes", False: "no"}.get(pair["after"]["same_choices"], "")
                    figures = [*(f"{float(pair[code]['seconds']):.3f}" for code in ("before", "after")), same]
                cohort = f"{max(1, num_clients // 100):,}"
                lines.append((f"`{selector}`: {WORK[work]}", f"{num_clients:,}", cohort, *figures))
    head = ("work", "clients", "m", f"before ({before})", "after", "same choices")
    return (
        f"{selection_page.SECTION}\n\nWritten by `python benchmarks/fedcor_divfl.py`; every figure stands in "
        "[fedcor_divfl.csv](fedcor_divfl.csv), with\nthe smallest and the largest of its runs. Both columns are from "
        f"one run. Machine: {machine}.\n\n"
        "Medians of the processor's seconds, one thread, seed 0 of the data and 1 of the selectors. FedCor's samples "
        "have four\ncommon causes; before, a fit was 150 steps of Adam. DivFL's gradients have 64 numbers, in 20 "
        "clusters.\n\n" + selection_page.table(head, lines)
    )


def described(load: Sequence[float]) -> str:
    """The machine, and what else it was doing."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line.split(":", 1)[1].strip() for line in information.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    averages = f"load averages {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after the run"
    return f"{model}, {os.cpu_count()} cores, {versions}, {averages}"


def main() -> None:
    """Measure, print, and write the table and the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",".join(map(str, FLEETS)), help="fleets, comma-separated")
    parser.add_argument("--before", default=BEFORE, help="the commit of the earlier code")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent, help="where the files go")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        selector, *rest = json.loads(args.cell)
        print(json.dumps({"fedcor": fedcor, "divfl": divfl}[selector](*rest)))
        return
    load, fleets = os.getloadavg(), [int(number) for number in args.clients.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = compared(unpacked(args.before, Path(folder)), fleets)
    with (args.folder / "fedcor_divfl.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page = args.folder / "selection.md"
    others = page.read_text(encoding="utf-8").partition(selection_page.SECTION)[0].rstrip() if page.exists() else ""
    text = section(rows, fleets, args.before, described(load))
    page.write_text(f"{others}\n\n{text}" if others else text, encoding="utf-8")


if __name__ == "__main__":
    main()
