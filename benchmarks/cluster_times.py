"""How long a comparison takes on clusters of 1, 8 and 64 nodes, computed from parts that this script measures.

    python benchmarks/cluster_times.py --data-dir DIR                          # the parts without Ray, and the table
    python benchmarks/cluster_times.py --data-dir DIR --ray-address HOST:PORT  # Ray's parts too, on a running cluster

The parts are processor seconds, so that a busy machine changes them little; those of Ray are seconds on the clock. The
seconds of a round with one thread come from ENGINES.md. The network is not measured: ``--gbit`` is an assumption.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import numpy as np

from fedsel_flwr.simulations import Comparison, load_scenario
from fedsel_flwr.simulations.comparisons.cluster import Cluster, play_on_node, receive
from fedsel_flwr.simulations.comparisons.comparison import Run
from fedsel_flwr.simulations.comparisons.parallel_runs import Job
from fedsel_flwr.simulations.comparisons.plan import Plan
from fedsel_flwr.simulations.comparisons.runtime_environment import read_inputs, runtime_environment
from fedsel_flwr.simulations.on_flower.ray_resources import cluster_for_runs
from fedsel_flwr.simulations.results import read_run
from fedsel_flwr.simulations.run_options import RunOptions
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of

SELECTORS, SEEDS, ROUNDS = 20, 20, 1000
NODES, CORES = (1, 8, 64), 16
MODELS = {"MLP 784-64-30-10": 0.0505, "CNN 16-32": 0.975}
"""Seconds of a round with one thread: "ours, vectorized, 1 thread" in ENGINES.md."""
IMAGES, FLOPS_PER_WEIGHT = 25 * 120, 6
"""Images in a round; additions and multiplications of a dense layer for each of its weights and each image."""
CORE_GFLOPS = 0.64 / 0.0195 / 2
"""Rate of the training of the MLP for each core, GFLOP/s: its work and its time in ENGINES.md, on 2 cores."""
CALL_S = 0.006
"""Seconds of a call on a cluster, as measured with ``--ray-address``: "each further call"."""
MEASURED_ROUNDS = 100
START = "from fedsel_flwr.simulations.comparisons import cluster; import time; print(time.process_time())"


@dataclass
class Parts:
    """Measured parts of a comparison.

    Attributes:
        start_s: Until a process on a node has loaded the package.
        world_s: Of each run: the data of its seed, the partition and the first model.
        receive_s: Of each run, on this machine: to write its files and read its result.
        rows_mb: Memory of each run's history on this machine.
        files_mb: Files of each run.
        report_s: Of each run, on this machine: its share of the table, the pictures and the page.
        code_mb: Code that travels to each node.
        data_mb: Data set that travels to each node.
    """

    start_s: float = 0.0
    world_s: float = 0.0
    receive_s: float = 0.0
    rows_mb: float = 0.0
    files_mb: float = 0.0
    report_s: float = 0.0
    code_mb: float = 0.0
    data_mb: float = 0.0


def spent(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(data_dir: str) -> Parts:
    """Measure the parts without Ray; those that grow with the rounds are scaled to :data:`ROUNDS`."""
    parts, scale = Parts(), ROUNDS / MEASURED_ROUNDS
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    parts.start_s = float(done.stdout)
    keys = {"rounds": MEASURED_ROUNDS, "engine": "vectorized", "selector": "random", "data.data_dir": data_dir}
    scenario = load_scenario("fashion-500", keys)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        with runtime_environment([scenario], 1) as sent:
            files = [one for one in Path(sent["working_dir"]).rglob("*") if one.is_file()]
            parts.code_mb = _megabytes(sum(one.stat().st_size for one in files))
        inputs = read_inputs([scenario], OwnParts())
        parts.data_mb = _megabytes(len(pickle.dumps(inputs, protocol=5)))
        world_of(scenario)
        parts.world_s, _ = spent(lambda: world_of(scenario.model_copy(update={"seed": 77})))
        (one,) = Plan.of(scenario, ["random"], seeds=1, engine="vectorized").selectors
        job = Job(one.scenario(scenario, 1), one, {"folder": place / "random-seed1", "label": "random"})
        outcome = play_on_node((job, {}), RunOptions(), lambda rounds: None)
        parts.files_mb = _megabytes(sum(map(len, outcome.files.values()))) * scale
        arrive = partial(receive, job, outcome, None)
        parts.receive_s = float(np.median([spent(arrive)[0] for _ in range(5)])) * scale
        tracemalloc.start()
        result = arrive()
        parts.rows_mb = _megabytes(tracemalloc.get_traced_memory()[0]) * scale
        tracemalloc.stop()
        _, other, result = read_run(place / "random-seed1")
        reports = []
        for count in (6, 6, 18):  # the first one also loads libraries
            comparison = Comparison(scenario, reference="random")
            for number in range(count):
                label = "random" if number % 2 else "other"
                comparison.runs.append(Run(label, other.model_copy(update={"seed": number // 2}), result))
            reports.append(spent(lambda one=comparison: one.report(place / "report"))[0])
        parts.report_s = (reports[2] - reports[1]) / 12 * scale
    return parts


def _megabytes(count: float) -> float:
    return count / 1e6


def on_ray(address: str) -> dict[str, float]:
    """Measure Ray's parts on a running cluster, in milliseconds on the clock."""
    where = cluster_for_runs(address)
    if where is None:
        raise SystemExit("give the address of a cluster")
    found: dict[str, float] = {}
    start = time.monotonic()
    names = [f"call {number}" for number in range(200)]
    with closing(Cluster(where).map(_nothing, list(range(200)), names)) as tasks:
        next(tasks)
        found["until the first call has ended"] = 1000 * (time.monotonic() - start)
        start = time.monotonic()
        ended = sum(1 for _ in tasks)
        found["each further call"] = 1000 * (time.monotonic() - start) / ended
    return found


def _nothing(given: int, _shared: None, _report: Any) -> int:
    return given


def table(parts: Parts, gbit: float) -> list[str]:
    """Return the table: hours of a comparison on 1, 8 and 64 nodes, and what limits each of them."""
    columns = ("model", "nodes", "cores", "waves of runs", "runs end after, s", "work of this machine, s", "all, s")
    lines = [f"| {' | '.join(columns)} | what limits it |", "| --- " * 8 + "|"]
    runs, rate = SELECTORS * SEEDS, gbit / 8 * 1000
    for model, round_s in MODELS.items():
        for nodes in NODES:
            cores = nodes * CORES
            waves = math.ceil(runs / cores)
            run_s = ROUNDS * round_s + parts.world_s
            begin = parts.start_s + (parts.code_mb + parts.data_mb) * nodes / rate
            playing = begin + waves * run_s
            # Runs of one wave end together, so this machine works on most of them after the last wave has ended.
            together = min(runs, cores)
            here = parts.receive_s * runs
            waiting = max(playing + parts.receive_s * together, begin + run_s + here)
            whole = waiting + parts.report_s * runs
            limit = "cores" if playing > whole / 2 else "this machine"
            lines.append(
                f"| {model} | {nodes} | {cores} | {waves} | {playing:.0f} | {here + parts.report_s * runs:.0f} | "
                f"{whole:.0f} | {limit} |"
            )
    return lines


def splitting(gbit: float) -> list[str]:
    """Return the table: from which size of a dense network on splitting one round over machines would pay.

    The server sends the model to each machine, and receives a sum of models from each.
    """
    lines = ["| machines | parameters from | a round then takes on one machine, s |", "| --- | --- | --- |"]
    for machines in (2, 4, 8, 16):
        alone = IMAGES * FLOPS_PER_WEIGHT / (CORE_GFLOPS * CORES * 1e9)
        saved, sent = alone * (1 - 1 / machines), 2 * 4 * machines / (gbit / 8 * 1e9)
        if saved <= sent:
            lines.append(f"| {machines} | never, because the network takes longer than the training | - |")
            continue
        least = machines * CALL_S / (saved - sent)
        lines.append(f"| {machines} | {least / 1e6:.1f} million | {alone * least:.3f} |")
    return lines


def main() -> None:
    """Print the parts and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("FEDSEL_DATA", ""), help="default: FEDSEL_DATA")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="measure Ray's parts on this cluster")
    parser.add_argument("--gbit", type=float, default=10.0, help="network of this machine, Gbit/s (default: 10)")
    args = parser.parse_args()
    parts = measure(args.data_dir)
    for name, value in vars(parts).items():
        print(f"{name:10s} {value:.3g}")
    for name, value in (on_ray(args.ray_address) if args.ray_address else {}).items():
        print(f"{name}: {value:.3g} ms")
    print("\n".join([*table(parts, args.gbit), "", *splitting(args.gbit)]))


if __name__ == "__main__":
    main()
