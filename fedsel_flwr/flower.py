"""Everything of Flower's that is deprecated or not public: no other file of this package imports such a name.

Public is what stands in ``__all__`` of flwr.app, flwr.client, flwr.clientapp, flwr.common, flwr.server,
flwr.server.strategy, flwr.serverapp, flwr.serverapp.strategy or flwr.simulation, and is not deprecated. Each name was
found in flwr 1.22, 1.41, 1.42 and the nightly of 1.43; ``make flower-matrix`` says so again.

``flwr.simulation.run_simulation``
    Deprecated ("use `flwr run`"). Ends with: not announced; its removal is proposed (flwr's pull request 7119).
    Plan: `fedsel run` and `simulate` on Ray start the app of ``simulations.app`` as `flwr run` does. A strategy or a
    selector given as an object is then left to the vectorized engine.
``flwr.server.compat.start_grid``
    Private; drives a legacy ``Server`` that we made, for its number of threads. Ends with: not announced. Plan: without
    it scenarios run in the Message API alone.
``flwr.simulation.ray_transport.ray_actor.ClientAppActor``
    Private; a retry of Ray's is switched off. Ends with: not announced. Plan: leave it out. Ray then says at the end
    that an actor died, and nothing else changes.
``flwr.supercore.task_identity.TaskIdentity``
    Private, and absent in 1.22; outside of a run no message can be made without it, which ``check_strategy`` does. Ends
    with: not announced. Plan: have the conformance suite play its fleet in a simulation.
``flwr.server.client_proxy.ClientProxy``
    In the signatures of the legacy ``Strategy``, but exported nowhere. Ends with: not announced, as the legacy API,
    which flwr calls deprecated by 1.42. Plan: it goes when the legacy API goes.
``flwr.server.criterion.Criterion``
    As ``ClientProxy``. Ends with: not announced. Plan: the same.
``flwr.common.constant.ErrorCode``
    Private. Ends with: not announced. Plan: write its numbers out.

Attributes that are read of public objects and are not documented: ``Message.metadata.ttl`` and ``message_id``, the
class name ``InMemoryGrid``, ``Grid.get_nodes``, ``pull_interval`` of a grid, ``grid`` and ``node_id`` of a proxy.
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
    """Flower's simulation on Ray, which this process waits for.

    Args:
        **options: Those of ``flwr.simulation.run_simulation``.
    """
    from flwr.simulation import run_simulation as flowers

    flowers(**options)


def start_grid(**options: Any) -> None:
    """A legacy server's rounds over a grid.

    Args:
        **options: Those of ``flwr.server.compat.start_grid``.
    """
    from flwr.server.compat import start_grid as flowers

    flowers(**options)


def disable_actor_retries() -> None:
    """Have Flower's actors end when they are told to: what dies of a message is given it once more, and Ray says so."""
    from flwr.simulation.ray_transport.ray_actor import ClientAppActor

    with contextlib.suppress(AttributeError):  # Ray has no public way to set this for a class of somebody else's
        ClientAppActor.__ray_metadata__.method_meta.max_task_retries["terminate"] = 0  # type: ignore[attr-defined]


@contextlib.contextmanager
def task_identity(run_id: int, task_id: int, node_id: int) -> Iterator[None]:
    """Be a run of Flower's for a while: outside of one it makes no message."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # an older Flower, which knows of no identities
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
