"""A base's own ``start`` in the Message API: it runs with the wrapper's rounds, and its attributes stay the base's.

A strategy may have a ``start`` that does more around ``super().start``, or that is a loop of its own over
``self.configure_train``, ``grid.send_and_receive`` and ``self.aggregate_train``. :func:`with_own_start` runs this
``start`` on an object that is like the base, but whose rounds are the wrapper's, and whose ``super().start`` is the
wrapper's loop.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedsel_flwr.errors import ParameterError

if TYPE_CHECKING:
    from fedsel_flwr.strategies.message.selection_strategy import SelectionStrategy

logger = logging.getLogger("fedsel_flwr")
P = ParamSpec("P")
ROUNDS = frozenset({"configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"})
"""Methods that go through the wrapper."""


def own_start(base: Strategy) -> Callable[..., Any] | None:
    """Return the function of a base's own ``start``; None if it has Flower's.

    Raises:
        ParameterError: ``start`` was replaced by a function that does not take the base as ``self``.
    """
    function = getattr(base.start, "__func__", None)
    if function is None:
        raise ParameterError(
            f"start of {type(base).__name__} is a {type(base.start).__name__}, not a method, so that it cannot call "
            "the wrapper's rounds. Define start in the class of the base"
        )
    return None if function is Strategy.start else function


def with_own_start(
    loop: Callable[Concatenate[SelectionStrategy, P], Result],
) -> Callable[Concatenate[SelectionStrategy, P], Result]:
    """Decorate a wrapper's ``start``, which is Flower's loop: a base's own ``start`` runs first, around this loop."""

    @functools.wraps(loop)
    def start(self: SelectionStrategy, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        function = own_start(self.base)
        if function is None:
            return loop(self, *args, **kwargs)
        # Only by name, because Flower's ``start`` does not have it up to 1.42.
        should_stop = None if _takes(function, "should_stop") else kwargs.pop("should_stop", None)
        driver, before = _driver(self.base, self, loop), self.core.round

        def call(swapped: Mapping[int, Any]) -> Any:
            own = {key: swapped.get(id(value), value) for key, value in kwargs.items()}
            return function(driver, *[swapped.get(id(value), value) for value in args], **own)

        result = self._run_own_start(call, _flowers_arguments(function, args, kwargs), should_stop)
        if self.core.round == before and not self.core.ended:
            logger.warning(
                "start of %s never called self.configure_train, so the selector has chosen no clients",
                type(self.base).__name__,
            )
        return result

    return start


def _flowers_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments of Flower's ``start``, by the order of Flower's and the names of the base's own."""
    found: dict[str, Any] = {}
    for signature in (inspect.signature(Strategy.start), inspect.signature(function)):
        try:
            bound = signature.bind(None, *args, **kwargs)
        # The call itself raises the same error, with the base's own text.
        except TypeError:
            continue
        for name, value in bound.arguments.items():
            found |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    values = [*args, *kwargs.values()]
    for name, kind in (("grid", Grid), ("initial_arrays", ArrayRecord)):
        if not isinstance(found.get(name), kind):
            found[name] = next((value for value in values if isinstance(value, kind)), None)
    return found


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def _driver(base: Strategy, strategy: SelectionStrategy, loop: Callable[..., Result]) -> Any:
    """Return an object like ``base`` whose rounds are the strategy's, and whose ``super().start`` is the loop."""

    class Through:
        """Rounds of the strategy; all other attributes are the base's, those in ``__slots__`` too."""

        def __getattribute__(self, name: str) -> Any:
            return getattr(strategy, name) if name in ROUNDS else super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(base, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(base, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(base, name)

    class FlowersStart(Strategy):
        """Flower's ``start``, after the base's own in the order of methods; without deriving it would come last."""

        def start(self, *args: Any, **kwargs: Any) -> Result:
            return loop(strategy, *args, **kwargs)

    kind: Any = type(base)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    driver = object.__new__(type(kind)(kind.__name__, (Through, kind, FlowersStart), names))
    object.__setattr__(driver, "__dict__", vars(base))
    return driver
