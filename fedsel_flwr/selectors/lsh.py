"""LSH: clients with the same hash of their data share an arm of a bandit (Pan et al.)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import IntArray, whole
from fedsel_flwr.selectors._clusters import GroupBandit


class LSH(GroupBandit):
    """Chooses the clients whose hash has the largest upper confidence bound of accuracy and energy score.

    ==============  ======================  ==================================================================
    paper           here                    meaning
    ==============  ======================  ==================================================================
    context         ``hashes``              SimHash of client k's data, computed on the client
    hash length     ``bits``                how many bits of a context count
    arm             ``_groups``             clients whose contexts are equal in these bits
    utility         ``_reward_sum``         weight * accuracy + (1 - weight) * energy score, by client
    n               ``_plays``              how often the client was chosen and observed
    ==============  ======================  ==================================================================

    The bound of an arm is its mean utility + sqrt(exploration * ln(all plays) / its plays), infinite before its first
    play; sums and plays are those of its clients together. The m clients of the largest bounds are chosen.

    Deviations:
        * The comparison that has this baseline gives neither its utility's weights nor its bound: equal weights and
          UCB1's bound are ours.
        * The number of bits is ours: the comparison gives none. Simulated clients send 64 bits, with which nearly every
          client is a separate arm. The first ``bits`` of a hash count, as its planes are drawn alike. The default of
          8 makes about sqrt(K) arms of 100 clients that share scikit-learn's digits: 10.1 with two shards each, 9.2
          with a Dirichlet partition (``docs/papers/diversity.md`` has the table).
        * Hashes come by a probe when a client is first seen, whose cost is charged. A client that sends none is asked
          three times and is a separate arm.
        * The rounds of a common warm-up of all selectors are plays; hashes are asked for after it.
        * A failed client counts as a play of utility 0. Ties, as among the clients of an arm, are broken at random.
        * The accuracy is that of the client's new model on the server's validation set.

    Args:
        clients_per_round: m.
        accuracy_weight: Weight of the accuracy in the utility, in [0, 1]; the energy score has the rest.
        exploration: Factor in the bound, at least 0.
        bits: How many bits of a hash count, at least 1; all of them if the hash has fewer.
        seed: Seed of the generator that breaks ties.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        Q. Pan, H. Cao, Y. Zhu, J. Liu, B. Li, Contextual client selection for efficient federated learning over edge
        devices, IEEE TMC 2023, without its clustering, as a baseline of PCZFL. SimHash: M. Charikar, Similarity
        estimation techniques from rounding algorithms, STOC 2002.

    >>> from fedsel_flwr.selectors import RoundReport
    >>> selector = LSH(clients_per_round=1, seed=0)
    >>> selector.inform(np.arange(3), sketch=np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    >>> chosen = selector.select(np.array([0]))
    >>> selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], accuracy=[0.9],
    ...                              energy_score=[0.9]))
    >>> int(selector.select(np.arange(3))[0]) in (1, 2)  # an arm without a play comes first
    True
    """

    name: ClassVar[str] = "lsh"

    def __init__(
        self,
        *,
        clients_per_round: int,
        accuracy_weight: float = 0.5,
        exploration: float = 2.0,
        bits: int = 8,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            clients_per_round=clients_per_round, accuracy_weight=accuracy_weight, exploration=exploration, seed=seed
        )
        self.bits = whole("bits", bits, 1)

    def _groups(self) -> IntArray:
        if not self._known.any():
            return np.zeros(0, dtype=np.int64)
        packed = np.packbits(self.hashes[self._known, : self.bits], axis=1)
        return np.asarray(np.unique(packed, axis=0, return_inverse=True)[1]).ravel()
