"""One world for the actors of a simulation: the server has built it, they read it where Ray keeps objects.

Reading data, drawing partitions and importing what does both takes an actor longer than its first round of training.
Ray keeps the arrays once a machine, and actors look at them in place.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from fedsel_flwr.simulations.world import KEPT, World

logger = logging.getLogger("fedsel_flwr")


@dataclass(frozen=True)
class Offer:
    """Where a world is.

    Attributes:
        scenario: The scenario as JSON.
        reference: Ray's reference to the world.
    """

    scenario: str
    reference: Any


def offered() -> Offer | None:
    """Offer the world that this process has built to its actors.

    Returns:
        Where it is; None where no world was built, Ray is not connected or cannot hold it: actors build their own.
    """
    return _COUNTER.offer()


def accept(offer: Offer) -> None:
    """Take over a world that another process has built, unless this one has it."""
    if KEPT.held is None or KEPT.held[0] != offer.scenario:
        import ray

        KEPT.keep(offer.scenario, ray.get(offer.reference))


@dataclass
class _Counter:
    """Puts a world into Ray once for each connection to Ray."""

    made: tuple[Any, Offer | None] = (None, None)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self) -> Offer | None:
        ray = sys.modules.get("ray")
        if KEPT.held is None or ray is None or not ray.is_initialized():
            return None
        scenario, world = KEPT.held
        context = ray.get_runtime_context()
        of = (context.get_node_id(), context.get_job_id(), scenario)
        with self.lock:
            if self.made[0] != of:
                self.made = (of, _put(ray, scenario, world))
            return self.made[1]


def _put(ray: Any, scenario: str, world: World) -> Offer | None:
    try:
        return Offer(scenario, ray.put(world.for_clients()))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        logger.warning("each actor builds the data by itself, as they cannot be pickled: %s", error)
        return None


_COUNTER = _Counter()
