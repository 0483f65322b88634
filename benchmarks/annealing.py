"""ALSA against simulated annealing after equal steps: ``python benchmarks/annealing.py``.

The claim of Ben Ami et al., section V-C: in 98.3 % of thousands of runs over varied K and m ALSA "reached a state with
a higher energy within the fixed time period". That may mean the last state, which is the solver's answer, or the best
state on the way, which nobody keeps: both are printed. Their instances are not given; here bounds and values are those
BSFL meets: clients with mean speeds U(.1, .9) that were played binomially often in t rounds. Draws Fig. 4 (25 of 500)
into ``runs/alsa.png``.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedsel_flwr.selectors.bsfl import maximize
from fedsel_flwr.selectors.bsfl_solvers import anneal

KINDS = ("alsa", "annealing")


def instance(rng: np.random.Generator, num_clients: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds (12) and values (3) after some rounds."""
    t = int(rng.integers(100, 10_000))
    plays = np.maximum(rng.binomial(t, m / num_clients, num_clients), 1)
    ucb = rng.uniform(0.1, 0.9, num_clients) + np.sqrt((m + 1) * np.log(t) / plays)
    return ucb, m / num_clients - plays / t


def energy(chosen: np.ndarray, ucb: np.ndarray, g: np.ndarray, alpha: float) -> float:
    """The objective (13) of a set."""
    return float(ucb[chosen].min() + alpha * g[chosen].mean())


READINGS = {"last state": lambda energies: energies[-1], "best state visited": max}
"""Two readings of "reached", each a number from the energies after each step."""


def shares(runs: int, steps: int) -> None:
    """Print in how many of ``runs`` ALSA is above, and at or above, annealing; and the exact solver above both."""
    above, level, exact = dict.fromkeys(READINGS, 0), dict.fromkeys(READINGS, 0), 0
    for seed in range(runs):
        rng = np.random.default_rng([seed, 1])
        k = int(rng.integers(10, 500))
        m = int(rng.integers(1, max(2, k // 2)))
        alpha = float(rng.choice([0.1, 1.0, 10.0]))
        ucb, g = instance(rng, k, m)
        alsa, annealing = (anneal(ucb, g, m, alpha, kind=kind, steps=steps, generator=rng)[1] for kind in KINDS)
        for name, reading in READINGS.items():
            above[name] += reading(alsa) > reading(annealing)
            level[name] += reading(alsa) == reading(annealing)
        exact += energy(maximize(ucb, g, m, alpha), ucb, g, alpha) >= max(*alsa, *annealing) - 1e-9
    print(f"{runs} runs, K in 10..499, m in 1..K/2, alpha .1, 1 or 10, {steps} steps")
    for name in READINGS:
        print(
            f"{name}: ALSA above annealing in {100 * above[name] / runs:.1f} %, at or above in "
            f"{100 * (above[name] + level[name]) / runs:.1f} %"
        )
    print(f"the exact solver at or above every state of both in {100 * exact / runs:.1f} %")


def figure(path: Path, steps: int, repeats: int) -> None:
    """Draw the energy against the step, 25 of 500."""
    ucb, g = instance(np.random.default_rng(4), 500, 25)
    best = energy(maximize(ucb, g, 25, 1.0), ucb, g, 1.0)
    canvas = FigureCanvasAgg(Figure(figsize=(7, 4.2), layout="constrained"))
    axes = canvas.figure.subplots()
    for kind, colour, label in zip(KINDS, ("#0072b2", "#d55e00"), ("ALSA (19)", "annealing (18)"), strict=True):
        curves = np.array(
            [
                anneal(ucb, g, 25, 1.0, kind=kind, steps=steps, generator=np.random.default_rng(seed))[1]
                for seed in range(repeats)
            ]
        )
        axes.plot(curves.mean(axis=0), color=colour, label=f"{label}, mean of {repeats} runs")
        axes.fill_between(np.arange(steps + 1), curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, lw=0)
        print(f"25 of 500, {steps} steps: {kind} ends at {curves[:, -1].mean():.4f} on average, optimum {best:.4f}")
    axes.axhline(best, color="black", ls="--", lw=1, label="optimum, exact solver")
    axes.set(xlabel="step", ylabel="energy (17)", title="Ben Ami et al., Fig. 4: choosing 25 of 500 clients")
    axes.legend(loc="center right")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.figure.savefig(path, dpi=150)
    print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}")
    shares(args.runs, args.steps)
    figure(Path("runs/alsa.png"), 2000, 20)
