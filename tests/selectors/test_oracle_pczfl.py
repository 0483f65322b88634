"""The oracle of PCZFL itself: it can say no."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fedsel_flwr.selectors import RoundReport, create
from tests.selectors.oracle_pczfl import Ball, PCZFLOracle, Point, Replay, follow
from tests.selectors.test_pczfl import ROUNDS, WORLD


class OpenDomains(PCZFLOracle):
    """Smaller balls do not take anything away."""

    def domain(self, ball: Ball, client: int) -> bool:
        """Forget (2)."""
        return math.dist(self.context[client], ball.centre) <= ball.radius


class NearestOnly(PCZFLOracle):
    """A ball's own bound, without (5)."""

    def significance(self, ball: Ball) -> Point:
        """Forget the minimum over the others."""
        return tuple(ball.radius + bound for bound in self.upper_bound(ball))


class NoRadius(PCZFLOracle):
    """(4) without the contextual uncertainty."""

    def upper_bound(self, ball: Ball) -> Point:
        """Forget r_B."""
        return tuple(bound - ball.radius for bound in super().upper_bound(ball))


class FirstClient(PCZFLOracle):
    """Zooms on the client of the lowest index."""

    def child(self, ball: Ball, contexts: Sequence[Point]) -> Ball:
        """Forget the mean of the contexts."""
        return super().child(ball, contexts[:1])


class RelevantOnly(PCZFLOracle):
    """(5) with the minimum over relevant balls instead of all."""

    def front(self, available: Sequence[int]) -> dict[int, list[int]]:
        """Hide the empty balls from (5)."""
        balls = list(self.balls)
        self.close_call = False
        self.relevant = [ball for ball in balls if any(self.domain(ball, client) for client in available)]
        return super().front(available)

    def significance(self, ball: Ball) -> Point:
        """Look at the relevant balls alone."""
        balls, self.balls = self.balls, self.relevant
        try:
            return super().significance(ball)
        finally:
            self.balls = balls


class LateZoom(PCZFLOracle):
    """Zooms by the count after the update."""

    def ripe(self, ball: Ball) -> bool:
        """Count this round's play."""
        return math.sqrt(2 * self.coefficient / (len(ball.rewards) + 1)) <= ball.radius


@pytest.mark.parametrize("wrong", [OpenDomains, NearestOnly, NoRadius, FirstClient, RelevantOnly, LateZoom])
def test_oracle_faults_wrong_readings(wrong: type[PCZFLOracle]) -> None:
    """The oracle can say no to whoever reads one line of Algorithm 1 otherwise."""
    assert follow(Replay(wrong(0.02)), PCZFLOracle(0.02), RoundReport, world=WORLD, rounds=ROUNDS, seed=0)


@pytest.mark.parametrize("uncertainty", [0.015, 0.03])
def test_oracle_faults_another_uncertainty(uncertainty: float) -> None:
    """The oracle can say no to another A."""
    selector = create("pczfl", seed=0, uncertainty=uncertainty)
    assert follow(selector, PCZFLOracle(0.02), RoundReport, world=WORLD, rounds=ROUNDS, seed=0)
