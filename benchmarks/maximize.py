"""How long the exact solution of Ben Ami et al., equation (13), takes: ``python benchmarks/maximize.py``."""

from __future__ import annotations

import itertools
import platform
import statistics
import timeit

import numpy as np

from fedsel_flwr.selectors.bsfl import maximize


def best_ms(num_clients: int, clients_per_round: int, repeats: int = 50) -> tuple[float, float]:
    """Smallest and median milliseconds of one call, over fresh random instances."""
    times = []
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        ucb, g = rng.uniform(0, 3, num_clients), rng.uniform(-1, 1, num_clients)
        times.append(
            min(timeit.repeat(lambda u=ucb, v=g: maximize(u, v, clients_per_round, 1.0), number=5, repeat=3)) / 5
        )
    return 1e3 * min(times), 1e3 * statistics.median(times)


def enumeration_ms(num_clients: int, clients_per_round: int) -> float:
    """Milliseconds of looking at every set, the paper's reading of (13)."""
    rng = np.random.default_rng(0)
    ucb, g = rng.uniform(0, 3, num_clients), rng.uniform(-1, 1, num_clients)

    def every_set() -> float:
        return max(
            min(ucb[list(s)]) + g[list(s)].sum() / clients_per_round
            for s in itertools.combinations(range(num_clients), clients_per_round)
        )

    return 1e3 * min(timeit.repeat(every_set, number=1, repeat=3))


if __name__ == "__main__":
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}")
    for k, m in ((20, 5), (500, 25), (10_000, 100), (100_000, 100)):
        least, median = best_ms(k, m)
        print(f"maximize {k:>7} clients, {m:>3} a round: min {least:.3f} ms, median {median:.3f} ms")
    exact, brute = best_ms(15, 5)[1], enumeration_ms(15, 5)
    print(f"15 clients, 5 a round: enumeration {brute:.1f} ms, maximize {exact:.3f} ms, ratio {brute / exact:.0f}")
