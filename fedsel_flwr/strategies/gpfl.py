"""GPFL (Na et al.) as a Flower strategy: train clients whose gradients point in the global model's direction."""

from __future__ import annotations

from fedsel_flwr import selectors
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class GPFL(PaperStrategy, SelectionStrategy):
    """Trains the clients whose gradients point in the global model's direction.

    The paper asks for:
        * Selector: :class:`fedsel_flwr.selectors.GPFL`, with all of its parameters.
        * Averaging: the unweighted mean of the models (section II). Filter: none.
        * Validation set: accuracy and loss of the global model after each round, for (8).
        * ``learning_rate``: the clients' nominal initial learning rate, which turns updates into gradients (3).

    This class requires ``validation``, ``learning_rate`` and ``total_rounds``. It refuses secure aggregation, under
    which the server sees only sums of updates.

    Round 1 measures every available client and keeps the model.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids.
        2. The selector chooses the m clients with the largest mean reward plus exploration (6). The weight of
           exploration grows until round ``total_rounds`` (7).
        3. ``base`` configures the instructions. Exactly the chosen clients receive them and train.
        4. ``aggregate_fit`` drops unusable updates and gives the others equal numbers of examples, so that ``base``
           takes their unweighted mean. It then measures the new model on ``validation``.
        5. Each update is projected on the server's direction (3). The softmax of all projections is the reward (5).
           The reward of the chosen clients is amplified if the model has improved (8).

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import GPFL, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> held_out = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = GPFL(clients_per_round=2, total_rounds=10, learning_rate=0.1, validation=held_out, seed=1)
    >>> model = play_round(strategy, clients, [np.zeros(2)])
    >>> model, strategy.history.rounds[0].num_selected  # round 1 measures all clients and keeps the model
    ([array([0., 0.])], 4)
    >>> play_round(strategy, clients, model, 2)
    [array([2.5, 2.5])]
    >>> [row.client_id for row in strategy.history.clients[4:]]  # the largest projections
    ['2', '3']
    """

    selector_class = selectors.GPFL
