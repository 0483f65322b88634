"""FedCM (Kim et al.) as a Flower strategy: FedCA, and a bandit that selects clients whose models the filter keeps."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.checks import one_of
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.selectors import FedCMTS, FedCMUCB
from fedsel_flwr.strategies.fedca import CombinatorialAveraging
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy


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
