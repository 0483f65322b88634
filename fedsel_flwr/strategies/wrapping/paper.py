"""What the strategies named after a paper share: the selector's parameters and the strategy's in one call.

Each paper has a file of its own here, which says once what the paper asks of a strategy. The classes of both of
Flower's APIs are made of it by :func:`in_api`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from fedsel_flwr.checks import AUTO, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping.adapter import Adapter

PAPERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BSFL": "bsfl",
        "CSUCB": "cs_ucb",
        "CSUCBQ": "cs_ucb_q",
        "FedCA": "fedca",
        "FedCM": "fedcm",
        "GPFL": "gpfl",
        "PCZFL": "pczfl",
    }
)
"""Name of the strategy -> its file."""


def in_api(name: str, strategy: type, module: str) -> type:
    """The strategy of a paper in one of Flower's APIs.

    Args:
        name: One of :data:`PAPERS`.
        strategy: The ``SelectionStrategy`` of the API.
        module: Where the class is to be found.

    Returns:
        What the paper asks for, on top of ``strategy``.
    """
    paper = getattr(importlib.import_module(f"fedsel_flwr.strategies.{PAPERS[name]}"), name)
    return type(name, (paper, strategy), {"__doc__": paper.__doc__, "__module__": module})


class PaperStrategy(Adapter):
    """A strategy that builds its own selector; comes before ``SelectionStrategy`` of either API among the bases.

    Subclasses set :attr:`selector_class`, and in :attr:`auto` the parameters that need no number on the server's clock.
    Parameters are the selector's and the strategy's, all by keyword. Where both have ``max_latency``, a number sets
    both; "auto" concerns the selector alone, and ``longest_wait`` is then the strategy's. Parameters that hold a number
    per client (:attr:`Selector.by_client`) take an array if the client ids are 0..K-1, else a mapping from client id.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        **params: Parameters of the selector's class and of
            :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`. If the selector has ``max_latency``, also
            ``longest_wait``: longest wait for a client, seconds; None takes ``max_latency``, or 60 if that is "auto".

    Raises:
        ParameterError: An unknown or missing parameter, or a value out of range.
    """

    selector_class: ClassVar[type[Selector]]
    auto: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the whole signature in ``help()`` and editors."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(list(_parameters(cls).values()))  # type: ignore[attr-defined]

    def __init__(self, base: Any = None, **params: Any) -> None:
        accepted = _parameters(type(self))
        unknown = sorted(params.keys() - accepted.keys())
        missing = sorted(k for k, p in accepted.items() if p.default is p.empty and k not in params)
        if unknown or missing:
            problem = f"does not know {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
            raise ParameterError(f"{type(self).__name__} {problem}; its parameters are {', '.join(accepted)}")
        params = params | self._unsaid(params)
        roster = Roster()
        own = inspect.signature(self.selector_class).parameters
        selector_params = {key: value for key, value in params.items() if key in own}
        values = {
            key: ClientValues(key, selector_params[key], roster)
            for key in self.selector_class.by_client
            if selector_params.get(key) is not None
        }
        if values:  # the selector checks every number that is given, also of clients that are yet to come
            self.selector_class(**selector_params | {k: dict(enumerate(v.given.values())) for k, v in values.items()})
        selector = self.selector_class(**selector_params | values)
        rest = {key: value for key, value in params.items() if key not in own}
        if "max_latency" in own:
            wait = rest.pop("longest_wait", None)
            rest["max_latency"] = None if wait is None else real("longest_wait", wait, above=0.0)
        super().__init__(selector, base, roster=roster, client_values=tuple(values.values()), **rest)

    def _unsaid(self, params: Mapping[str, Any]) -> dict[str, str]:
        """The parameters that were not given and are "auto" on the server's clock; elsewhere nobody times clients."""
        unsaid = {name: AUTO for name in self.auto if params.get(name) is None}
        if unsaid and params.get("clock") != "server":
            raise ParameterError(
                f'{type(self).__name__} needs {", ".join(unsaid)} on the virtual clock: give seconds, or "auto" for '
                'what the observed times say, which is the default with clock="server"'
            )
        return unsaid


def _parameters(strategy: type[PaperStrategy]) -> dict[str, inspect.Parameter]:
    """The parameters of a strategy's selector and its own, each once."""
    selector_class = strategy.selector_class
    outer = inspect.signature(Adapter.__init__).parameters
    hidden = ("self", "selector", "roster", "client_values")
    merged = dict(inspect.signature(selector_class).parameters)
    if "max_latency" in merged:
        merged["longest_wait"] = outer["max_latency"].replace(name="longest_wait")
    for name in strategy.auto:
        merged[name] = merged[name].replace(default=None)
    merged |= {k: p for k, p in outer.items() if k not in merged and k not in hidden}
    averaging = selector_class.paper_options.get("averaging")
    merged["averaging"] = merged["averaging"].replace(default=averaging)
    return {k: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for k, p in merged.items()}
