"""Rounds played by hand, for the tests of all papers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.selectors import RoundReport


def report(
    chosen: Iterable[int], seconds: npt.ArrayLike | Mapping[int, float] = 1.0, *, failed: Iterable[int] = (),
    late: float = 60.0, **columns: Any,
) -> RoundReport:  # fmt: skip
    """Make a round's report; columns are numbers by client (NaN for clients they lack), or arrays, or one number.

    So are seconds. A client in ``failed``, or not in ``seconds``, fails; without seconds it takes ``late``.
    """
    clients = np.asarray(chosen, dtype=np.int64)
    taken = seconds
    if not isinstance(taken, Mapping):
        taken = dict(zip(clients.tolist(), np.broadcast_to(taken, clients.shape).tolist(), strict=True))
    told = {
        name: np.array([value.get(k, np.nan) for k in clients.tolist()]) if isinstance(value, Mapping) else value
        for name, value in columns.items()
    }
    return RoundReport(
        clients=clients,
        completed=np.array([k in taken and k not in failed for k in clients.tolist()], dtype=np.bool_),
        latency=np.array([taken.get(k, late) for k in clients.tolist()], dtype=np.float64),
        **told,
    )


def play(selector: Any, available: Iterable[int], *arguments: Any, **keywords: Any) -> list[int]:
    """Choose, then :func:`report`; returns the choice."""
    chosen = selector.select(np.array(list(available), dtype=np.int64)).tolist()
    selector.observe(report(chosen, *arguments, **keywords))
    return list(chosen)


def answer(selector: Any, available: Iterable[int], values: Mapping[int, float]) -> list[int]:
    """Answer the selector's probe with a number of each client, NaN if it has none; returns who was asked."""
    if (question := selector.probe(np.array(list(available), dtype=np.int64))) is None:
        return []
    asked, (column,) = question.clients.tolist(), question.columns
    selector.inform(question.clients, **{column: np.array([values.get(k, np.nan) for k in asked])})
    return list(asked)
