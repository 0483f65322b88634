"""PCZFL's cohort and energy: ``python benchmarks/pczfl.py [fashion|cifar] --data-dir DIR`` (section 5.5.2).

Runs the scenario pczfl-fashion or pczfl-cifar with several seeds and prints for each the mean cohort after the warm-up
(the paper: about 5), the energy, which is the sum over rounds and selected clients of 1 - score, and the accuracy on
the test set; at the end the mean over the seeds, +- the sample standard deviation (divisor n - 1). Draws the balls of
the first seed into ``runs/pczfl-*.png``: at the end of the warm-up, after a quarter of the rounds that follow, and at
the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.shutdown import end_descendants
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import RoundRecord

PAPER = {"fashion": (286.71, 0.919), "cifar": (208.15, 0.5389)}
"""Energy and accuracy that the paper prints."""
CHOSEN, UNCHOSEN = "#0072b2", "#999999"


def main() -> None:
    """Run each seed, print, draw the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", choices=PAPER, nargs="?", default="fashion")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    energy, accuracy = PAPER[args.dataset]
    print(f"{args.dataset}, the paper: mean cohort about 5, energy {energy}, accuracy {accuracy}", flush=True)
    found = []
    for seed in range(1, args.seeds + 1):
        overrides = {"data.data_dir": args.data_dir, "rounds": args.rounds, "seed": seed}
        figures, snapshots = run(load_scenario(f"pczfl-{args.dataset}", overrides))
        found.append(figures)
        print(
            f"seed {seed}, {args.rounds} rounds: mean cohort {figures[0]:.2f}, energy {figures[1]:.2f}, "
            f"accuracy {figures[2]:.4f} (best {figures[3]:.4f}), {len(snapshots[args.rounds]['radius'])} balls",
            flush=True,
        )
        if seed == 1:
            print(draw(snapshots, Path(f"runs/pczfl-{args.dataset}.png")), flush=True)
    names = ("mean cohort", "energy", "accuracy", "best accuracy")
    for name, values in zip(names, np.transpose(found).tolist(), strict=True):
        spread = f" +- {statistics.stdev(values):.2g}" if args.seeds > 1 else ""
        print(f"{args.seeds} seeds: {name} {statistics.fmean(values):.4g}{spread}")
    end_descendants()


def run(scenario: Scenario) -> tuple[tuple[float, ...], dict[int, dict[str, Any]]]:
    """Return mean cohort, energy, last and best accuracy, and the selector's state at three times."""
    warmup = scenario.selectors["pczfl"]["warmup_rounds"]
    times = drawn_rounds(warmup, scenario.rounds)
    snapshots: dict[int, dict[str, Any]] = {}

    def on_round(record: RoundRecord) -> None:
        if record.round in times:
            snapshots[record.round] = strategy.selector.state_dict()

    world = world_of(scenario)
    strategy = make_strategy(world, on_round)
    history = simulate(scenario, strategy=strategy).history
    scores = np.array(world.energy_scores(range(scenario.num_clients)))
    cohort = np.mean([record.num_selected for record in history.rounds[warmup:]])
    energy = sum(1.0 - scores[int(row.client_id)] for row in history.clients)  # section 5.5
    accuracies = [record.accuracy for record in history.rounds]
    return (float(cohort), energy, accuracies[-1], max(accuracies)), snapshots


def drawn_rounds(warmup: int, rounds: int) -> tuple[int, int, int]:
    """The end of the warm-up, a quarter of what follows, and the end.

    >>> drawn_rounds(5, 200), drawn_rounds(20, 200)
    ((5, 53, 200), (20, 65, 200))
    """
    return warmup, warmup + (rounds - warmup) // 4, rounds


def draw(snapshots: dict[int, dict[str, Any]], path: Path) -> Path:
    """Draw balls and contexts, one panel for each time."""
    canvas = FigureCanvasAgg(Figure(figsize=(12, 4.4), layout="constrained"))
    for axes, (round, state) in zip(
        np.atleast_1d(canvas.figure.subplots(1, len(snapshots))), snapshots.items(), strict=True
    ):
        for centre, radius, plays in zip(state["centre"], state["radius"], state["ball_plays"], strict=True):
            axes.add_patch(Circle(centre, radius, fill=False, lw=0.8, alpha=0.7, color=CHOSEN if plays else UNCHOSEN))
        axes.plot([], [], color=CHOSEN, lw=0.8, label="ball that was chosen")
        axes.plot([], [], color=UNCHOSEN, lw=0.8, label="ball not chosen yet")
        axes.plot(state["accuracy"], state["energy_score"], "o", ms=4, color="#d55e00", label="contexts of the clients")
        axes.set(
            xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"round {round}: {len(state['radius'])} balls",
            xlabel="accuracy on the interview set", ylabel="energy score",
        )  # fmt: skip
    canvas.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    main()
