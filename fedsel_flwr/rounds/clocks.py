"""How long a client took: what it reports, or what the server saw."""

from __future__ import annotations

import math

from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import number, shown

SLACK = 0.1
"""Share of the observed time by which a report may undercut it, where the settings name no seconds."""
Reading = tuple[float, str, str, bool]
"""Seconds, where they come from, what was wrong, and whether the client came too late."""


def read_latency(reported: object, observed_s: float | None, settings: Settings) -> Reading:
    """The latency of a client that answered, on the clock of the settings.

    On the server's clock a client whom nothing timed (under secure aggregation nobody is timed) is believed, as on the
    virtual clock.

    Args:
        reported: What the client says it took, seconds; None if it says nothing.
        observed_s: Seconds the server waited for it; None if it was not timed.
        settings: The clock, its slack, and the longest wait.

    Returns:
        Seconds (not capped), their source, a problem or an empty text, and whether the client is late.
    """
    if settings.clock == "server" and observed_s is not None:
        return _observed(observed_s, reported, settings.clock_slack)
    return _reported(reported, settings.max_latency)


def _reported(reported: object, max_latency: float) -> Reading:
    """On the clock that the clients keep."""
    seconds = number(reported)
    if reported is None:
        return max_latency, "max_latency", "latency: not reported, max_latency taken", False
    if seconds is None or math.isnan(seconds) or seconds < 0:
        return max_latency, "max_latency", f"latency: {shown(reported)} cannot be used, max_latency taken", False
    if seconds >= max_latency:
        return max_latency, "max_latency", f"late: {seconds:.6g} s reach max_latency = {max_latency:g} s", True
    return seconds, "reported", "", False


def _observed(observed: float, reported: object, slack: float | None) -> Reading:
    """On the server's clock: a report within [0, observed] counts, but for no less than observed - slack."""
    if reported is None:
        return observed, "observed", "", False
    seconds = number(reported)
    if seconds is None or not 0.0 <= seconds <= observed:
        problem = f"latency: {shown(reported)} cannot be used, the server's {observed:.6g} s taken"
        return observed, "observed", problem, False
    low = max(0.0, observed - (SLACK * observed if slack is None else slack))
    if seconds >= low:
        return seconds, "reported", "", False
    return low, "clipped", f"latency: {seconds:.6g} s clipped to [{low:.6g}, {observed:.6g}] s", False
