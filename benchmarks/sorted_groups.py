"""How near BSFL comes to the best that equal shares allow: ``python benchmarks/sorted_groups.py``.

The phones of the scenario ``phones``, 200 clients, 10 a round, latencies only: nobody trains. A round lasts as long as
its slowest client. Sorted groups know every client's true mean latency and take the clients in its order, 10 at a time
in turn: no other way to choose everybody equally often waits less (:func:`fedsel_flwr.theory.sorted_groups`).

BSFL has alpha = 10 and equal targets. A seed is a fleet, the same for every row. Means over the seeds, with the sample
standard deviation of the round: the mean round of the last quarter of the rounds (in whole cycles of the groups), the
same against that of sorted groups, Jain's index of all choices, and how often the fastest and the slowest tenth, by
true mean, took part in that quarter, in equal shares.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.device import System, mean_latencies
from fedsel_flwr.report import jain_index
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import sorted_groups

MIN_LATENCY_S = 4.0
"""tau_min of the scenario."""
SELECTORS = {
    "random": {},
    "round-robin": {},
    "bsfl": {"alpha": 10.0, "min_latency": MIN_LATENCY_S},
    "cs-ucb": {"max_latency": 60.0},
}
GROUPS = "sorted groups"
Latencies = Callable[[IntArray, int], FloatArray]


def latencies(system: System) -> Latencies:
    """A function of clients and round: seconds, capped at the deadline."""

    def of(clients: IntArray, number: int) -> FloatArray:
        drawn = system.draws(clients.tolist(), number)
        return np.minimum([d.download_s + d.compute_s + d.upload_s for d in drawn], system.max_latency_s)

    return of


def cohorts(name: str, num_clients: int, m: int, seed: int, of: Latencies) -> Iterator[IntArray]:
    """Whom a selector chooses, round by round; it is told what came of it."""
    selector = create(name, clients_per_round=m, seed=seed, **SELECTORS[name])
    for number in itertools.count(1):
        chosen = selector.select(np.arange(num_clients))
        yield chosen
        done = np.ones(chosen.size, dtype=np.bool_)
        selector.observe(RoundReport(clients=chosen, completed=done, latency=of(chosen, number)))


def trial(system: System, name: str, m: int, ends: list[int], seed: int) -> list[FloatArray]:
    """The four numbers of the table, for runs of each of these lengths (ascending)."""
    of, means = latencies(system), mean_latencies(system)
    if name == GROUPS:
        turns: Iterator[IntArray] = itertools.cycle(sorted_groups(means, m))
    else:
        turns = cohorts(name, system.num_clients, m, seed, of)
    chosen = np.zeros((ends[-1], system.num_clients))
    seconds = np.zeros(ends[-1])
    for number, cohort in zip(range(1, ends[-1] + 1), turns, strict=False):
        chosen[number - 1, cohort] = 1
        seconds[number - 1] = of(cohort, number).max()
    cycle = -(-system.num_clients // m)
    by_speed, tenth = np.argsort(means), max(1, system.num_clients // 10)
    results = []
    for end in ends:
        late = slice(end - cycle * max(1, round(end / 4 / cycle)), end)
        shares = chosen[late].mean(axis=0) * system.num_clients / m
        fast, slow = shares[by_speed[:tenth]].mean(), shares[by_speed[-tenth:]].mean()
        results.append(np.array([seconds[late].mean(), jain_index(chosen[:end].sum(axis=0)), fast, slow]))
    return results


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, nargs="+", default=[300, 1000], help="lengths of the runs, ascending")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--per-round", type=int, default=10)
    args = parser.parse_args()
    found: dict[str, list[list[FloatArray]]] = {name: [] for name in (*SELECTORS, GROUPS)}
    for seed in range(1, args.seeds + 1):
        system = World(load_scenario("phones", {"seed": seed, "num_clients": args.clients})).system
        for name, rows in found.items():
            rows.append(trial(system, name, args.per_round, args.rounds, seed))
    print(f"{args.clients} clients, {args.per_round} a round, {args.seeds} seeds; shares: 1 is an equal share\n")
    print(
        "| rounds | selector | mean round, s | against sorted groups | Jain's index | fastest tenth | slowest tenth |"
    )
    print("| --- " * 7 + "|")
    for i, rounds in enumerate(args.rounds):
        best = np.array([row[i][0] for row in found[GROUPS]])
        for name, rows in found.items():
            seconds, jain, fast, slow = np.array([row[i] for row in rows]).T
            spread = f" ±{seconds.std(ddof=1):.2f}" if len(rows) > 1 else ""
            cells = (rounds, name, f"{seconds.mean():.2f}{spread}", f"{(seconds / best).mean():.3f}",
                     f"{jain.mean():.3f}", f"{fast.mean():.2f}", f"{slow.mean():.2f}")  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
