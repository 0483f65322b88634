"""FedCA (Kim et al.) as a Flower strategy of either API."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.selectors import Random, Selector
from fedsel_flwr.strategies.wrapping.adapter import Adapter


class FedCA(Adapter):
    """FedCA: any sampling; of the round's models the best-scoring combination is averaged.

    Deviations:
        * FedPdp's weights are normalized; ``averaging="fedpdp-exact"`` is (5) as printed.
        * The loss score is minus the cross-entropy of the softmax of the averaged logits; the print takes the logarithm
          of a logit, and its sign would keep the worst combination.
        * Above 20 models the search is greedy. Ties: the larger subset, then the lowest indices. Never the empty one.
        * A model whose logits are not finite is never kept.
        * A client of unknown size counts in p_k as an average one.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        validation: Examples on the server and how to run the model on them.
        selector: Chooses the clients; None draws ``clients_per_round`` uniformly.
        clients_per_round: m, where no selector is given.
        seed: Seed of the uniform draws, where no selector is given.
        score: "loss" or "accuracy" (the paper's Dirac delta), of the averaged logits.
        averaging: The averaging scheme of the kept models, (5): "fedpdp" normalized, or "fedpdp-exact" as printed.
        **options: Those of :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`.

    Raises:
        ParameterError: There is no validation set, neither or both of ``selector`` and ``clients_per_round`` are
            given, or a value is out of range.

    References:
        T. Kim et al., Accurate and fast federated learning via combinatorial multi-armed bandits, 2020, section 3.
    """

    def __init__(
        self,
        base: Any = None,
        *,
        validation: Validation | None = None,
        selector: Selector | None = None,
        clients_per_round: int | None = None,
        seed: int | None = None,
        score: str = "loss",
        averaging: str = "fedpdp",
        **options: Any,
    ) -> None:
        if (selector is None) == (clients_per_round is None):
            raise ParameterError("give either selector or clients_per_round (for uniform sampling), not both or none")
        if selector is None:
            selector = Random(clients_per_round=clients_per_round or 0, seed=seed)
        super().__init__(
            selector, base, validation=validation, filter=Filter(score=score), averaging=averaging, **options
        )
