"""Papers as strategies: one constructor takes the selector's parameters and the strategy's.

Each paper has one class per API: in its own file for the legacy API, such as ``strategies/bsfl.py``, and in
``strategies/message/papers.py`` for the Message API. The first declares the paper's requirements, and the second names
it as its twin.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from fedsel_flwr.checks import AUTO, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping.adapter import Adapter


class PaperStrategy(Adapter):
    """A strategy that builds its own selector; put it before ``SelectionStrategy`` of either API in the list of bases.

    The parameters are the selector's and the strategy's, all by keyword. If both have ``max_latency``, a number sets
    both. With "auto", which concerns only the selector, ``longest_wait`` sets the strategy's value. Parameters with a
    number per client (:attr:`Selector.by_client`) take an array if the client ids are 0..K-1, else a mapping from
    client id.

    Args:
        base: Any Flower strategy of the same API; None for FedAvg without federated evaluation.
        **params: Parameters of the selector's class, and the options of :class:`fedsel_flwr.rounds.settings.Options`.
            If the selector has ``max_latency``, also ``longest_wait``: longest wait for a client, seconds. None takes
            ``max_latency``, or 60 if that is "auto".

    Attributes:
        selector_class: The paper's selector. A subclass sets it.
        auto_on_server_clock: Parameters of the selector that are optional on the server's clock, with the default
            "auto": the observed times decide. A subclass may set it.

    Raises:
        ParameterError: A parameter is unknown, missing or out of range.
    """

    selector_class: ClassVar[type[Selector]]
    auto_on_server_clock: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, twin: type[PaperStrategy] | None = None, **kwargs: Any) -> None:
        """Show the whole signature in ``help()`` and editors; a ``twin`` has the paper's requirements."""
        super().__init_subclass__(**kwargs)
        if twin is not None:
            cls.selector_class, cls.auto_on_server_clock = twin.selector_class, twin.auto_on_server_clock
        cls.__signature__ = inspect.Signature(list(_parameters(cls).values()))  # type: ignore[attr-defined]

    def __init__(self, base: Any = None, **params: Any) -> None:
        accepted = _parameters(type(self))
        unknown = sorted(params.keys() - accepted.keys())
        missing = sorted(k for k, p in accepted.items() if p.default is p.empty and k not in params)
        if unknown or missing:
            problem = f"does not know {', '.join(unknown)}" if unknown else f"needs the parameter {', '.join(missing)}"
            raise ParameterError(f"{type(self).__name__} {problem}. All its parameters are {', '.join(accepted)}.")
        params = params | self._observed(params)
        roster = Roster()
        own = inspect.signature(self.selector_class).parameters
        selector_params = {key: value for key, value in params.items() if key in own}
        values = {
            key: ClientValues(key, selector_params[key], roster)
            for key in self.selector_class.by_client
            if selector_params.get(key) is not None
        }
        if values:
            # The roster is empty, so a ClientValues has no numbers for the selector yet. A temporary selector reads all
            # of them here, so that a wrong number is refused before round 1.
            self.selector_class(**selector_params | {k: dict(enumerate(v.given.values())) for k, v in values.items()})
        selector = self.selector_class(**selector_params | values)
        rest = {key: value for key, value in params.items() if key not in own}
        if "max_latency" in own:
            # None lets the strategy take the selector's number, or 60 s if that is "auto".
            wait = rest.pop("longest_wait", None)
            rest["max_latency"] = None if wait is None else real("longest_wait", wait, above=0.0)
        super().__init__(selector, base, roster=roster, client_values=tuple(values.values()), **rest)

    def _observed(self, params: Mapping[str, Any]) -> dict[str, str]:
        """Return "auto" for missing parameters; refuse it on the virtual clock, on which no client is timed."""
        left_out = {name: AUTO for name in self.auto_on_server_clock if params.get(name) is None}
        if left_out and params.get("clock") != "server":
            raise ParameterError(
                f'{type(self).__name__} needs {", ".join(left_out)} on the virtual clock. Give seconds, or "auto" to '
                'learn it from the reported times; with clock="server" it may be left out.'
            )
        return left_out


def _parameters(strategy: type[PaperStrategy]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a strategy's selector and of every strategy, each once."""
    selector_class = strategy.selector_class
    common = inspect.signature(Adapter.__init__).parameters
    hidden = ("self", "selector", "roster", "client_values")
    merged = dict(inspect.signature(selector_class).parameters)
    if "max_latency" in merged:
        merged["longest_wait"] = common["max_latency"].replace(name="longest_wait")
    for name in strategy.auto_on_server_clock:
        merged[name] = merged[name].replace(default=None)
    # The selector's parameters come first and take precedence: its max_latency scales a reward, and may be "auto".
    merged |= {k: p for k, p in common.items() if k not in merged and k not in hidden}
    averaging = selector_class.paper_options.get("averaging")
    merged["averaging"] = merged["averaging"].replace(default=averaging)
    return {k: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for k, p in merged.items()}
