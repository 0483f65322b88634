"""Deprecated and private names of Flower; no other file of this package imports such names.

A public name is in ``__all__`` of flwr.app, flwr.client, flwr.clientapp, flwr.common, flwr.server,
flwr.server.strategy, flwr.serverapp, flwr.serverapp.strategy or flwr.simulation, and is not deprecated. We found each
name below in flwr 1.22, 1.41, 1.42 and the nightly of 1.43. ``make flower-matrix`` checks this again.

``flwr.simulation.run_simulation``
    Deprecated ("use `flwr run`"). Ends with: not announced; its removal is proposed (flwr's pull request 7119).
    Plan: `fedsel run` and `simulate` on Ray start the app of ``simulations.on_flower.app``, as `flwr run` does. Only
    the vectorized engine then accepts a strategy or a selector as an object.
``flwr.server.compat.start_grid``
    Private. Runs a legacy ``Server`` that we make in order to set its number of threads. Ends with: not announced.
    Plan: without it, scenarios run only in the Message API.
``flwr.simulation.ray_transport.ray_actor.ClientAppActor``
    Private. Used to switch off a retry of Ray. Ends with: not announced. Plan: leave it out. Ray then reports at the
    end that an actor died, and nothing else changes.
``flwr.supercore.task_identity.TaskIdentity``
    Private, and missing in 1.22. ``check_strategy`` makes messages outside of a run, which needs this class. Ends
    with: not announced. Plan: run the fleet of the conformance suite in a simulation.
``flwr.server.client_proxy.ClientProxy``
    In the signatures of the legacy ``Strategy``, but not exported anywhere. Ends with: not announced, like the legacy
    API, which flwr 1.42 calls deprecated. Plan: remove it together with the legacy API.
``flwr.server.criterion.Criterion``
    In the signatures of the legacy API, but not exported anywhere. Ends with: not announced. Plan: remove it together
    with the legacy API.
``flwr.common.constant.ErrorCode``
    Private. Ends with: not announced. Plan: write its numbers out.

We also read undocumented attributes of public objects: ``Message.metadata.ttl`` and ``message_id``, the class name
``InMemoryGrid``, ``Grid.get_nodes``, ``pull_interval`` of a grid, ``grid`` and ``node_id`` of a proxy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flwr.common.constant import ErrorCode
from flwr.server.client_proxy import ClientProxy
from flwr.server.criterion import Criterion

__all__ = [
    "ClientProxy",
    "Criterion",
    "ErrorCode",
    "disable_actor_retries",
    "run_simulation",
    "start_grid",
    "task_identity",
]


def run_simulation(**options: Any) -> None:
    """Run Flower's simulation on Ray and wait for it.

    Args:
        **options: Arguments of ``flwr.simulation.run_simulation``.
    """
    from flwr.simulation import run_simulation as flowers

    flowers(**options)


def start_grid(**options: Any) -> None:
    """Run a legacy server's rounds over a grid.

    Args:
        **options: Arguments of ``flwr.server.compat.start_grid``.
    """
    from flwr.server.compat import start_grid as flowers

    flowers(**options)


def disable_actor_retries() -> None:
    """Switch off the retry of the message that ends Flower's actors."""
    # The message ends the actor. With a retry, Ray would send it again, and warn that the actor is dead.
    from flwr.simulation.ray_transport.ray_actor import ClientAppActor

    # Ray has no public way to set this for a class that another package has decorated.
    with contextlib.suppress(AttributeError):
        ClientAppActor.__ray_metadata__.method_meta.max_task_retries["terminate"] = 0  # type: ignore[attr-defined]


@contextlib.contextmanager
def task_identity(run_id: int, task_id: int, node_id: int) -> Iterator[None]:
    """Set the identity of a Flower run within a block, because Flower makes no messages outside of a run."""
    # Versions of Flower without TaskIdentity make messages without it.
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        yield
        return
    names = ("_task_id", "_run_id", "_node_id")
    before = {name: getattr(TaskIdentity, name, None) for name in names}
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, task_id, node_id
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
