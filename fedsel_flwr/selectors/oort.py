"""Oort: select fast clients whose data are useful for the training (Lai et al.)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, one_of, real, whole
from fedsel_flwr.selectors._draws import draw, tolerant_floor
from fedsel_flwr.selectors.base import SizedSelector
from fedsel_flwr.selectors.round_report import RoundReport, repeated_failures

FLAT, SHARP = 0.1, 5.0
"""Relative changes of the utility. After a change of at most FLAT (10 %), the pacer raises the preferred duration.
After a change of at least SHARP (500 %), it lowers the preferred duration."""
CLIPS_FROM = 3
"""With at least this many utilities, the largest utility is always lowered to the clip limit. With only two
utilities, either one could be the outlier."""


class Oort(SizedSelector):
    """Exploits tried clients with high utility, discounts slow ones, and explores clients never tried.

    The utility of a client is its number of examples times the root mean square of its losses.

    ============  ===============================  ==========================================================
    paper         here                             meaning
    ============  ===============================  ==========================================================
    B_i           ``_examples``                    examples on which client i trains in a round
    U(i)          ``_utility``                     statistical utility: examples times the root mean squared loss
    u_1, u_2      ``low``, ``clipped``             0.999 times the smallest utility above 0; the clip limit
    L(i)          ``_last_round``                  last round in which client i was tried; 0 if never tried
    t_i           ``_duration``                    latency of client i in that round
    T             ``_preferred_duration``          preferred duration; clients above it are slow
    epsilon       ``_exploration_share``           share of a round for clients never tried
    alpha         ``penalty``                      exponent of the discount of slow clients
    c             ``cut_off``                      candidates need at least c times the m'-th largest score
    m'            ``exploit`` in ``_select``       number of clients that a round exploits
    W, Delta      ``pacer_step``, ``pacer_delta``  rounds between two updates of T, and the step of an update
    ============  ===============================  ==========================================================

    The *clip limit* u_2 is the quantile ``clip`` of the utilities. The range of the utilities is from u_1 to u_2. In
    the authors' code and with ``score_range="paper"``, the range ends at the largest utility instead of u_2.

    All defaults are those of the authors' code, github.com/SymbioticLab/Oort, ``training/argParser.py`` at 25c8853.
    Two other versions of the code have other defaults:

    * An earlier version (11494b8) has a decay of 0.98, a clip of 0.95 and a ``pacer_delta`` of 10. Its first percentile
      is 101, so that it sets no limit on the duration in the first rounds.
    * The successor, FedScale (``fedscale/cloud/config_parser.py`` at 0f1a07e), has a decay of 0.98 and a lowest epsilon
      of 0.3. It has a clip of 0.9, a cut-off of 0.05 and a first percentile of 30.

    The constants 0.1 (bonus), 0.1 and 5 (pacer) are from ``oort/oort.py`` at f5fccf3. We could not compare the defaults
    with the settings of the paper.

    When not to use:
        * Every client must train regularly. Slow clients are rarely selected.
        * Clients may report losses that are too large. A larger loss raises the client's score; see ``score_range``.

    Deviations:
        * The pacer is that of the authors' code. T is a percentile of the tried clients' durations. The pacer compares
          the exploited utility of the last W rounds with the utility of the W rounds before. The percentile rises if
          the two differ by at most a tenth of the earlier utility. The percentile falls if they differ by at least five
          times the earlier utility. The paper raises T if the utility has fallen.
        * The pacer makes its first update after 2 W complete rounds. The authors' code makes its first update one round
          earlier, and uses 0 as the utility of the missing round.
        * In buffered rounds (``concurrency``), the pacer's round is a step of the server, and no round waits for T.
        * Round 1 uses ``exploration`` as epsilon. The authors' code multiplies epsilon by the decay before the first
          round.
        * Each client computes its losses with the received model, on all its training examples. The authors' code
          instead uses a moving average of the losses that the client computes while it trains (``training/learner.py``
          at 05a3aa1, lines 307 to 312).
        * The clients to explore are drawn uniformly, because their speed is unknown. If too few untried clients are
          left, the selector exploits more clients instead. Clients that join later are explored too.
        * The cut-off is relative to the score of rank floor(m (1 - epsilon)). The authors' code uses the next rank.
        * Utilities above the clip limit are lowered to this limit. The scores are scaled by the range of the utilities,
          and this range ends at the clip limit (``score_range="clipped"``). With three or more clients, the clip limit
          is lowered if necessary, so that at least the largest utility is above it. In the authors' code, the range
          ends at the largest utility. With the default ``clip`` and up to 50 utilities, that code clips no utility. One
          client that reports a huge loss then lowers the scores of all others to 0. ``score_range="paper"`` follows the
          authors' code.
        * ``benchmarks/liars.py`` measures this effect with 200 clients, 10 per round, and 100 rounds. For each honest
          client, it counts the rounds in which the client is selected. The table has the rank correlation of these
          counts with the clients' utilities:

          ==============================  =========  ===========
          clients                         "paper"    "clipped"
          ==============================  =========  ===========
          all honest                      0.51       0.51
          one with an rms_loss of 20      0.25       0.47
          one with an rms_loss of 1e30    0.04       0.47
          ==============================  =========  ===========

        * The lowest utility, the largest utility and the clip limit are computed over tried, available clients with a
          utility above 0. The authors' code does the same (``oort/oort.py`` at 05a3aa1, lines 279 to 286), with one
          exception. For an untried client, that code uses the number of examples as the utility, and includes these
          values too. As in the authors' code (lines 394 to 403), the range starts at 0.999 times the lowest utility,
          and is at least 1e-4 wide.
        * The statistical part of a client's score is 0 if its utility is 0. In the authors' code, this part is below 0.
        * The temporal uncertainty is that of the paper: sqrt(0.1 ln(t) / L(i)), where t is the number of the round. In
          the authors' code, it is sqrt(0.1 ln(t - 1) / (L(i) + 1)). That code selects the clients of round 1 at random,
          and counts only the later selections, so it uses t - 1. It gives round 1 the number 2, so its L(i) is larger
          by 1.
        * The authors' code ignores the failure of a client (``training/param_server.py`` at 05a3aa1, lines 104 to 110).
          A client that never replies is then selected again and again. In this class, a first failure also changes
          nothing. From the second failure in a row on, the client counts as tried, with utility 0 and the latency in
          the report. The statistical part of its score is then 0. A client with a utility, the same L(i) and the same
          latency therefore has a higher score.
        * If a client completes a round but reports no loss, its utility does not change.
        * A *spare* is a client that was asked to train because of over-selection, and whose reply was not needed. A
          spare gets the mean utility of the used clients and its own latency. A straggler gets the same values in the
          authors' code (``training/param_server.py``, lines 348 to 353). If the spare has not replied yet, its new
          duration is either its old duration or the time that the server waited, whichever is longer. If no used client
          has reported a loss, the spare's utility does not change.
        * ``inform(clients, num_examples=...)`` sets the sizes of clients. A client of unknown size counts as one of
          average size. A size above ``trained_examples`` counts as ``trained_examples``, as in the authors' code
          (``training/param_server.py``, lines 258 and 259).
        * If a run starts with a common warm-up (``warmup_rounds``), all clients have been tried when the warm-up ends.
          The decay of epsilon and the pacer start after the warm-up. The temporal uncertainty counts all rounds.
        * There is no blacklist, no noise on utilities and no fairness parameter. In the authors' code, the blacklist is
          off by default, and set to 10 rounds in the runs with outliers.

    Args:
        clients_per_round: m.
        exploration: epsilon of round 1, the share of the round for clients never tried, in [0, 1].
        exploration_decay: Factor of epsilon from round to round, in [0, 1].
        exploration_min: Lowest epsilon, in [0, 1].
        penalty: alpha, the exponent of the discount of slow clients, at least 0.
        clip: Quantile of the tried clients' utilities that is the clip limit, in [0, 1].
        cut_off: c, the share of the m'-th largest score that candidates need, in [0, 1].
        pacer_step: W, the rounds between two updates of T, at least 1.
        pacer_delta: Delta, the step of an update of T's percentile, at least 0.
        first_percentile: First value of T, as a percentile of the tried clients' durations, in [0, 100]. 100 sets no
            limit.
        score_range: End of the range of the utilities: "clipped" (the clip limit) or "paper" (the largest).
        trained_examples: Number of examples that a client trains on in a round (steps times batch size), at least 1. If
            None, a client trains on all its examples. Scenarios with ``local_steps`` set this number.
        seed: Seed of the random draws.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, Oort: efficient federated learning via guided participant
        selection, OSDI 2021, sections 4.2 to 4.4, Algorithm 1.

    >>> import numpy as np
    >>> selector = Oort(clients_per_round=2, exploration_min=0.0, exploration_decay=0.0, seed=0)
    >>> chosen = selector.select(np.arange(2))  # no client was tried yet
    >>> selector.observe(RoundReport(clients=[0, 1], completed=[True] * 2, latency=[1.0] * 2, rms_loss=[3.0, 1.0]))
    >>> selector.clients_per_round = 1
    >>> sorted({int(selector.select(np.arange(2))[0]) for _ in range(50)})  # scores about 1.3 and 0.3
    [0]
    """

    name: ClassVar[str] = "oort"
    citations: ClassVar[tuple[str, ...]] = ("lai2021oort",)
    needs: ClassVar[frozenset[str]] = frozenset({"latency", "rms_loss", "spare"})
    client_state: ClassVar[dict[str, float | int | bool]] = {
        "_rms_loss": 0.0, "_duration": 0.0, "_last_round": 0, "_exploited": False, "_failures": 0,
    }  # fmt: skip
    scalar_state: ClassVar[tuple[str, ...]] = ("_percentile", "_gain")
    free_state: ClassVar[dict[str, tuple[type, tuple[int, ...]]]] = {"_gains": (float, ())}

    _rms_loss: FloatArray
    _duration: FloatArray
    _last_round: IntArray
    _exploited: BoolArray
    # Failures in a row.
    _failures: IntArray
    # Utility gained in each of the last 2 W rounds.
    _gains: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        exploration: float = 0.9,
        exploration_decay: float = 0.95,
        exploration_min: float = 0.2,
        penalty: float = 2.0,
        clip: float = 0.98,
        cut_off: float = 0.7,
        pacer_step: int = 20,
        pacer_delta: float = 5.0,
        first_percentile: float = 10.0,
        trained_examples: int | None = None,
        score_range: str = "clipped",
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.exploration = fraction("exploration", exploration)
        self.exploration_decay = fraction("exploration_decay", exploration_decay)
        self.exploration_min = fraction("exploration_min", exploration_min)
        self.penalty = real("penalty", penalty, at_least=0.0)
        self.clip, self.cut_off = fraction("clip", clip), fraction("cut_off", cut_off)
        self.pacer_step = whole("pacer_step", pacer_step, 1)
        self.pacer_delta = real("pacer_delta", pacer_delta, at_least=0.0)
        self.first_percentile = real("first_percentile", first_percentile, at_least=0.0, at_most=100.0)
        self.trained_examples = None if trained_examples is None else whole("trained_examples", trained_examples, 1)
        self.score_range = one_of("score_range", score_range, ("clipped", "paper"))
        self._percentile = self.first_percentile
        # Mean utility of the exploited clients in the latest round.
        self._gain = 0.0

    def _advance(self) -> None:
        if (passed := self.own_round - 1) < 1:
            return
        self._exploited[:] = False
        self._gains, self._gain = np.append(self._gains, self._gain)[-2 * self.pacer_step :], 0.0
        if passed >= 2 * self.pacer_step and passed % self.pacer_step == 0:
            before, now = self._gains[: self.pacer_step].sum(), self._gains[self.pacer_step :].sum()
            if abs(now - before) <= FLAT * before:
                self._percentile = min(100.0, self._percentile + self.pacer_delta)  # Algorithm 1, pacer
            elif abs(now - before) >= SHARP * before:
                self._percentile = max(self.pacer_delta, self._percentile - self.pacer_delta)  # the code's pacer

    def _select(self, available: IntArray) -> IntArray:
        count = min(self.asked_per_round, available.size)
        seen = self._last_round[available] > 0
        tried, unseen = available[seen], available[~seen]
        exploit = tolerant_floor(count * (1.0 - self._exploration_share()))  # Algorithm 1, exploitation
        exploit = min(max(exploit, count - unseen.size), tried.size)
        exploited = self._draw_exploited(tried, exploit)
        self._exploited[exploited] = True
        explored = self._generator.permutation(unseen)[: count - exploited.size]  # Algorithm 1, exploration
        return np.concatenate([exploited, explored])

    def _observe(self, report: RoundReport) -> None:
        k, loss, latency = report.clients, np.asarray(report.rms_loss), report.latency
        spare, again = np.asarray(report.spare), repeated_failures(self._failures, report)
        reported = report.used & np.isfinite(loss)
        self._rms_loss[k[reported]] = loss[reported]
        self._rms_loss[k[again]] = 0.0
        timed, waiting = report.completed | again, spare & ~report.completed
        self._duration[k[timed]] = latency[timed]  # t_i
        self._duration[k[waiting]] = np.maximum(self._duration[k[waiting]], latency[waiting])
        self._last_round[k[timed | spare]] = self.round  # L(i)
        if reported.any():
            size = np.maximum(self._examples()[k[spare]], 1.0)
            self._rms_loss[k[spare]] = self._utility(k[reported]).mean() / size  # the code's exploredPendingWorkers
        # Only exploited clients count, because the preferred duration does not affect which new clients are explored.
        gained = k[(report.used | (spare & reported.any())) & self._exploited[k]]
        self._gain = float(self._utility(gained).mean()) if gained.size else 0.0  # Algorithm 1, pacer

    def _exploration_share(self) -> float:
        """Return epsilon of the current round."""
        share = self.exploration * self.exploration_decay ** (self.own_round - 1)  # section 4.4
        return max(self.exploration_min, share)  # section 4.4

    def _draw_exploited(self, tried: IntArray, count: int) -> IntArray:
        """Draw ``count`` clients with a score above the cut-off, in proportion to their scores."""
        if count < 1:
            return tried[:0]
        score = self._score(tried)
        near = score >= self.cut_off * np.partition(score, -count)[-count]  # Algorithm 1, cut-off utility
        # A score of 0 has the weight 0 and is drawn last.
        with np.errstate(divide="ignore"):
            return draw(self._generator, tried[near], np.log(score[near]), count)  # Algorithm 1, by probability

    def _score(self, tried: IntArray) -> FloatArray:
        """Return Util(i) of ``tried``, shape (n,), n at least 1."""
        utility = self._utility(tried)
        above = np.sort(utility[utility > 0.0])
        score = np.zeros(tried.size)
        if above.size:
            clipped = above[self._clip_rank(above.size)]  # section 4.4
            low = 0.999 * above[0]  # get_norm, the authors' code
            high = clipped if self.score_range == "clipped" else above[-1]
            reach = max(high - low, 1e-4)  # get_norm
            score = np.maximum((np.minimum(utility, clipped) - low) / reach, 0.0)  # Algorithm 1, clip
        score += np.sqrt(0.1 * np.log(self.round) / self._last_round[tried])  # Algorithm 1, temporal uncertainty
        duration, preferred = self._duration[tried], self._preferred_duration()
        slow = duration > preferred
        score[slow] *= (preferred / duration[slow]) ** self.penalty  # section 4.3, global system utility
        return score

    def _clip_rank(self, count: int) -> int:
        """Return the rank of the clip limit among ``count`` utilities; the lowest has rank 0."""
        place = min(tolerant_floor(self.clip * count), count - 1)  # section 4.4
        clips = self.score_range == "clipped" and self.clip < 1.0 and count >= CLIPS_FROM
        return min(place, count - 2) if clips else place

    def _utility(self, clients: IntArray) -> FloatArray:
        """Return the statistical utility of ``clients``, shape (n,)."""
        return self._examples()[clients] * self._rms_loss[clients]  # U(i), section 4.2

    def _examples(self) -> FloatArray:
        """Return |B_i| of all clients, the number of examples that a client trains on in a round."""
        size = self._sizes()
        return size if self.trained_examples is None else np.minimum(size, self.trained_examples)

    def _preferred_duration(self) -> float:
        """Return T, a percentile of the durations of all tried clients."""
        duration = np.sort(self._duration[self._last_round > 0])
        if self._percentile >= 100.0:
            return float("inf")
        return float(duration[min(tolerant_floor(duration.size * self._percentile / 100.0), duration.size - 1)])  # T
