"""Simulated dropout of clients: crashes before training, and updates that never arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsel_flwr.checks import real
from fedsel_flwr.clients.streams import first_uniforms
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.replies import CRASHED, FAILED

REPLIED = 0
"""Outcome of a client whose reply arrives."""


@dataclass(frozen=True, kw_only=True)
class ClientDropout:
    """Draws the clients that drop out of a round, each client from its own random streams.

    A client whose reply is lost has trained, so its seconds and joules are in the history. A client that crashes has
    spent nothing. The server cannot distinguish the two. It waits for both until ``max_latency_s``, and the selector
    sees a failure.

    Args:
        seed: Seed of the run.
        failure_probability: Probability that the reply of a client that trained is lost, in [0, 1].
        crash_probability: Probability that a client crashes before it trains, in [0, 1].

    Raises:
        ParameterError: A probability is outside [0, 1].

    Example:
        >>> ClientDropout(seed=1, failure_probability=0.3, crash_probability=0.2).outcomes(range(8), 2)
        [1, 0, 0, 1, 2, 1, 2, 0]
    """

    seed: int
    failure_probability: float = 0.0
    crash_probability: float = 0.0

    def __post_init__(self) -> None:
        """Check both probabilities."""
        for name in ("failure_probability", "crash_probability"):
            if real(name, getattr(self, name), at_least=0.0) > 1:
                raise ParameterError(
                    f"{name} must be a probability in [0, 1], got {getattr(self, name)!r}. Give a number in [0, 1]."
                )

    @property
    def probability(self) -> float:
        """Probability that a chosen client drops out, for either reason."""
        return 1 - (1 - self.crash_probability) * (1 - self.failure_probability)

    def outcomes(self, partition_ids: Sequence[int], round: int) -> list[int]:
        """Draw the outcome of a round for each client.

        Args:
            partition_ids: The clients' partitions.
            round: Absolute round.

        Returns:
            One outcome for each client: :data:`REPLIED`, or the :data:`~fedsel_flwr.rounds.replies.FAILED` or
            :data:`~fedsel_flwr.rounds.replies.CRASHED` in its reply.
        """
        # Both are drawn for all clients, each from its own stream, so that a change of one probability does not change
        # the other draws.
        crashed = self._drawn("crash", self.crash_probability, partition_ids, round)
        failed = self._drawn("failure", self.failure_probability, partition_ids, round)
        return [CRASHED if c else FAILED if f else REPLIED for c, f in zip(crashed, failed, strict=True)]

    def _drawn(self, purpose: str, probability: float, partition_ids: Sequence[int], round: int) -> list[bool]:
        # Most runs have no dropout, and seeding the streams takes longer than the rest of this function.
        if not probability:
            return [False] * len(partition_ids)
        drawn: list[bool] = (first_uniforms(self.seed, purpose, partition_ids, round) < probability).tolist()
        return drawn
