"""Flower's simulation on Ray after the death of an actor: known by what comes in place of the clients' answers."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

from fedsel_flwr.errors import RunError

DEAD = re.compile(r"ray\.exceptions\.\w*Actor\w*Error.{,400}?actor_id: ([0-9a-f]+)", re.DOTALL)
"""An actor that will not be started again is named by its id; of others Ray says that they are unavailable."""
LONGEST = 2_000
"""So much of an error is read."""


class DeadActors:
    """Counts the messages that were lost to each actor that is dead for good.

    Flower puts an actor that died back into its pool. It refuses every message at once, while the others work, and so
    is free for the next one: most messages of every later round are lost to it. An actor has one message at a time; a
    second one that is lost to the same actor was given to it after its death.
    """

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()

    def check(self, errors: Iterable[str], round: int, way_back: str) -> None:
        """Take in what a round's clients failed with.

        Only where Ray runs in this process: the errors of a deployment are what its clients write.

        Args:
            errors: The texts.
            round: The absolute round.
            way_back: How a run that ends here can be gone on with, in words.

        Raises:
            RunError: A dead actor was given another message.
        """
        if not _ray_runs_here():
            return
        met = [found[1] for error in errors if (found := DEAD.search(error[:LONGEST]))]
        self._lost.update(met)
        if any(self._lost[actor] > 1 for actor in met):
            raise RunError(
                f"an actor of Ray has died (was it killed, or memory short?), and Flower's simulation still hands it "
                f"messages: {len(met)} of round {round} were lost that way, as most of every later round would be. "
                f"Round {round} does not count. {way_back}. Where memory is short, let fewer clients train at one time"
            )


def _ray_runs_here() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
