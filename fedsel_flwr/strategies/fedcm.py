"""FedCM (Kim et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.checks import one_of
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.selectors import FedCMTS, FedCMUCB
from fedsel_flwr.strategies.wrapping.adapter import Adapter


class FedCM(Adapter):
    """FedCM: FedCA, with clients sampled by how often the filter kept their models.

    Deviations: as :class:`~fedsel_flwr.strategies.fedca.FedCA`; of the sampling, see
    :class:`~fedsel_flwr.selectors.FedCMUCB`.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        validation: Examples on the server and how to run the model on them.
        clients_per_round: m, the paper's SamplingRatio times the number of clients.
        sampler: "ucb" (Algorithm 2) or "ts" (Algorithm 3, Thompson sampling).
        seed: Seed of the selector.
        score: "loss" or "accuracy", of the averaged logits.
        averaging: The averaging scheme of the kept models.
        **options: Those of :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`.

    Raises:
        ParameterError: There is no validation set, or a value is out of range.

    References:
        T. Kim et al., Accurate and fast federated learning via combinatorial multi-armed bandits, 2020, section 4.
    """

    def __init__(
        self,
        base: Any = None,
        *,
        clients_per_round: int,
        validation: Validation | None = None,
        sampler: str = "ucb",
        seed: int | None = None,
        score: str = "loss",
        averaging: str = "fedpdp",
        **options: Any,
    ) -> None:
        one_of("sampler", sampler, ("ucb", "ts"))
        kind = FedCMUCB if sampler == "ucb" else FedCMTS
        super().__init__(
            kind(clients_per_round=clients_per_round, seed=seed),
            base,
            validation=validation,
            filter=Filter(score=score),
            averaging=averaging,
            **options,
        )
