"""PCZFL as a Flower strategy: train clients on the Pareto front of accuracy and energy."""

from __future__ import annotations

from fedsel_flwr import selectors
from fedsel_flwr.strategies.selection_strategy import SelectionStrategy
from fedsel_flwr.strategies.wrapping.paper import PaperStrategy


class PCZFL(PaperStrategy, SelectionStrategy):
    """Trains the clients on the Pareto front of accuracy and energy.

    The paper asks for:
        * Selector: :class:`fedsel_flwr.selectors.PCZFL`, with all of its parameters.
        * Averaging: that of ``base``. Filter: none.
        * Validation set: the server's interview set, on which the server measures each client's model.
        * Clients report ``energy_score``, or ``energy_j``, from which the score is derived.

    This class requires ``validation``. It refuses secure aggregation, under which the server sees only sums of updates.

    The selector alone would never stop choosing a client that always fails. ``cooldown="auto"`` excludes such a client
    for some rounds.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and asks new clients for their ids and energy scores. The
           accuracy of a new client is that of the initial model on ``validation``.
        2. The selector scores the balls that cover the clients' contexts (5), and chooses every client in a ball of the
           Pareto front.
        3. ``base`` configures the instructions. Exactly the chosen clients receive them and train.
        4. ``aggregate_fit`` drops unusable updates, measures each other update on ``validation``, and lets ``base``
           average them.
        5. The selector updates the contexts and the mean rewards of the chosen balls. A ball that has been chosen often
           enough gets a smaller ball inside it (Algorithm 1).

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import PCZFL, Validation
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> def client(number):
    ...     return lambda model, config: ([model[0] + number], 10, {"latency_s": 0.5, "energy_score": number / 4})
    >>> interview = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))
    >>> strategy = PCZFL(validation=interview, seed=1)
    >>> play_round(strategy, [client(k) for k in range(4)], [np.zeros(2)])
    [array([1.5, 1.5])]
    >>> [row.client_id for row in strategy.history.clients]  # one ball covers all clients
    ['0', '1', '2', '3']
    """

    selector_class = selectors.PCZFL
