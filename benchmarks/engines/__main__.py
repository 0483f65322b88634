"""Our engines beside other frameworks, taking turns in one run: seconds a round, as CSV and page.

    python benchmarks/engines --data-dir DIR          # Fashion-MNIST; without it random images of its shape
    python benchmarks/engines --models cnn5 --only vectorized-2 flower pfl --turns 3

Environments for the frameworks that ours lacks are made in runs/engines once (`--python fedlab=/path` names one of your
own). Results are kept in runs/engines/results.json by model, so that one model can be run again; benchmarks/ENGINES.md
and benchmarks/engines.csv are written from all that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from cast import HERE, PLAYERS
from compiling import compiling
from environments import interpreter, version
from floor import operations_per_round, rate
from machine import Processors, machine
from page import write
from racing import race
from running import Runner
from task import MODELS, measure, write_task

TURNS = {"mlp": 12, "cnn5": 5, "resnet": 3}


def main() -> None:
    """Run the comparison and write the page."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # the workers are ended on the way out
    args = _arguments()
    runs = args.runs_dir
    runs.mkdir(parents=True, exist_ok=True)
    stored = runs / "results.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    load = os.getloadavg()[0]
    pythons, absent = _interpreters(args, runs)
    for model in args.models:
        print(f"== {MODELS[model]}", flush=True)
        results[model] = _compare(model, args, pythons, absent) | {"load": load}
        stored.write_text(json.dumps(results))
        write(results, args.page, args.page.with_name("engines.csv"))
    print(f"written: {args.page}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="holds Fashion-MNIST; without it the images are random")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=list(PLAYERS), choices=list(PLAYERS))
    parser.add_argument("--turns", type=int, help=f"of each half, one for all models; default {TURNS}")
    parser.add_argument("--trial", type=int, default=2, help="turns after which the slower variants leave")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter of your own")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/engines"))
    parser.add_argument("--page", type=Path, default=HERE.parent / "ENGINES.md")
    return parser.parse_args()


def _interpreters(args: argparse.Namespace, runs: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Who runs where, and why some do not run."""
    given = dict(pair.split("=", 1) for pair in args.python)
    pythons, absent = {}, {}
    for name in args.only:
        try:
            pythons[name] = interpreter(PLAYERS[name].environment, runs.resolve() / "environments", given)
        except Exception as error:  # whatever hinders one must not hinder the others
            absent[name] = str(error)
    return pythons, absent


def _compare(model: str, args: argparse.Namespace, pythons: dict[str, str], absent: dict[str, str]) -> dict[str, Any]:
    turns = args.turns or TURNS[model]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        world = write_task(folder, model, args.data_dir)
        settings = json.loads((folder / "settings.json").read_text())
        runners = _runners(model, args, pythons, folder, rounds=2 * turns + 1)
        processors = Processors()
        race(runners, folder, turns, min(args.trial, turns), lambda what: print(what, flush=True))
        stolen = processors.stolen()
        said = []
        for runner in runners:
            loss = accuracy = float("nan")
            if runner.trained:
                try:
                    loss, accuracy = measure(world, runner.trained)
                except Exception as error:  # it must not take the others' figures with it
                    runner.failure = f"its model cannot be measured: {error}"
            package = PLAYERS[runner.player].package
            facts = {key: value for key, value in dataclasses.asdict(runner).items() if not key.startswith("_")}
            facts |= {"loss": loss, "accuracy": accuracy, "trained": None, "command": [], "environ": {}}
            facts["version"] = version(pythons[runner.player], package) if package else ""
            said.append(facts)
        was_compiled = any(turn.get("backend") == "numba" for facts in said for turn in facts["turns"])
        in_it = {runner["player"] for runner in said if not runner["failure"]}
        failed = {r["player"]: r["failure"] for r in said if r["player"] not in in_it}
        without = {name: PLAYERS[name].without[model] for name in args.only if model in PLAYERS[name].without}
        examples, shape = len(world.train_rows(0)), world.dataset.input_shape
        rates = {threads: rate(args.device, threads) for threads in ((1, 2) if args.device == "cpu" else (1,))}
        return {
            "model": model,
            "runners": said,
            "absent": absent | failed | without,
            "turns": turns,
            "trial": min(args.trial, turns),
            "floor": {
                "operations": operations_per_round(world.model, settings, examples, tuple(shape)),
                "rates": rates,
            },
            "compiling": compiling() if was_compiled else None,
            "settings": {
                "clients": settings["clients"], "examples": examples, "cohort": settings["clients_per_round"],
                "epochs": settings["local_epochs"], "batch": settings["batch_size"],
            },
            "data": "Fashion-MNIST" if args.data_dir else "Random images, of which nothing can be learned",
            "when": datetime.date.today().isoformat(),
            "machine": machine(args.device),
            "stolen": stolen,
        }  # fmt: skip


def _runners(model: str, args: argparse.Namespace, pythons: dict[str, str], folder: Path, rounds: int) -> list[Runner]:
    path = os.pathsep.join(str(part) for part in (HERE, HERE.parent.parent))
    environ = {
        "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }  # fmt: skip
    runners: list[Runner] = []
    for name, python in pythons.items():
        player = PLAYERS[name]
        for variant, own in player.variants.items() if model not in player.without else ():
            if model not in own.get("only", [model]):
                continue
            plan = {
                "task": str(folder), "out": str(folder / f"trained-{len(runners)}.npz"), "rounds": rounds,
                "device": args.device, "port": _free_port(), **own,
            }  # fmt: skip
            threads = {"OMP_NUM_THREADS": str(own["threads"])}
            runners.append(Runner(name, variant, [python, str(player.worker)], plan, environ | threads))
    return runners


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
