"""What any strategy that wraps a selector must do, in either of Flower's APIs: one function per promise.

A fleet is played to it through Flower's own types, in this process: clients that are healthy, slow, absent, that raise,
send NaN, other shapes or other types, lie about their latency, and reconnect under a new node id. Each check takes a
:class:`~fedsel_flwr.testing.trial.Trial`; a broken promise raises :class:`AssertionError` that says what was promised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsel_flwr.testing.arguments import StrategyFactory
from fedsel_flwr.testing.remembering import (
    check_failures_are_named,
    check_history,
    check_identity,
    check_same_seed,
    check_save_and_load,
    check_selector_observes,
    check_times,
)
from fedsel_flwr.testing.serving import (
    check_asked_once,
    check_base_aggregates,
    check_base_gets_survivors,
    check_base_hears_of_failures,
    check_configs,
    check_evaluation_configs,
    check_impostor,
    check_model_is_sound,
    check_model_stays,
    check_no_client_breaks_a_round,
    check_only_those_there_are_asked,
    check_right_number,
)
from fedsel_flwr.testing.trial import Trial

STRATEGY_CHECKS: tuple[Callable[[Trial], None], ...] = (
    check_no_client_breaks_a_round,
    check_only_those_there_are_asked,
    check_impostor,
    check_asked_once,
    check_right_number,
    check_history,
    check_identity,
    check_configs,
    check_evaluation_configs,
    check_model_is_sound,
    check_failures_are_named,
    check_times,
    check_base_gets_survivors,
    check_base_aggregates,
    check_base_hears_of_failures,
    check_model_stays,
    check_selector_observes,
    check_same_seed,
    check_save_and_load,
)
"""Every check, in the order in which they are made: what the later ones rely on comes first."""


def check_strategy(
    make_strategy: StrategyFactory,
    arrays: Sequence[Any],
    *,
    num_clients: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Play a fleet to a strategy and run every check.

    It needs Flower, but neither Ray nor torch, and takes a second or two; five, with fifty clients a round: let it be
    few. Clients have the ids 0, 1, 2, ... and train by adding random numbers to the model that they receive. On the
    server's clock the two checks that compare choices are left out with a warning.

    Args:
        make_strategy: Returns a new strategy at each call, of Flower's legacy or of its Message API, with a seed: a
            :class:`~fedsel_flwr.strategies.SelectionStrategy` around your selector and base, or one of the papers'.
        arrays: The initial model, a list of NumPy arrays; small ones will do. A base that holds an initial model of its
            own (``initial_parameters``) must hold this one.
        num_clients: Clients of the fleet, for parameters that are given by client; None takes 12 or more.
        metrics: What every client reports beside, for a base that reads metrics of its own.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ParameterError: An argument cannot be used.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import CSUCB
    >>> check_strategy(lambda: CSUCB(clients_per_round=3, max_latency=5.0, seed=1), arrays=[np.zeros((3, 2))])
    """
    trial = Trial(make_strategy, arrays, num_clients, metrics)
    for check in STRATEGY_CHECKS:
        check(trial)
