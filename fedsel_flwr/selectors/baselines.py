"""Baselines of the papers: uniform and size-weighted draws, round robin, and the lowest local accuracy.

McMahan et al. (FedAvg) draw uniformly. Ben Ami et al. and FedProx draw in proportion to data sizes. Xia et al. compare
with round robin, and with the clients on which the model has the lowest accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import Probe, Selector, SizedSelector


class Random(Selector):
    """Selects clients uniformly at random without replacement, as FedAvg does.

    It learns nothing from the rounds, so it is the usual reference of a comparison.

    When not to use:
        * Rounds wait for slow clients, and the server knows the clients' latencies. Slow clients are selected as often
          as fast clients.
        * Each client must be selected in the first K/m rounds. After these rounds, about a third of the clients has not
          been selected yet.

    Deviations: none.

    Args:
        clients_per_round: Number of clients to select each round (m).
        seed: Seed of the selector's generator.

    References:
        McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
        Algorithm 1.

    >>> import numpy as np
    >>> Random(clients_per_round=2, seed=3).select(np.arange(5)).size
    2
    """

    name: ClassVar[str] = "random"
    citations: ClassVar[tuple[str, ...]] = ("mcmahan2017communication",)

    def _select(self, available: IntArray) -> IntArray:
        return self._generator.permutation(available)[: self.asked_per_round]


class Everyone(Selector):
    """Selects all available clients, for federations of a few sites that all train in every round.

    A strategy can end such a round early (``wait_for``, ``round_deadline_s``), and it excludes a client for some rounds
    after failures (``cooldown="auto"``), because this selector asks a dead client for ever.

    When not to use:
        * There are many clients. Each round then costs the energy and the network of all of them.

    Deviations: none.

    Args:
        clients_per_round: Optional largest number of clients, drawn uniformly at random. None sets no limit. In a
            scenario it is None, unless the selector's table sets it.
        seed: Seed of the selector's generator.

    >>> import numpy as np
    >>> Everyone().select(np.arange(3))
    array([0, 1, 2])
    """

    name: ClassVar[str] = "everyone"
    may_exceed_clients_per_round: ClassVar[bool] = True
    asks_failed_for_ever: ClassVar[bool] = True
    buffers: ClassVar[bool] = False
    waves: ClassVar[bool] = False

    def __init__(self, *, clients_per_round: int | None = None, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)

    def _select(self, available: IntArray) -> IntArray:
        return self._generator.permutation(available)[: self.asked_per_round]


class RandomBySize(SizedSelector):
    """Draws clients one after the other, each in proportion to its number of examples, p_k.

    A client with more examples is therefore selected more often.

    Without replacement, the draws are the m largest values of ln(p_k) + Gumbel noise, which have the same distribution.

    With replacement, a client may be drawn c times, and fewer than m different clients may be selected. The client
    trains once. :meth:`draws` returns c, its weight in the plain mean over the multiset (averaging scheme ``"mean"``).
    This sampling with this mean is FedProx in Table 1 of Kim et al. FedCA's filter averages and searches the c copies.

    When not to use:
        * The server weights the models by numbers of examples, as FedAvg does. Clients with many examples then count
          twice. With ``averaging="mean"``, they count once.
        * Clients with many examples are also slow. Rounds then take longer than with uniform selection.

    Deviations: none. Sizes come by ``inform(clients, num_examples=...)``. A client of unknown (or NaN) size counts as a
    client of average size. The p_k are normalized over the available clients.

    Args:
        clients_per_round: Number of clients to draw each round (m).
        replacement: Whether a client may be drawn again in the same round.
        seed: Seed of the selector's generator.

    Raises:
        ParameterError: ``clients_per_round`` < 1, or ``replacement`` is not a boolean.

    References:
        Ben Ami et al., section VI (non-i.i.d. baseline, without replacement); W. Kool et al., Stochastic beams and
        where to find them, ICML 2019 (Gumbel top-k); T. Li et al., Federated optimization in heterogeneous networks,
        MLSys 2020, Algorithm 2 (with replacement).

    >>> import numpy as np
    >>> selector = RandomBySize(clients_per_round=1, seed=0)
    >>> selector.inform(np.arange(2), num_examples=np.array([1.0, 9.0]))
    >>> float(np.mean([selector.select(np.arange(2))[0] for _ in range(1000)]).round(2))
    0.89
    """

    name: ClassVar[str] = "random-by-size"
    citations: ClassVar[tuple[str, ...]] = ("benami2025client", "li2020federated")
    # A size of -1 is unknown.
    client_state: ClassVar[dict[str, float | int]] = {"_draws": 0}

    _draws: IntArray

    def __init__(self, *, clients_per_round: int, replacement: bool = False, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        if not isinstance(replacement, bool):
            raise ParameterError(f"replacement must be True or False, got {replacement!r}. Give a boolean")
        self.replacement = replacement

    def expected_count(self, num_available: int) -> int | None:
        """Return the number of clients in the next cohort; None with replacement, because only the draws decide."""
        warmup = self.round < self.common_warmup
        return None if self.replacement and num_available and not warmup else super().expected_count(num_available)

    def draws(self, clients: IntArray) -> IntArray:
        """Return how often each of ``clients`` was drawn in the latest round."""
        return self._draws[clients]

    def _advance(self) -> None:
        self._draws[:] = 0

    def _join(self, available: IntArray) -> None:
        self._draws[available] = 1

    def _select(self, available: IntArray) -> IntArray:
        size = self._sizes()
        if self.replacement:
            weight = size[available] if size[available].any() else np.ones(available.size)
            drawn = self._generator.choice(available, size=self.asked_per_round, p=weight / weight.sum())
            chosen, times = np.unique(drawn, return_counts=True)
            self._draws[chosen] = times
            return chosen
        with np.errstate(divide="ignore"):
            score = np.log(size)
        # Only available clients draw noise, so the draws do not depend on the number of other registered clients.
        noise = np.full(score.shape, -np.inf)
        noise[available] = self._generator.gumbel(size=available.size)
        chosen = self._largest(score + noise, available)
        self._draws[chosen] = 1
        return chosen


class RoundRobin(Selector):
    """Selects the clients in turn, by index; a client that is offline at its turn waits for the next cycle.

    In each cycle, every client is selected once.

    When not to use:
        * Rounds must be short. The order does not depend on the latency, so most rounds wait for a slow client.
        * Clients are often offline at their turn. They then wait for a whole cycle.

    Deviations: the paper's groups of N follow the index here. If m does not divide K, the last group continues with the
    next cycle. The paper has such a case (Fig. 6: K = 10, N = 4), but no rule for it. A client that is offline is
    skipped. The first cycle begins after a common warm-up.

    Args:
        clients_per_round: Number of clients to select each round (m).
        seed: Accepted as in all selectors; this selector draws nothing.

    References:
        Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B.

    >>> import numpy as np
    >>> selector = RoundRobin(clients_per_round=2)
    >>> [selector.select(np.arange(3)).tolist() for _ in range(3)]
    [[0, 1], [0, 2], [1, 2]]
    """

    name: ClassVar[str] = "round-robin"
    citations: ClassVar[tuple[str, ...]] = ("xia2020multi",)
    scalar_state: ClassVar[tuple[str, ...]] = ("_next",)

    # The next index in the cycle.
    _next: int = 0

    def _select(self, available: IntArray) -> IntArray:
        turn = np.roll(available, -int(np.searchsorted(available, self._next)))
        chosen = turn[: self.asked_per_round]
        self._next = int(chosen[-1]) + 1
        return chosen


class LocalAccuracy(Selector):
    """Selects the m clients on whose test data the current model has the lowest accuracy.

    A probe before each round asks all available clients for this accuracy.

    When not to use:
        * The network is slow, or there are many clients. Each probe sends the model to all available clients.
        * Some clients have wrong labels. The accuracy on their data stays low, so they are selected again and again.

    Deviations: the paper does not say how the server learns the accuracies. Here, a probe before each round asks
    all available clients for them. The probe's time and energy are charged. Clients that reply NaN come last. For a
    client that does not reply, the earlier accuracy counts. A common warm-up has no probes.

    Args:
        clients_per_round: Number of clients to select each round (m).
        seed: Seed of the generator that breaks ties.

    References:
        Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B,
        "local accuracy based scheduling".

    >>> import numpy as np
    >>> selector = LocalAccuracy(clients_per_round=1)
    >>> selector.probe(np.arange(3)).columns
    ('local_accuracy',)
    >>> selector.inform(np.arange(3), local_accuracy=np.array([0.9, 0.4, 0.7]))
    >>> selector.select(np.arange(3))
    array([1])
    """

    name: ClassVar[str] = "local-accuracy"
    citations: ClassVar[tuple[str, ...]] = ("xia2020multi",)
    asks: ClassVar[frozenset[str]] = frozenset({"local_accuracy"})
    # An unknown accuracy is 2, above every other.
    client_state: ClassVar[dict[str, float | int]] = {"_accuracy": 2.0}

    _accuracy: FloatArray

    def _probe(self, available: IntArray) -> Probe:
        return Probe(clients=available, columns=("local_accuracy",))

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(-self._accuracy, available)

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        if "local_accuracy" in columns:
            answers = columns["local_accuracy"]
            self._accuracy[clients] = np.where(np.isfinite(answers), answers, 2.0)
