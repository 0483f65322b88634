"""This checkout and an older revision in turn: is a change of the code's shape free?

    python benchmarks/old_and_new.py REV --data-dir DIR          # Fashion-MNIST; nine turns take about ten minutes
    python benchmarks/old_and_new.py REV --only round-500        # one measure

Each turn measures both sides in fresh processes, one after the other; which is first changes from turn to turn. A ratio
is new / old within a turn. The median of the ratios is printed with an interval of at least 95 % from order statistics.
A measure is "slower" if its interval lies wholly above 1.05, "not decided" if the interval is wider than 5 % to either
side, else "no slower".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from math import comb
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BOUND = 1.05
ROUNDS = {"mlp": 300, "cnn5": 5}
"""Rounds of the vectorized engine; the first two are left out of the median. A run of 300 rounds is
long enough for compiled loops; the engine does not load them for a short run."""
SHORT = 60
"""Rounds of a short run of the perceptron, timed from its start to its end."""


def course_of_rounds(num_clients: int) -> float:
    """Median milliseconds of a round's course, selector and training left out; as ``benchmarks/growth.py``."""
    from growth import measure

    return 1000 * measure(num_clients, True)[1]


def vectorized(model: str, data_dir: str | None) -> float:
    """Median milliseconds of a round of 500 clients in the vectorized engine, training included."""
    return 1000 * float(np.median(np.diff(ends_of_rounds(model, ROUNDS[model], data_dir))[1:]))


def short_run(data_dir: str | None) -> float:
    """Milliseconds of a whole run of :data:`SHORT` rounds of the perceptron, its start included."""
    start = time.perf_counter()
    return 1000 * (ends_of_rounds("mlp", SHORT, data_dir)[-1] - start)


def ends_of_rounds(model: str, rounds: int, data_dir: str | None) -> list[float]:
    """Run ``fashion-500`` in the vectorized engine, and return the moment at which each round ended, in seconds."""
    from fedsel_flwr.simulations import load_scenario, simulate

    scenario = load_scenario(
        "fashion-500",
        {"selector": "random", "model.name": model, "rounds": rounds, "evaluation_every": 10**6}
        | ({} if data_dir is None else {"data.data_dir": data_dir}),
    )
    ends: list[float] = []
    simulate(scenario, engine="vectorized", on_round=lambda record: ends.append(time.perf_counter()))
    return ends


MEASURES: dict[str, Callable[[str | None], float]] = {
    "round-500": lambda data_dir: course_of_rounds(500),
    "round-100000": lambda data_dir: course_of_rounds(100_000),
    "mlp": lambda data_dir: vectorized("mlp", data_dir),
    "mlp-short-run": short_run,
    "cnn5": lambda data_dir: vectorized("cnn5", data_dir),
}


def in_process(source: Path, measure: str, data_dir: str | None) -> float:
    """Measure once, with the package and the benchmarks of ``source``."""
    paths = os.pathsep.join((str(source), str(source / "benchmarks")))
    # -P: else the folder of this file would come first, and with it the benchmarks of this checkout for both sides.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--measure", measure]
    command += [] if data_dir is None else ["--data-dir", data_dir]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, cwd=source, capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the narrowest symmetric interval of order statistics that covers it with at least 95 %.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    (5.0, 2.0, 8.0)
    """
    ordered, n, k = sorted(values), len(values), 0
    while 1 - 2 * sum(comb(n, i) for i in range(k + 2)) / 2**n >= 0.95:
        k += 1
    return float(np.median(ordered)), ordered[k], ordered[n - 1 - k]


def verdict(low: float, high: float) -> str:
    """What an interval says."""
    if low > BOUND:
        return "slower"
    return "not decided" if (high - low) / 2 > BOUND - 1 else "no slower"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="the older revision")
    parser.add_argument("--data-dir", help="holds Fashion-MNIST (else $FEDSEL_DATA)")
    parser.add_argument("--only", nargs="*", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--measure", choices=list(MEASURES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(MEASURES[args.measure](args.data_dir)))
        return
    if args.revision is None or args.turns < 6:
        parser.error("give a revision, and at least 6 turns: fewer have no interval of 95 %")
    packed = subprocess.run(
        ["git", "archive", args.revision, "fedsel_flwr", "benchmarks"], cwd=ROOT, capture_output=True, check=True
    )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in args.only}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as tar:
            tar.extractall(folder, filter="data")
        for turn in range(args.turns):
            for name in args.only:
                sides = [Path(folder), ROOT]
                taken = {side: in_process(side, name, args.data_dir) for side in (sides if turn % 2 else sides[::-1])}
                found[name].append((taken[sides[0]], taken[sides[1]]))
                print(
                    f"turn {turn + 1}: {name}: {found[name][-1][0]:.3f} -> {found[name][-1][1]:.3f} ms", file=sys.stderr
                )
    print(f"{args.turns} turns, load {os.getloadavg()[0]:.1f}\n")
    print("| measure | old, ms | new, ms | new / old | 95 % | |\n|---|---:|---:|---:|---|---|")
    for name, pairs in found.items():
        old, new = (float(np.median(column)) for column in zip(*pairs, strict=True))
        middle, low, high = median_interval([after / before for before, after in pairs])
        print(f"| {name} | {old:.2f} | {new:.2f} | {middle:.3f} | {low:.3f} to {high:.3f} | {verdict(low, high)} |")


if __name__ == "__main__":
    main()
