"""A question to clients before a choice."""

from __future__ import annotations

from dataclasses import dataclass

from fedsel_flwr.checks import IntArray


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question to clients before the choice; the answers come by :meth:`Selector.inform`.

    Args:
        clients: Whom to ask, shape (n,).
        columns: What to ask for, at the current global model: columns of :meth:`Selector.inform`.
    """

    clients: IntArray
    columns: tuple[str, ...]
