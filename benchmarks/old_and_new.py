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
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BOUND = 1.05
ROUNDS = {"mlp": 300, "cnn5": 5}
"""Rounds of the vectorized engine; the first two are left out of the median. A run of 300 rounds is
long enough for compiled loops; the engine does not load them for a short run."""
COHORT = {500: 25, 100_000: 1_000}
"""Clients -> those of a round's course."""
COURSES = {500: 61, 100_000: 9}
"""Clients -> rounds of the course; the first is left out."""
SHAPES = ((64, 784), (64,), (30, 64), (30,), (10, 30), (10,))
SHORT = 60
"""Rounds of a short run of the perceptron, timed from its start to its end."""


def course_of_rounds(num_clients: int) -> float:
    """Median milliseconds of a round's course, selector and training left out.

    BSFL, the MLP 784-64-30-10 (float32) in stacks, and every client answers.
    """
    from fedsel_flwr.rounds.core import SelectionCore
    from fedsel_flwr.rounds.models import ModelStack
    from fedsel_flwr.rounds.replies import Reply
    from fedsel_flwr.rounds.settings import resolve_settings
    from fedsel_flwr.selectors import create

    m = COHORT[num_clients]
    selector = create("bsfl", clients_per_round=m, min_latency=0.1, seed=1)
    taken = time_calls(selector, "select", "observe")
    nodes = {f"node-{k}": k for k in range(num_clients)}
    layers = [np.random.default_rng(0).normal(size=(m, *shape)).astype(np.float32) for shape in SHAPES]
    model = [layer[0].copy() for layer in layers]
    core = SelectionCore(selector, resolve_settings(selector, max_latency=5.0))
    core.register({node: {"client_id": k, "num_examples": 120} for node, k in nodes.items()})
    replies = [
        Reply(num_examples=120, metrics={"latency_s": 0.2 + 0.001 * i, "energy_j": 0.5, "train_loss": 1.0})
        for i in range(m)
    ]
    rounds = []
    for _ in range(COURSES[num_clients]):
        start = time.perf_counter()
        taken.clear()
        # BSFL asks nobody anything.
        chosen = core.choose(nodes, model, None)  # type: ignore[arg-type]
        core.collect(dict(zip(chosen, replies, strict=True)), ModelStack(layers))
        core.finish(model)
        rounds.append(time.perf_counter() - start - sum(taken))
    return 1000 * float(np.median(rounds[1:]))


def time_calls(instance: object, *names: str) -> list[float]:
    """Return a list to which these methods add the seconds of each call."""
    seconds: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                seconds.append(time.perf_counter() - start)

        return inner

    for name in names:
        setattr(instance, name, timed(getattr(instance, name)))
    return seconds


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
    """Measure once, with the package of ``source``."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", measure]
    command += [] if data_dir is None else ["--data-dir", data_dir]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(source)}, cwd=source, capture_output=True, text=True, check=True
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
    packed = subprocess.run(["git", "archive", args.revision, "fedsel_flwr"], cwd=ROOT, capture_output=True, check=True)
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
