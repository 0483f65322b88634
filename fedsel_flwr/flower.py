"""Deprecated and private names of Flower; no other file of this package imports such names.

A public name is in ``__all__`` of flwr.app, flwr.client, flwr.clientapp, flwr.common, flwr.server,
flwr.server.strategy, flwr.serverapp, flwr.serverapp.strategy or flwr.simulation, and is not deprecated.
``fedsel_flwr/flower_entries.py`` has for each name below what depends on it, and its planned replacement.

We also read undocumented attributes of public objects: ``Message.metadata.ttl`` and ``message_id``, the class name
``InMemoryGrid``, ``Grid.get_nodes``, ``pull_interval`` of a grid, ``grid`` and ``node_id`` of a proxy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flwr.common.constant import ErrorCode as ErrorCode
from flwr.server.client_proxy import ClientProxy as ClientProxy
from flwr.server.criterion import Criterion as Criterion


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
    # The message ends the actor. With a retry, Ray would send it again, and warn that the actor is dead. Nothing else
    # depends on this. Ray has no public way to set it for a class that another package has decorated.
    with contextlib.suppress(AttributeError, ImportError):
        from flwr.simulation.ray_transport.ray_actor import ClientAppActor

        ClientAppActor.__ray_metadata__.method_meta.max_task_retries["terminate"] = 0  # type: ignore[attr-defined]


def bytes_of(content: Any) -> bytes:
    """Return the content of a message, a ``RecordDict``, as Flower sends it."""
    from flwr.common.serde import recorddict_to_proto

    sent: bytes = recorddict_to_proto(content).SerializeToString()
    return sent


def content_of(sent: bytes) -> Any:
    """Return the content of a message from the bytes of :func:`bytes_of`."""
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict as Proto

    return recorddict_from_proto(Proto.FromString(sent))


@contextlib.contextmanager
def task_identity(run_id: int, task_id: int, node_id: int) -> Iterator[None]:
    """Set the identity of a Flower run within a block, because Flower makes no messages outside of a run."""
    # Versions of Flower without TaskIdentity make messages without it.
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        yield
        return
    before = {name: getattr(TaskIdentity, name, None) for name in ("_task_id", "_run_id", "_node_id")}
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, task_id, node_id
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
