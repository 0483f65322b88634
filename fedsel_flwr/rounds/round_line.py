"""The log's one line for each round, with the same fields in every round."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence

from fedsel_flwr.rounds.records import ClientRecord, RoundRecord
from fedsel_flwr.rounds.replies import NUMBERS
from fedsel_flwr.selectors.columns import COLUMNS

logger = logging.getLogger("fedsel_flwr")
LATE = "late"
MINOR = frozenset({*NUMBERS, *COLUMNS, "identity", "max_examples"} - {"num_examples"})
"""Kinds of problems that do not cost an update."""
MOST_REASONS = 8
"""Reasons in a line; further ones count as "other"."""
Value = int | float | str


def log_round(rounds: Sequence[RoundRecord], clients: Sequence[ClientRecord]) -> None:
    """Log the last round of a history; ``fedsel`` of the log record has the fields."""
    if not rounds or not logger.isEnabledFor(logging.INFO):
        return
    last = rounds[-1]
    rows = clients[-last.num_selected :] if last.num_selected else []
    fields = round_fields(last, [row for row in rows if row.round == last.round])
    logger.info(round_line(fields), extra={"fedsel": fields})


def round_fields(record: RoundRecord, clients: Sequence[ClientRecord]) -> dict[str, Value]:
    """What the line says of a round.

    Args:
        record: The round.
        clients: Its clients.

    Returns:
        ``round``, ``available``, ``selected``, ``completed``, ``kept``, ``late`` (answers that came after the end of
        the round), ``timeouts`` (no answer came while the server waited), ``round_s``, ``simulated_s``, ``joules``,
        ``loss``, ``accuracy`` (NaN where they are unknown), and ``failures``: why the other updates could not be used,
        each reason with its count, the most frequent first.
    """
    reasons = Counter(reason(row) for row in clients if not row.completed and not row.timed_out)
    late = reasons.pop(LATE, 0)
    named = reasons.most_common(MOST_REASONS)
    if rest := reasons.total() - sum(count for _, count in named):
        named.append(("other", rest))
    return {
        "round": record.round,
        "available": record.num_available,
        "selected": record.num_selected,
        "completed": record.num_completed,
        "kept": record.num_kept,
        "late": late,
        "timeouts": record.num_timeouts,
        "round_s": record.round_s,
        "simulated_s": record.simulated_s,
        "joules": record.energy_j,
        "loss": record.loss,
        "accuracy": record.accuracy,
        "failures": ",".join(f"{name}:{count}" for name, count in named),
    }


def round_line(fields: dict[str, Value]) -> str:
    """The fields in logfmt.

    >>> round_line({"round": 3, "round_s": 1.25, "loss": float("nan"), "failures": "exception:2"})
    'round=3 round_s=1.25 loss=nan failures="exception:2"'
    """
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def reason(row: ClientRecord) -> str:
    """Why a client's update could not be used: the kind of the problem that cost it.

    >>> from fedsel_flwr.rounds.records import ClientRecord
    >>> nothing = dict.fromkeys(["latency_s", "energy_j", "download_s", "compute_s", "upload_s", "train_loss"], 0.0)
    >>> reason(ClientRecord(round=1, client_id="a", client=0, completed=False, num_examples=0, **nothing,
    ...                     problem="energy: -1 cannot be used; late: done after 3 s"))
    'late'
    """
    kinds = [problem.split(":")[0].replace(",", " ")[:40] for problem in row.problem.split("; ")]
    return next((kind for kind in kinds if kind not in MINOR), kinds[0])


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
