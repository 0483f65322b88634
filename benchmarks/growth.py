"""What the course of a round costs beside the selector and the training, as the fleet grows; before and after.

BSFL, the MLP 784-64-30-10 (52,500 numbers, float32), every client answers; the models are a stack. Medians of rounds.

    python benchmarks/growth.py                  this checkout
    python benchmarks/growth.py --before REV     and, in the same run, an older revision of this repository (before
                                                 rounds/ was a package of its own), out of `git archive`

The older revision takes the stack as a list of views. Both are run twice in turn; each figure is the better one.
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
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {500: 25, 100_000: 1_000}
ROUNDS = {500: 60, 100_000: 8}
SHAPES = ((64, 784), (64,), (30, 64), (30,), (10, 30), (10,))
ROOT = Path(__file__).resolve().parent.parent


class Timed:
    """A selector whose own time is known."""

    def __init__(self, selector: Any) -> None:
        self.selector, self.seconds = selector, 0.0
        for name in ("select", "observe"):
            setattr(selector, name, self._timed(getattr(selector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(num_clients: int, new: bool) -> tuple[float, float]:
    """Seconds to enrol everybody, and the median seconds of a round beside the selector."""
    from fedsel_flwr.selectors import create

    m = SIZES[num_clients]
    selector = create("bsfl", clients_per_round=m, min_latency=0.1, seed=1)
    timed = Timed(selector)
    nodes = {f"node-{k}": k for k in range(num_clients)}
    layers = [np.random.default_rng(0).normal(size=(m, *shape)).astype(np.float32) for shape in SHAPES]
    model = [layer[0].copy() for layer in layers]
    play = _new if new else _old
    enrol, one_round = play(selector, nodes, m)
    start = time.perf_counter()
    enrol()
    enrolment = time.perf_counter() - start
    one_round(model, layers)
    rounds = []
    for _ in range(ROUNDS[num_clients]):
        start, timed.seconds = time.perf_counter(), 0.0
        one_round(model, layers)
        rounds.append(time.perf_counter() - start - timed.seconds)
    return enrolment, float(np.median(rounds))


def _new(selector: Any, nodes: dict[str, int], m: int) -> tuple[Callable[[], None], Callable[..., None]]:
    from fedsel_flwr.rounds.core import SelectionCore
    from fedsel_flwr.rounds.models import ModelStack
    from fedsel_flwr.rounds.replies import Reply
    from fedsel_flwr.rounds.settings import resolve_settings

    class Transport:
        def introduce(self, asked: list[str]) -> Any:
            raise AssertionError

        def probe(self, asked: list[str], config: Any) -> Any:
            raise AssertionError

    core, transport = SelectionCore(selector, resolve_settings(selector, max_latency=5.0)), Transport()
    facts = {node: {"client_id": k, "num_examples": 120} for node, k in nodes.items()}

    def enrol() -> None:
        core.enroll({node: facts[node] for node in core.parts.roster.unregistered(nodes)})

    replies = [Reply(num_examples=120, metrics=_metrics(i)) for i in range(m)]

    def one_round(model: Any, layers: Any) -> None:
        chosen = core.choose(nodes, model, transport)
        core.collect(dict(zip(chosen, replies, strict=True)), ModelStack(layers))
        core.finish(model)

    return enrol, one_round


def _old(selector: Any, nodes: dict[str, int], m: int) -> tuple[Callable[[], None], Callable[..., None]]:
    from fedsel_flwr.strategies.core import Introduction, SelectionCore, Settings
    from fedsel_flwr.strategies.replies import Reply
    from fedsel_flwr.strategies.roster import Roster

    core = SelectionCore(selector, Settings(max_latency=5.0, channels=m), Roster())

    facts = {node: Introduction(client_id=k, num_examples=120) for node, k in nodes.items()}

    def enrol() -> None:
        core.enroll({node: facts[node] for node in core.strangers(nodes)})

    def one_round(model: Any, layers: Any) -> None:
        core.strangers(nodes)
        core.question(nodes)
        core.received(model)
        chosen = core.choose(nodes)
        replies = {
            node: Reply(arrays=[layer[i] for layer in layers], num_examples=120, metrics=_metrics(i))
            for i, node in enumerate(chosen)
        }
        core.finish(core.collect(replies, model), model, model)

    return enrol, one_round


def _metrics(i: int) -> dict[str, float]:
    return {"latency_s": 0.2 + 0.001 * i, "energy_j": 0.5, "train_loss": 1.0}


def in_process(source: Path, new: bool) -> dict[str, tuple[float, float]]:
    """Measure in a fresh process, with the package from ``source``."""
    env = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", "new" if new else "old"]
    done = subprocess.run(command, env=env, cwd=source, capture_output=True, text=True, check=True)
    figures: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="REV", help="an older revision to measure beside this checkout")
    parser.add_argument("--measure", choices=("old", "new"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps({str(size): measure(size, args.measure == "new") for size in SIZES}))
        return
    with tempfile.TemporaryDirectory() as folder:
        sides = {"now": (ROOT, True)}
        if args.before:
            archive = subprocess.run(
                ["git", "archive", args.before, "fedsel_flwr"], cwd=ROOT, capture_output=True, check=True
            )
            with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
                tar.extractall(folder, filter="data")
            sides = {args.before: (Path(folder), False), **sides}
        runs = [(name, in_process(source, new)) for _ in range(2) for name, (source, new) in sides.items()]
    heads = ("clients", "a round", "enrolment, s", "round beside selector, ms")
    print(f"{'':>12} {heads[0]:>8} {heads[1]:>8} {heads[2]:>13} {heads[3]:>26}")
    for size, cohort in SIZES.items():
        for name in sides:
            found = [figures[str(size)] for which, figures in runs if which == name]
            first, each = (min(column) for column in zip(*found, strict=True))
            print(f"{name:>12} {size:>8} {cohort:>8} {first:>13.3f} {1000 * each:>26.2f}")


if __name__ == "__main__":
    main()
