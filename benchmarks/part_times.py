"""Seconds in the parts of a program that a benchmark names."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any


def timed(
    parts: Mapping[str, tuple[Any, str]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Have some methods note the seconds of each call.

    Args:
        parts: Name -> whose method, and which; it is replaced.
        clock: Returns seconds.

    Returns:
        Where they note them.
    """
    seconds: dict[str, list[float]] = defaultdict(list)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **keywords: Any) -> Any:
            start = clock()
            try:
                return call(*args, **keywords)
            finally:
                seconds[name].append(clock() - start)

        return measured

    for name, (owner, method) in parts.items():
        setattr(owner, method, noted(name, getattr(owner, method)))
    return seconds
