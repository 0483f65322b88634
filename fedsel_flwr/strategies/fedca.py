"""FedCA and FedCM (Kim et al.) as Flower strategies: the best-scoring combination of the round's models is averaged."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.checks import one_of
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import Validation
from fedsel_flwr.selectors import FedCMTS, FedCMUCB, Random, Selector
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.adapter import Adapter


class CombinatorialAveraging(Adapter):
    """FedCA's selector, filter and averaging, shared by both of Flower's APIs."""

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
            given = "none" if selector is None else "both"
            raise ParameterError(f"expected either selector or clients_per_round, got {given}. Set one of them.")
        if selector is None:
            selector = Random(clients_per_round=clients_per_round or 0, seed=seed)
        super().__init__(
            selector, base, validation=validation, filter=Filter(score=score), averaging=averaging, **options
        )


class FedCA(CombinatorialAveraging, SelectionStrategy):
    """Averages the combination of the round's models that scores best on the server's validation set.

    The paper asks for:
        * Selector: any; the default is uniform sampling of ``clients_per_round`` clients.
        * Filter: :class:`fedsel_flwr.aggregation.Filter`, which keeps the best combination (4).
        * Averaging: FedPdp of the kept models (5).
        * Validation set: required, for the filter.

    This class refuses a missing ``validation``, a base that needs several models, and updates that the server sees
    only as a sum (secure aggregation).

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids and data sizes.
        2. The selector selects m clients, by default uniformly.
        3. ``base`` configures the instructions. Exactly the selected clients get them and train.
        4. ``aggregate_fit`` drops unusable updates. The filter averages the logits of every combination of the other
           models on ``validation``, and keeps the combination with the best score (4).
        5. ``base`` averages the kept models with FedPdp's weights (5). The selector learns which models were kept.

    Deviations:
        * FedPdp's weights are normalized; ``averaging="fedpdp-exact"`` is (5) as printed.
        * The loss score is minus the cross-entropy of the softmax of the averaged logits. The paper takes the logarithm
          of a logit, and its sign would keep the worst combination.
        * Above 20 models the search is greedy. Of equal scores the larger subset wins, then the lowest indices. The
          empty subset is never kept.
        * A model with infinite or NaN logits is never kept.
        * A client of unknown size counts in p_k as a client of average size.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        validation: Examples on the server, and a function that runs the model on them.
        selector: Selects the clients; None draws ``clients_per_round`` uniformly.
        clients_per_round: m, only without ``selector``.
        seed: Seed of the uniform draws, only without ``selector``.
        score: "loss" or "accuracy" (the paper's Dirac delta), of the averaged logits.
        averaging: Averaging scheme of the kept models, (5): "fedpdp", normalized, or "fedpdp-exact", as printed.
        **options: The options of :class:`fedsel_flwr.rounds.settings.Options`.

    Raises:
        ParameterError: There is no validation set, or a value is out of range. Or neither or both of ``selector`` and
            ``clients_per_round`` are set.

    References:
        T. Kim et al., Accurate and fast federated learning via combinatorial multi-armed bandits, 2020, section 3.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import FedCA, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> held_out = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = FedCA(clients_per_round=3, validation=held_out, seed=1)
    >>> play_round(strategy, clients, [np.zeros(2)])
    [array([2., 2.])]
    >>> [(row.client_id, row.kept) for row in strategy.history.clients]  # the larger model has the smaller loss
    [('0', False), ('1', False), ('2', True)]
    """


class CombinatorialBandit(CombinatorialAveraging):
    """FedCA with one of FedCM's two samplers, shared by both of Flower's APIs."""

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
        selector_class = FedCMUCB if sampler == "ucb" else FedCMTS
        selector = selector_class(clients_per_round=clients_per_round, seed=seed)
        super().__init__(base, validation=validation, selector=selector, score=score, averaging=averaging, **options)


class FedCM(CombinatorialBandit, SelectionStrategy):
    """Trains the clients whose models FedCA's filter most probably keeps.

    The paper asks for:
        * Selector: :class:`~fedsel_flwr.selectors.FedCMUCB`, or :class:`~fedsel_flwr.selectors.FedCMTS`.
        * Filter, averaging and validation set: as in :class:`~fedsel_flwr.strategies.fedca.FedCA`.

    This class refuses an unknown ``sampler``, and the same cases as FedCA.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids and data sizes.
        2. The selector takes the m clients whose models are most likely to be kept: by upper confidence bound
           (Algorithm 2), or by a draw from each client's Beta posterior (Algorithm 3).
        3. ``base`` configures the instructions. Exactly the selected clients get them and train.
        4. ``aggregate_fit`` drops unusable updates. FedCA's filter keeps the best-scoring combination of the other
           models (4), and ``base`` averages it with FedPdp's weights (5).
        5. The reward of a selected client is 1 if its model was kept, else 0. A failed client has reward 0.

    Deviations: as for :class:`~fedsel_flwr.strategies.fedca.FedCA`. For the sampling, see
    :class:`~fedsel_flwr.selectors.FedCMUCB`.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        validation: Examples on the server, and a function that runs the model on them.
        clients_per_round: m, the paper's SamplingRatio times the number of clients.
        sampler: "ucb" (Algorithm 2) or "ts" (Algorithm 3, Thompson sampling).
        seed: Seed of the selector.
        score: "loss" or "accuracy", of the averaged logits.
        averaging: Averaging scheme of the kept models.
        **options: The options of :class:`fedsel_flwr.rounds.settings.Options`.

    Raises:
        ParameterError: There is no validation set, or a value is out of range.

    References:
        T. Kim et al., Accurate and fast federated learning via combinatorial multi-armed bandits, 2020, section 4.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import FedCM, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> held_out = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = FedCM(clients_per_round=2, validation=held_out, seed=1)
    >>> model = [np.zeros(2)]
    >>> for number in range(1, 11):
    ...     model = play_round(strategy, clients, model, number)
    >>> asked = [row.client_id for row in strategy.history.clients]
    >>> [asked.count(str(number)) for number in range(4)]  # client 3 takes the largest steps, and its models are kept
    [2, 4, 4, 10]
    """
