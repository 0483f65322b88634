"""Workers that take turns, and what becomes of those that are slower or fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from running import Runner


def race(
    runners: Sequence[Runner], logs: Path, turns: int, trial: int, say: Callable[[str], None], idle_s: float = 3.0
) -> None:
    """Let workers take turns, twice through; the second time in the opposite order.

    After ``trial`` turns each player goes on with its fastest variant. One that fails is out; the others go on.

    Args:
        runners: Who; their attributes hold the results.
        logs: A folder for what they print.
        turns: Turns of each of the two passes.
        trial: At most ``turns``.
        say: Tells the user what happens.
        idle_s: For how long the idle workers are watched.
    """
    started: list[Runner] = []
    try:
        for number, runner in enumerate(runners):
            started.append(runner)
            runner.start(logs / f"{number:02d}-{runner.player}.log")
            say(runner.failure or f"{runner}: ready after {runner.startup:.1f} s, round 1 in {runner.first:.2f} s")
        for turn in range(2 * turns):
            order = started if turn < turns else started[::-1]
            for runner in order:
                if not runner.failure and (said := runner.take()) is not None:
                    runner.turns.append(said)
            if turn + 1 == trial:
                _keep_fastest(started, say)
        _measure_idle([runner for runner in started if not runner.failure], idle_s)
        for runner in started:
            runner.end()
    finally:
        for runner in started:
            runner.stop()


def _keep_fastest(runners: Sequence[Runner], say: Callable[[str], None]) -> None:
    """Take each player's slower variants out."""
    for player in dict.fromkeys(runner.player for runner in runners):
        own = [runner for runner in runners if runner.player == player and not runner.failure]
        own.sort(key=Runner.median)
        for slower in own[1:]:
            slower.failure = f"slower than {own[0].variant}"
            slower.stop()
        if len(own) > 1:
            say(f"{player}: " + ", ".join(f"{runner.variant} {runner.median():.3f} s" for runner in own))


def _measure_idle(runners: Sequence[Runner], seconds: float) -> None:
    """What the workers take of a core while all wait."""
    time.sleep(seconds / 3)
    before = [runner.processor_seconds() for runner in runners]
    time.sleep(seconds)
    for runner, earlier in zip(runners, before, strict=True):
        runner.idle = (runner.processor_seconds() - earlier) / seconds
