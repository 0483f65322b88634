"""What the strategies named after a paper share: the selector's parameters and the strategy's in one call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.client_values import ClientValues
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.adapter import Adapter

OPTION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"gpfl": {"averaging": "mean"}}  # section II: unweighted mean
"""Selector -> options whose default differs from the adapter's."""


class PaperStrategy(Adapter):
    """A strategy that builds its own selector; comes before ``SelectionStrategy`` of either API among the bases.

    Subclasses set :attr:`selector_class`. Parameters are the selector's and the strategy's, all by keyword; where
    both have ``max_latency``, the one argument sets both. Parameters that hold a number per client
    (:attr:`Selector.by_client`) take an array if the client ids are 0..K-1, else a mapping from client id.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        **params: Parameters of the selector's class and of :class:`fedsel_flwr.strategies.adapter.Adapter`.

    Raises:
        ParameterError: An unknown or missing parameter, or a value out of range.
    """

    selector_class: ClassVar[type[Selector]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the whole signature in ``help()`` and editors."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(list(_parameters(cls.selector_class).values()))  # type: ignore[attr-defined]

    def __init__(self, base: Any = None, **params: Any) -> None:
        accepted = _parameters(self.selector_class)
        unknown = sorted(params.keys() - accepted.keys())
        missing = sorted(k for k, p in accepted.items() if p.default is p.empty and k not in params)
        if unknown or missing:
            problem = f"does not know {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
            raise ParameterError(f"{type(self).__name__} {problem}; its parameters are {', '.join(accepted)}")
        roster = Roster()
        own = inspect.signature(self.selector_class).parameters
        selector_params = {key: value for key, value in params.items() if key in own}
        values = {
            key: ClientValues(key, selector_params[key], roster)
            for key in self.selector_class.by_client
            if selector_params.get(key) is not None
        }
        selector = self.selector_class(**selector_params | values)
        rest = dict(OPTION_DEFAULTS.get(self.selector_class.name, {})) | {
            key: value for key, value in params.items() if key not in own
        }
        super().__init__(selector, base, roster=roster, client_values=tuple(values.values()), **rest)


def _parameters(selector_class: type[Selector]) -> dict[str, inspect.Parameter]:
    """The parameters of selector and strategy, each once."""
    outer = inspect.signature(Adapter.__init__).parameters
    hidden = ("self", "selector", "roster", "client_values")
    merged = dict(inspect.signature(selector_class).parameters)
    merged |= {k: p for k, p in outer.items() if k not in merged and k not in hidden}
    defaults = OPTION_DEFAULTS.get(selector_class.name, {})
    merged |= {k: merged[k].replace(default=value) for k, value in defaults.items()}
    return {k: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for k, p in merged.items()}
