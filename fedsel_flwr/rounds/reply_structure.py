"""Structure of replies: the names, types and shapes of their arrays, if the base aggregates more than models.

Control variates, packed updates and personal layers have another structure than the model. Without a comparison with
the global model (``compare_models``), all replies of a run must have one structure. This is that of the arrays that
each client received, or another one that most replies of the first round have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.settings import Settings

Structure = tuple[str, ...]
"""Name, type and shape of each array of a reply, and the names of its records of metrics, in one order."""
STRUCTURAL = ("arrays: expected", "arrays: cannot be decoded", "metrics: expected one MetricRecord")
"""Beginnings of the faults in a reply's structure."""


def structure_of(names: Iterable[object], arrays: Arrays, metric_records: Iterable[str] = ()) -> Structure:
    """Return the structure of a reply.

    Args:
        names: The names of its arrays, or their numbers.
        arrays: The arrays.
        metric_records: The names of its records of metrics.

    >>> structure_of(["bias"], [np.zeros(2)], ["train"])
    ('bias: float64 (2,)', 'train: MetricRecord')
    """
    texts = [f"{name}: {array.dtype} {array.shape}" for name, array in zip(names, arrays, strict=True)]
    # Sorted, because clients may send their arrays in any order.
    return tuple(sorted([*texts, *(f"{name}: MetricRecord" for name in metric_records)]))


class ReplyStructure(state_dicts.NotByClient):
    """The structure of a run's replies: that of the arrays sent, or another one that its first round fixes.

    Args:
        settings: Whether replies are held against the global model, and the names of what requires that.

    Attributes:
        decided: Whether a round has aggregated replies, so that the structure cannot change any more.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.decided = settings, False
        self._other: Structure | None = None

    def expected(self, replies: Iterable[Reply], model: Arrays) -> Structure | None:
        """Return the structure that the replies of a round must have; None for that of the arrays sent to each client.

        Args:
            replies: The replies of the round that have no other fault.
            model: The global model.
        """
        if self.decided:
            return self._other
        decoded = [reply for reply in replies if reply.arrays is not None]
        if any(_is_as_sent(reply, model) for reply in decoded):
            return None
        structures = Counter(map(_structure, decoded))
        usual, count = structures.most_common(1)[0] if structures else ((), 0)
        # A single reply shows nothing about the others.
        return usual if count > max(1, structures.total() / 2) else None

    def decide(self, expected: Structure | None) -> None:
        """Keep the structure of the first round that aggregates."""
        if not self.decided:
            self.decided, self._other = True, expected

    def check_any_usable(self, results: Mapping[str, ClientResult], number: int) -> None:
        """End a run whose first replies all fail for the same reason in their structure.

        Args:
            results: Connection -> its reply after reading.
            number: The absolute round.

        Raises:
            RunError: No reply is usable, and none would be usable in later rounds.
        """
        problems = [result.problems[0] for result in results.values() if result.problems and not result.completed]
        reasons = [problem for problem in problems if problem.startswith(STRUCTURAL)]
        # A reply that is only late has no such fault. One of several clients may be broken, and must not end the run.
        fitting = any(result.completed or result.num_examples for result in results.values())
        same = len({reason.partition(", got")[0] for reason in reasons}) == 1
        if self.decided or fitting or not same or len(reasons) < min(2, len(results)):
            return
        cure = "If the base aggregates such updates, set compare_models=False"
        if reader := self._settings.update_reader:
            cure = f"{reader} needs updates like that model. Do without it, and set compare_models=False"
        elif not self._settings.compare_models:
            cure = "Without compare_models, more than half of at least two updates must be alike. Select more clients"
        raise RunError(
            f"round {number}: no update has the structure of the global model, all for one reason: {reasons[0]}. {cure}"
        )

    def state_dict(self) -> state_dicts.State:
        """Return the structure that the first round fixed."""
        return {"decided": self.decided, "structure": None if self._other is None else list(self._other)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        if not isinstance(state["decided"], bool):
            raise StateError(f"decided must be True or False, got {state['decided']!r:.80}")
        other = state["structure"]
        self._other = None if other is None else tuple(state_dicts.texts("structure", other))
        self.decided = state["decided"]


BEFORE_STRUCTURES: state_dicts.State = {"decided": True, "structure": None}
"""State of a run whose checkpoint has none: its replies were held against the global model."""


def with_fault(reply: Reply, expected: Structure | None) -> Reply:
    """Return a reply, with an error if its structure is not the expected one, or if a float is not finite there.

    Args:
        reply: The reply.
        expected: The structure that it must have; None for that of the arrays that were sent to the client. Only the
            names are then compared here.
    """
    fault = reply.error or (reply.misfit if expected is None else "")
    if not fault and expected is not None:
        fault = "arrays: cannot be decoded" if reply.arrays is None else ""
        if not fault and (got := _structure(reply)) != expected:
            missing = next((text for text in expected if text not in got), "no further array")
            surplus = next((text for text in got if text not in expected), "none")
            fault = f"arrays: expected {missing} as in the first round, got {surplus}"
        bad = [i for i, a in enumerate(reply.arrays or ()) if a.dtype.kind in "fc" and not np.isfinite(a).all()]
        fault = fault or (f"arrays: not finite at {bad[0]}" if bad else "")
    return replace(reply, error=fault)


def _structure(reply: Reply) -> Structure:
    arrays = reply.arrays or ()
    return structure_of(range(len(arrays)), arrays) if reply.structure is None else reply.structure


def _is_as_sent(reply: Reply, model: Arrays) -> bool:
    """Return whether a reply has the names, types and shapes of the arrays that its client received."""
    own, sent = ([(a.dtype, a.shape) for a in arrays] for arrays in (reply.arrays or (), reply.sent or model))
    return not reply.misfit and own == sent
