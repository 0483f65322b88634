"""Who answers in time: over-selection keeps the first answers, a deadline ends the round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedsel_flwr.rounds.replies import ClientResult
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.wireless import finish_times, round_time


def in_time(
    results: Mapping[str, ClientResult], settings: Settings, wanted: int | None
) -> tuple[dict[str, ClientResult], float]:
    """Decide who is late for the round, and how long it takes.

    A client is done after its latency; in a cohort larger than the channels, after that and the waves before its own.

    Args:
        results: Connection -> its reply after reading, by ascending row.
        settings: The channels and the round's deadline.
        wanted: The round ends when this many usable answers are here; among clients done at the same time the lower
            rows count as earlier. None waits for all.

    Returns:
        The results, where late ones are not completed and hold max_latency, and the seconds the round takes: until the
        last answer that is waited for, at most until the deadline.
    """
    latency = np.array([result.latency_s for result in results.values()], dtype=np.float64)
    channels, deadline = settings.channels or max(1, len(latency)), settings.round_deadline_s or math.inf
    if wanted is None and deadline == math.inf:
        return dict(results), round_time(latency, channels)
    done = finish_times(latency, channels)
    completed = np.array([result.completed for result in results.values()], dtype=np.bool_)
    early = np.flatnonzero(completed & (done <= deadline))
    waited = ~np.array([result.spare for result in results.values()], dtype=np.bool_)
    end = min(deadline, float(done[waited].max(initial=0.0)))
    if wanted is not None and len(early) >= wanted:
        early = early[np.argsort(done[early], kind="stable")[:wanted]]
        end = float(done[early[-1]])
    here = set(early.tolist())
    return {
        node: result
        if i in here or not result.completed
        else _late(result, float(done[i]), end, settings, spare=len(here) == wanted)
        for i, (node, result) in enumerate(results.items())
    }, end


def _late(result: ClientResult, done: float, end: float, settings: Settings, spare: bool) -> ClientResult:
    """A result that came after the end of the round."""
    why = "enough others were there" if spare else f"round_deadline_s = {settings.round_deadline_s:g} s"
    return replace(
        result,
        completed=False,
        problems=(*result.problems, f"late: done after {done:.6g} s, the round ended after {end:.6g} s ({why})"),
        latency_s=settings.max_latency,
        latency_source="max_latency",
        spare=spare,
        answered=spare,
        spare_s=result.latency_s if spare else 0.0,
    )
