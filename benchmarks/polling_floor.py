"""Whether a bandit finds the slow client of a deployment: ``python benchmarks/polling_floor.py``.

5 clients, 2 a round. Flower's polling puts a floor of 4 to 7 s, drawn anew each time, under every round trip; a client
takes 2 s of its own, and the last one 3 s more. Nobody fails, nobody trains. A row is a selector and its numbers; the
columns are how often the slow client and the mean other one were asked, of all rounds, and the quotient of the two:
its mean, smallest and largest over the seeds. The last rows have one odd time in round 20, of whoever was chosen first.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors import RoundReport, Selector, create

CLIENTS, M, ROUNDS = 5, 2, 200
FLOOR_S, OWN_S, SLOWER_S = (4.0, 7.0), 2.0, 3.0
ODD_ROUND = 20


class Row(NamedTuple):
    """What is tried: a selector, its numbers, how long, and the seconds of the odd answer, 0 for none."""

    selector: str
    params: dict[str, Any]
    rounds: int = ROUNDS
    odd_s: float = 0.0


ROWS = (
    Row("bsfl", {"min_latency": 0.01}),
    Row("bsfl", {"min_latency": 2.0}),
    Row("bsfl", {"min_latency": 6.0}),
    Row("bsfl", {"min_latency": 7.0, "alpha": 0.1}),
    Row("bsfl", {"min_latency": "auto"}),
    Row("cs-ucb", {"max_latency": 120.0}),
    Row("cs-ucb", {"max_latency": 60.0}),
    Row("cs-ucb", {"max_latency": 20.0}),
    Row("cs-ucb", {"max_latency": 13.0}),
    Row("cs-ucb", {"max_latency": "auto"}),
    Row("cs-ucb-q", {"max_latency": 120.0}, 1000),
    Row("cs-ucb-q", {"max_latency": 30.0}),
    Row("cs-ucb-q", {"max_latency": 20.0}),
    Row("cs-ucb-q", {"max_latency": "auto"}),
    Row("bsfl", {"min_latency": "auto"}, odd_s=1.0),
    Row("cs-ucb", {"max_latency": "auto"}, odd_s=20.0),
    Row("cs-ucb", {"max_latency": "auto"}, odd_s=30.0),
    Row("cs-ucb", {"max_latency": "auto"}, odd_s=60.0),
    Row("cs-ucb-q", {"max_latency": "auto"}, odd_s=30.0),
)


def round_trips(clients: IntArray, generator: np.random.Generator) -> FloatArray:
    """Seconds that each of these clients, shape (n,), keeps the server waiting."""
    floor = generator.uniform(*FLOOR_S, clients.size)
    return np.asarray(floor + OWN_S + SLOWER_S * (clients == CLIENTS - 1))


def shares(selector: Selector, rounds: int, seed: int, odd_s: float = 0.0) -> FloatArray:
    """How often each client was asked, of all rounds, shape (CLIENTS,).

    Args:
        selector: Chooses M clients a round.
        rounds: How many rounds.
        seed: Of the round trips; rounds before the odd one are the same with and without it.
        odd_s: Seconds that the first client chosen in ODD_ROUND takes; 0 for as long as ever.
    """
    generator, asked = np.random.default_rng(seed), np.zeros(CLIENTS)
    for number in range(1, rounds + 1):
        chosen = selector.select(np.arange(CLIENTS))
        latency = round_trips(chosen, generator)
        if odd_s and number == ODD_ROUND:
            latency[0] = odd_s
        selector.observe(RoundReport(clients=chosen, completed=np.ones(chosen.size, dtype=np.bool_), latency=latency))
        asked[chosen] += 1
    return asked / rounds


def trial(row: Row, seeds: int) -> FloatArray:
    """The shares of each seed, shape (seeds, CLIENTS)."""
    made = (create(row.selector, clients_per_round=M, seed=seed, **row.params) for seed in range(seeds))
    return np.array([shares(one, row.rounds, seed, row.odd_s) for seed, one in enumerate(made)])


def ratios(found: FloatArray) -> FloatArray:
    """How often the slow client was asked against the mean other one, of each seed, shape (seeds,)."""
    return np.asarray(found[:, -1] / found[:, :-1].mean(axis=1))


def main() -> None:
    """Print a row for each try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    print(f"{'selector':9} {'parameters':32} {'odd, s':>6} {'rounds':>6} {'slow':>5} {'others':>6}  slow : others")
    for row in ROWS:
        found = trial(row, seeds)
        ratio, said = ratios(found), ", ".join(f"{name}={value}" for name, value in row.params.items())
        print(
            f"{row.selector:9} {said:32} {row.odd_s or '-':>6} {row.rounds:6} {found[:, -1].mean():5.3f} "
            f"{found[:, :-1].mean():6.3f}  {ratio.mean():.3f} ({ratio.min():.3f} to {ratio.max():.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
