"""What Flower's SuperLink says of its nodes."""

from __future__ import annotations

from collections.abc import Mapping

from fedsel_flwr.rounds.transport import Registration


def registrations(grid: object) -> Mapping[str, Registration] | None:
    """Name and public key of every node, in one call.

    Args:
        grid: Flower's grid; None where a transport has none.

    Returns:
        Node id -> registration; None where the grid tells ids alone, as that of old versions of Flower does.
    """
    get_nodes = getattr(grid, "get_nodes", None)
    if get_nodes is None:
        return None
    return {
        str(info.node_id): Registration(getattr(info, "name", "") or "", getattr(info, "public_key", b"") or b"")
        for info in get_nodes()
    }
