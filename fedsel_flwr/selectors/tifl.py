"""TiFL: select a tier of equally fast clients in each round, more often a tier with low accuracy (Chai et al.)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import Probe, Selector
from fedsel_flwr.selectors.round_report import RoundReport

ATTEMPTS = 5
"""Number of attempts to profile a client. After these attempts, the client counts as a client that does not reply."""


class TiFL(Selector):
    """Sorts the clients into tiers by their latency, draws a tier, and draws the round's clients from this tier.

    A tier is drawn more often if the model is less accurate on the data of its clients.

    ============  ======================  ============================================================
    paper         here                    meaning
    ============  ======================  ============================================================
    RT_i          ``_profile``            client i's latency in its profiling round, -1 if unknown
    T             ``tiers``               number of tiers, the fastest first
    Credits_i     ``_credits``            rounds for which tier i may still be drawn
    NewProbs      ``_weight``             the tiers' chances, not normalized
    A_i           ``_means``              accuracy on the data of tier i when the chances last changed
    I             ``interval``            rounds between two changes of the chances
    ``|C|``       ``clients_per_round``   clients per round
    ============  ======================  ============================================================

    When not to use:
        * The latency of one client varies more from round to round than the clients differ. The tiers are then random
          groups.
        * The run is short. The first rounds, at least ceil(K / m), only profile the clients.
        * The network is slow. A probe of all clients is sent every ``interval`` rounds.

    Deviations:
        * Clients are profiled while they train in the first rounds. Available clients without a profile are selected
          first, at random, and other clients fill the round. The paper profiles clients before it trains. New clients
          are profiled in the same way, and the tiers are then formed again.
        * A common warm-up of all selectors profiles all clients at once, without a tier or a credit. The rounds of the
          interval count from the end of the warm-up. The first accuracies are requested at this point.
        * A client that fails in its profiling round is profiled again, up to five attempts. After the fifth failure,
          the client is in no tier, and is selected only if the round cannot be filled otherwise. If it then completes a
          round, it gets a profile.
        * On the server's clock, the first measured time of a client contains the start of its process. This time is not
          used as a profile, and the client is profiled in one more round.
        * A spare that has replied is profiled like any other client. If a spare has not replied, its profile is at
          least the time that the server waited.
        * In buffered rounds (``concurrency``), a round does not wait, so equally fast clients in a round save no time.
        * The tiers have equal numbers of clients, sorted by latency. The paper splits a histogram of the latencies.
        * A_i is the mean accuracy of the tier's clients on their test data. Every I rounds, a probe asks all clients
          for this accuracy, and its time and energy are charged. The change of A_i is computed over the clients that
          replied to both probes.
        * The new chance of a tier is proportional to 1 - A_i. The paper does not specify this function. A tier without
          a reply gets the average chance of the other tiers.
        * A tier without available clients is not drawn. If a tier has fewer than m available clients, random clients of
          the other tiers fill the round. In the paper, every tier has enough clients.
        * If no tier with credits is left, every tier gets its credits again. A credit is spent when the round is
          observed. If ``credits`` is None, there is no limit.

    Args:
        clients_per_round: m.
        tiers: T, the number of tiers, at least 1.
        interval: I, the rounds between two changes of the tiers' chances, at least 1.
        credits: Rounds for which each tier may be drawn, at least 1: one number for all tiers, or one for each, the
            fastest first. None sets no limit.
        seed: Seed of the generator of tiers and clients.

    Raises:
        ParameterError: A parameter is out of range, or the length of ``credits`` is not the number of tiers.

    References:
        Z. Chai et al., TiFL: a tier-based federated learning system, HPDC 2020, section 4, Algorithm 2.

    >>> import numpy as np
    >>> selector = TiFL(clients_per_round=2, tiers=2, seed=0)
    >>> for _ in range(2):  # all clients are profiled
    ...     chosen = selector.select(np.arange(4))
    ...     selector.observe(RoundReport(clients=chosen, completed=[True] * 2, latency=chosen + 1.0))
    >>> sorted({tuple(selector.select(np.arange(4)).tolist()) for _ in range(50)})
    [(0, 1), (2, 3)]
    """

    name: ClassVar[str] = "tifl"
    citations: ClassVar[tuple[str, ...]] = ("chai2020tifl",)
    needs: ClassVar[frozenset[str]] = frozenset({"latency", "spare", "first"})
    asks: ClassVar[frozenset[str]] = frozenset({"local_accuracy"})
    remembers: ClassVar[dict[str, str]] = {"local_accuracy": "_accuracy"}
    client_state: ClassVar[dict[str, float | int]] = {
        "_profile": -1.0, "_attempts": 0, "_accuracy": -1.0, "_before": -1.0,
    }  # fmt: skip
    scalar_state: ClassVar[tuple[str, ...]] = ("_tier", "_asked_in")
    free_state: ClassVar[dict[str, tuple[type, tuple[int, ...]]]] = {"_weight": (float, ()), "_credits": (int, ())}

    _profile: FloatArray
    # Failed attempts to profile a client.
    _attempts: IntArray
    # Accuracies of the last interval and of the one before; -1 if unknown.
    _accuracy: FloatArray
    _before: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        tiers: int = 5,
        interval: int = 20,
        credits: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.tiers, self.interval = whole("tiers", tiers, 1), whole("interval", interval, 1)
        self.credits = None if credits is None else _by_tier(credits, self.tiers)
        self._weight: FloatArray = np.ones(self.tiers)  # Algorithm 2, equal at first
        self._credits: IntArray = np.array(self.credits or [0] * self.tiers, dtype=np.int64)  # Algorithm 2
        # The tier of the current round; -1 if the round is for profiling.
        self._tier = -1
        # The round before which the last probe asked for accuracies.
        self._asked_in = 0

    def _probe(self, available: IntArray) -> Probe | None:
        upcoming = self.round + 1
        if self.own_round % self.interval:  # Algorithm 2, r % I
            return None
        # A second probe before the same round must not confuse this round's replies with the previous ones.
        if self._asked_in != upcoming:
            self._before[available], self._accuracy[available] = self._accuracy[available], -1.0
            self._asked_in = upcoming
        return Probe(clients=available, columns=("local_accuracy",))

    def _select(self, available: IntArray) -> IntArray:
        tier_of, shuffled = self._tiers(), self._generator.permutation(available)
        tier = tier_of[shuffled]
        if self._asked_in == self.round and self._tier >= 0:
            self._change_chances(tier_of)
        profiled = self._is_profiled()
        if profiled[available].all():
            self._tier = self._draw_tier(np.bincount(tier[tier >= 0], minlength=self.tiers) > 0)
        else:
            self._tier = -1
        # Clients to profile come first, then the tier, then other tiers, then clients without a profile.
        rank = np.select([~profiled[shuffled], tier < 0, tier == self._tier], [0, 3, 1], default=2)
        return shuffled[np.argsort(rank, kind="stable")][: self.asked_per_round]  # Algorithm 2, |C| of the tier

    def _observe(self, report: RoundReport) -> None:
        k = report.clients
        new = report.completed & (self._profile[k] < 0) & ~np.asarray(report.first)
        self._profile[k[new]] = report.latency[new]  # RT_i, section 4.2
        waiting = np.asarray(report.spare) & ~report.completed
        self._profile[k[waiting]] = np.maximum(self._profile[k[waiting]], report.latency[waiting])
        self._attempts[k] += report.failed & (self._profile[k] < 0)
        if self.credits is not None and self._tier >= 0:
            self._credits[self._tier] = max(0, self._credits[self._tier] - 1)  # Algorithm 2, Credits

    def _is_profiled(self) -> BoolArray:
        """Return whether each client needs no further profiling, shape (K,)."""
        return (self._profile >= 0) | (self._attempts >= ATTEMPTS)

    def _tiers(self) -> IntArray:
        """Return the tier of every client, shape (K,), -1 without a profile."""
        profiled = np.flatnonzero(self._profile >= 0)
        order = profiled[np.argsort(self._profile[profiled], kind="stable")]
        tier = np.full(self._profile.size, -1, dtype=np.int64)
        for number, part in enumerate(np.array_split(order, self.tiers)):
            tier[part] = number  # section 4.2, tiering
        return tier

    def _draw_tier(self, here: BoolArray) -> int:
        """Draw a tier among those with available clients (``here``, shape (tiers,)), or return -1 if there is none."""
        if not here.any():
            return -1
        if self.credits is not None and not (here & (self._credits > 0)).any():
            self._credits[:] = self.credits
        allowed = here & (self._credits > 0) if self.credits is not None else here
        chance = self._weight * allowed
        # Every allowed tier may have weight 0, if the accuracies are 1.
        chance = chance if chance.any() else allowed.astype(np.float64)
        return int(self._generator.choice(self.tiers, p=chance / chance.sum()))  # Algorithm 2, NewProbs

    def _change_chances(self, tier_of: IntArray) -> None:
        """Prefer tiers with low accuracy, unless the accuracy of the current tier has risen."""
        both = (tier_of == self._tier) & (self._accuracy >= 0) & (self._before >= 0)
        if not both.any() or self._accuracy[both].mean() > self._before[both].mean():  # Algorithm 2, A^r and A^(r - I)
            return
        accuracy = self._means(tier_of)
        weight = np.maximum(0.0, 1.0 - accuracy)  # ChangeProbs, ours
        weight[np.isnan(accuracy)] = np.nanmean(weight)
        self._weight = weight if weight.any() else np.ones(self.tiers)

    def _means(self, tier_of: IntArray) -> FloatArray:
        """Return A_t of each tier, shape (tiers,), NaN if unknown. At least one must be known."""
        known = (tier_of >= 0) & (self._accuracy >= 0)
        count = np.bincount(tier_of[known], minlength=self.tiers)
        total = np.bincount(tier_of[known], weights=self._accuracy[known], minlength=self.tiers)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)  # A_t


def _by_tier(credits: int | Sequence[int], tiers: int) -> tuple[int, ...]:
    given = list(credits) if isinstance(credits, Sequence | np.ndarray) else [credits] * tiers
    if len(given) != tiers:
        raise ParameterError(
            f"credits must be one number for each of the {tiers} tiers, got {credits!r}. Give {tiers} numbers, or one"
        )
    return tuple(whole("each value of credits", number, 1) for number in given)
