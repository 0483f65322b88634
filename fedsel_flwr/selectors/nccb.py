"""NCCB, without its neural network: clusters of clients with similar data are the arms of a bandit (Pan et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, whole
from fedsel_flwr.selectors._clusters import GroupBandit, cluster


class NCCB(GroupBandit):
    """Chooses the clients whose cluster has the largest upper confidence bound of accuracy and energy score.

    ==============  ======================  ==================================================================
    paper           here                    meaning
    ==============  ======================  ==================================================================
    context         ``hashes``              SimHash of client k's data, computed on the client
    cluster         ``_cluster``            k-means over the contexts with the Hamming distance
    utility         ``_reward_sum``         weight * accuracy + (1 - weight) * energy score, by client
    n               ``_plays``              how often the client was chosen and observed
    ==============  ======================  ==================================================================

    The bound of a cluster is its mean utility + sqrt(exploration * ln(all plays) / its plays), infinite before its
    first play; sums and plays are those of its clients together. The m clients of the largest bounds are chosen.

    Deviations:
        * The paper's NCCB is a neural contextual combinatorial bandit: a network predicts the reward of a context. No
          network is here. This is a UCB bandit over clusters of SimHash contexts, which keeps the paper's name.
        * The comparison that has this baseline gives neither its utility's weights, nor the number of clusters, nor its
          bound: equal weights, five clusters and UCB1's bound are ours.
        * Hashes come by a probe when a client is first seen, whose cost is charged; all are then clustered
          again, and the clients' own sums move with them. A client that sends none is asked three times and is a
          separate cluster.
        * A centre is the majority of its hashes, bit by bit, which is nearest to them in the sum; centres start at
          hashes that are far apart.
        * The rounds of a common warm-up of all selectors are plays; hashes are asked for after it.
        * A failed client counts as a play of utility 0. Ties, as within a cluster, are broken at random.
        * The accuracy is that of the client's new model on the server's validation set.

    Args:
        clients_per_round: m.
        clusters: Largest number of clusters.
        accuracy_weight: Weight of the accuracy in the utility, in [0, 1]; the energy score has the rest.
        exploration: Factor in the bound, at least 0.
        seed: Seed of the generator of ties and of the first centre.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        Q. Pan, H. Cao, Y. Zhu, J. Liu, B. Li, Contextual client selection for efficient federated learning over edge
        devices, IEEE TMC 2023, as a baseline of PCZFL. SimHash: M. Charikar, Similarity estimation techniques from
        rounding algorithms, STOC 2002.

    >>> from fedsel_flwr.selectors import RoundReport
    >>> selector = NCCB(clients_per_round=1, clusters=2, seed=0)
    >>> selector.inform(np.arange(3), sketch=np.array([[1.0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1, 1]]))
    >>> chosen = selector.select(np.array([1]))
    >>> selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], accuracy=[0.9],
    ...                              energy_score=[0.9]))
    >>> selector.select(np.arange(3))  # 2 is of the cluster that was played
    array([0])
    """

    name: ClassVar[str] = "nccb"
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {**GroupBandit.client_state, "_cluster": -1}
    scalar_state: ClassVar[tuple[str, ...]] = (*GroupBandit.scalar_state, "_regroup")

    _cluster: IntArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        clusters: int = 5,
        accuracy_weight: float = 0.5,
        exploration: float = 2.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            clients_per_round=clients_per_round, accuracy_weight=accuracy_weight, exploration=exploration, seed=seed
        )
        self.clusters = whole("clusters", clusters, 1)
        # Whether hashes arrived since the last clustering.
        self._regroup = False

    def _groups(self) -> IntArray:
        known = np.flatnonzero(self._known)
        if self._regroup and known.size:
            self._cluster[known] = cluster(self.hashes[known], self.clusters, self._generator)
        self._regroup = False
        return self._cluster[known]

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        if "sketch" in columns and self._store_vectors(clients, columns["sketch"]).size:
            self._regroup = True
