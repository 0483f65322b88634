"""What :func:`fedsel_flwr.testing.check_strategy` is given, looked at before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.testing.faults import Model

StrategyFactory = Callable[[], Any]
"""Builds the strategy under test, a new one at each call."""
PARTS = ("selector", "base", "history", "roster", "core", "state_dict", "load_state_dict")
"""What a strategy must have to be looked at."""


def made_strategy(make: StrategyFactory) -> Any:
    """Return ``make()``; raise :class:`ParameterError` if it cannot be called so, or returns something else."""
    try:
        strategy = make()
    except TypeError as error:
        raise ParameterError(f"make_strategy() must build a strategy without arguments, but: {error}") from error
    is_legacy(strategy)
    if missing := [name for name in PARTS if not hasattr(strategy, name)]:
        raise ParameterError(
            f"make_strategy must return a SelectionStrategy, one of the papers' or a class on them; "
            f"{type(strategy).__name__} has no {', '.join(missing)}: wrap it, SelectionStrategy(selector, base)"
        )
    return strategy


def is_legacy(strategy: Any) -> bool:
    """Whether a strategy is one of Flower's legacy API; raises :class:`ParameterError` if it is of neither API."""
    from flwr.server.strategy import Strategy as Legacy
    from flwr.serverapp.strategy import Strategy

    if not isinstance(strategy, Legacy | Strategy):
        raise ParameterError(
            "make_strategy must return a strategy of flwr.server.strategy or flwr.serverapp.strategy, got "
            f"{type(strategy).__name__}"
        )
    return isinstance(strategy, Legacy)


def checked(arrays: Sequence[Any]) -> Model:
    """The initial model as a list of arrays; raises :class:`ParameterError` if it is none."""
    model = [np.asarray(array) for array in arrays]
    if not model or not all(array.dtype.kind in "fiu" and np.isfinite(array).all() for array in model):
        raise ParameterError(
            "arrays must be the initial model, a list of NumPy arrays of finite numbers, got "
            f"{[f'{a.dtype}{list(a.shape)}' for a in model]}"
        )
    return model


def layers(base: Any) -> Iterator[Any]:
    """A base strategy and those it wraps."""
    while base is not None:
        yield base
        base = getattr(base, "strategy", None)
