"""PCZFL's cohort and energy: ``python benchmarks/pczfl.py --data-dir DIR`` (section 5.5.2, Fashion-MNIST).

Prints the mean cohort after the warm-up (the paper: about 5) and the energy, the sum over rounds and selected clients
of 1 - score (the paper: 286.71), and draws the balls at three times into ``runs/pczfl.png``.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.processes import end_descendants
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.world import world_of
from fedsel_flwr.strategies import RoundRecord


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    scenario = load_scenario("pczfl-fashion", {"data.data_dir": args.data_dir, "rounds": args.rounds})
    warmup = scenario.selectors["pczfl"]["warmup_rounds"]
    times = (warmup, (warmup + args.rounds) // 4, args.rounds)
    snapshots: dict[int, dict[str, Any]] = {}
    made: list[Any] = []
    original = engine.make_strategy

    def keep(*arguments: Any) -> Any:
        made.append(original(*arguments))
        return made[-1]

    engine.make_strategy = keep  # to look into the selector while it learns

    def on_round(record: RoundRecord) -> None:
        if record.round in times:
            snapshots[record.round] = made[0].selector.state_dict()

    history = engine.simulate(scenario, on_round=on_round).history
    end_descendants()
    world = world_of(scenario)
    scores = np.array([world.energy_score(k) for k in range(scenario.num_clients)])
    cohorts = [record.num_selected for record in history.rounds[warmup:]]
    energy = sum(1.0 - scores[int(row.client_id)] for row in history.clients)
    print(
        f"{args.rounds} rounds: mean cohort after the warm-up {np.mean(cohorts):.2f} (paper: about 5), "
        f"energy {energy:.2f} (paper: 286.71), accuracy {history.rounds[-1].accuracy:.4f} (paper, a CNN: 0.919), "
        f"{len(made[0].selector.state_dict()['radius'])} balls"
    )
    print(draw(snapshots, Path("runs/pczfl.png")))


def draw(snapshots: dict[int, dict[str, Any]], path: Path) -> Path:
    """Draw balls and contexts, one panel for each time."""
    canvas = FigureCanvasAgg(Figure(figsize=(12, 4.4), layout="constrained"))
    for axes, (round, state) in zip(
        np.atleast_1d(canvas.figure.subplots(1, len(snapshots))), snapshots.items(), strict=True
    ):
        for centre, radius, plays in zip(state["centre"], state["radius"], state["ball_plays"], strict=True):
            axes.add_patch(
                Circle(centre, radius, fill=False, lw=0.8, alpha=0.7, color="#0072b2" if plays else "#999999")
            )
        axes.plot(state["accuracy"], state["energy_score"], "o", ms=4, color="#d55e00", label="contexts of the clients")
        axes.set(
            xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"round {round}: {len(state['radius'])} balls",
            xlabel="accuracy on the interview set", ylabel="energy score",
        )  # fmt: skip
    canvas.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    main()
