"""How many questions may be on their way at once.

In Flower's simulation the SuperLink lives in the server's process and looks, for each node in turn, through every
message that is on its way: nodes times messages, ten times a second, while nothing else runs there. With questions to
500 nodes on their way, that takes the cores from the actors for as long as these start: the roll call took 50 s on 2
cores, where 20 suffice to start Ray and the actors. A deployed SuperLink has a process of its own.
"""

from __future__ import annotations

FIRST = 8
"""Questions before the first answer: until the simulation's actors have started, each look through would slow them."""
WINDOW = 96
"""Questions on their way at once after that: with 500 nodes, 64 to 128 take about the same time, 32 and 256 longer."""
POLL_S = 0.05
"""Seconds between two looks for answers."""


def crowds(grid: object) -> bool:
    """Whether messages that are on their way slow down all others: a grid of Flower's simulation.

    Args:
        grid: Flower's grid; None if there is none.
    """
    return type(grid).__name__ == "InMemoryGrid"
