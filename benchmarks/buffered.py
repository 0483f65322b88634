"""Time of a buffered step against that of a synchronous round with as many updates, in the vectorized engine.

    python benchmarks/buffered.py

The fleet has 100,000 clients. A synchronous round has 100 of them, a buffered step 100 arrivals of 1,000 at work. The
runs alternate, so that other work on the machine affects both. Prints the median milliseconds of the rounds after the
fifth, and their ratio.
"""

from __future__ import annotations

import argparse

import numpy as np

from fedsel_flwr.simulations import load_scenario, simulate

SETTINGS = {
    "num_clients": 100_000, "clients_per_round": 100, "rounds": 45, "evaluation_every": 45,
    "partition.kind": "sampled", "model.name": "logistic",
}  # fmt: skip


def main() -> None:
    """Print a line for each pair of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selectors", nargs="*", default=["random", "bsfl"])
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    for selector in args.selectors:
        for _ in range(args.pairs):
            synchronous, buffered = median_ms(selector), median_ms(selector, concurrency=1000)
            ratio = buffered / synchronous
            print(f"{selector}: {synchronous:.1f} and {buffered:.1f} ms, ratio {ratio:.2f}", flush=True)


def median_ms(selector: str, **aggregation: int) -> float:
    """Return the median milliseconds of a round."""
    own = {"selector": selector} | {f"aggregation.{key}": value for key, value in aggregation.items()}
    result = simulate(load_scenario("digits", SETTINGS | own), engine="vectorized", quiet=True)
    return float(np.median(np.asarray(result.timing["round_ms"][5:], dtype=np.float64)))


if __name__ == "__main__":
    main()
